"""How to get from what a reader has to the version it wants, for the fewest bytes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from deltacast.delta.errors import FormatError, MissingObjectError, StoreError, VerificationError
from deltacast.store.fetch import ObjectRef
from deltacast.store.folds import FoldRef, list_folds
from deltacast.store.log import VersionLog
from deltacast.store.records import VersionRecord
from deltacast.store.snapshots import Manifest, list_snapshots, read_manifest

__all__ = [
    "READ_COST_BYTES",
    "Plan",
    "Step",
    "Way",
    "cheapest_way",
    "find_plan",
    "require_snapshot_of",
    "usable_snapshots",
]

_LOG: Final = logging.getLogger(__name__)

READ_COST_BYTES: Final = 1 << 16
"""What opening one more object counts for, beside its bytes."""

_FAR: Final = 1 << 80


@dataclass(frozen=True, slots=True)
class Step:
    """One container to apply: an update, or a fold of several.

    Attributes:
        object: the container.
        base: the version that it applies to.
        target: the version that it makes.
    """

    object: ObjectRef
    base: VersionRecord
    target: VersionRecord

    @property
    def is_fold(self) -> bool:
        """Whether it stands for several updates: a cache, which can be done without."""
        update = self.target.update
        return update is None or update.object != self.object


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fetch, in this order: maybe a snapshot, then containers that follow one another.

    Attributes:
        have: the version that the reader has; None for none.
        want: the version that it gets.
        snapshot: what to start from; None to start from `have`.
        updates: what to apply. Empty, without a snapshot: there is nothing to do.
    """

    have: int | None
    want: int
    snapshot: Manifest | None
    updates: tuple[Step, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects to fetch."""
        whole = 0 if self.snapshot is None else self.snapshot.weights_bytes
        return whole + sum(step.object.num_bytes for step in self.updates)


@dataclass(frozen=True, slots=True)
class Way:
    """Steps that follow one another, and what they cost: their bytes, and `READ_COST_BYTES` for each."""

    steps: tuple[Step, ...]
    cost_bytes: int


def find_plan(log: VersionLog, have: int | None, want: int, *, without: Collection[str] = ()) -> Plan:
    """Find the way to a version that takes the fewest bytes.

    Reads one version file in 65 between the two, one listing of folds, and, unless updates alone are sure to be
    cheaper than the weights, one of snapshots and one manifest.

    Args:
        log: the store's versions.
        have: the version that the reader has; None for none. One that the store has no more is as good as none, and
            so is one above `want`.
        want: the version to get.
        without: names of containers and manifests that were found to be of no use.

    Raises:
        StoreError: no such version, or nothing leads there.
        ChecksumError, FormatError: a version file on the way is damaged.
    """
    if have == want:
        log.record(want)
        return Plan(have, want, None, ())
    lowest = have if have is not None and have < want else 0
    folds = list(list_folds(log.backend, lowest))
    way: Way | None = None
    if have is not None and have < want:
        records = log.between(have, want)
        way = cheapest_way(records, folds, have, want, without=without)
        if way is not None and way.cost_bytes <= records[0].num_words:  # no word takes less than a byte
            return Plan(have, want, None, way.steps)
    for manifest, records in usable_snapshots(log, 0 if way is None else lowest + 1, want, without=without):
        after = cheapest_way(records, folds, manifest.version, want, without=without)
        if after is None:
            continue
        whole = manifest.weights_bytes + READ_COST_BYTES * len(manifest.files) + after.cost_bytes
        if way is None or whole < way.cost_bytes:
            return Plan(have, want, manifest, after.steps)
        break  # older snapshots are no smaller, and have more to come after them
    if way is None:
        log.record(want)  # says which versions there are, if this is none of them
        raise StoreError("no snapshot leads to that version", version=want, hint="`deltacast store fsck` says why.")
    return Plan(have, want, None, way.steps)


def usable_snapshots(
    log: VersionLog, lowest: int, want: int, *, without: Collection[str] = ()
) -> Iterator[tuple[Manifest, list[VersionRecord]]]:
    """Yield snapshots that are what the log says, newest first; others are logged and passed over.

    Args:
        log: the store's versions.
        lowest: only of versions from here on.
        want: and up to here.
        without: names of manifests that are not even looked at.

    Yields:
        Each manifest, and the records from `want` down to its version.

    Raises:
        StoreError: the store failed.
        ChecksumError, FormatError: a version file on the way is damaged.
    """
    for version, path in sorted(list_snapshots(log.backend), reverse=True):
        if not lowest <= version <= want or path in without:
            continue
        records = log.between(version, want)
        if not records or records[-1].version != version:
            continue  # of a version that was removed, or never came to be
        try:
            manifest = read_manifest(log.backend, path, log.key)
            require_snapshot_of(manifest, records[-1])
        except (FormatError, VerificationError, MissingObjectError) as err:
            _LOG.warning("snapshot %s cannot be used: %s", path, err)
        else:
            yield manifest, records


def require_snapshot_of(manifest: Manifest, record: VersionRecord) -> None:
    """Raise unless a manifest says of its weights what a version's record says.

    Raises:
        VerificationError: it is of another run or of other weights.
    """
    found = (manifest.run_id, manifest.version, manifest.table_digest, manifest.state_digest)
    expected = (record.run_id, record.version, record.table_digest, record.state_digest)
    if found != expected:
        raise VerificationError(f"{manifest.path} is no snapshot of its version", version=record.version,
                                expected=expected, found=found)  # fmt: skip


def cheapest_way(
    records: Iterable[VersionRecord], folds: Iterable[FoldRef], start: int, want: int, *, without: Collection[str] = ()
) -> Way | None:
    """Return the cheapest way between two versions: a shortest path over versions, in O(versions + folds).

    Args:
        records: those of the versions that may be passed through, both ends included.
        folds: what may stand for several updates; those between other versions do not count.
        start: where to begin.
        want: where to go.
        without: names of containers that cannot be used.

    Returns:
        The way; None if none leads there.
    """
    known = {record.version: record for record in records}
    into = _steps_by_target(known, folds)
    costs: dict[int, int] = {start: 0} if start in known else {}
    last: dict[int, Step] = {}
    for version in sorted(known):  # every step goes up, so whatever a step begins at is settled
        for step in into[version]:
            if step.object.path in without:
                continue
            cost = costs.get(step.base.version, _FAR) + step.object.num_bytes + READ_COST_BYTES
            if cost < costs.get(version, _FAR):
                costs[version], last[version] = cost, step
    if want not in costs:
        return None
    steps: list[Step] = []
    at = want
    while at != start:
        steps.append(last[at])
        at = last[at].base.version
    return Way(tuple(reversed(steps)), costs[want])


def _steps_by_target(known: Mapping[int, VersionRecord], folds: Iterable[FoldRef]) -> dict[int, list[Step]]:
    into: dict[int, list[Step]] = defaultdict(list)
    for version, record in known.items():
        base = known.get(version - 1)
        if record.update is not None and base is not None:
            into[version].append(Step(record.update.object, base, record))
    for fold in folds:
        base, target = known.get(fold.base_version), known.get(fold.target_version)
        if base is not None and target is not None:
            into[target.version].append(Step(fold.object, base, target))
    return into
