"""`deltacast apply`: an update onto a checkpoint, proven by digest, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deltacast.commands.console import print_facts, print_json, progress
from deltacast.commands.options import (
    DEFAULT_THREADS,
    Checkpoint,
    Force,
    Json,
    SigningKey,
    Threads,
    read_key,
    refuse_existing,
)
from deltacast.delta.errors import InputError

__all__ = ["apply"]


def apply(
    update_file: Annotated[Path, typer.Argument(metavar="U", help="An update file.", show_default=False)],
    base: Checkpoint,
    *,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT", help="Where to write the result.", show_default=False)
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Patch BASE itself, with an undo journal.")] = False,
    signing_key: SigningKey = None,
    force: Force = False,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Apply an update to a checkpoint, to a new path or in place.

    BASE is proven to be the update's base before anything is written, and the result is proven before it appears:
    there is never a partial or unproven OUT. An update that changes the parameter table makes one fresh file.
    """
    from deltacast.delta.checkpoint_update import apply_to_checkpoint
    from deltacast.delta.codec import read_update

    if (out is None) != in_place:
        raise InputError("say where the result goes", expected="either -o OUT or --in-place",
                         found="neither" if out is None else "both")  # fmt: skip
    if out is not None:
        refuse_existing(out, force=force)
    update = read_update(update_file, signing_key=read_key(signing_key), threads=threads)
    with progress(f"apply {update_file.name}", 0 if out is None else _num_bytes(base)) as done:
        apply_to_checkpoint(update, base, out, force=force, threads=threads, progress=done)
    document = {
        "checkpoint": str(base if out is None else out),
        "in_place": in_place,
        "run_id": update.run_id,
        "base_version": update.base_version,
        "target_version": update.target_version,
        "num_changed": update.num_changed,
        "num_changed_parameters": len({patch.name for patch in update.patches}),
        "state_digest": update.target_digest,
    }
    if as_json:
        print_json(document)
    else:
        _show(document)


def _num_bytes(base: Path) -> int:
    """Return the bytes that will be proven to be the base."""
    from deltacast.delta.checkpoint import CheckpointSource

    with CheckpointSource(base) as source:
        return sum(meta.nbytes for meta in source.metas())


def _show(document: dict[str, Any]) -> None:
    print_facts(
        {
            "checkpoint": document["checkpoint"],
            "version": f"{document['target_version']} of run {document['run_id']}",
            "changed": f"{document['num_changed']:,} words in {document['num_changed_parameters']:,} parameters",
            "state digest": f"{document['state_digest']}  (proven)",
        }
    )
