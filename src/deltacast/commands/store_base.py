"""What `deltacast store push` compares a checkpoint with: the newest version's weights, found, fetched or cached."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deltacast.commands.console import progress
from deltacast.delta.errors import TableError

if TYPE_CHECKING:
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.patch import WeightUpdate
    from deltacast.delta.table import ParameterTable
    from deltacast.store.records import VersionRecord
    from deltacast.store.version_store import VersionStore

__all__ = ["advance_cache", "newest_weights", "require_table"]

_HINT = "Pass --snapshot to store it whole."


def require_table(store: VersionStore, head: VersionRecord, table: ParameterTable) -> None:
    """Refuse a checkpoint that no update from the newest version leads to.

    Raises:
        TableError: it has other parameters, dtypes or shapes; names the first of them if the store's files are on this
            machine. In a bucket only digests are compared: its headers are not fetched for a message.
        StoreError, FormatError: the store cannot be read.
    """
    from deltacast.delta.sources import table_of
    from deltacast.store.snapshots import open_snapshot

    if table.digest == head.table_digest:
        return
    manifest = store.plan(None, head.version).snapshot
    if manifest is not None and store.backend.path(manifest.path) is not None:
        with open_snapshot(store.backend, manifest) as kept:
            try:
                table_of(kept).require_equal(table, who="the checkpoint")
            except TableError as err:
                err.version, err.hint = head.version, _HINT
                raise
    raise TableError("the checkpoint has other parameters, dtypes or shapes than the newest version",
                     version=head.version, expected=head.table_digest, found=table.digest, hint=_HINT)  # fmt: skip


@contextmanager
def newest_weights(
    store: VersionStore, head: VersionRecord, num_bytes: int, *, cache: Path | None, threads: int
) -> Generator[CheckpointSource]:
    """Open the newest version's weights; whether they are them shows when the update is published.

    They are mapped where they lie if the store is a folder that holds them whole. Else they are in `cache`, or fetched
    into it, or without one into a folder that is gone at the end.

    Args:
        store: where they are.
        head: its newest version.
        num_bytes: of the weights, for the progress bar.
        cache: made if it is not there.
        threads: for downloads and scans.

    Raises:
        FormatError, VerificationError, StoreError: the version cannot be made. OSError: there is no room for it.
    """
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.store.snapshots import open_snapshot

    plan = store.plan(None, head.version)
    if plan.snapshot is not None and not plan.updates and store.backend.path(plan.snapshot.path) is not None:
        with open_snapshot(store.backend, plan.snapshot) as mapped:
            yield mapped
        return
    with ExitStack() as stack:
        if cache is not None:
            cache.mkdir(exist_ok=True)
        folder = _cached(cache or Path(stack.enter_context(TemporaryDirectory(prefix="deltacast-"))), head)
        if not folder.exists():
            with progress(f"fetch version {head.version}", 2 * num_bytes) as done:  # written, then proven
                store.materialize(head.version, folder, threads=threads, progress=done)
        yield stack.enter_context(CheckpointSource(folder))


def advance_cache(cache: Path, head: VersionRecord, record: VersionRecord, update: WeightUpdate, threads: int) -> None:
    """Make the cached weights of `head` those of `record`, which was just published, in place; or drop them.

    Raises:
        DeltacastError, OSError: they could not be patched. They are gone, and the next push fetches them.
    """
    from deltacast.delta.checkpoint_update import apply_to_checkpoint

    old, new = _cached(cache, head), _cached(cache, record)
    if not old.exists() or new.exists():
        return
    try:
        apply_to_checkpoint(update, old, None, threads=threads)
        old.rename(new)
    except BaseException:
        shutil.rmtree(old, ignore_errors=True)
        raise


def _cached(cache: Path, record: VersionRecord) -> Path:
    return cache / record.state_digest.removeprefix("xxh3_128:")
