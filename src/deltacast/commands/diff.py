"""`deltacast diff`: the update from one checkpoint to another, as a file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, progress
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

if TYPE_CHECKING:
    from deltacast.delta.patch import WeightUpdate

__all__ = ["diff"]

_DEFAULT_RUN_ID: Final = "offline"


class _Values(StrEnum):
    """The forms that values are sent in; `deltacast.delta.codec.ValuesChoice`."""

    auto = "auto"
    delta = "delta"
    absolute = "absolute"


def diff(
    base: Checkpoint,
    new: Checkpoint,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="U", help="The update file to write.")],
    values: Annotated[
        _Values, typer.Option(help="Differences, new bits, or per parameter whichever is smaller.")
    ] = _Values.auto,
    run_id: Annotated[str, typer.Option(help="The lineage of versions that both belong to.")] = _DEFAULT_RUN_ID,
    base_version: Annotated[int, typer.Option(min=0, help="The version that BASE is.")] = 0,
    target_version: Annotated[
        int | None, typer.Option(min=0, help="The version that NEW is.", show_default="base version + 1")
    ] = None,
    signing_key: SigningKey = None,
    force: Force = False,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Write the update that turns BASE into NEW.

    Parameters may appear, vanish, and change dtype or shape: those travel whole. Neither checkpoint is held in memory.
    """
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.checkpoint_update import diff_checkpoints
    from deltacast.delta.codec import write_update

    refuse_existing(out, force=force)
    key = read_key(signing_key)
    with CheckpointSource(base) as source, CheckpointSource(new) as target:
        metas = target.metas()
        with progress(f"diff {base.name} {new.name}", sum(meta.nbytes for meta in metas)) as done:
            update = diff_checkpoints(
                source, target, run_id=run_id, base_version=base_version, target_version=target_version,
                threads=threads, progress=done,
            )  # fmt: skip
    update_bytes = write_update(update, out, values=values.value, signing_key=key, threads=threads)
    sizes = {
        "num_parameters": len(metas),
        "num_words": sum(meta.num_words for meta in metas),
        "checkpoint_bytes": sum(meta.nbytes for meta in metas),
        "update_bytes": update_bytes,
    }
    document = _document(str(out), update, sizes)
    if as_json:
        print_json(document)
    else:
        _show(document)


def _document(out: str, update: WeightUpdate, sizes: dict[str, int]) -> dict[str, Any]:
    changed, num_words = update.num_changed, sizes["num_words"]
    return {
        "update": out,
        "run_id": update.run_id,
        "base_version": update.base_version,
        "target_version": update.target_version,
        "base_digest": update.base_digest,
        "target_digest": update.target_digest,
        "table_digest": update.table_digest,
        **sizes,
        "num_changed_parameters": len(update.patches),
        "num_removed_parameters": len(update.removed),
        "num_changed": changed,
        "density": changed / num_words if num_words else 0.0,
        "bits_per_change": 8 * sizes["update_bytes"] / changed if changed else None,
        "times_smaller": sizes["checkpoint_bytes"] / sizes["update_bytes"],
    }


def _show(document: dict[str, Any]) -> None:
    num_removed, bits = document["num_removed_parameters"], document["bits_per_change"]
    print_facts(
        {
            "update": f"{document['update']}, {human_bytes(document['update_bytes'])}, "
            f"{document['times_smaller']:.1f}x smaller than {human_bytes(document['checkpoint_bytes'])}",
            "versions": f"{document['base_version']} -> {document['target_version']} of run {document['run_id']}",
            "changed": f"{document['num_changed']:,} of {document['num_words']:,} words ({document['density']:.4%}) in "
            f"{document['num_changed_parameters']:,} of {document['num_parameters']:,} parameters",
            "removed": f"{num_removed:,} parameters" if num_removed else None,
            "bits per change": None if bits is None else f"{bits:.2f}",
            "base digest": document["base_digest"],
            "target digest": document["target_digest"],
        }
    )
