"""`deltacast fold`: consecutive updates made into one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json
from deltacast.commands.options import DEFAULT_THREADS, Force, Json, SigningKey, Threads, read_key, refuse_existing
from deltacast.delta.errors import BaseError

if TYPE_CHECKING:
    from deltacast.delta.fold import BaseWords
    from deltacast.delta.patch import WeightUpdate

__all__ = ["fold"]


def fold(
    update_files: Annotated[list[Path], typer.Argument(metavar="U...", help="Updates in version order.")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="U", help="The folded update to write.")],
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="CKPT", help="The first update's base: updates of mixed forms need it.", show_default=False
        ),
    ] = None,
    signing_key: SigningKey = None,
    force: Force = False,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Fold consecutive updates into one that does the same in one step."""
    from deltacast.delta.codec import read_update, write_update
    from deltacast.delta.fold import fold as fold_updates

    refuse_existing(out, force=force)
    key = read_key(signing_key)
    updates = [read_update(path, signing_key=key, threads=threads) for path in update_files]
    with ExitStack() as stack:
        words = None if base is None else _base_words(base, updates[0], threads, stack)
        folded = fold_updates(updates, base=words)
    update_bytes = write_update(folded, out, signing_key=key, threads=threads)
    document = {
        "update": str(out),
        "run_id": folded.run_id,
        "base_version": folded.base_version,
        "target_version": folded.target_version,
        "base_digest": folded.base_digest,
        "target_digest": folded.target_digest,
        "num_updates": len(updates),
        "num_changed": folded.num_changed,
        "num_changed_parameters": len({patch.name for patch in folded.patches}),
        "update_bytes": update_bytes,
        "input_bytes": sum(path.stat().st_size for path in update_files),
    }
    if as_json:
        print_json(document)
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    base_version = document["base_version"]
    print_facts(
        {
            "update": f"{document['update']}, {human_bytes(document['update_bytes'])}, from "
            f"{document['num_updates']} of {human_bytes(document['input_bytes'])}",
            "versions": f"{'seed' if base_version is None else base_version} -> {document['target_version']} of run "
            f"{document['run_id']}",
            "changed": f"{document['num_changed']:,} words in {document['num_changed_parameters']:,} parameters",
            "target digest": document["target_digest"],
        }
    )


def _base_words(base: Path, first: WeightUpdate, threads: int, stack: ExitStack) -> BaseWords:
    """Return the words of a checkpoint by name, after proving that it is the first update's base."""
    from deltacast.delta.bits import numpy_words
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.checkpoint_digest import digest_checkpoint

    source = stack.enter_context(CheckpointSource(base))
    found = digest_checkpoint(source, threads=threads).state_digest
    if found != first.base_digest:
        raise BaseError("the checkpoint is not the first update's base", version=first.base_version,
                        expected=first.base_digest, found=found)  # fmt: skip
    return lambda name: numpy_words(source.tensor(name), name=name)
