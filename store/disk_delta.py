"""Version folders as SGLang's `/pull_weights` reads them and slime writes them: one at a time, as files.

A folder `weight_v000007` is an ordinary Hugging Face checkpoint (a *full* version) or a *delta* against version 6:
an index that says so, and a safetensors file with one compressed byte tensor per changed parameter and a checksum of
what each becomes. docs/disk_delta.md has the layout and where its facts come from; `disk_delta_exchange.py` brings
whole stores in and out.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray

from deltacast.delta.bits import Words, numpy_words
from deltacast.delta.checkpoint import CheckpointSource, write_checkpoint
from deltacast.delta.checkpoint_files import INDEX_NAME, fsync_folder
from deltacast.delta.codec.envelope import Fields, load_json
from deltacast.delta.errors import ChecksumError, FormatError, InputError
from deltacast.delta.table import ParamMeta
from deltacast.delta.threads import in_order

__all__ = ["Change", "DeltaEncoding", "DeltaIndex", "read_delta", "read_index", "version_folder", "write_delta"]

DeltaEncoding: TypeAlias = Literal["xor", "overwrite"]

_Bytes: TypeAlias = NDArray[np.uint8]

_LEVEL: Final = 1
_SHARD: Final = "model-00000-of-00001.safetensors"  # the numbers count from 0 there
_STATE_DIGEST: Final = "deltacast_state_digest"
_CHECKSUMS: Final[dict[str, Callable[[_Bytes], str]]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data.data),
    "adler32": lambda data: f"{zlib.adler32(data.data):08x}",
}


@dataclass(frozen=True, slots=True)
class DeltaIndex:
    """What the index of a delta folder says.

    Attributes:
        version: the version that it makes.
        base_version: the one that it applies to.
        encoding: `xor`: the old bytes XOR the new ones, all of them. `overwrite`: how many bytes changed, where, and
            to what.
        checksum: `xxh3-128` or `adler32`, of each changed tensor's new bytes.
        names: the changed tensors.
        state_digest: of the whole new state; a key of ours, which other writers leave out.
    """

    version: int
    base_version: int
    encoding: DeltaEncoding = "xor"
    checksum: str = "xxh3-128"
    names: tuple[str, ...] = ()
    state_digest: str | None = None

    def to_json(self) -> bytes:
        """Write the index file; every tensor is in the one file that `write_delta` makes."""
        metadata = {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
        }
        if self.state_digest is not None:
            metadata[_STATE_DIGEST] = self.state_digest
        return json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(self.names, _SHARD)}).encode()


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What became of one parameter, for `write_delta`.

    Attributes:
        meta: the parameter.
        positions: int64 flat positions of the words that differ, ascending.
        old: the words that were there.
        new: the words that are there now.
        whole: every word of the parameter now; only looked at until `write_delta` returns.
    """

    meta: ParamMeta
    positions: NDArray[np.int64]
    old: Words
    new: Words
    whole: Words


def version_folder(root: Path, version: int) -> Path:
    """Return where a version lies below the folder that trainer and engines share."""
    return root / f"weight_v{version:06d}"


def write_delta(root: Path, index: DeltaIndex, changes: Iterable[Change], *, threads: int = 1) -> int:
    """Write one delta folder; it appears whole, or not at all. Holds all compressed changes in memory.

    Args:
        root: the shared folder.
        index: of it, versions, encoding, checksum and state digest count; names come from the changes.
        changes: parameters of which at least one bit differs.
        threads: parameters that are compressed at once.

    Returns:
        The bytes of the folder's files.

    Raises:
        InputError: the folder is there already, or `overwrite` cannot address a parameter of 4 GiB or more.
        OSError: the disk is full. There is no such folder then.
    """
    folder = version_folder(root, index.version)
    if folder.exists():
        raise InputError("the version folder is there already", version=index.version, found=str(folder))

    def packed(change: Change) -> tuple[str, _Bytes, str]:
        raw = _ENCODERS[index.encoding](change)
        data = np.frombuffer(bytearray(zstandard.ZstdCompressor(level=_LEVEL).compress(raw.data)), np.uint8)
        return change.meta.name, data, _CHECKSUMS[index.checksum](change.whole.view(np.uint8))

    tensors: dict[str, torch.Tensor] = {}
    checksums: dict[str, str] = {}
    for name, data, checksum in in_order(packed, changes, threads):
        tensors[name], checksums[name] = torch.from_numpy(data), checksum
    return _publish(folder, index, tensors, checksums)


