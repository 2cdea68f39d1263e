"""`deltacast store log` and `show`: which versions there are, and all that is known of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, print_table
from deltacast.commands.options import Json
from deltacast.commands.store_options import KeyFile, Store, opened, wanted

if TYPE_CHECKING:
    from deltacast.store.records import VersionRecord
    from deltacast.store.version_store import VersionStore

__all__ = ["log", "show"]

_DIGITS: Final = 8
"""Of a digest, in a list: enough to see which versions are the same."""


def log(
    store: Store,
    *,
    limit: Annotated[int, typer.Option(min=0, help="Versions to list; 0 lists all.")] = 50,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """List the versions of a store, newest first."""
    with opened(store, key_file) as found:
        records = list(found.log(limit or None))
        rows = [_document(record, sizes) for sizes in [_sizes(found, records)] for record in records]
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo("no version yet: `deltacast store push` publishes one")
        return
    columns = ("version", "published, UTC ", "step", "changed", "bytes", "smaller", "digest ")
    print_table(columns, [_row(row) for row in rows])
    if limit == len(rows):
        typer.echo(f"the newest {limit:,} (--limit 0 lists all)")


def _sizes(store: VersionStore, records: Iterable[VersionRecord]) -> dict[str, int]:
    """Return the bytes of the weights by table digest, as snapshots tell them; one manifest is read."""
    from deltacast.store.plan import usable_snapshots

    sizes: dict[str, int] = {}
    versions = store.versions()
    for manifest, _ in usable_snapshots(store.version_log, 0, versions.stop - 1):
        sizes[manifest.table_digest] = manifest.weights_bytes
        break
    for record in records:
        if record.snapshot is not None:
            sizes.setdefault(record.table_digest, record.snapshot.weights_bytes)
    return sizes


def _document(record: VersionRecord, sizes: dict[str, int]) -> dict[str, Any]:
    update = record.update
    whole = sizes.get(record.table_digest)
    num_bytes = whole if update is None else update.object.num_bytes
    return {
        "version": record.version,
        "kind": "snapshot" if update is None else "update",
        "published": record.published,
        "optimizer_step": record.optimizer_step,
        "epoch": record.epoch,
        "num_changed": None if update is None else update.num_changed,
        "density": None if update is None else update.num_changed / max(record.num_words, 1),
        "num_bytes": num_bytes,
        "times_smaller": whole / num_bytes if whole and num_bytes else None,
        "state_digest": record.state_digest,
    }


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    """Return what fits a terminal of 80 columns; `show` and --json have the rest."""
    whole = row["kind"] == "snapshot"
    changed = "whole" if whole else f"{row['density']:.3%}" if row["num_changed"] else "nothing"
    return (
        row["version"], row["published"][:16].replace("T", " "),
        "" if row["optimizer_step"] is None else row["optimizer_step"], changed, human_bytes(row["num_bytes"]),
        "" if whole or row["times_smaller"] is None else f"{row['times_smaller']:,.0f}x",
        row["state_digest"].removeprefix("xxh3_128:")[:_DIGITS],
    )  # fmt: skip


def show(
    store: Store,
    version: Annotated[int, typer.Argument(min=0, help="Which version.", show_default=False)],
    *,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Show all that a store says of one version, and the snapshots and folds that there are of it."""
    from deltacast.store.folds import list_folds
    from deltacast.store.snapshots import list_snapshots

    with opened(store, key_file) as found:
        record = found.record(wanted(found, version))
        snapshots = [path for number, path in list_snapshots(found.backend) if number == version]
        folds = [fold.object.path for fold in list_folds(found.backend) if fold.target_version == version]
    document: dict[str, Any] = record.to_json() | {"snapshots": snapshots, "folds": folds}
    if as_json:
        print_json(document)
    else:
        _show(record, snapshots, folds)


def _show(record: VersionRecord, snapshots: list[str], folds: list[str]) -> None:
    update, whole = record.update, record.snapshot
    facts: dict[str, object] = {
        "version": f"{record.version} of run {record.run_id}",
        "published": f"{record.published} by writer {record.writer}, epoch {record.epoch}",
        "optimizer step": record.optimizer_step,
        "state digest": record.state_digest,
        "table digest": record.table_digest,
        "previous": record.previous or "none: the first of its run",
    }
    if update is not None:
        facts["update"] = f"{update.object.path}, {human_bytes(update.object.num_bytes)}"
        density = update.num_changed / max(record.num_words, 1)
        facts["changed"] = f"{update.num_changed:,} of {record.num_words:,} words ({density:.4%})"
    if whole is not None:
        facts["published whole"] = f"{whole.path}, {human_bytes(whole.weights_bytes)}"
    facts["snapshots"] = ", ".join(snapshots) or None
    facts["folds"] = ", ".join(folds) or None
    print_facts(facts)
