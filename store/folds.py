"""Folds: containers that do in one step what several updates do. A cache; nothing is lost with it.

The writer folds aligned spans: after version v, the 8 updates before it if v is a multiple of 8, then 64 if it is one
of 64, and so on, as long as a fold stays far smaller than the weights (`worth_folding`). So every span of n versions is
covered by O(log n) objects where versions change little, and each update is folded once per power.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from deltacast.delta.codec import encode_update
from deltacast.delta.errors import InputError
from deltacast.delta.fold import fold
from deltacast.delta.patch import WeightUpdate
from deltacast.store.fetch import ObjectRef, content_digest
from deltacast.store.names import FOLDS, fold_path, parse_fold_path
from deltacast.store.objects import ObjectBackend
from deltacast.store.records import VersionRecord

__all__ = ["FOLD_WIDTH", "FoldRef", "aligned_spans", "fold_updates", "list_folds", "worth_folding", "write_fold"]

FOLD_WIDTH: Final = 8

_SHARE: Final = 8
"""One change in so many words: it takes 3 bytes of memory for each word of the model to make such a fold (23 for each
change: two decoded, and one encoded), and it has about a tenth of a bf16 snapshot's bytes. Above that a fold costs ever
more memory, and saves few bytes over the updates that it stands for: the next anchor is the better way."""
_FEW_CHANGES: Final = 4 << 20
"""So many are folded in any case: they take 100 MB."""


@dataclass(frozen=True, slots=True)
class FoldRef:
    """A fold, as its name says it: whether it is what it says shows when it is read (`replay.py`).

    Attributes:
        object: the container.
        base_version: what it applies to.
        target_version: what it makes.
    """

    object: ObjectRef
    base_version: int
    target_version: int


def aligned_spans(version: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield the spans to fold once `version` is published, small ones first, none from below `first`."""
    width = FOLD_WIDTH
    while version % width == 0 and version - width >= first:
        yield version - width, version
        width *= FOLD_WIDTH


def worth_folding(records: Iterable[VersionRecord]) -> bool:
    """Say whether the updates of these versions should be folded: whether they change few words, taken together.

    Each word counts as often as it changed: how much of that is the same word is only known once they are folded.

    Args:
        records: of the versions that the updates make, base excluded.
    """
    sums = [(record.num_words, 0 if record.update is None else record.update.num_changed) for record in records]
    num_words = min((words for words, _ in sums), default=0)
    return sum(changed for _, changed in sums) <= max(num_words // _SHARE, _FEW_CHANGES)


def list_folds(backend: ObjectBackend, lowest: int = 0) -> Iterator[FoldRef]:
    """Yield the folds whose base is at least `lowest`; reads none of them.

    Raises:
        StoreError: the store failed.
    """
    after = f"{FOLDS}{lowest:020}" if lowest else ""  # before every name that begins with it
    for info in backend.list(FOLDS, after=after):
        found = parse_fold_path(info.name)
        if found is not None:
            base, target, digest = found
            yield FoldRef(ObjectRef(info.name, info.num_bytes, digest), base, target)


def fold_updates(updates: Iterable[WeightUpdate]) -> WeightUpdate:
    """Fold consecutive updates, holding the result so far and one update at a time.

    Raises:
        InputError, BaseError: as `deltacast.delta.fold.fold`.
    """
    folded: WeightUpdate | None = None
    for update in updates:
        folded = update if folded is None else fold([folded, update])
    if folded is None:
        raise InputError("there is nothing to fold")
    return folded


def write_fold(backend: ObjectBackend, folded: WeightUpdate, key: bytes | None, *, threads: int = 1) -> FoldRef:
    """Store a fold under its name.

    Raises:
        InputError: a seed.
        StoreError: the store failed; there may be a fold that nobody needs.
    """
    if folded.base_version is None:
        raise InputError("a seed is no fold", version=folded.target_version)
    data = encode_update(folded, values="delta", signing_key=key, threads=threads)
    digest = content_digest(data)
    ref = ObjectRef(fold_path(folded.base_version, folded.target_version, digest), len(data), digest)
    backend.write(ref.path, [data])
    return FoldRef(ref, folded.base_version, folded.target_version)
