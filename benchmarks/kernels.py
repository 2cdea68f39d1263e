"""Device time of the diff, apply and audit kernels, next to bounds and stock operations measured in the same run.

    python benchmarks/kernels.py [--words 1073741824] [--json OUT.json] [--models flat qwen2.5-7b]

Needs one CUDA GPU (for Qwen2.5-7B shapes, 50 GB of it). Times are medians of CUDA event intervals. Bounds:

- copy: bytes read plus written over time of a device-to-device copy.
- read floor: a kernel that reads two tensors of the same bytes and only compares them.
- diff: the read floor. audit: bytes read over the copy's bandwidth. apply: 32-byte sectors touched, read and written,
  plus offsets, values and undo, over the copy's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltacast.delta.kernels import (
    Arena,
    ParamGroup,
    RawChunk,
    UndoLog,
    advance_group,
    apply_group,
    audit_group,
    diff_group,
    faults,
    masks,
    undo_group,
)
from deltacast.delta.kernels.language import constexpr, jit, tensor, tl

DENSITIES = (0.0005, 0.01, 0.08, 0.5)
APPLY_DENSITY = 0.01
CHUNK_BLOCKS = 8192


@dataclass(frozen=True)
class Row:
    """One measurement: milliseconds, the bound's, and which operation it is."""

    model: str
    operation: str
    density: float | None
    ms: float
    bound_ms: float | None

    @property
    def fraction(self) -> float | None:
        """Share of the bound that is reached."""
        return self.bound_ms / self.ms if self.bound_ms else None


@jit
def compare_only(a_ptr: tensor, b_ptr: tensor, out_ptr: tensor, block: constexpr) -> None:
    """Count differing 8-byte words: two streams read, next to nothing computed."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    differs = tl.load(a_ptr + at) != tl.load(b_ptr + at)
    tl.store(out_ptr + tl.program_id(0), tl.sum(differs.to(tl.int32), 0))


def median_ms(run: Callable[[], object], *, launches: int = 5, repeats: int = 7) -> float:
    """Time `launches` runs at a time, after a warm-up, and return the median of one run."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(launches):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / launches)
    return statistics.median(times)


def qwen_shapes() -> list[tuple[int, ...]]:
    """The 339 tensors of Qwen2.5-7B: 7.6 thousand million parameters."""
    hidden, inter, kv, vocab = 3584, 18944, 512, 152064
    attention = [(hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden)]
    mlp = [(inter, hidden), (inter, hidden), (hidden, inter)]
    layer: list[tuple[int, ...]] = [*attention, *mlp, (hidden,), (hidden,)]
    return [(vocab, hidden), *(layer * 28), (hidden,), (vocab, hidden)]


def make(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Random bf16 weights; every bit pattern of a normal distribution's bf16."""
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in shapes]


def change(baseline: list[torch.Tensor], new: list[torch.Tensor], density: float) -> int:
    """Set `new` to the baseline with this share of the words one step up; return how many."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for old, target in zip(baseline, new, strict=True):
        picked = torch.rand(old.shape, device="cuda", dtype=torch.float32) < density
        target.view(torch.int16).copy_(old.view(torch.int16)).add_(picked)
        total += picked.sum()
    return int(total)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per millisecond of a 2 GiB device-to-device copy."""
    source = torch.randint(0, 1 << 62, (1 << 28,), device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source))


