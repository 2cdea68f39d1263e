"""`deltacast store anchor`, `gc` and `fsck`: keep a store short, and find what is damaged in it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, printable, progress
from deltacast.commands.failures import MISMATCH
from deltacast.commands.options import DEFAULT_THREADS, Json, Threads, read_key
from deltacast.commands.store_options import KeyFile, Store, opened, wanted
from deltacast.delta.errors import MissingObjectError

if TYPE_CHECKING:
    from deltacast.store.fsck import FsckReport
    from deltacast.store.gc import GcReport
    from deltacast.store.plan import Plan
    from deltacast.store.version_store import VersionStore

__all__ = ["anchor", "fsck", "gc"]


def anchor(
    store: Store,
    *,
    version: Annotated[int | None, typer.Option(min=0, help="Of which version.", show_default="the newest")] = None,
    key_file: KeyFile = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Add a snapshot of a version, so that getting it takes no older ones, and gc can remove those.

    It is made from what the store has, in $TMPDIR, which needs room for the weights. Pushes do this where it is due.
    """
    with opened(store, key_file) as found:
        way = found.plan(None, wanted(found, version))
        added = bool(way.updates)
        if added:
            _add_anchor(found, way, threads)
            way = found.plan(None, way.want)
        assert way.snapshot is not None  # a plan from nothing
        document = {
            "store": found.backend.url,
            "version": way.want,
            "added": added,
            "path": way.snapshot.path,
            "num_bytes": way.snapshot.weights_bytes,
        }
    if as_json:
        print_json(document)
        return
    print_facts(
        {
            "version": f"{way.want} of run {found.run_id}",
            "snapshot": f"{way.snapshot.path}, {human_bytes(way.snapshot.weights_bytes)}",
            "added": None if added else "nothing: it was there already",
        }
    )


def _add_anchor(store: VersionStore, way: Plan, threads: int) -> None:
    from deltacast.delta.checkpoint import CheckpointSource

    whole = 0 if way.snapshot is None else way.snapshot.weights_bytes
    with TemporaryDirectory(prefix="deltacast-") as scratch, progress(f"anchor version {way.want}", 3 * whole) as done:
        weights = Path(scratch) / "weights"
        store.materialize(way.want, weights, threads=threads, progress=done)  # written, then proven
        with CheckpointSource(weights) as source:
            store.add_anchor(way.want, source, threads=threads, progress=done)


def gc(
    store: Store,
    *,
    keep: Annotated[int, typer.Option(min=1, help="So many of the newest versions stay.")],
    min_age_hours: Annotated[
        float, typer.Option(min=0, help="What no version names goes when it is older; longer than any push takes.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only say what would go.")] = False,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Remove old versions, and objects that nothing needs.

    Versions that a registered reader needs stay, and so does all down to the snapshot that the oldest kept version is
    made from. Writers and readers need not stop.
    """
    with opened(store, key_file) as found:
        total = 0 if dry_run else found.gc(keep, min_age_s=3600 * min_age_hours, dry_run=True).num_bytes
        with progress("gc", total) as done:
            report = found.gc(keep, min_age_s=3600 * min_age_hours, dry_run=dry_run, progress=done)
        first_kept = found.versions().stop - keep
    if as_json:
        print_json({
            "dry_run": dry_run, "versions": list(report.versions), "objects": list(report.objects),
            "num_bytes": report.num_bytes, "oldest": report.oldest, "held_by": list(report.held_by),
        })  # fmt: skip
        return
    _show_gc(report, store, first_kept, dry_run=dry_run)


def _show_gc(report: GcReport, store: str, first_kept: int, *, dry_run: bool) -> None:
    versions = report.versions
    holders = ["a lease that cannot be read" if name is None else name for name in report.held_by]
    is_chained = not holders and report.oldest is not None and report.oldest < first_kept
    anchor_it = f"version {first_kept}, until deltacast store anchor {store} --version {first_kept}"
    print_facts(
        {
            "would remove" if dry_run else "removed": f"{len(versions):,} versions, {len(report.objects):,} other "
            f"objects, {human_bytes(report.num_bytes)}",
            "versions": f"{versions[0]} to {versions[-1]}" if versions else None,
            "oldest version": report.oldest,
            "needed by": anchor_it if is_chained else None,
            "held by": ", ".join(holders) or None,
        }
    )


def fsck(store: Store, *, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Read everything in a store and check it; the exit code is 1 if anything is damaged.

    Says which versions a damaged object hits, and which can still be pulled.
    """
    from deltacast.store.backends import open_backend
    from deltacast.store.fsck import check, find_log

    with closing(open_backend(store)) as backend:
        try:
            log = find_log(backend, read_key(key_file))  # not `opened`: what says that there is a store may be lost
        except MissingObjectError as err:
            raise MissingObjectError(
                f"there is no store at {backend.url}", hint="`deltacast store init` makes one."
            ) from err
        with progress("fsck", sum(info.num_bytes for info in backend.list(""))) as done:
            report = check(log, progress=done)
    if as_json:
        print_json(_document(report))
    else:
        _show(report)
    if report.damaged:
        raise typer.Exit(MISMATCH)


def _document(report: FsckReport) -> dict[str, Any]:
    return {
        "ok": not report.damaged,
        "damaged": [
            {"path": one.path, "what": one.what, "expected": one.expected, "found": one.found,
             "versions": list(one.versions)}
            for one in report.damaged
        ],
        "stray": list(report.stray),
        "materialisable": list(report.materialisable),
        "lost": list(report.lost),
    }  # fmt: skip


def _show(report: FsckReport) -> None:
    for damage in report.damaged:
        hit = _spans(damage.versions)
        typer.echo(printable(f"{damage} ({f'needed by {hit}' if hit else 'no version needs it'})"))
    print_facts(
        {
            "damaged": f"{len(report.damaged):,}" if report.damaged else "nothing",
            "versions": _spans(report.materialisable) or "none",
            "lost": _spans(report.lost) or None,
            "stray": f"{len(report.stray):,} objects that nothing names (gc removes them)" if report.stray else None,
        }
    )


def _spans(versions: tuple[int, ...]) -> str:
    """Write ascending versions as spans: `0 to 4, 7`."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    return ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in spans)
