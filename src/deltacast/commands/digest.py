"""`deltacast digest`: the state digest of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, print_table, progress
from deltacast.commands.failures import MISMATCH
from deltacast.commands.options import DEFAULT_THREADS, Checkpoint, Json, Threads

if TYPE_CHECKING:
    from deltacast.delta.checkpoint_digest import CheckpointDigest

__all__ = ["digest"]


def digest(
    checkpoint: Checkpoint,
    *,
    parameters: Annotated[bool, typer.Option("--parameters", help="Also show each parameter's fingerprint.")] = False,
    expect: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Exit 1 unless the state digest is this one.")
    ] = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Print the state digest of a checkpoint.

    It is the value that trainer and workers agree on for live weights of the same names, dtypes, shapes and bits.
    """
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.checkpoint_digest import digest_checkpoint

    with CheckpointSource(checkpoint) as source:
        total = sum(meta.nbytes for meta in source.metas())
        with progress(f"digest {checkpoint.name}", total) as done:
            found = digest_checkpoint(source, threads=threads, progress=done)
    document = _document(str(checkpoint), found, parameters=parameters)
    if expect is not None:
        document |= {"expected_digest": expect, "matches": expect == found.state_digest}
    if as_json:
        print_json(document)
    else:
        _show(document)
    if expect is not None and expect != found.state_digest:
        raise typer.Exit(MISMATCH)


def _document(checkpoint: str, found: CheckpointDigest, *, parameters: bool) -> dict[str, Any]:
    from deltacast.delta.fingerprint import format_sum

    document: dict[str, Any] = {
        "checkpoint": checkpoint,
        "state_digest": found.state_digest,
        "table_digest": found.table.digest,
        "num_parameters": len(found.table),
        "num_elements": sum(meta.numel for meta in found.table),
        "total_bytes": found.table.nbytes,
    }
    if parameters:
        document["parameters"] = [
            {"name": meta.name, "dtype": meta.dtype, "shape": list(meta.shape), "fingerprint": format_sum(int(value))}
            for meta, value in zip(found.table, found.fingerprints, strict=True)
        ]
    return document


def _show(document: dict[str, Any]) -> None:
    if "parameters" in document:
        rows = [(row["name"], row["dtype"], row["shape"], row["fingerprint"]) for row in document["parameters"]]
        print_table(("parameter", "dtype ", "shape ", "fingerprint "), rows)
    expected = document.get("expected_digest")
    print_facts(
        {
            "state digest": document["state_digest"],
            "expected": None if expected is None or document["matches"] else f"{expected}  (another)",
            "table digest": document["table_digest"],
            "parameters": f"{document['num_parameters']:,}",
            "elements": f"{document['num_elements']:,}",
            "bytes": f"{document['total_bytes']:,} ({human_bytes(document['total_bytes'])})",
        }
    )
