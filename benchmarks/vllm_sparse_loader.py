"""Writing a sparse update into a running model's tensors: deltacast's direct strategy beside vLLM's own loader.

    python benchmarks/vllm_sparse_loader.py [--shares 0.0001 0.001 0.01] [--wire raw] [--threads 1] [--json OUT.json]

Needs vllm. On a GPU if there is one. A plain module that follows vLLM's `weight_loader` convention has 64 Mi bf16
elements, once as one parameter, once as q, k and v fused by rows. Random elements of a share change to other finite
values. Median wall time of writing them, of nine runs that go to and fro between two versions, until the device is
done; all in one process, and after each run the module holds the expected bits, every one. What is timed starts with
positions and values in memory:

- deltacast: what a worker does over views of the module; with --wire container (the default on a CPU) a `Transaction`,
  with --wire raw (on a GPU) a `ChunkReceiver`, whose chunks are copied into its buffers first. Both check the order and
  range of positions and the sum of the words that are overwritten, keep those for undo, and prove each changed
  parameter's fingerprint and the digest of all; the former before it writes, and it reads back what it wrote. Any
  bits may be sent.
- vLLM: `load_checkpoint_weight_patches` as its `sparse_nccl` calls it. Checks range and uniqueness of positions and
  that no value is NaN; fills a tensor of the parameter's shape with NaN, and has the module's loader copy what is not.
  Neither proves what was there nor what is there now, and undoes nothing.
- index_copy_: torch, into views of the module, with nothing besides: the floor.

Decoding is what a container costs before that; vLLM's wire has nothing to decode and is 48 bits per change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from deltacast.delta.apply import Transaction
from deltacast.delta.chunks.headers import Begin, Sums
from deltacast.delta.chunks.receiver import ChunkReceiver
from deltacast.delta.chunks.sender import ChunkSender
from deltacast.delta.codec import decode_update, encode_update
from deltacast.delta.diff import diff_state
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.state import WeightState

COLUMNS: Final = 8192
LAYOUTS: Final = {
    "one parameter": {"down_proj.weight": 8192},
    "q, k, v fused": {"q_proj.weight": 6144, "k_proj.weight": 1024, "v_proj.weight": 1024},
}
REPEATS: Final = 9

Weights: TypeAlias = dict[str, torch.Tensor]
Wire: TypeAlias = Literal["container", "raw"]


class Layer(nn.Module):
    """One weight of 64 Mi elements that checkpoint parameters are loaded into by rows, as vLLM's fused layers are."""

    def __init__(self, rows: Mapping[str, int], device: torch.device) -> None:
        super().__init__()
        self.rows = rows
        whole = torch.empty(sum(rows.values()), COLUMNS, dtype=torch.bfloat16, device=device)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def shard(self, name: str) -> torch.Tensor:
        """Return the rows of a checkpoint parameter, live."""
        names = list(self.rows)
        first = sum(self.rows[other] for other in names[: names.index(name)])
        return self.weight.data.narrow(0, first, self.rows[name])

    def weight_loader(self, loaded: torch.Tensor, name: str) -> None:
        """Copy a checkpoint parameter to its rows."""
        self.shard(name).copy_(loaded)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint parameters; vLLM calls this."""
        loaded = set()
        for name, tensor in weights:
            self.weight_loader(tensor, name)
            loaded.add(name)
        return loaded

    def views(self) -> Weights:
        """Return the checkpoint's parameters as the module holds them, live."""
        return {name: self.shard(name) for name in self.rows}


@dataclass(frozen=True)
class Row:
    """One measurement: median, fastest and slowest run."""

    layout: str
    share: float
    num_changes: int
    method: str
    ms: float
    fastest_ms: float
    slowest_ms: float


def changed(weights: Weights, share: float, seed: int) -> Weights:
    """Return weights of which a share of the elements are other finite values."""
    random = np.random.default_rng(seed)
    result = {}
    for name, tensor in weights.items():
        words = tensor.contiguous().view(torch.int16).numpy().reshape(-1).copy()
        places = random.choice(words.size, int(share * words.size), replace=False, shuffle=False)
        words[places] ^= random.integers(1, 1 << 6, places.size, np.int16)  # of the mantissa's bits: nothing gets NaN
        result[name] = torch.from_numpy(words).view(torch.bfloat16).view(tensor.shape)
    return result


def patches_of(update: WeightUpdate, device: torch.device) -> list[CheckpointWeightPatch]:
    """Return an update as vLLM's engine receives it."""
    return [
        CheckpointWeightPatch(
            name=patch.name,
            shape=patch.meta.shape,
            dtype=torch.bfloat16,
            values=torch.from_numpy(patch.values.view(np.int16)).to(device).view(torch.bfloat16),
            indices=torch.from_numpy(patch.indices.astype(np.int32)).to(device),
        )
        for patch in update.patches
        if patch.indices is not None
    ]


def apply_container(state: WeightState, update: WeightUpdate) -> None:
    """Check, prove, write, keep."""
    transaction = Transaction.stage(state, update)
    transaction.write()
    transaction.commit()


@dataclass(frozen=True)
class StreamedRound:
    """What comes to a worker in a round of the raw wire."""

    begin: Begin
    chunks: list[tuple[torch.Tensor, ...]]
    sums: Sums
    digest: str


def apply_streamed(receiver: ChunkReceiver, sent: StreamedRound) -> None:
    """Receive, check, write, prove."""
    receiver.begin(sent.begin)
    for number, tensors in enumerate(sent.chunks):
        chunk = receiver.take(tensors[-1].numel())
        for here, there in zip((chunk.counts, chunk.offsets, chunk.values), tensors, strict=True):
            here.copy_(there)
        receiver.apply(number)
    receiver.finish(sent.begin.base_version + 1, sent.sums, sent.digest)


