"""Write a snapshot: one pass over a source, from which shards, content digests and fingerprints come.

Shards are written one after the other, in the source's order, because a source is an iterator: a trainer's module, a
gather over ranks and a mapped checkpoint go the same way. Threads fingerprint the pieces of the shard that is being
written; that, not hashing or writing, is what takes a core.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import Words, strided_words
from deltacast.delta.checkpoint_digest import Progress
from deltacast.delta.checkpoint_files import INDEX_NAME
from deltacast.delta.codec.envelope import dump_json
from deltacast.delta.errors import InputError, MissingObjectError, ObjectExistsError, StoreError
from deltacast.delta.fingerprint import add, words_fingerprint
from deltacast.delta.safetensors_header import build_header, strict_json
from deltacast.delta.sources import WeightSource, matched
from deltacast.delta.table import ParameterTable, ParamMeta
from deltacast.delta.threads import in_order
from deltacast.store.fetch import content_digest
from deltacast.store.names import MANIFEST_NAME, manifest_path
from deltacast.store.objects import Buffer, ObjectBackend
from deltacast.store.records import SnapshotRef
from deltacast.store.sealed import check_number, check_run_id
from deltacast.store.snapshots.manifest import (
    MAX_EXTRA_BYTES,
    FileHash,
    Manifest,
    SnapshotFile,
    is_extra_name,
    shard_name,
)

__all__ = ["extra_files_of", "write_snapshot"]

Tensors: TypeAlias = Iterator[tuple[ParamMeta, torch.Tensor]]

_PIECE_BYTES: Final = 16 << 20
_METADATA: Final = {"format": "pt"}  # transformers refuses files without it


def extra_files_of(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """List what lies beside a checkpoint's weights and should go along: config, tokenizer, generation config.

    Left out are hidden files, folders, weights in any format, files above 64 MiB, `manifest.json`, and names that are
    not of A-Z a-z 0-9 . _ - alone. Links to files are followed: the Hugging Face cache is made of them.

    Returns:
        name -> path, by name.
    """
    found = (path for path in sorted(Path(folder).iterdir()) if is_extra_name(path.name) and path.is_file())
    return {path.name: path for path in found if path.stat().st_size <= MAX_EXTRA_BYTES}


def write_snapshot(
    backend: ObjectBackend,
    source: WeightSource,
    *,
    run_id: str,
    version: int,
    shard_bytes: int = 4 << 30,
    extra_files: Mapping[str, Path | bytes] | None = None,
    signing_key: bytes | None = None,
    threads: int = 4,
    progress: Progress | None = None,
) -> tuple[Manifest, SnapshotRef]:
    """Store all weights of a source as a snapshot; blocks.

    The source is read once, in order, and must keep its bits meanwhile. At most `threads` + 2 pieces of 16 MiB are
    under way. They are views of tensors that are contiguous on the host; from a GPU they are copied one by one; of
    others on the host, the tensors that they are cut from are copied whole.

    A shard whose tensors would not be aligned in the source's order (an odd number of bytes before wider elements) is
    written widest first; what the source yields before its turn is held until then, at most a shard.

    Args:
        backend: the store.
        source: the weights; tied names are recorded in the manifest, and in no file, as transformers does it.
        run_id: the lineage of versions.
        version: which version these weights are.
        shard_bytes: tensors' bytes of one shard, at most; a larger tensor gets a shard of its own.
        extra_files: name -> file that goes along (`extra_files_of`), or its bytes (`read_extra_files`).
        signing_key: signs the manifest, which then also holds a SHA-256 of each file.
        threads: for fingerprints.
        progress: told about the tensors' bytes as they are handed to the store.

    Returns:
        The manifest, and what a version's record says of it.

    Raises:
        InputError: no parameters, a bad run id, version or shard size, an extra file of a bad name or above 64 MiB, or
            a tensor without plain memory.
        TableError: the source breaks its contract.
        DTypeError: a dtype that safetensors has no code for.
        OSError: an extra file cannot be read.
        StoreError: the store failed. In every case there is no manifest, so no snapshot; files that were written
            before are unreferenced, and gc removes them in time. Or a file was removed while others were written
            (gc, from a writer that was held up): the manifest stays, and readers pass it over.
    """
    _check(run_id, version, extra_files or {})
    metas = list(source.metas())
    table = ParameterTable(metas, source.aliases)
    shards = _plan(metas, shard_bytes)
    path = manifest_path(version, secrets.token_hex(8))
    writing = _Writing(backend, path.removesuffix(MANIFEST_NAME), table, signing_key is not None, threads, progress,
                       np.zeros(len(table), np.uint64))  # fmt: skip
    tensors = matched(metas, source.tensors())
    files = [writing.shard(shard, tensors) for shard in shards]
    next(tensors, None)  # a source that yields more than it lists is refused here
    files.append(writing.small_file(INDEX_NAME, _index(shards), is_index=True))
    files += [writing.small_file(name, _read_extra(file)) for name, file in sorted((extra_files or {}).items())]
    manifest = Manifest(path, run_id, version, table.state_digest(writing.fingerprints), table.digest,
                        table.num_words, tuple(files), table.aliases)  # fmt: skip
    return manifest, _commit(backend, manifest, signing_key)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One safetensors file that will be written.

    Attributes:
        name: its name.
        metas: what the source yields for it, in that order.
        header: its first bytes.
        layout: the same metas in the file's order.
    """

    name: str
    metas: Sequence[ParamMeta]
    header: bytes
    layout: Sequence[ParamMeta]


