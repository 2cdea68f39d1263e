"""`deltacast store gc` and `fsck`: remove what is not needed any more, and find what is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, printable, progress
from deltacast.commands.failures import MISMATCH
from deltacast.commands.options import Json
from deltacast.commands.store_options import KeyFile, Store, opened

if TYPE_CHECKING:
    from deltacast.store.fsck import FsckReport

__all__ = ["fsck", "gc"]


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
    if as_json:
        print_json({
            "dry_run": dry_run, "versions": list(report.versions), "objects": list(report.objects),
            "num_bytes": report.num_bytes, "oldest": report.oldest, "held_by": list(report.held_by),
        })  # fmt: skip
        return
    versions = report.versions
    print_facts(
        {
            "removed" if not dry_run else "would remove": f"{len(versions):,} versions, {len(report.objects):,} other "
            f"objects, {human_bytes(report.num_bytes)}",
            "versions": f"{versions[0]} to {versions[-1]}" if versions else None,
            "oldest version": report.oldest,
            "held by": ", ".join("a lease that cannot be read" if name is None else name for name in report.held_by)
            or None,
        }
    )


def fsck(store: Store, *, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Read everything in a store and check it; the exit code is 1 if anything is damaged.

    Says which versions a damaged object hits, and which can still be pulled.
    """
    with opened(store, key_file) as found:
        total = sum(info.num_bytes for info in found.backend.list(""))
        with progress("fsck", total) as done:
            report = found.fsck(progress=done)
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
