"""Measure the codec against entropy floors, dense XOR + zstd, and memcpy, in one run.

Speeds are GB of dense bytes on one side per second, medians of a few repeats; ratios to `memcpy_gbps`, measured in
the same run, are what compares between machines. Reads only the folder it is given; writes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
import zstandard
from safetensors import deserialize

from deltacast.bench.floors import Change, floors
from deltacast.bench.generator import PRESETS, Model, make_model, take_step
from deltacast.delta.apply import Transaction
from deltacast.delta.bits import Words, from_words
from deltacast.delta.codec import decode_update, encode_update, read_header
from deltacast.delta.diff import changed_words, diff_words
from deltacast.delta.errors import ChecksumError, FormatError, InputError
from deltacast.delta.fingerprint import words_fingerprint
from deltacast.delta.fold import fold
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate, ordered, unordered
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParameterTable, ParamMeta

__all__ = ["CHAINS", "PRESETS", "bench_codec"]

CHAINS: Final = (10, 32)
"""Lengths of the chains whose fold is measured, besides single steps."""

_RUN_ID: Final = "b1946ac92492d2347c6235b4d2611184"
_TRACE_TYPES: Final = {"BF16": "<u2", "I16": "<i2", "I32": "<i4"}


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Weights before and after one update."""

    table: ParameterTable
    old: dict[str, Words]
    new: dict[str, Words]
    version: int