class Measurement:
    """Two versions of a layer, and the updates from each to the other."""

    def __init__(self, layout: str, share: float, device: torch.device, threads: int) -> None:
        self.layout, self.share, self.device, self.threads = layout, share, device, threads
        torch.manual_seed(0)
        before = {name: torch.randn(rows, COLUMNS).bfloat16() for name, rows in LAYOUTS[layout].items()}
        self.versions = [before, changed(before, share, seed=1)]
        self.updates = [self.update_between(*self.versions), self.update_between(*reversed(self.versions))]

    def update_between(self, old: Weights, new: Weights) -> WeightUpdate:
        """Diff two versions."""
        state = WeightState(old, version=0, threads=self.threads)
        return diff_state(state, ((meta, new[meta.name]) for meta in state.table), run_id="bench")

    def rounds(self) -> list[StreamedRound]:
        """Send to and fro once."""
        on_device = [{name: tensor.to(self.device) for name, tensor in weights.items()} for weights in self.versions]
        baseline = WeightState({name: tensor.clone() for name, tensor in on_device[0].items()}, version=0)
        order = range(len(baseline.table))
        sender = ChunkSender(baseline, order, self.device, chunk_bytes=1 << 31, max_density=1 / 16)
        rounds = []
        for version, weights in enumerate(reversed(on_device)):
            sender.begin()
            sent = sender.chunks(weights[meta.name] for meta in baseline.table)
            chunks = [tuple(tensor.clone() for tensor in chunk.tensors) for chunk in sent]
            rounds.append(StreamedRound(sender.header(), chunks, *sender.sums()))
            sender.advance(version + 1)
        return rounds

    def deltacast(self, wire: Wire) -> Row:
        """Measure ours."""
        module = self.module()
        state = WeightState(module.views(), version=0, threads=self.threads)
        runs = range(REPEATS + 1)
        if wire == "raw":
            two = self.rounds()
            rounds = [replace(two[run % 2], begin=replace(two[run % 2].begin, base_version=run)) for run in runs]
            receiver = ChunkReceiver(state, rounds[0].begin)
            return self.timed("deltacast, raw", module, lambda run: apply_streamed(receiver, rounds[run]))
        updates = [replace(self.updates[run % 2], base_version=run, target_version=run + 1) for run in runs]
        return self.timed("deltacast, container", module, lambda run: apply_container(state, updates[run]))

    def vllm(self) -> Row:
        """Measure vLLM's."""
        module, patches = self.module(), [patches_of(update, self.device) for update in self.updates]
        return self.timed("vLLM", module, lambda run: load_checkpoint_weight_patches(module, patches[run % 2]))

    def floor(self) -> Row:
        """Measure writing alone."""
        module, patches = self.module(), [patches_of(update, self.device) for update in self.updates]
        views = {name: view.view(-1) for name, view in module.views().items()}
        places = [[patch.indices.long() for patch in each if patch.indices is not None] for each in patches]

        def copy(run: int) -> None:
            for patch, indices in zip(patches[run % 2], places[run % 2], strict=True):
                views[patch.name].index_copy_(0, indices, patch.values)

        return self.timed("index_copy_", module, copy)

    def decoding(self) -> Row:
        """Measure what comes before, where a container is sent."""
        encoded = encode_update(self.updates[0])
        return self.timed("decoding a container", None, lambda _: decode_update(encoded))

    def module(self) -> Layer:
        """Make a module that holds the first version."""
        module = Layer(LAYOUTS[self.layout], self.device)
        module.load_weights(self.versions[0].items())
        return module

    def timed(self, method: str, module: Layer | None, apply: Callable[[int], object]) -> Row:
        """Apply update after update, of which the first warms up; raises if the module holds other bits after one."""
        times = []
        for run in range(REPEATS + 1):
            self.wait()
            start = time.perf_counter()
            apply(run)
            self.wait()
            times.append((time.perf_counter() - start) * 1e3)
            if module is not None:
                self.check(method, module, self.versions[1 - run % 2])
        num_changes = sum(patch.num_changed for patch in self.updates[0].patches)
        del times[0]
        return Row(self.layout, self.share, num_changes, method, statistics.median(times), min(times), max(times))

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @staticmethod
    def check(method: str, module: Layer, expected: Weights) -> None:
        """Compare all bits."""
        for name, view in module.views().items():
            if not torch.equal(view.cpu().view(torch.int16), expected[name].view(torch.int16)):
                raise AssertionError(f"{method} left other bits in {name}")


def main() -> None:
    """Run, print, and write JSON if asked to."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0001, 0.001, 0.01], help="changed elements")
    parser.add_argument("--wire", choices=get_args(Wire), default="raw" if device.type == "cuda" else "container")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {options.threads} threads"
    print(f"{name}, torch {torch.__version__}")
    rows = []
    for layout in LAYOUTS:
        for share in options.shares:
            at = Measurement(layout, share, device, options.threads)
            for row in (at.deltacast(options.wire), at.vllm(), at.floor(), at.decoding()):
                rows.append(row)
                print(
                    f"{row.layout:14} {row.share:8.2%} {row.num_changes:8} changes  {row.method:20} {row.ms:9.2f} ms "
                    f"({row.fastest_ms:.2f} to {row.slowest_ms:.2f})",
                    flush=True,
                )
    if options.json:
        result = {"device": name, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