@dataclass(frozen=True, slots=True, eq=False)
class _Writing:
    """A snapshot while its files are written.

    Attributes:
        folder: where, with its slash.
        table: the parameters.
        secure: whether files get a SHA-256.
        fingerprints: uint64 [parameters] in table order, of what was written so far.
    """

    backend: ObjectBackend
    folder: str
    table: ParameterTable
    secure: bool
    threads: int
    progress: Progress | None
    fingerprints: NDArray[np.uint64]

    def shard(self, shard: _Shard, tensors: Tensors) -> SnapshotFile:
        """Write one shard with the next of the source's tensors."""
        content = FileHash(secure=self.secure)
        mine = _in_file_order(shard.layout, islice(tensors, len(shard.metas)))
        self.backend.write(f"{self.folder}{shard.name}", self._pieces(shard.header, mine, content))
        return content.file(shard.name, "weights")

    def small_file(self, name: str, raw: bytes, *, is_index: bool = False) -> SnapshotFile:
        """Write a file that is in memory."""
        content = FileHash(secure=self.secure)
        content.update(raw)
        self.backend.write(f"{self.folder}{name}", [raw])
        return content.file(name, "index" if is_index else "extra")

    def _pieces(self, header: bytes, tensors: Tensors, content: FileHash) -> Iterator[Buffer]:
        content.update(header)
        yield header
        for name, partial, piece in in_order(_scan, _cut(tensors), self.threads):
            place = self.table.index(name)
            self.fingerprints[place] = add(int(self.fingerprints[place]), partial)
            content.update(piece)
            yield piece
            if self.progress is not None:
                self.progress(len(piece))


def _cut(tensors: Tensors) -> Iterator[tuple[ParamMeta, int, Words]]:
    """Cut tensors into runs of words on the host: views where a tensor is contiguous and there already."""
    for meta, tensor in tensors:
        strided = strided_words(tensor.detach().resolve_conj().resolve_neg(), name=meta.name)
        on_host = strided.device.type == "cpu"
        flat = torch.from_numpy(np.ascontiguousarray(strided.numpy())) if on_host else strided.contiguous()
        flat = flat.view(-1)
        step = _PIECE_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            # copied from a GPU here and not in a thread, whose current stream is another
            yield meta, start, (part if on_host else _host_copy(part)).numpy().view(meta.row.numpy_word)


def _host_copy(part: torch.Tensor) -> torch.Tensor:
    # numpy's memory: glibc seldom reuses what torch's aligned allocations free, which adds up to the whole model
    return torch.from_numpy(np.empty(part.nbytes, np.uint8)).view(part.dtype).copy_(part)


