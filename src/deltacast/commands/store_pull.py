"""`deltacast store pull`, `plan` and `fold`: get a version, see what that takes, and make it take less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, print_table, progress
from deltacast.commands.options import DEFAULT_THREADS, Json, Threads
from deltacast.commands.store_options import KeyFile, Store, opened, wanted
from deltacast.delta.errors import InputError

if TYPE_CHECKING:
    from deltacast.store.plan import Plan

__all__ = ["fold", "plan", "pull"]


def pull(
    store: Store,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The checkpoint folder to write.")],
    version: Annotated[int | None, typer.Option(min=0, help="Which version.", show_default="the newest")] = None,
    key_file: KeyFile = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Write a version as a checkpoint folder that loads as it is, every bit of it proven, or nothing."""
    if os.path.lexists(out):
        raise InputError("the output exists already", found=str(out), hint="Name a path that does not exist.")
    with opened(store, key_file) as found:
        way = found.plan(None, wanted(found, version))
        whole = 0 if way.snapshot is None else way.snapshot.weights_bytes
        with progress(f"pull version {way.want}", 2 * whole) as done:  # written, then proven
            record = found.materialize(way.want, out, threads=threads, progress=done)
        document = {
            "store": found.backend.url,
            "run_id": record.run_id,
            "version": record.version,
            "checkpoint": str(out),
            "fetched_bytes": way.num_bytes,
            "num_updates": len(way.updates),
            "state_digest": record.state_digest,
        }
    if as_json:
        print_json(document)
        return
    print_facts(
        {
            "checkpoint": str(out),
            "version": f"{record.version} of run {record.run_id}",
            "fetched": f"{human_bytes(way.num_bytes)}: a snapshot" + _and_updates(len(way.updates)),
            "state digest": f"{record.state_digest}  (proven)",
        }
    )


def _and_updates(count: int) -> str:
    return f" and {count:,} update{'' if count == 1 else 's'}" if count else ""


def plan(
    store: Store,
    *,
    have: Annotated[
        int | None, typer.Option(min=0, help="The version that the reader has.", show_default="none")
    ] = None,
    want: Annotated[int | None, typer.Option(min=0, help="The version it wants.", show_default="the newest")] = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Show what a reader would fetch to get from one version to another; fetches none of it."""
    with opened(store, key_file) as found:
        document = _plan_document(found.plan(have, wanted(found, want)))
    if as_json:
        print_json(document)
        return
    rows = [
        (step["kind"], f"{'' if step['base'] is None else step['base']} -> {step['target']}",
         human_bytes(step["num_bytes"]), step["path"])
        for step in document["steps"]
    ]  # fmt: skip
    if rows:
        print_table(("fetch", "versions", "size", "object "), rows)
    have_text = "nothing" if document["have"] is None else f"version {document['have']}"
    print_facts(
        {
            "way": f"from {have_text} to version {document['want']}",
            "objects": f"{len(rows):,}" if rows else "none: there is nothing to do",
            "bytes": f"{document['num_bytes']:,} ({human_bytes(document['num_bytes'])})",
        }
    )


def _plan_document(way: Plan) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if way.snapshot is not None:
        steps.append({"kind": "snapshot", "base": None, "target": way.snapshot.version,
                      "num_bytes": way.snapshot.weights_bytes, "path": way.snapshot.path})  # fmt: skip
    for step in way.updates:
        kind = "fold" if step.is_fold else "update"
        steps.append({"kind": kind, "base": step.base.version, "target": step.target.version,
                      "num_bytes": step.object.num_bytes, "path": step.object.path})  # fmt: skip
    return {"have": way.have, "want": way.want, "num_bytes": way.num_bytes, "steps": steps}


def fold(
    store: Store,
    base: Annotated[int, typer.Argument(metavar="A", min=0, help="The version before the first update.")],
    target: Annotated[int, typer.Argument(metavar="B", min=0, help="The version after the last.")],
    *,
    key_file: KeyFile = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Make one object of the updates from version A to B, for readers who are so far apart.

    Spans of 8, 64, 512 ... updates that end at a multiple of that are folded as they are published.
    """
    with opened(store, key_file) as found:
        before = found.plan(wanted(found, base), wanted(found, target)).num_bytes
        made = found.fold(base, target, threads=threads)
    document = {
        "base_version": base,
        "target_version": target,
        "path": made.object.path,
        "num_bytes": made.object.num_bytes,
        "bytes_before": before,
        "digest": made.object.digest,
    }
    if as_json:
        print_json(document)
        return
    print_facts(
        {
            "fold": f"{base} -> {target}, {human_bytes(made.object.num_bytes)}, was {human_bytes(before)}",
            "object": made.object.path,
        }
    )
