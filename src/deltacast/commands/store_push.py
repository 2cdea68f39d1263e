"""`deltacast store init` and `push`: make a store, and publish checkpoints in it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, progress
from deltacast.commands.failures import message, warn
from deltacast.commands.options import DEFAULT_THREADS, Checkpoint, Json, Threads, read_key
from deltacast.commands.store_base import advance_cache, newest_weights, require_table
from deltacast.commands.store_options import KeyFile, Store, opened
from deltacast.delta.errors import BaseError, DeltacastError, InputError

if TYPE_CHECKING:
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.patch import WeightUpdate
    from deltacast.store.records import VersionRecord
    from deltacast.store.version_store import VersionStore

__all__ = ["init", "push"]


def init(
    store: Store,
    *,
    run_id: Annotated[str | None, typer.Option(help="The lineage of versions.", show_default="random")] = None,
    first_version: Annotated[int, typer.Option(min=0, help="The number of the first version.")] = 0,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make an empty store."""
    from deltacast.store.version_store import VersionStore

    key = read_key(key_file)
    with VersionStore.create(store, run_id=run_id, first_version=first_version, signing_key=key) as made:
        document = {
            "store": made.backend.url,
            "run_id": made.run_id,
            "first_version": first_version,
            "signed": key is not None,
        }
    if as_json:
        print_json(document)
    else:
        print_facts({"store": document["store"], "run": document["run_id"], "first version": first_version,
                     "signed": "yes" if key else "no"})  # fmt: skip


