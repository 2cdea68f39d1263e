"""`deltacast verify`: are two checkpoints the same, bit by bit, and if not, where do they differ?

The second one may be what a running server holds (verify_server.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import print_facts, print_json, print_table, progress
from deltacast.commands.failures import MISMATCH
from deltacast.commands.options import DEFAULT_THREADS, Checkpoint, Json, Threads
from deltacast.commands.verify_server import verify_server

if TYPE_CHECKING:
    from deltacast.delta.checkpoint_compare import Comparison, ParameterDifference
    from deltacast.delta.table import ParamMeta

__all__ = ["verify"]


def verify(
    a: Checkpoint,
    b: Annotated[str, typer.Argument(help="Another one, or the URL of a running server.", show_default=False)],
    *,
    first: Annotated[int, typer.Option(min=0, help="Differing elements to name per parameter.")] = 3,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0 shows all. JSON always holds all.")] = 50,
    token: Annotated[
        str | None, typer.Option(envvar="DELTACAST_TOKEN", help="The bearer token that the server wants.")
    ] = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints bit by bit, or a checkpoint with what a running vLLM server holds.

    Names, dtypes, shapes and bits count; shards, order within files and metadata do not. Where they differ, a table
    says which elements of which parameters, and the exit code is 1.

    A server (http://host:port) is asked for the fingerprints of what all of its ranks hold at that moment; it
    generates nothing meanwhile. It must run deltacast's worker extension, in vLLM's development mode.
    """
    if b.startswith(("http://", "https://")):
        verify_server(a, b, token=token, limit=limit, threads=threads, as_json=as_json)
    else:
        _verify_files(a, Path(b), first=first, limit=limit, threads=threads, as_json=as_json)


def _verify_files(a: Path, b: Path, *, first: int, limit: int, threads: int, as_json: bool) -> None:
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.checkpoint_compare import compare_checkpoints

    with CheckpointSource(a) as source_a, CheckpointSource(b) as source_b:
        sizes = {meta.name: meta.nbytes for meta in source_a.metas()}
        for meta in source_b.metas():
            sizes[meta.name] = max(meta.nbytes, sizes.get(meta.name, 0))
        with progress(f"verify {a.name} {b.name}", sum(sizes.values())) as done:
            found = compare_checkpoints(source_a, source_b, num_first=first, threads=threads, progress=done)
    if as_json:
        print_json(_document(str(a), str(b), found))
    else:
        _show(found, limit)
    if not found.identical:
        raise typer.Exit(MISMATCH)


def _document(a: str, b: str, found: Comparison) -> dict[str, Any]:
    return {
        "identical": found.identical,
        "a": {"checkpoint": a, "state_digest": found.a.state_digest, "num_parameters": len(found.a.table)},
        "b": {"checkpoint": b, "state_digest": found.b.state_digest, "num_parameters": len(found.b.table)},
        "num_differing_parameters": len(found.differences),
        "differences": [_difference(difference) for difference in found.differences],
    }


def _difference(difference: ParameterDifference) -> dict[str, Any]:
    return {
        "name": difference.name,
        "kind": difference.kind,
        "a": _described(difference.a),
        "b": _described(difference.b),
        "num_differing": difference.num_differing,
        "first": [
            {"position": one.position, "index": list(one.index), "a": one.a, "b": one.b} for one in difference.first
        ],
    }


def _described(meta: ParamMeta | None) -> dict[str, Any] | None:
    return None if meta is None else {"dtype": meta.dtype, "shape": list(meta.shape)}


def _show(found: Comparison, limit: int) -> None:
    if found.identical:
        print_facts({"identical": f"{len(found.a.table):,} parameters", "state digest": found.a.state_digest})
        return
    shown = found.differences[: limit or None]
    columns = ("parameter", "difference ", "differing", "elements", "A -> B ")
    print_table(columns, [_row(difference) for difference in shown])
    left = len(found.differences) - len(shown)
    print_facts(
        {
            "parameters that differ": f"{len(found.differences):,}"
            + (f" ({left:,} not shown: --limit 0 shows all)" if left else ""),
            "A": found.a.state_digest,
            "B": found.b.state_digest,
        }
    )


def _row(difference: ParameterDifference) -> tuple[object, ...]:
    if difference.num_differing is None or difference.a is None:
        a, b = (f"{meta.dtype}{list(meta.shape)}" if meta else "nothing" for meta in (difference.a, difference.b))
        return difference.name, difference.kind, "", "", f"{a} -> {b}"
    first = ", ".join(f"{list(one.index)} {one.a} -> {one.b}" for one in difference.first)
    return difference.name, "bits", f"{difference.num_differing:,}", f"{difference.a.numel:,}", first
