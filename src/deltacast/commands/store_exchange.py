"""`deltacast store export` and `import`: version folders as SGLang and slime know them (docs/disk_delta.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_json, print_table, progress
from deltacast.commands.options import DEFAULT_THREADS, Json, Threads
from deltacast.commands.store_options import KeyFile, Store, opened, wanted

if TYPE_CHECKING:
    from deltacast.store.disk_delta_exchange import Exchanged

__all__ = ["export", "import_"]


class _Encoding(StrEnum):
    """`deltacast.store.disk_delta.DeltaEncoding`."""

    xor = "xor"
    overwrite = "overwrite"


def export(
    store: Store,
    folder: Annotated[Path, typer.Argument(help="The folder that trainer and engines share.", show_default=False)],
    *,
    first: Annotated[int, typer.Option(min=0, help="The first version; it is written whole.")],
    last: Annotated[int | None, typer.Option(min=0, help="The last version.", show_default="the newest")] = None,
    encoding: Annotated[_Encoding, typer.Option(help="Of the deltas.")] = _Encoding.xor,
    key_file: KeyFile = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Write versions as the folders that SGLang's /pull_weights reads.

    Start the engines with the folder of the first version as their model path if that is version 0; they fetch any
    other first version themselves.
    """
    from deltacast.store.disk_delta_exchange import export_versions

    exported: list[Exchanged] = []
    with opened(store, key_file) as found:
        way = found.plan(None, wanted(found, first))
        each = 0 if way.snapshot is None else way.snapshot.weights_bytes
        highest = wanted(found, last)
        with progress(f"export {first} to {highest}", each * (highest - first + 1)) as done:
            for one in export_versions(
                found, folder, first=first, last=highest, encoding=encoding.value, threads=threads
            ):
                exported.append(one)
                done(each)
    _report(exported, as_json=as_json)


def import_(
    store: Store,
    folder: Annotated[Path, typer.Argument(help="The folder that trainer and engines share.", show_default=False)],
    *,
    base: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="What the engines started with, for an empty store.", show_default=False),
    ] = None,
    last: Annotated[int | None, typer.Option(min=0, help="The last version.", show_default="the newest")] = None,
    key_file: KeyFile = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Publish the versions of such a folder that come after the newest of the store, as slime wrote them."""
    from deltacast.store.disk_delta_exchange import import_versions

    imported: list[Exchanged] = []
    with opened(store, key_file) as found:
        total = sum(path.stat().st_size for path in folder.glob("weight_v*/*"))
        with progress(f"import {folder.name}", total) as done:
            for one in import_versions(found, folder, base=base, last=last, threads=threads):
                imported.append(one)
                done(one.num_bytes)
    _report(imported, as_json=as_json)


def _report(versions: Iterable[Exchanged], *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [asdict(one) for one in versions]
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo("nothing new")
        return
    columns = ("version", "folder ", "bytes", "state digest ")
    print_table(columns, [(r["version"], r["kind"], human_bytes(r["num_bytes"]), r["state_digest"]) for r in rows])