def push(
    store: Store,
    checkpoint: Checkpoint,
    *,
    version: Annotated[
        int | None, typer.Option(min=0, help="Refuse to give it another number than this.", show_default=False)
    ] = None,
    optimizer_step: Annotated[
        int | None, typer.Option(min=0, help="The trainer's own counter.", show_default=False)
    ] = None,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Store it whole, whatever there is.")] = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Make a new version even of the newest version's very bits.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the newest version's weights here between pushes.", show_default=False),
    ] = None,
    key_file: KeyFile = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Publish a checkpoint as the next version of a store.

    The first one is stored whole, later ones as what changed. The weights of the version before are mapped where they
    lie if the store is a folder and holds them whole; else they are fetched first, unless --cache has them.
    """
    from deltacast.delta.checkpoint import CheckpointSource

    with opened(store, key_file) as found, CheckpointSource(checkpoint) as new:
        head = found.head()
        pushing = _Push(found, new, _extra_files(checkpoint), threads)
        if head is None or snapshot:
            record = pushing.whole(f"push {checkpoint.name}", version, optimizer_step)
        else:
            record = pushing.changes(head, version, optimizer_step, cache=cache, allow_empty=allow_empty)
        anchored = pushing.anchor(record)
        document = _document(found.backend.url, record, pushing.num_bytes) | {
            "published": head is None or record.version != head.version,
            "anchored": anchored,
            "warnings": pushing.warnings,
        }
    if as_json:
        print_json(document)
    else:
        _show(document)


def _extra_files(checkpoint: Path) -> Mapping[str, Path]:
    """Return what lies beside the weights, without which a version could not be loaded."""
    from deltacast.store.snapshots import extra_files_of

    return extra_files_of(checkpoint) if checkpoint.is_dir() else {}


class _Push:
    """One checkpoint on its way into a store; once its version stands, what fails is only a warning."""

    def __init__(
        self, store: VersionStore, new: CheckpointSource, extra_files: Mapping[str, Path], threads: int
    ) -> None:
        from deltacast.delta.sources import table_of

        self._store, self._new, self._extra_files, self._threads = store, new, extra_files, threads
        self._table = table_of(new)
        self.num_bytes = self._table.nbytes
        self.warnings: list[str] = []

    def whole(self, label: str, version: int | None, optimizer_step: int | None) -> VersionRecord:
        """Publish it as a snapshot."""
        with progress(label, self.num_bytes) as done:
            return self._store.publish_snapshot(
                self._new, version=version, optimizer_step=optimizer_step, extra_files=self._extra_files,
                threads=self._threads, progress=done,
            )  # fmt: skip

    def changes(
        self, head: VersionRecord, version: int | None, optimizer_step: int | None, *, cache: Path | None,
        allow_empty: bool,
    ) -> VersionRecord:  # fmt: skip
        """Publish what changed since the newest version; return that one if nothing did."""
        following = head.version + 1
        if version not in (None, head.version, following):
            raise InputError("versions of a store follow one another without a gap", expected=following, found=version)
        require_table(self._store, head, self._table)
        with newest_weights(self._store, head, self.num_bytes, cache=cache, threads=self._threads) as base:
            update = self._diff(base, head, optimizer_step)
            if not (update.patches or allow_empty):
                return head
            if version == head.version:
                raise InputError("that version is published already", version=version,
                                 hint=f"This checkpoint would be version {following}.")  # fmt: skip
            record = self._store.publish_update(update, threads=self._threads)
        if cache is not None:
            with self._only_warned("--cache could not be brought to it; the next push fetches the version"):
                advance_cache(cache, head, record, update, self._threads)
        return record

    def _diff(self, base: CheckpointSource, head: VersionRecord, optimizer_step: int | None) -> WeightUpdate:
        from deltacast.delta.checkpoint_update import diff_checkpoints

        with progress(f"diff with version {head.version}", self.num_bytes) as done:
            update = diff_checkpoints(
                base, self._new, run_id=self._store.run_id, base_version=head.version, optimizer_step=optimizer_step,
                threads=self._threads, progress=done,
            )  # fmt: skip
        if update.base_digest != head.state_digest:
            raise BaseError(
                "the base to compare with does not have the newest version's bits", version=head.version,
                expected=head.state_digest, found=update.base_digest,
                hint="Empty the --cache folder; without one, `deltacast store fsck` says what is damaged.",
            )  # fmt: skip
        return update

    def anchor(self, record: VersionRecord) -> bool:
        """Add a snapshot of the version where one is due, and say whether it was added."""
        later = f"deltacast store anchor {self._store.backend.url} --version {record.version}"
        with self._only_warned(f"it got no snapshot: `{later}` adds one"):
            if self._store.anchor_due():
                with progress(f"anchor version {record.version}", self.num_bytes) as done:
                    self._store.add_anchor(
                        record.version, self._new, extra_files=self._extra_files, threads=self._threads, progress=done
                    )
                return True
        return False

    @contextmanager
    def _only_warned(self, what: str) -> Generator[None]:
        try:
            yield
        except (DeltacastError, OSError) as err:
            self.warnings.append(f"the version is published, but {what} ({message(err)})")


def _document(store: str, record: VersionRecord, checkpoint_bytes: int) -> dict[str, Any]:
    update, snapshot = record.update, record.snapshot
    stored = update.object.num_bytes if update is not None else snapshot.weights_bytes if snapshot is not None else 0
    num_changed = record.num_words if update is None else update.num_changed
    return {
        "store": store,
        "run_id": record.run_id,
        "epoch": record.epoch,
        "version": record.version,
        "kind": "snapshot" if update is None else "update",
        "state_digest": record.state_digest,
        "checkpoint_bytes": checkpoint_bytes,
        "stored_bytes": stored,
        "num_changed": num_changed,
        "num_words": record.num_words,
        "density": num_changed / record.num_words if record.num_words else 0.0,
        "times_smaller": checkpoint_bytes / stored if stored else None,
    }


def _show(document: dict[str, Any]) -> None:
    whole = document["kind"] == "snapshot"
    stored = human_bytes(document["stored_bytes"])
    if not whole:
        stored += f", {document['times_smaller']:,.1f}x smaller than {human_bytes(document['checkpoint_bytes'])}"
    published = document["published"]
    nothing = "nothing: this is the newest version already (--allow-empty makes another of it)"
    print_facts(
        {
            "version": f"{document['version']} of run {document['run_id']}, epoch {document['epoch']}",
            "stored": f"{'whole' if whole else 'what changed'}, {stored}" if published else nothing,
            "changed": None
            if whole or not published
            else f"{document['num_changed']:,} of {document['num_words']:,} words ({document['density']:.4%})",
            "anchor": "a snapshot of this version was added" if document["anchored"] else None,
            "state digest": document["state_digest"],
        }
    )
    for warning in document["warnings"]:
        warn(warning)
