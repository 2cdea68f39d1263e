"""Read the containers of a plan: each is proven to be the one that the version files mean before it is handed out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from deltacast.delta.codec import decode_update
from deltacast.delta.errors import DeltacastError, FormatError, MissingObjectError, StoreError, VerificationError
from deltacast.delta.patch import WeightUpdate
from deltacast.store.fetch import fetch_ref
from deltacast.store.log import VersionLog
from deltacast.store.plan import Step, cheapest_way

__all__ = ["read_step", "replay"]

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
    path, record = step.object.path, step.target
    num_changed = record.num_words if step.is_fold or record.update is None else record.update.num_changed
    data = fetch_ref(log.backend, step.object)
    try:
        update = decode_update(
            data, signing_key=log.key, threads=threads, max_decoded_bytes=_BYTES_PER_CHANGE * num_changed
        )
    except FormatError as err:
        raise type(err)(f"{path}: {err.message}", parameter=err.parameter, version=record.version,
                        expected=err.expected, found=err.found, hint=err.hint) from err  # fmt: skip
    found = (update.run_id, update.base_version, update.base_digest, update.target_version, update.target_digest,
             update.table_digest, update.epoch)  # fmt: skip
    expected = (log.run_id, step.base.version, step.base.state_digest, record.version, record.state_digest,
                record.table_digest, record.epoch)  # fmt: skip
    if found != expected:
        raise VerificationError(f"{path} is not what the version files say", version=record.version,
                                expected=expected, found=found)  # fmt: skip
    return update


def replay(
    log: VersionLog, steps: Iterable[Step], *, threads: int = 1, unusable: dict[str, DeltacastError] | None = None
) -> Iterator[WeightUpdate]:
    """Yield what steps stand for, in order, one at a time in memory.

    A fold that is gone or not what it should be is done without: the updates that it stands for come instead.

    Args:
        log: the store's versions.
        steps: what to read.
        threads: for the decoder.
        unusable: gets the name of each container that cannot be read, and why; with what it holds already, updates
            among them are not tried again.

    Raises:
        As `read_step`, for updates.
    """
    unusable = {} if unusable is None else unusable
    for step in steps:
        try:
            update = read_step(log, step, threads=threads)
        except (FormatError, VerificationError, StoreError) as err:
            unusable[step.object.path] = err
            if not step.is_fold:
                raise
            _LOG.warning("fold %s cannot be used: %s", step.object.path, err)
            yield from replay(log, _unfolded(log, step, unusable), threads=threads, unusable=unusable)
        else:
            yield update
            del update  # before the next one is decoded: the caller may have let go of it by now


def _unfolded(log: VersionLog, fold: Step, unusable: Collection[str]) -> tuple[Step, ...]:
    low, high = fold.base.version, fold.target.version
    records = [record for record in log.records(low) if record.version <= high]
    way = cheapest_way(records, (), low, high, without=unusable)
    if way is None:
        raise MissingObjectError("the updates that a fold stands for are gone", version=high, found=fold.object.path,
                                 hint="Plan again.")  # fmt: skip
    return way.steps
