"""Time of whole weights from one rank to the others through slabs, next to one broadcast of the same bytes.

    python benchmarks/dense_nccl.py [--world 2] [--models qwen2.5-7b small] [--scale 1.0] [--json OUT.json]

NCCL if there is a GPU for each rank, else Gloo. Wall time, from a broadcast that all ranks have just finished until
the slowest receiver holds the weights; medians. `small` is 20,000 tensors of 64 KiB. The last two rows of a model
say what the copies out of a slab cost by themselves, when each is launched alone and when they share launches.

`--scale` shrinks tensors and slabs alike (by default 1 with NCCL and 0.02 with Gloo).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
from kernels import qwen_shapes

from deltacast.engines.control import Deadline
from deltacast.engines.dense_nccl import DenseReceiver, DenseSender
from deltacast.engines.group import PayloadGroup, Rendezvous

HOST = "127.0.0.1"
SLABS_MIB = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Setting:
    """What every rank is told."""

    world_size: int
    device: str
    model: str
    scale: float
    repeats: int
    timeout_s: float

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the bf16 tensors: fewer rows, or fewer tensors, where the scale is below 1."""
        if self.model == "small":
            return [(32768,)] * max(1, int(20_000 * self.scale))
        return [(max(1, int(rows * self.scale)), *rest) for rows, *rest in qwen_shapes()]

    def slab_bytes(self, mib: int) -> int:
        """Bytes of a slab."""
        return max(1, int(mib * self.scale * (1 << 16))) * 16


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    operation: str
    num_bytes: int
    ms: float

    @property
    def gb_per_s(self) -> float:
        """Bytes of the weights over the time."""
        return self.num_bytes / self.ms / 1e6


class Rank:
    """One process of the measurement: rank 0 sends, the others receive."""

    def __init__(self, setting: Setting, rank: int, port: int) -> None:
        self.setting, self.rank = setting, rank
        self.device = torch.device("cpu" if setting.device == "cpu" else f"cuda:{rank}")
        self.group = PayloadGroup(
            rank=rank,
            world_size=setting.world_size,
            generation=1,
            device=self.device,
            timeout_s=setting.timeout_s,
            interface=HOST,
        )
        self.group.join(HOST, port)
        torch.manual_seed(rank)
        self.tensors = [torch.empty(s, dtype=torch.bfloat16, device=self.device).normal_() for s in setting.shapes()]
        self.sizes = [tensor.nbytes for tensor in self.tensors]

    def measure(self) -> dict[str, list[float]]:
        """Return milliseconds of every repetition, by operation."""
        times = {"one broadcast of the same bytes": self.plain()}
        for mib in SLABS_MIB:
            slab_bytes = self.setting.slab_bytes(mib)
            times[f"packed, slabs of {slab_bytes / (1 << 20):.4g} MiB"] = self.packed(slab_bytes)
        self.check()
        times["copies alone, a launch for each"] = self.copies(batched=False)
        times["copies alone, batched"] = self.copies(batched=True)
        self.group.close()
        return times

    def plain(self) -> list[float]:
        """Broadcast one tensor as large as all together: the bound."""
        whole = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=self.device)

        def run() -> None:
            self.group.post([whole], self.deadline())
            self.group.wait(self.deadline())

        return self.timed(run)

    def packed(self, slab_bytes: int) -> list[float]:
        """Send or receive the tensors through slabs of this size."""
        if self.rank == 0:
            sender = DenseSender(self.group, slab_bytes)
            return self.timed(lambda: sender.send(self.tensors, self.sizes, self.deadline()))
        receiver = DenseReceiver(self.group, slab_bytes)
        return self.timed(lambda: receiver.receive(self.tensors, self.sizes, self.deadline()))

    def copies(self, *, batched: bool) -> list[float]:
        """Fill the tensors from a buffer, without any broadcast."""
        targets = [tensor.view(-1).view(torch.uint8) for tensor in self.tensors]
        sources = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=self.device).split(self.sizes)

        def run() -> None:
            if batched:
                torch.ops.aten._foreach_copy_(targets, sources)
            else:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)

        return self.timed(run)

    def check(self) -> None:
        """Compare a sum of each tensor's bits with rank 0's."""
        mine = torch.stack([tensor.view(torch.int16).sum(dtype=torch.int64) for tensor in self.tensors])
        theirs = mine.clone()
        self.group.post([theirs], self.deadline())
        self.group.wait(self.deadline())
        assert torch.equal(mine, theirs), "other bits than rank 0's"

    def timed(self, run: Callable[[], None]) -> list[float]:
        """Run once to warm up, then `repeats` times, each from a broadcast that everybody has finished."""
        token, times = torch.zeros(1, dtype=torch.uint8, device=self.device), list[float]()
        for _ in range(1 + self.setting.repeats):
            self.group.post([token], self.deadline())
            self.group.wait(self.deadline())
            started = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - started) * 1e3)
        return times[1:]

    def deadline(self) -> Deadline:
        """Return a fresh one."""
        return Deadline(self.setting.timeout_s)