def _scan(piece: tuple[ParamMeta, int, Words]) -> tuple[str, int, memoryview]:
    meta, start, array = piece
    return meta.name, words_fingerprint(array, start), array.view(np.uint8).data


def _in_file_order(layout: Iterable[ParamMeta], tensors: Tensors) -> Tensors:
    """Yield tensors in the order of a file, holding those that come before their turn."""
    early: dict[str, torch.Tensor] = {}
    for meta in layout:
        while meta.name not in early:
            came, tensor = next(tensors)
            early[came.name] = tensor
        yield meta, early.pop(meta.name)


def _plan(metas: Sequence[ParamMeta], shard_bytes: int) -> list[_Shard]:
    """Cut a source's parameters into shards, in its own order."""
    if not metas:
        raise InputError("a source without parameters cannot be stored")
    if shard_bytes < 1:
        raise InputError("bad shard_bytes", expected="at least 1", found=shard_bytes)
    runs: list[list[ParamMeta]] = []
    left = 0
    for meta in metas:
        if not runs or meta.nbytes > left:
            runs.append([])
            left = shard_bytes
        runs[-1].append(meta)
        left -= meta.nbytes
    return [_Shard(shard_name(n + 1, len(runs)), run, *_lay_out(run)) for n, run in enumerate(runs)]


def _lay_out(metas: Sequence[ParamMeta]) -> tuple[bytes, Sequence[ParamMeta]]:
    """Return a file's first bytes and its tensors in their order there.

    In the source's order where that leaves every tensor aligned, so that none has to wait; else in the stock one.
    """
    raw, stock = build_header(metas, _METADATA)
    entries: dict[str, Any] = strict_json(raw[8:], where="a header")
    at = 0
    for meta in metas:
        if at % meta.row.itemsize:
            return raw, [slot.meta for slot in stock.slots]
        entries[meta.name]["data_offsets"] = [at, at + meta.nbytes]
        at += meta.nbytes
    header = dump_json(entries)
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, metas


def _index(shards: Sequence[_Shard]) -> bytes:
    """Return the index that Hugging Face libraries read."""
    total = sum(meta.nbytes for shard in shards for meta in shard.metas)
    weight_map = {meta.name: shard.name for shard in shards for meta in shard.metas}
    return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}) + b"\n"


def _require_files(backend: ObjectBackend, manifest: Manifest) -> None:
    """Raise if a file is gone: gc takes files that no manifest lists, once they are older than any writer should be."""
    for file in manifest.files:
        try:
            backend.stat(manifest.object_name(file))
        except MissingObjectError as err:
            raise StoreError(
                f"{manifest.object_name(file)} was removed while its snapshot was written", version=manifest.version,
                hint="Write it again. gc must wait (min_age_s) for longer than any writer is held up.",
            ) from err  # fmt: skip


def _check(run_id: str, version: int, extra_files: Mapping[str, Path | bytes]) -> None:
    check_run_id(run_id)
    check_number(version, "version")
    for name, file in extra_files.items():
        if not is_extra_name(name):
            raise InputError("a file that must not go along with weights", found=ascii(name)[:200])
        if isinstance(file, Path) and file.stat().st_size > MAX_EXTRA_BYTES:
            raise InputError(f"{file} is too large to go along", expected=f"at most {MAX_EXTRA_BYTES} bytes")


def _read_extra(file: Path | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    with file.open("rb") as opened:  # bounded: it may have grown since it was checked
        return opened.read(MAX_EXTRA_BYTES + 1)


def _commit(backend: ObjectBackend, manifest: Manifest, key: bytes | None) -> SnapshotRef:
    """Create the manifest, from which moment on there is a snapshot."""
    raw = manifest.to_bytes(key)
    try:
        backend.create(manifest.path, raw)
    except ObjectExistsError:
        if backend.read(manifest.path) != raw:  # else a first attempt whose answer was lost
            raise
    _require_files(backend, manifest)
    return SnapshotRef(manifest.path, len(raw), content_digest(raw), manifest.weights_bytes)
