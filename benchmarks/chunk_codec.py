"""Packing and unpacking chunks of changed bf16 words: time by step, whole pipelines by threads, bits per change.

    python benchmarks/chunk_codec.py [--words N] [--chunks 14] [--threads 1 4 16] [--no-steps] [--json OUT.json]

On a GPU if there is one. A chunk covers N words (2^29 on a GPU, 2^24 without), 1.2 % of them changed as by AdamW over
fp32 masters: the chance halves with each binade of |w|, nine in ten changes are one step of the ordered integer. Two
different chunks are made and taken in turn. Steps are medians of wall time of one chunk, waiting for the device after
each; a pipeline is all chunks, at most four pending, the best of three runs, and for packing also what the caller's
thread spends of it in `pack`. Results are compared with what went in. `--no-steps` leaves out the steps: the rest
needs nothing but the codec's API, so that it compares two versions of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from deltacast.bench.floors import position_bits, value_bits
from deltacast.delta.chunk_codec import ChunkCodec, PackingChunk, UnpackedChunk, UnpackingChunk
from deltacast.delta.chunk_codec.codec import deflate_piece, inflate_piece
from deltacast.delta.chunk_codec.layout import Bytes, parse
from deltacast.delta.chunk_codec.transforms import decode_streams, encode_streams

SHARE = 0.012
BLOCK_WORDS = 65536
PENDING = 4
STEPS = [1] * 88 + [2] * 6 + [3] * 2 + [4, 5, 9, 40]

R = TypeVar("R")


@dataclass(frozen=True)
class Changes:
    """One chunk on the device, and the fewest bits that it needs if only densities are known."""

    counts: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor
    old: torch.Tensor
    floor_bits: float


def make_changes(num_words: int, device: torch.device, seed: int) -> Changes:
    """Draw weights block by block of 2^24 words, and which of them step by how much."""
    torch.manual_seed(seed)
    counts, offsets, values, olds, steps = [], [], [], [], []
    for _ in range(0, num_words, 1 << 24):
        words = torch.randn(1 << 24, device=device).mul_(0.02).bfloat16()
        chance = torch.exp2(-torch.frexp(words.float()).exponent.float())
        chance *= SHARE / chance.mean()
        for _ in range(4):  # what is clipped at 1 is made up for by the others
            chance = (chance * (SHARE / chance.clamp(max=1).mean())).clamp_(max=1)
        index = torch.nonzero(torch.rand(words.numel(), device=device) < chance).view(-1)
        old = words.view(torch.int16)[index]
        tail = torch.tensor(STEPS, dtype=torch.int16, device=device)
        step = tail[torch.randint(0, len(STEPS), index.shape, device=device)]
        step *= torch.randint(0, 2, index.shape, device=device).to(torch.int16) * 2 - 1
        magnitude = (old >> 15) & 0x7FFF
        moved = (old ^ magnitude) + step
        counts.append(torch.bincount(index // BLOCK_WORDS, minlength=words.numel() // BLOCK_WORDS).to(torch.int32))
        offsets.append(index.to(torch.int16))
        values.append(moved ^ ((moved >> 15) & 0x7FFF))
        olds.append(old)
        steps.append(step)
    step = torch.cat(steps)
    floor = position_bits(num_words, step.numel()) + value_bits(step.cpu().numpy())
    return Changes(torch.cat(counts), torch.cat(offsets), torch.cat(values), torch.cat(olds), floor)


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], R], device: torch.device) -> tuple[float, R]:
    """Return the median of seven runs after one, and what the last one returned."""
    times = []
    for _ in range(8):
        wait(device)
        start = time.perf_counter()
        result = run()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:]), result


def bench_steps(changes: Changes, device: torch.device, threads: int) -> dict[str, float]:
    """Time what one chunk goes through, step by step."""
    sizes, num_changes = torch.full_like(changes.counts, BLOCK_WORDS), changes.offsets.numel()
    steps = {}
    steps["encode: transforms"], staged = median_ms(
        lambda: encode_streams(changes.counts, changes.offsets, changes.values, changes.old, signed_magnitude=True),
        device,
    )
    host = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    steps["encode: copy to the host"], _ = median_ms(lambda: host.copy_(staged), device)
    with ChunkCodec(device, 2, max_changes=num_changes, threads=threads) as codec:
        steps[f"pack, all of it, {threads} threads"], packed = median_ms(lambda: pack(codec, changes).result(), device)
        pending = pack(codec, changes)
        pending.result()
        steps["pack: put together, checksum"], _ = median_ms(pending.result, device)
        steps[f"unpack, all of it, {threads} threads"], chunk = median_ms(
            lambda: codec.unpack(packed, sizes).result(), device
        )
    header, pieces = parse(packed.data, 2, sizes.numel(), num_changes)
    host = torch.empty(header.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = host.numpy()

    def inflate_all() -> None:
        for piece, stored in pieces:
            inflate_piece(stored, out[piece.start : piece.stop], piece.stream)

    steps["decode: zstd, one thread"], _ = median_ms(inflate_all, device)
    parts = [out[piece.start : piece.stop].data for piece, _ in pieces]
    steps["encode: zstd, one thread"], _ = median_ms(lambda: [deflate_piece(part) for part in parts], device)
    streams = torch.empty(host.shape, dtype=torch.uint8, device=device)
    steps["decode: copy to the device"], _ = median_ms(lambda: streams.copy_(host), device)
    steps["decode: transforms"], _ = median_ms(lambda: decode_streams(header, streams, sizes), device)
    steps["decode: new words from old"], _ = median_ms(lambda: chunk.values(changes.old, signed_magnitude=True), device)
    return steps


def pack(codec: ChunkCodec, changes: Changes) -> PackingChunk:
    """Start packing."""
    return codec.pack(changes.counts, changes.offsets, changes.values, changes.old, signed_magnitude=True)


def pipeline(
    starts: Iterable[Callable[[], Any]], finish: Callable[[Any], None], device: torch.device
) -> tuple[float, float]:
    """Return the milliseconds that all chunks take, a few pending at a time, and those that starting them takes."""
    wait(device)
    begin = time.perf_counter()
    starting_s = 0.0
    pending: deque[PackingChunk | UnpackingChunk] = deque()
    for start in starts:
        started = time.perf_counter()
        pending.append(start())
        starting_s += time.perf_counter() - started
        if len(pending) == PENDING:
            finish(pending.popleft().result())
    while pending:
        finish(pending.popleft().result())
    wait(device)
    return (time.perf_counter() - begin) * 1e3, starting_s * 1e3


def bench_pipelines(chunks: list[Changes], count: int, device: torch.device, threads: int) -> dict[str, float]:
    """Return the milliseconds to pack and to unpack `count` chunks, and those of the former that are inside `pack`."""
    turns = [chunks[number % len(chunks)] for number in range(count)]
    sizes = torch.full_like(chunks[0].counts, BLOCK_WORDS)
    packing, unpacking = [], []
    with ChunkCodec(device, 2, max_changes=max(c.offsets.numel() for c in chunks), threads=threads) as codec:
        for _ in range(3):
            packed: list[Bytes] = []
            packing.append(pipeline([partial(pack, codec, c) for c in turns], packed.append, device))
            receiver = Receiver(iter(turns))
            starts = [partial(codec.unpack, data, sizes) for data in packed]
            unpacking.append(pipeline(starts, receiver.take, device))
            if not torch.equal(receiver.values, turns[-1].values):
                raise AssertionError("other words came back")
    return {"pack": min(packing)[0], "callers_thread": min(ms for _, ms in packing), "unpack": min(unpacking)[0]}


@dataclass
class Receiver:
    """Turns unpacked chunks into new words; keeps the last ones."""

    turns: Iterator[Changes]
    values: torch.Tensor = field(init=False)

    def take(self, chunk: UnpackedChunk) -> None:
        """Take the next chunk."""
        self.values = chunk.values(next(self.turns).old, signed_magnitude=True)


def main() -> None:
    """Run, print, and write JSON if asked to."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--words", type=int, default=1 << (29 if device.type == "cuda" else 24), help="words of a chunk"
    )
    parser.add_argument("--chunks", type=int, default=14, help="chunks in a pipeline")
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, 4, os.cpu_count() or 1}))
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    chunks = [make_changes(options.words, device, seed) for seed in range(2)]
    first, name = chunks[0], torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    num_changes = first.offsets.numel()
    print(f"{name}, torch {torch.__version__}, {num_changes} changes of {options.words} words a chunk")
    with ChunkCodec(device, 2, max_changes=0) as codec:
        bits = 8 * pack(codec, first).result().size / num_changes
    floor = first.floor_bits / num_changes
    print(f"{bits:.3f} bits per change, entropy {floor:.3f} (x {bits / floor:.3f}), raw 32")
    steps = bench_steps(first, device, max(options.threads)) if options.steps else {}
    for step, ms in steps.items():
        print(f"{step:40} {ms:9.3f} ms")
    pipelines = {}
    for threads in options.threads:
        pipelines[threads] = bench_pipelines(chunks, options.chunks, device, threads)
        times = pipelines[threads]
        print(
            f"{options.chunks} chunks, {threads:3} threads: pack {times['pack']:9.2f} ms, of it the caller's thread "
            f"{times['callers_thread']:8.2f} ms; unpack {times['unpack']:9.2f} ms"
        )
    if options.json:
        result = {
            "device": name,
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "words": options.words,
            "changes": num_changes,
            "bits_per_change": bits,
            "floor": floor,
            "steps_ms": steps,
            "pipelines_ms": {str(threads): times for threads, times in pipelines.items()},
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
