"""Read the containers of a plan: each is proven to be the one that the version files mean before it is handed out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias, TypeVar

from deltacast.delta.codec import decode_portions, decode_update
from deltacast.delta.errors import DeltacastError, FormatError, MissingObjectError, StoreError, VerificationError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.store.fetch import fetch_ref
from deltacast.store.log import VersionLog
from deltacast.store.plan import Step, cheapest_way

__all__ = ["Portions", "open_step", "read_step", "replay", "replay_portions"]

Portions: TypeAlias = tuple[WeightUpdate, Iterator[tuple[SparseWeightPatch, ...]]]
"""An update without its patches, and these, some at a time."""

_T = TypeVar("_T")

_LOG: Final = logging.getLogger(__name__)
_BYTES_PER_CHANGE: Final = 16
"""At most: an int64 position and a word of 8 bytes."""


def read_step(log: VersionLog, step: Step, *, threads: int = 1) -> WeightUpdate:
    """Read one container, as the records at both its ends say it must be.

    Args:
        log: the store's versions.
        step: which.
        threads: for the decoder.

    Raises:
        MissingObjectError: it is gone; plan again.
        ChecksumError, FormatError: its bytes are not those of its record or name, not signed as they must be, or no
            container; the message names the object.
        VerificationError: it is of another run, or between other versions or weights.
    """
    with _naming(step):
        update = decode_update(fetch_ref(log.backend, step.object), signing_key=log.key, threads=threads,
                               max_decoded_bytes=_most_decoded(step))  # fmt: skip
    _require_step(log, step, update)
    return update


def open_step(log: VersionLog, step: Step, *, threads: int = 1) -> Portions:
    """Read one container as `read_step`, whose arguments and errors it has, and decode it some patches at a time.

    Returns:
        The update without patches, and its patches. What breaks a rule of the format within these is raised when its
        turn comes: by then the bytes have been those of the record or name.
    """
    with _naming(step):
        update, portions = decode_portions(fetch_ref(log.backend, step.object), signing_key=log.key, threads=threads,
                                           max_decoded_bytes=_most_decoded(step))  # fmt: skip
    _require_step(log, step, update)

    def named() -> Iterator[tuple[SparseWeightPatch, ...]]:
        with _naming(step):
            yield from portions

    return update, named()


def replay(log: VersionLog, steps: Iterable[Step], *, threads: int = 1) -> Iterator[WeightUpdate]:
    """Yield what steps stand for, in order, one at a time in memory.

    A fold that is gone or not what it should be is done without: the updates that it stands for come instead.

    Raises:
        As `read_step`, for updates.
    """
    return _replay(log, steps, partial(read_step, log, threads=threads), {})


def replay_portions(
    log: VersionLog, steps: Iterable[Step], unusable: dict[str, DeltacastError], *, threads: int = 1
) -> Iterator[Portions]:
    """Yield what steps stand for as `replay`, each some patches at a time.

    Args:
        log: the store's versions.
        steps: what to read.
        unusable: gets the name of each container that cannot be opened, and why; with what it holds already, updates
            among them are not tried again.
        threads: for the decoder.

    Raises:
        As `open_step`, for updates.
    """
    return _replay(log, steps, partial(open_step, log, threads=threads), unusable)


def _replay(
    log: VersionLog, steps: Iterable[Step], read: Callable[[Step], _T], unusable: dict[str, DeltacastError]
) -> Iterator[_T]:
    for step in steps:
        try:
            found = read(step)
        except (FormatError, VerificationError, StoreError) as err:
            unusable[step.object.path] = err
            if not step.is_fold:
                raise
            _LOG.warning("fold %s cannot be used: %s", step.object.path, err)
            yield from _replay(log, _unfolded(log, step, unusable), read, unusable)
        else:
            yield found
            del found  # before the next one is read: the caller may have let go of it by now


@contextmanager
def _naming(step: Step) -> Iterator[None]:
    """Have errors of the format name the object."""
    try:
        yield
    except FormatError as err:
        if err.message.startswith(step.object.path):
            raise
        raise type(err)(f"{step.object.path}: {err.message}", parameter=err.parameter, version=step.target.version,
                        expected=err.expected, found=err.found, hint=err.hint) from err  # fmt: skip


def _most_decoded(step: Step) -> int:
    record = step.target
    return _BYTES_PER_CHANGE * (
        record.num_words if step.is_fold or record.update is None else record.update.num_changed
    )


def _require_step(log: VersionLog, step: Step, update: WeightUpdate) -> None:
    """Raise unless an update is what the records at its ends say; its patches do not count."""
    record = step.target
    found = (update.run_id, update.base_version, update.base_digest, update.target_version, update.target_digest,
             update.table_digest, update.epoch)  # fmt: skip
    expected = (log.run_id, step.base.version, step.base.state_digest, record.version, record.state_digest,
                record.table_digest, record.epoch)  # fmt: skip
    if found != expected:
        raise VerificationError(f"{step.object.path} is not what the version files say", version=record.version,
                                expected=expected, found=found)  # fmt: skip


def _unfolded(log: VersionLog, fold: Step, unusable: Collection[str]) -> tuple[Step, ...]:
    low, high = fold.base.version, fold.target.version
    records = [record for record in log.records(low) if record.version <= high]
    way = cheapest_way(records, (), low, high, without=unusable)
    if way is None:
        raise MissingObjectError("the updates that a fold stands for are gone", version=high, found=fold.object.path,
                                 hint="Plan again.")  # fmt: skip
    return way.steps