def _publish(folder: Path, index: DeltaIndex, tensors: dict[str, torch.Tensor], checksums: dict[str, str]) -> int:
    """Write the files under a name that no reader looks for, and rename the folder: readers poll for its name."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        if tensors:
            metas = [ParamMeta(name, "uint8", tuple(tensor.shape)) for name, tensor in tensors.items()]
            write_checkpoint(temporary / _SHARD, metas, tensors.items(), metadata=checksums)
        with (temporary / INDEX_NAME).open("xb") as file:
            file.write(replace(index, names=tuple(tensors)).to_json())
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(temporary)
        num_bytes = sum(path.stat().st_size for path in temporary.iterdir())
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    fsync_folder(folder.parent)
    return num_bytes


def _xor_encoded(change: Change) -> _Bytes:
    difference = np.zeros(change.meta.num_words, change.new.dtype)
    difference[change.positions] = change.old ^ change.new
    return difference.view(np.uint8)


def _overwrite_encoded(change: Change) -> _Bytes:
    """Count, positions and values are of bytes, not words: u32, u32 each, u8 each."""
    if change.meta.nbytes >= 1 << 32:
        raise InputError("overwrite addresses bytes with 32 bits", parameter=change.meta.name,
                         expected="less than 4 GiB", found=f"{change.meta.nbytes} bytes", hint="Use xor.")  # fmt: skip
    size = change.new.itemsize
    old, new = (words.view(np.uint8).reshape(-1, size) for words in (change.old, change.new))
    differs = old != new
    positions = (change.positions[:, None] * size + np.arange(size))[differs].astype("<u4")
    count = np.array([positions.size], "<u4")
    return np.concatenate((count.view(np.uint8), positions.view(np.uint8), new[differs]))


_ENCODERS: Final[dict[str, Callable[[Change], _Bytes]]] = {"xor": _xor_encoded, "overwrite": _overwrite_encoded}


def read_index(folder: Path) -> DeltaIndex | None:
    """Read what kind of version a folder holds.

    Returns:
        None for a full version: an ordinary checkpoint, with or without an index.

    Raises:
        FormatError: the index is damaged, or uses a compression, encoding or checksum that is not read here.
        OSError: it cannot be read.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    fields = load_json(path.read_bytes(), str(path))
    metadata = Fields(fields.mapping("metadata"), f"{path}: metadata")
    if not metadata.has("delta_encoding"):
        return None
    metadata.one_of("compression_format", ("zstd",))
    encodings, checksums = get_args(DeltaEncoding), tuple(_CHECKSUMS)
    return DeltaIndex(
        _version(metadata, "version"),
        _version(metadata, "base_version"),
        encodings[metadata.one_of("delta_encoding", encodings)],
        checksums[metadata.one_of("checksum_format", checksums)],
        tuple(fields.mapping("weight_map")),
        metadata.text(_STATE_DIGEST) if metadata.has(_STATE_DIGEST) else None,
    )


def _version(metadata: Fields, key: str) -> int:
    text = metadata.text(key)
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise metadata.wrong(key, "decimal digits")
    return int(text)


def read_delta(
    folder: Path, index: DeltaIndex, held: Callable[[str], Words], *, threads: int = 1
) -> Iterator[tuple[str, Words]]:
    """Yield what each changed tensor becomes, checked.

    Nothing is written. A tensor takes twice its own size while it is decoded, six times if it is said to be
    overwritten; what a file says of itself is checked before that. File names that lead out of the folder are refused.

    Args:
        folder: a delta folder.
        index: its index.
        held: returns the words of a tensor at the base version; may be asked from several threads.
        threads: tensors that are decoded at once.

    Yields:
        Name and all words, in memory of their own.

    Raises:
        FormatError: a file is damaged, the index and the files disagree, or a delta does not fit its tensor.
        ChecksumError: a tensor does not become what the folder says: damage, or another base.
        TableError: from `held`, for a tensor that the base does not have.
        OSError: a file is missing.
    """
    if not index.names:
        return
    with CheckpointSource(folder) as source:
        checksums = source.metadata
        decode = _DECODERS[index.encoding]

        def one(name: str) -> tuple[str, Words]:
            old = held(name)
            what = f"{folder}: {name}"
            new = decode(numpy_words(source.tensor(name)).view(np.uint8), old.view(np.uint8), what)
            found = _CHECKSUMS[index.checksum](new)
            if found != checksums.get(name):
                raise ChecksumError("a tensor does not become what the delta says", parameter=name, found=found,
                                    version=index.version, expected=checksums.get(name, "a checksum"),
                                    hint="The folder is damaged, or the base is another one.")  # fmt: skip
            return name, new.view(old.dtype)

        yield from in_order(one, index.names, threads)


def _xor_decoded(packed: _Bytes, old: _Bytes, what: str) -> _Bytes:
    raw = _decompressed(packed, old.size, what)
    if len(raw) != old.size:
        raise FormatError(f"{what}: a delta for a tensor of another size", expected=old.size, found=len(raw))
    return np.frombuffer(raw, np.uint8) ^ old


def _overwrite_decoded(packed: _Bytes, old: _Bytes, what: str) -> _Bytes:
    raw = np.frombuffer(_decompressed(packed, 4 + 5 * old.size, what), np.uint8)
    count = int(raw[:4].view("<u4")[0]) if raw.size >= 4 else -1
    if raw.size != 4 + 5 * count:
        raise FormatError(f"{what}: the number of changes does not fit the bytes", found=count)
    positions = raw[4 : 4 + 4 * count].view("<u4").astype(np.int64)
    if count and (positions[-1] >= old.size or bool((positions[1:] <= positions[:-1]).any())):
        raise FormatError(f"{what}: positions are not ascending, or beyond the tensor", expected=f"below {old.size}")
    new = old.copy()
    new[positions] = raw[4 + 4 * count :]
    return new


_DECODERS: Final[dict[str, Callable[[_Bytes, _Bytes, str], _Bytes]]] = {
    "xor": _xor_decoded, "overwrite": _overwrite_decoded,
}  # fmt: skip


def _decompressed(packed: _Bytes, limit: int, what: str) -> bytes:
    """Decompress one frame to at most `limit` bytes; what a frame states is checked before it is believed."""
    try:
        stated = zstandard.get_frame_parameters(packed.data).content_size
        if stated != zstandard.CONTENTSIZE_UNKNOWN and stated > limit:  # max_output_size would not be looked at
            raise FormatError(f"{what}: too large when decompressed", expected=f"at most {limit}", found=stated)
        return zstandard.ZstdDecompressor().decompress(
            packed.data, max_output_size=max(limit, 1), allow_extra_data=False
        )
    except zstandard.ZstdError as err:
        raise FormatError(f"{what}: does not decompress: {err}") from err