def bench_codec(
    trace_dir: Path | None = None, *, presets: Sequence[float] = PRESETS, chains: Sequence[int] = CHAINS,
    num_elements: int = 1 << 24, seed: int = 0, repeats: int = 5, threads: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield one row per measured update.

    Args:
        trace_dir: a folder in the layout of the recorded trace (`digests.json`, `v00000.safetensors`, one folder of
            `v*.safetensors.zst` per run), or None for the generator only. Every version's bits are checked against
            the folder's digests.
        presets: percent of words that change, for the generator.
        chains: lengths of chains at the preset nearest 1.2 % whose fold is measured.
        num_elements: size of the generated model.
        seed: of the generator.
        repeats: each time is the median of so many runs.
        threads: for encoding and decoding.

    Yields:
        Rows with keys `source`, `version` (trace) or `preset` (generator), `encoding`, `num_changed`, `density`,
        `bits_per_change`, `floor_bits`, `floor_bits_given_exponent`, `stream_bits`, `xor_zstd_bits`,
        `times_smaller`, `encode_gbps`, `decode_apply_gbps`, `verified_apply_gbps`, `memcpy_gbps`. Bits are per
        changed word. Encoding starts from both sides' words. `decode_apply` only writes; `verified_apply` is a whole
        `Transaction`: every check, fingerprints, undo log, and reading back.

    Raises:
        FormatError, ChecksumError: the trace is not what its digests say.
    """
    if trace_dir is not None:
        for run, step in _trace(trace_dir):
            yield {"source": f"trace {run}", "version": step.version} | _measure(step, repeats, threads)
    if not presets and not chains:
        return
    model = make_model(num_elements, seed)
    for percent in presets:
        step = _generated(model, percent, seed, 1)[0]
        yield {"source": "generator", "preset": f"{percent:g} %"} | _measure(step, repeats, threads)
    for length in chains:
        steps = _generated(model, 1.2, seed, length)
        row = _measure_fold(steps, repeats, threads)
        yield {"source": "generator", "preset": f"1.2 %, fold of {length}"} | row


def _trace(folder: Path) -> Iterator[tuple[str, _Step]]:
    """Yield every step of every run of a recorded trace, its bits checked."""
    try:
        digests = json.loads((folder / "digests.json").read_text())
        start = _read_safetensors((folder / "v00000.safetensors").read_bytes())
    except (OSError, ValueError) as err:
        raise InputError("no trace in this folder", expected="digests.json, v00000.safetensors", found=folder) from err
    table = ParameterTable(ParamMeta(name, "bfloat16", shape) for name, (shape, _) in start.items())
    for run in sorted(digests):
        words = {name: array.copy() for name, (_, array) in start.items()}
        for version in sorted(map(int, digests[run])):
            old = words
            if version:
                raw = (folder / run / f"v{version:05d}.safetensors.zst").read_bytes()
                changes = _read_safetensors(zstandard.ZstdDecompressor().decompress(raw))
                words = {name: _changed(name, array, changes) for name, array in old.items()}
            for name, wanted in digests[run][str(version)].items():
                if xxhash.xxh3_128_hexdigest(words[name].data) != wanted:
                    raise ChecksumError("the trace is damaged", parameter=name, version=version, expected=wanted)
            if version:
                yield run, _Step(table, old, words, version)


def _read_safetensors(raw: bytes) -> dict[str, tuple[tuple[int, ...], Words]]:
    tensors = {}
    for name, tensor in deserialize(raw):  # type: ignore[no-untyped-call]
        if tensor["dtype"] not in _TRACE_TYPES:
            raise FormatError("unexpected dtype in the trace", parameter=name, found=tensor["dtype"])
        array = np.frombuffer(tensor["data"], _TRACE_TYPES[tensor["dtype"]])
        tensors[name] = (tuple(tensor["shape"]), array)
    return tensors


def _changed(name: str, old: Words, changes: dict[str, tuple[tuple[int, ...], Words]]) -> Words:
    if f"{name}#idx" not in changes:
        return old
    new = old.copy()
    new[changes[f"{name}#idx"][1]] = changes[f"{name}#val"][1].view("<u2")
    return new


def _generated(model: Model, percent: float, seed: int, length: int) -> list[_Step]:
    """Return a chain of steps from the generated model."""
    rng = np.random.default_rng([seed, int(percent * 1000)])
    steps, words = [], model.words
    for version in range(1, length + 1):
        moved = Model(model.table, words, model.idle)
        new = {meta.name: array for meta, array in take_step(moved, percent, rng)}
        steps.append(_Step(model.table, words, new, version))
        words = new
    return steps


def _digest(table: ParameterTable, words: dict[str, Words]) -> str:
    return table.state_digest(np.array([words_fingerprint(words[meta.name]) for meta in table], np.uint64))


def _update(step: _Step, patches: Sequence[SparseWeightPatch]) -> WeightUpdate:
    return WeightUpdate(
        run_id=_RUN_ID, epoch=1, base_version=step.version - 1, target_version=step.version,
        base_digest=_digest(step.table, step.old), target_digest=_digest(step.table, step.new),
        table_digest=step.table.digest, patches=tuple(patches), optimizer_step=step.version,
    )  # fmt: skip


def _fingerprints(step: _Step) -> dict[str, int]:
    return {meta.name: words_fingerprint(step.old[meta.name]) for meta in step.table}


def _diff(step: _Step, before: dict[str, int]) -> list[SparseWeightPatch]:
    found = (diff_words(meta, step.old[meta.name], step.new[meta.name], before[meta.name]) for meta in step.table)
    return [patch for patch in found if patch is not None]


def _measure(step: _Step, repeats: int, threads: int) -> dict[str, Any]:
    """Measure one step: sizes, then speeds. Encoding starts from both sides' words, sums included."""
    before = _fingerprints(step)
    update = _update(step, _diff(step, before))
    raw = encode_update(update, threads=threads)

    def encode() -> None:
        encode_update(replace(update, patches=tuple(_diff(step, before))), threads=threads)

    return _sizes(step, raw) | _speeds(step, raw, encode, repeats, threads)


def _measure_fold(steps: list[_Step], repeats: int, threads: int) -> dict[str, Any]:
    """Measure the fold of a chain: its size against one diff of the ends, and its speeds; encode includes folding."""
    whole = _Step(steps[0].table, steps[0].old, steps[-1].new, steps[-1].version)
    updates = [decode_update(encode_update(_update(step, _diff(step, _fingerprints(step))))) for step in steps]
    folded = fold(updates)
    raw = encode_update(folded, threads=threads)
    row = _sizes(whole, raw)
    return row | _speeds(whole, raw, lambda: encode_update(fold(updates), threads=threads), repeats, threads)


def _sizes(step: _Step, raw: bytes) -> dict[str, Any]:
    changes = []
    for meta in step.table:
        old, new = step.old[meta.name], step.new[meta.name]
        at, _, values = changed_words(old, new)
        if at.size:
            changes.append(Change(meta, old, at, values))
    bound = floors(changes)
    num_changed = sum(change.indices.size for change in changes)
    compressor = zstandard.ZstdCompressor(level=1)
    xor = sum(len(compressor.compress((step.old[m.name] ^ step.new[m.name]).data)) for m in step.table)
    header = read_header(raw)
    each = max(num_changed, 1)
    return {
        "encoding": "+".join(sorted({entry.encoding for entry in header.entries})),
        "num_changed": num_changed,
        "density": num_changed / sum(meta.num_words for meta in step.table),
        "bits_per_change": 8 * len(raw) / each,
        "floor_bits": bound.unconditional / each,
        "floor_bits_given_exponent": bound.given_exponent / each,
        "stream_bits": 8 * sum(header.stream_bytes.values()) / each,
        "xor_zstd_bits": 8 * xor / each,
        "times_smaller": step.table.nbytes / len(raw),
    }


def _speeds(step: _Step, raw: bytes, encode: Callable[[], object], repeats: int, threads: int) -> dict[str, float]:
    target = {name: array.copy() for name, array in step.old.items()}

    def decode_apply() -> None:
        for patch in decode_update(raw, threads=threads).patches:
            _apply(target[patch.name], patch)

    state = WeightState(
        {meta.name: from_words(step.old[meta.name].copy(), meta.row, meta.shape) for meta in step.table},
        version=decode_update(raw).base_version,
    )

    def verified_apply() -> Transaction:
        transaction = Transaction.stage(state, decode_update(raw, threads=threads))
        transaction.write()
        return transaction

    decode_apply()
    wrong = next((name for name, array in step.new.items() if not np.array_equal(array, target[name])), None)
    if wrong is not None:
        raise FormatError("decoded weights are not the ones that were encoded", parameter=wrong)
    dense = step.table.nbytes / 1e9
    copies = [(np.empty_like(array), array) for array in step.old.values()]

    def copy() -> None:
        for to, source in copies:
            np.copyto(to, source)

    measured = {"encode_gbps": encode, "decode_apply_gbps": decode_apply, "verified_apply_gbps": verified_apply,
                "memcpy_gbps": copy}  # fmt: skip
    return {key: dense / _median(function, repeats) for key, function in measured.items()}


def _apply(words: Words, patch: SparseWeightPatch) -> None:
    if patch.indices is None:
        np.copyto(words, patch.values)
        return
    new = patch.values
    if patch.form == "delta":
        signed = patch.meta.row.signed_magnitude
        new = unordered(ordered(words.take(patch.indices), signed_magnitude=signed) + new, signed_magnitude=signed)
    words[patch.indices] = new


def _median(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        made = function()
        times.append(time.perf_counter() - start)
        if isinstance(made, Transaction):
            made.rollback()
    return sorted(times)[len(times) // 2]
