"""How fast workers get the trainer's weights: ours, dense and the common sparse wire, in one run on the same weights.

`sync_ranks.py` starts the processes, `sync_trainer.py` is rank 0's script, `sync_methods.py` what is compared;
`sync_plot.py` draws the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from deltacast.bench.shapes import model_metas
from deltacast.bench.sync_ranks import run_ranks
from deltacast.bench.sync_rows import Facts, SyncOptions, SyncRow
from deltacast.bench.sync_trainer import measure
from deltacast.bench.sync_worker import serve
from deltacast.delta.errors import InputError

__all__ = ["bench_sync", "dense_of", "document", "notes"]


def bench_sync(options: SyncOptions) -> Iterator[str | Facts | SyncRow]:
    """Run all ranks on this machine, and yield what comes: what is being done, `Facts` once, then rows.

    After each way the workers' bits are compared with the trainer's, independently of digests.

    Raises:
        InputError: an unknown model, or one without bf16 parameters.
        VerificationError: workers did not hold the trainer's bits after some way.
        DeltacastError: a rank failed; its traceback is a note of the error. No process is left, however this ends.
    """
    metas = model_metas(options.model, options.scale)
    if not any(meta.dtype == "bfloat16" and meta.numel for meta in metas):
        raise InputError("no parameter is bf16, and only those are changed", found=f"{len(metas)} parameters")
    timeout_s = 2 * options.phase_s(
        sum(meta.nbytes for meta in metas)
    )  # the ranks' own deadlines come first, and say more
    for item in run_ranks(options, timeout_s, measure, serve):
        assert isinstance(item, str | Facts | SyncRow)
        yield item


def dense_of(row: SyncRow, rows: Iterable[SyncRow]) -> SyncRow:
    """Return the dense row that a row is compared with: of the same link and density."""
    key = row.link_gbits, row.percent
    return next(other for other in rows if (other.link_gbits, other.percent) == key and other.method == "dense")


def notes(options: SyncOptions, facts: Facts) -> list[str]:
    """Return what a reader of the figures must know."""
    software = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    shrunk = f", shrunk by --scale {options.scale:g}" if options.scale != 1 else ""
    said = [
        f"{facts.device_name}, {facts.cores} cores, {software}",
        f"{options.world - 1} worker(s), threads: {options.threads}, median of {options.repeats} rounds",
        f"{options.model}: {facts.num_tensors:,} tensors, {facts.model_bytes:,} bytes{shrunk}",
        f"copy: {facts.copy_bytes_per_s / 1e9:.1f} GB/s, read and written bytes",
        "bits: the same after every row, by a dense broadcast and torch.equal",
        "bound: the larger of reading both states once and the bytes sent over the link",
        "trainer +, worker +: the most memory of a round, without baseline, of the engine's own bound",
    ]
    if facts.device == "cpu":
        said.append(
            "CPU ranks over Gloo on one machine: no GPU was measured; memory is resident pages, a rough measure"
        )
    if options.links_gbits:
        said.append("simulated links: the sender hands a piece over when a link of that rate would have delivered it; "
                    "dense there is computed, the larger of its own time and bytes / rate")  # fmt: skip
    faster = [rate for rate in options.links_gbits if facts.link_floor_s(1, rate) < facts.link_floor_s(1, None)]
    if faster:
        names = ", ".join(f"{rate:g}" for rate in faster)
        said.append(f"this machine's own link is slower than {names} Gbit/s: such rows show the machine's own")
    return said


def document(options: SyncOptions, facts: Facts, rows: Sequence[SyncRow], command: Sequence[str]) -> dict[str, Any]:
    """Return everything as JSON-ready values."""
    return {
        "command": list(command),
        "options": asdict(options),
        "machine": asdict(facts) | {"read_floor_s": facts.read_floor_s},
        "notes": notes(options, facts),
        "rows": [row.as_dict(dense_of(row, rows).median_s) for row in rows],
    }