def work(pipe: Connection, setting: Setting, rank: int, port: int) -> None:
    """Be one rank, and send what was measured. A failure's traceback goes to stderr, and the pipe breaks."""
    torch.set_num_threads(1)
    pipe.send(Rank(setting, rank, port).measure())


def bench(setting: Setting) -> list[Row]:
    """Measure one model. Ends the program if a rank fails or is not done in time."""
    context = multiprocessing.get_context("spawn")
    rendezvous = Rendezvous(HOST, setting.world_size, setting.timeout_s)
    pipes: list[Connection] = []
    ranks: list[SpawnProcess] = []
    for rank in range(setting.world_size):
        ours, theirs = context.Pipe()
        ranks.append(context.Process(target=work, args=(theirs, setting, rank, rendezvous.port), daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        times = [heard(rank, pipe, setting.timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in ranks:
            process.join(5)  # time for a traceback
            process.kill()
    num_bytes = 2 * sum(math.prod(shape) for shape in setting.shapes())
    return [Row(setting.model, name, num_bytes, slowest_ms([ms[name] for ms in times[1:]])) for name in times[0]]


def slowest_ms(receivers: list[list[float]]) -> float:
    """Return the median over repetitions of the slowest receiver's time."""
    return statistics.median(max(ms) for ms in zip(*receivers, strict=True))


def heard(rank: int, pipe: Connection, timeout_s: float) -> dict[str, list[float]]:
    """Return what a rank measured, or end the program."""
    if not pipe.poll(timeout_s):
        sys.exit(f"rank {rank} is not done within {timeout_s:g} s")
    try:
        times: dict[str, list[float]] = pipe.recv()
    except EOFError:
        sys.exit(f"rank {rank} failed")
    return times


def main() -> None:
    """Run, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks, the sender included")
    parser.add_argument("--models", nargs="*", default=["qwen2.5-7b", "small"], choices=["qwen2.5-7b", "small"])
    parser.add_argument("--scale", type=float, default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for one model")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= options.world else "cpu"
    scale = options.scale or (1.0 if device == "cuda" else 0.02)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{options.world} ranks, {name}, torch {torch.__version__}, scale {scale:g}")
    print(f"{'model':12} {'operation':36} {'MB':>9} {'ms':>9} {'GB/s':>7}")
    rows: list[Row] = []
    for model in options.models:
        found = bench(Setting(options.world, device, model, scale, options.repeats, options.timeout_s))
        for row in found:
            print(f"{row.model:12} {row.operation:36} {row.num_bytes / 1e6:9.1f} {row.ms:9.3f} {row.gb_per_s:7.1f}")
        rows += found
    if options.json:
        result = {
            "device": name,
            "torch": torch.__version__,
            "world_size": options.world,
            "scale": scale,
            "rows": [{**asdict(row), "gb_per_s": row.gb_per_s} for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