def read_floor(num_words: int, copy_bytes_per_ms: float) -> float:
    """Milliseconds to read two tensors of so many bf16 words, measured on at most 2^30 and scaled."""
    size = min(num_words, 1 << 30) // 4 // 4096 * 4096
    a, b = (torch.randint(-(1 << 62), 1 << 62, (size,), device="cuda") for _ in range(2))
    out = torch.empty(size // 4096, dtype=torch.int32, device="cuda")
    ms = median_ms(lambda: compare_only[(size // 4096,)](a, b, out, block=4096, num_warps=4))
    print(f"read floor {ms:.3f} ms for 2 x {size * 8} bytes, {size * 16 / ms / copy_bytes_per_ms:.2f} x copy bandwidth")
    return ms * num_words * 2 / (size * 8)


def stock_diff(baseline: list[torch.Tensor], new: list[torch.Tensor]) -> None:
    """What torch alone does: `ne`, `nonzero`, gather; no fingerprint, a host wait per parameter."""
    for old, target in zip(baseline, new, strict=True):
        flat = target.view(torch.int16).view(-1)
        index = torch.nonzero(flat != old.view(torch.int16).view(-1)).view(-1)
        flat.index_select(0, index)


def bench(model: str, shapes: list[tuple[int, ...]], copy_bytes_per_ms: float) -> list[Row]:
    """Measure one set of parameters."""
    baseline = make(shapes)
    new = [torch.empty_like(old) for old in baseline]
    group = ParamGroup(baseline, new)
    words = sum(group.num_words)
    floor = read_floor(words, copy_bytes_per_ms)
    sums = torch.zeros(group.num_params, dtype=torch.int64, device="cuda")
    audit = median_ms(lambda: audit_group(group, sums))
    rows = [Row(model, "audit", None, audit, 2 * words / copy_bytes_per_ms)]
    for density in DENSITIES:
        found = change(baseline, new, density)
        rows.append(bench_chunks(model, group, density, found, floor))
        chunk, more = bench_diff(model, group, density, found, floor)
        rows += more
        stock = median_ms(lambda: stock_diff(baseline, new))
        rows.append(Row(model, "ne + nonzero + gather", density, stock, floor))
        if density == APPLY_DENSITY:
            rows += bench_apply(model, group, chunk, density, copy_bytes_per_ms)
        del chunk
    return rows


def bench_diff(model: str, group: ParamGroup, density: float, changes: int, floor: float) -> tuple[RawChunk, list[Row]]:
    """Measure the diff of everything as one chunk, and return it."""
    arena = Arena(group, changes, 1)
    chunk = arena.chunk(0, group.num_blocks)
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device="cuda")
    plain = partial(diff_group, group, chunk, sums=sums, scratch=masks(group, group.num_blocks))
    audited = partial(plain, audit_baseline=True)
    rows = [
        Row(model, "diff", density, median_ms(plain), floor),
        Row(model, "diff + audit of the baseline", density, median_ms(audited), floor),
    ]
    require_total(int(chunk.total), changes)
    arena.settle(chunk, changes)
    return chunk, rows


def bench_chunks(model: str, group: ParamGroup, density: float, changes: int, floor: float) -> Row:
    """Measure the diff in chunks, one launched after the other without waiting for any total."""
    firsts = range(0, group.num_blocks, CHUNK_BLOCKS)
    arena = Arena(group, changes + 16 * len(firsts), len(firsts))
    chunks = [arena.chunk(first, min(CHUNK_BLOCKS, group.num_blocks - first)) for first in firsts]
    sums = torch.zeros(3, group.num_params, dtype=torch.int64, device="cuda")
    scratch = masks(group, min(CHUNK_BLOCKS, group.num_blocks))

    def diff_round() -> None:
        for chunk in chunks:
            diff_group(group, chunk, sums=sums, scratch=scratch)

    row = Row(model, f"diff in chunks of {CHUNK_BLOCKS} blocks", density, median_ms(diff_round), floor)
    require_total(int(arena.totals.sum()), changes)
    return row


def require_total(found: int, made: int) -> None:
    """Raise unless a diff found all changes."""
    if found != made:
        raise AssertionError(f"{found} changes found, {made} made")


def bench_apply(model: str, group: ParamGroup, chunk: RawChunk, density: float, copy_bytes_per_ms: float) -> list[Row]:
    """Measure apply and undo of a diff, and torch's `index_copy_` of the first parameter's share, scaled."""
    changes, words = chunk.offsets.numel(), sum(group.num_words)
    undo, fault = UndoLog(chunk.arena), faults(group)
    sums = torch.zeros(2, group.num_params, dtype=torch.int64, device="cuda")
    sectors = words / 16 * (1 - (1 - density) ** 16)
    bound = (2 * 32 * sectors + 6 * changes) / copy_bytes_per_ms

    def apply_again() -> None:
        undo.reset()
        apply_group(group, chunk, undo, sums=sums, fault=fault)

    apply = median_ms(apply_again)
    advance = median_ms(lambda: advance_group(group, [chunk]))
    back = median_ms(lambda: undo_group(group, undo))
    base = group.baseline[0]
    index = torch.nonzero(torch.rand(base.numel(), device="cuda") < density).view(-1)
    values = base[index]
    stock = median_ms(lambda: base.index_copy_(0, index, values)) * words / base.numel()
    return [
        Row(model, "apply: check, undo log, sums", density, apply, bound),
        Row(model, "advance: no check, undo, sums", density, advance, bound),
        Row(model, "undo", density, back, bound),
        Row(model, "index_copy_ (no check, undo, sums)", density, stock, bound),
    ]


def main() -> None:
    """Run, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=1 << 30, help="bf16 words of the flat tensor")
    parser.add_argument("--models", nargs="*", default=["flat", "qwen2.5-7b"], choices=["flat", "qwen2.5-7b"])
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    copy_bytes_per_ms = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy_bytes_per_ms / 1e9:.2f} TB/s")
    shapes: dict[str, list[tuple[int, ...]]] = {"flat": [(options.words,)], "qwen2.5-7b": qwen_shapes()}
    rows: list[Row] = []
    for model in options.models:
        rows += bench(model, shapes[model], copy_bytes_per_ms)
        torch.cuda.empty_cache()
    print(f"{'model':12} {'operation':36} {'density':>8} {'ms':>9} {'bound ms':>9} {'of bound':>9}")
    for row in rows:
        density = "" if row.density is None else f"{row.density:.2%}"
        print(
            f"{row.model:12} {row.operation:36} {density:>8} {row.ms:9.3f} "
            f"{row.bound_ms or 0:9.3f} {row.fraction or 0:9.1%}"
        )
    if options.json:
        result: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_bytes_per_s": copy_bytes_per_ms * 1e3,
            "rows": [{**asdict(row), "fraction": row.fraction} for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
