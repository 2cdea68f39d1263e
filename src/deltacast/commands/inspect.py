"""`deltacast inspect`: what an update file holds."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltacast.commands.console import human_bytes, print_facts, print_json, print_table
from deltacast.commands.options import DEFAULT_THREADS, Json, SigningKey, Threads, read_key

if TYPE_CHECKING:
    from deltacast.delta.codec import EntryHeader, UpdateHeader

__all__ = ["inspect"]


def inspect(
    update_file: Annotated[Path, typer.Argument(metavar="U", help="An update file.", show_default=False)],
    *,
    check: Annotated[bool, typer.Option("--check", help="Also decode the payload and check every checksum.")] = False,
    limit: Annotated[int, typer.Option(min=0, help="Rows of the table; 0 shows all. JSON always holds all.")] = 50,
    signing_key: SigningKey = None,
    threads: Threads = DEFAULT_THREADS,
    as_json: Json = False,
) -> None:
    """Show an update's header, entries and where its bytes go.

    Only the header is read, however large the file: pass --check to look for damage in the rest.
    """
    from deltacast.delta.codec import decode_update, read_header

    key = read_key(signing_key)
    content = _mapped(update_file)
    header = read_header(content, signing_key=key)
    if check:
        decode_update(content, signing_key=key, threads=threads)
    document = _document(str(update_file), header) | {"payload_checked": check}
    if as_json:
        print_json(document)
    else:
        _show(document, limit)


def _mapped(path: Path) -> memoryview:
    """Map a file; the mapping ends with the last view of it."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _document(update_file: str, header: UpdateHeader) -> dict[str, Any]:
    envelope, changed = header.envelope, header.num_changed
    return {
        "update": update_file,
        **envelope.to_json(),
        "signed": header.signed,
        "file_bytes": header.file_bytes,
        "header_bytes": header.header_bytes,
        "num_groups": len(header.groups),
        "num_changed": changed,
        "bits_per_change": 8 * header.file_bytes / changed if changed else None,
        "stream_bytes": header.stream_bytes,
        "entries": [_entry(entry) for entry in header.entries],
    }


def _entry(entry: EntryHeader) -> dict[str, Any]:
    from deltacast.delta.fingerprint import format_sum

    before = entry.fingerprint_before
    document: dict[str, Any] = {
        "name": entry.meta.name,
        "dtype": entry.meta.dtype,
        "shape": list(entry.meta.shape),
        "part": entry.part,
        "encoding": entry.encoding,
        "values": entry.values,
        "num_changed": entry.num_changed,
        "fingerprint_before": None if before is None else format_sum(before),
        "fingerprint_after": format_sum(entry.fingerprint_after),
        "old_sum": None if entry.old_sum is None else format_sum(entry.old_sum),
    }
    if entry.box is not None:
        document["box"] = [list(bounds) for bounds in entry.box]
    if entry.base_meta is not None:
        document |= {"base_dtype": entry.base_meta.dtype, "base_shape": list(entry.base_meta.shape)}
    return document


def _show(document: dict[str, Any], limit: int) -> None:
    entries = document["entries"]
    shown = entries[: limit or None]
    rows = [
        (e["name"], e["part"] or "", e["dtype"], e["shape"], e["encoding"], e["values"], f"{e['num_changed']:,}")
        for e in shown
    ]
    if rows:
        print_table(("parameter", "part", "dtype ", "shape ", "encoding ", "values ", "changed"), rows)
    if len(entries) > len(shown):
        typer.echo(f"entries not shown: {len(entries) - len(shown):,} (--limit 0 shows all)\n")
    _show_streams(document)
    bits, base = document["bits_per_change"], document.get("base_version")
    print_facts(
        {
            "update": f"format {document['format']}, {human_bytes(document['file_bytes'])}, "
            f"groups: {document['num_groups']}, {'signed' if document['signed'] else 'not signed'}, "
            f"payload {'checked' if document['payload_checked'] else 'not checked'}",
            "versions": f"{'seed' if base is None else base} -> {document['target_version']} of run "
            f"{document['run_id']}, epoch {document['epoch']}",
            "optimizer step": document.get("optimizer_step"),
            "changed": f"{document['num_changed']:,} words, entries: {len(entries):,}",
            "removed": ", ".join(document.get("removed", ())) or None,
            "aliases": ", ".join(f"{a} = {n}" for a, n in document.get("aliases", {}).items()) or None,
            "bits per change": None if bits is None else f"{bits:.2f}",
            "base digest": document.get("base_digest"),
            "target digest": document["target_digest"],
            "table digest": document["table_digest"],
        }
    )


def _show_streams(document: dict[str, Any]) -> None:
    sizes = {"header": document["header_bytes"], **document["stream_bytes"]}
    sizes["frame"] = document["file_bytes"] - sum(sizes.values())
    changed = document["num_changed"]
    rows = [
        (kind, f"{size:,}", f"{size / document['file_bytes']:.1%}", f"{8 * size / changed:.3f}" if changed else "")
        for kind, size in sizes.items()
    ]
    print_table(("bytes by stream kind", "bytes", "share", "bits per change"), rows)
