"""What every version number was ever said to be, in bytes that never went through an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deltacast.engines.base import ServingStatus, WorkerStatus
from soak.model import Bit, Weights, flipped

__all__ = ["Ledger", "SoakError"]

_KEPT = 64
"""Versions that are remembered: none that is older can be served by anybody who is looked at."""
_RECENT = 16
"""Versions that a trainer may go on from: its store's, of which those that waited to be published are gone."""


class SoakError(AssertionError):
    """The product broke its promise."""


class Ledger:
    """The weights by (run, version).

    Two things are left open until the first worker tells: whether a trainer that was lost had published, and which of
    its store's versions a trainer went on from. From then on the answer stands.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[Weights]] = {}
        self._open = set[tuple[str, int]]()
        self._doubts: deque[Weights] = deque(maxlen=_KEPT)

    def note(self, run_id: str, version: int, weights: Weights) -> None:
        """Record what a version is.

        A number can come to mean something else: if its trainer was lost and nobody told the next one of it. Workers
        that were frozen meanwhile may still hold what it was.
        """
        known = self._known.setdefault((run_id, version), [])
        if weights not in known:
            known.append(weights)
        while len(self._known) > _KEPT:
            self._known.pop(next(iter(self._known)))

    def note_one_of(self, run_id: str, version: int) -> None:
        """Record that a version is one of the last ones, in bits."""
        candidates = self.recent()
        self._doubts.extend(self._known.pop((run_id, version), []))
        self._known[run_id, version] = candidates
        self._open.add((run_id, version))

    def doubt(self, weights: Weights) -> None:
        """Record that a trainer was lost that may have published these weights."""
        self._doubts.append(weights)

    def recent(self) -> list[Weights]:
        """Return the weights of the versions that are remembered, and those in doubt, newest last."""
        last = [self._known[key][-1] for key in list(self._known)[-_RECENT:] if key not in self._open]
        return [*last, *list(self._doubts)[-1:]]

    def check(self, who: str, status: WorkerStatus, weights: Weights, flips: Iterable[Bit]) -> set[Bit]:
        """Return the bits in which a worker differs from the version that it says it holds.

        Raises:
            SoakError: nobody published that version, or it differs in more than the bits that were flipped.
        """
        if status.status not in (ServingStatus.SERVING, ServingStatus.STALE) or status.version is None:
            return set()
        key = status.run_id, status.version
        candidates = [*self._known.get(key, []), *self._doubts]
        best, fewest = _closest(candidates, weights)
        if fewest is None or not fewest <= set(flips):
            found = "nobody published what it holds" if fewest is None else f"bits differ: {sorted(fewest)[:3]}"
            raise SoakError(f"{who} is {status.status.value} at version {status.version} of {status.run_id}: {found}")
        if key in self._open or key not in self._known:
            self._known[key] = [best]
            self._open.discard(key)
        return fewest


def _closest(candidates: Iterable[Weights], weights: Weights) -> tuple[Weights, set[Bit] | None]:
    """Return the candidate that weights differ least from, and the bits in which they do; None if from all in many."""
    best, fewest = weights, None
    for candidate in candidates:
        differs = flipped(candidate, weights)
        if differs is not None and (fewest is None or len(differs) < len(fewest)):
            best, fewest = candidate, differs
    return best, fewest
