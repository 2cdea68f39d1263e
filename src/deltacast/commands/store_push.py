"""`deltacast store init` and `push`: make a store, and publish checkpoints in it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, progress
from deltacast.commands.options import DEFAULT_THREADS, Checkpoint, Json, Threads, read_key
from deltacast.commands.store_options import KeyFile, Store, opened
from deltacast.delta.errors import InputError, TableError

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
        head, extra_files = found.head(), _extra_files(checkpoint)
        following = None if head is None else head.version + 1
        if following is not None and version not in (None, following):
            raise InputError("versions of a store follow one another without a gap", expected=following, found=version)
        total = sum(meta.nbytes for meta in new.metas())
        if head is None or snapshot:
            with progress(f"push {checkpoint.name}", total) as done:
                record = found.publish_snapshot(
                    new, version=version, optimizer_step=optimizer_step, extra_files=extra_files, threads=threads,
                    progress=done,
                )  # fmt: skip
        else:
            record = _push_update(found, head, new, optimizer_step=optimizer_step, cache=cache, threads=threads)
        anchored = found.anchor_due()
        if anchored:
            with progress(f"anchor version {record.version}", total) as done:
                found.add_anchor(record.version, new, extra_files=extra_files, threads=threads, progress=done)
        document = _document(found.backend.url, record, total) | {"anchored": anchored}
    if as_json:
        print_json(document)
    else:
        _show(document)


def _extra_files(checkpoint: Path) -> Mapping[str, Path]:
    """Return what lies beside the weights, without which a version could not be loaded."""
    from deltacast.store.snapshots import extra_files_of

    return extra_files_of(checkpoint) if checkpoint.is_dir() else {}


def _push_update(
    store: VersionStore, head: VersionRecord, new: CheckpointSource, *, optimizer_step: int | None, cache: Path | None,
    threads: int,
) -> VersionRecord:  # fmt: skip
    from deltacast.delta.checkpoint_update import diff_checkpoints
    from deltacast.delta.sources import table_of

    table = table_of(new)
    if table.digest != head.table_digest:
        raise TableError(
            "the checkpoint has other parameters, dtypes or shapes than the newest version", version=head.version,
            expected=head.table_digest, found=table.digest, hint="Pass --snapshot to store it whole.",
        )  # fmt: skip
    with _weights(store, head, table.nbytes, cache=cache, threads=threads) as base:
        with progress(f"diff with version {head.version}", table.nbytes) as done:
            update = diff_checkpoints(
                base, new, run_id=store.run_id, base_version=head.version, optimizer_step=optimizer_step,
                threads=threads, progress=done,
            )  # fmt: skip
        record = store.publish_update(update, threads=threads)
    if cache is not None:
        _advance(_cached(cache, head), _cached(cache, record), update, threads)
    return record


@contextmanager
def _weights(
    store: VersionStore, head: VersionRecord, num_bytes: int, *, cache: Path | None, threads: int
) -> Generator[CheckpointSource]:
    """Open the newest version's weights: whether they are them shows when the update is published."""
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


def _cached(cache: Path, record: VersionRecord) -> Path:
    return cache / record.state_digest.removeprefix("xxh3_128:")


def _advance(old: Path, new: Path, update: WeightUpdate, threads: int) -> None:
    """Make the cached weights those that were just published, in place; what is not cached stays so."""
    from deltacast.delta.checkpoint_update import apply_to_checkpoint

    if old.exists() and not new.exists():
        apply_to_checkpoint(update, old, None, threads=threads)
        old.rename(new)


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
        stored += f", {document['times_smaller']:.1f}x smaller than {human_bytes(document['checkpoint_bytes'])}"
    print_facts(
        {
            "version": f"{document['version']} of run {document['run_id']}, epoch {document['epoch']}",
            "stored": f"{'whole' if whole else 'what changed'}, {stored}",
            "changed": None
            if whole
            else f"{document['num_changed']:,} of {document['num_words']:,} words ({document['density']:.4%})",
            "anchor": "a snapshot of this version was added" if document["anchored"] else None,
            "state digest": document["state_digest"],
        }
    )
