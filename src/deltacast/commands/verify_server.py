"""`deltacast verify CKPT http://server`: does a running server hold a checkpoint, and if not, what of it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from deltacast.commands.console import print_facts, print_json, print_table, progress
from deltacast.commands.failures import MISMATCH

if TYPE_CHECKING:
    from deltacast.delta.checkpoint_digest import CheckpointDigest
    from deltacast.engines.vllm.client import ServerParts
    from deltacast.engines.vllm.server_digest import PartFault

__all__ = ["verify_server"]


def verify_server(checkpoint: Path, server: str, *, token: str | None, limit: int, threads: int, as_json: bool) -> None:
    """Compare a checkpoint with what the ranks of a vLLM server hold; exits with 1 if they hold another.

    Raises:
        TransportError: the server cannot be asked.
        CorruptionError: what it runs is not what it says that it holds.
        InputError: no URL of a server, or a bad token.
    """
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.checkpoint_digest import digest_checkpoint
    from deltacast.engines.vllm.client import VllmClient
    from deltacast.engines.vllm.server_digest import compare_parts

    client = VllmClient([server], token=token, connect_timeout_s=2.0)
    with CheckpointSource(checkpoint) as source:
        [held] = client.parts()  # first: a server that cannot be asked is told before a long scan
        total = sum(meta.nbytes for meta in source.metas())
        with progress(f"verify {checkpoint.name}", total) as done:
            wanted = digest_checkpoint(source, threads=threads, progress=done)
    faults = compare_parts(wanted, held.parts)
    if as_json:
        print_json(_document(checkpoint, wanted, held, faults))
    else:
        _show(wanted, held, faults, limit)
    if faults:
        raise typer.Exit(MISMATCH)


def _document(checkpoint: Path, wanted: CheckpointDigest, held: ServerParts, faults: list[PartFault]) -> dict[str, Any]:
    return {
        "identical": not faults,
        "a": {
            "checkpoint": str(checkpoint),
            "state_digest": wanted.state_digest,
            "num_parameters": len(wanted.table),
        },
        "b": {
            "server": held.server,
            "version": held.version,
            "num_ranks": held.num_ranks,
            "num_parameters": len({part.name for part in held.parts}),
        },
        "num_differing_parameters": len(faults),
        "differences": [{"name": fault.name, "kind": fault.kind, "detail": fault.detail} for fault in faults],
    }


def _show(wanted: CheckpointDigest, held: ServerParts, faults: list[PartFault], limit: int) -> None:
    ranks = f"{held.num_ranks} rank{'s' if held.num_ranks > 1 else ''}"
    server = {"server": f"{held.server}, {ranks}", "version": held.version}
    if not faults:
        print_facts({"identical": f"{len(wanted.table):,} parameters", **server, "state digest": wanted.state_digest})
        return
    shown = faults[: limit or None]
    print_table(("parameter", "difference ", "checkpoint -> server "), [(f.name, f.kind, f.detail) for f in shown])
    left = len(faults) - len(shown)
    more = f" ({left:,} not shown: --limit 0 shows all)" if left else ""
    print_facts({"parameters that differ": f"{len(faults):,}{more}", **server, "checkpoint": wanted.state_digest})
