"""What a store costs as its chain of versions grows: to publish one more, and to catch up from the first.

Weights and steps are generated (`generator.py`). Each publish stands next to a plain file of the same bytes, written
and synced in the same folder right after it; catching up over folds next to replaying every update. Nothing is cold:
what was just written is read from the page cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from deltacast.bench.generator import Model, make_model, take_step
from deltacast.delta.apply import apply_update
from deltacast.delta.bits import Words, from_words
from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.diff import diff_state
from deltacast.delta.errors import InputError, VerificationError
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from deltacast.store.plan import Plan, cheapest_way
from deltacast.store.version_store import VersionStore

__all__ = ["CHAINS", "StoreRow", "bench_store"]

CHAINS: Final = (1, 10, 100, 1000)
"""Updates in the chain when a row is measured."""


@dataclass(frozen=True, slots=True)
class StoreRow:
    """A chain of `num_updates` updates on top of one snapshot. Times are seconds, medians unless they say otherwise.

    Attributes:
        num_updates: in the chain.
        weights_bytes: of all weights: what a dense transfer would move.
        update_bytes: of one update, mean over those since the row before.
        publish_s: to encode an update, write it, and commit its version durably.
        fold_s: to make folds, mean per update.
        write_s: to write and sync a plain file of the same bytes.
        folded_objects: containers that a reader at the first version fetches to get to the newest.
        folded_bytes: of them.
        folded_s: to plan, read, check and apply them, proven by digest.
        replayed_bytes: of all updates.
        replayed_s: to do the same with each update in turn.
    """

    num_updates: int
    weights_bytes: int
    update_bytes: float
    publish_s: float
    fold_s: float
    write_s: float
    folded_objects: int
    folded_bytes: int
    folded_s: float
    replayed_bytes: int
    replayed_s: float


def bench_store(
    folder: Path,
    *,
    chains: Sequence[int] = CHAINS,
    num_elements: int = 1 << 22,
    percent: float = 1.0,
    repeats: int = 3,
    threads: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[StoreRow]:
    """Grow one store and measure it at each length.

    Args:
        folder: an empty folder on the disk to measure.
        chains: lengths, in updates.
        num_elements: of the generated model, nearly all bf16; takes about 12 bytes of memory each.
        percent: of all words, changed per update.
        repeats: of each catching up.
        threads: for the codec.
        seed: of weights and steps.
        progress: told the bytes of the weights for every version that is published.

    Raises:
        InputError: nothing to measure.
        VerificationError: a reader got other weights than were published.
        StoreError: the disk is full, or fails.
    """
    if not chains or min(chains) < 1 or repeats < 1 or not 0 <= percent <= 100:
        raise InputError("nothing to measure", expected="chains and repeats of 1 or more, 0 to 100 percent",
                         found=f"chains {list(chains)}, {repeats} repeats, {percent} %")  # fmt: skip
    with VersionStore.create(folder / "store") as store:
        chain = _Chain(store, make_model(num_elements, seed), threads)
        rng = np.random.default_rng(seed)
        for version in range(1, max(chains) + 1):
            chain.grow(take_step(chain.model, percent, rng), folder / "plain")
            if progress is not None:
                progress(chain.model.table.nbytes)
            if version in chains:
                yield chain.measured(repeats)


class _Chain:
    """A store that grows, the trainer that publishes, and readers that catch up from its first version."""

    def __init__(self, store: VersionStore, model: Model, threads: int) -> None:
        self.store, self.model, self.threads = store, model, threads
        self._first = dict(model.words)
        self._trainer = self._weights()
        self._times: list[tuple[float, float, float, int]] = []
        store.publish_snapshot(StateDictSource(self._tensors()))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the first version's weights, in memory of their own."""
        return {meta.name: from_words(self._first[meta.name].copy(), meta.row, meta.shape) for meta in self.model.table}

    def _weights(self) -> WeightState:
        return WeightState(self._tensors(), version=0, threads=self.threads)

    def grow(self, step: Iterable[tuple[ParamMeta, Words]], plain: Path) -> None:
        """Publish one more version, and write a plain file of as many bytes."""
        new = list(step)
        self.model.words = {meta.name: words for meta, words in new}
        pairs = ((meta, from_words(words, meta.row, meta.shape)) for meta, words in new)
        update = diff_state(self._trainer, pairs, run_id=self.store.run_id)
        start = time.perf_counter()
        record = self.store.publish_update(update, folds=False, threads=self.threads)
        published = time.perf_counter()
        self.store.fold_aligned(record.version, threads=self.threads)
        folded = time.perf_counter()
        num_bytes = 0 if record.update is None else record.update.object.num_bytes
        self._times.append((published - start, folded - published, _write_plain(plain, num_bytes), num_bytes))
        apply_update(self._trainer, update)

    def measured(self, repeats: int) -> StoreRow:
        """Let readers catch up, folded and replayed in turn, so that both see the same neighbours."""
        plans = (self.store.plan(0), self._unfolded(0))
        both = [[self._catch_up(plan) for plan in (self.store.plan, self._unfolded)] for _ in range(repeats)]
        folded_s, replayed_s = (statistics.median(times) for times in zip(*both, strict=True))
        publish_s, fold_s, write_s, num_bytes = zip(*self._times, strict=True)
        self._times.clear()
        return StoreRow(
            num_updates=len(plans[1].updates),
            weights_bytes=self.model.table.nbytes,
            update_bytes=statistics.mean(num_bytes),
            publish_s=statistics.median(publish_s),
            fold_s=statistics.mean(fold_s),
            write_s=statistics.median(write_s),
            folded_objects=len(plans[0].updates),
            folded_bytes=plans[0].num_bytes,
            folded_s=folded_s,
            replayed_bytes=plans[1].num_bytes,
            replayed_s=replayed_s,
        )

    def _unfolded(self, have: int) -> Plan:
        """Return the plan of a reader that knows no folds."""
        records = list(self.store.version_log.records(have))
        way = cheapest_way(records, (), have, records[0].version)
        assert way is not None  # nothing was removed
        return Plan(have, records[0].version, None, way.steps)

    def _catch_up(self, plan: Callable[[int], Plan]) -> float:
        """Bring a reader from the first version to the newest, and return how long that took."""
        reader = self._weights()
        start = time.perf_counter()
        for update in self.store.updates(plan(0), threads=self.threads):
            apply_update(reader, update)
        took = time.perf_counter() - start
        if reader.digest != self._trainer.digest or reader.audit():
            raise VerificationError("a reader got other weights than were published", version=reader.version,
                                    expected=self._trainer.digest, found=reader.digest)  # fmt: skip
        return took


def _write_plain(path: Path, num_bytes: int) -> float:
    """Return how long it takes to write a new file of so many bytes and sync it."""
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    start = time.perf_counter()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    path.unlink()
    return took
