"""Container files: magic, header, groups, trailer (docs/format.md).

`encode_update` and `decode_update` work on bytes, `write_update` and `read_update` on files; a file appears whole
or not at all. `read_header` looks at the header only.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.boxes import check_box, to_global
from deltacast.delta.checkpoint_files import fsync_folder
from deltacast.delta.codec import layout as lay
from deltacast.delta.codec.choose import ValuesChoice
from deltacast.delta.codec.decode import Checked, EntryData, check_decoded_size, check_layout, decode_entries
from deltacast.delta.codec.encode import encode_patches
from deltacast.delta.codec.envelope import Envelope, as_format_error
from deltacast.delta.codec.header import (
    EntryHeader,
    UpdateHeader,
    check_parts,
    fill_entries,
    read_json,
    write_json,
)
from deltacast.delta.codec.portions import cut_portions
from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate

__all__ = [
    "MAGIC",
    "ReadBuffer",
    "decode_portions",
    "decode_update",
    "encode_update",
    "read_header",
    "read_update",
    "write_update",
]

ReadBuffer: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"\x89DCU\r\n\x1a\n"
"""High bit, CR LF and LF: a transfer that is not 8-bit clean or rewrites line ends damages it."""

PORTION_CHANGES: Final = 4 << 20
"""Changes that `decode_portions` decodes together: 40 MiB of positions and bf16 words."""

_PREFIX: Final = struct.Struct("<8sQ")
_SIGNATURE: Final = struct.Struct("<II")
_NO_SIGNATURE, _HMAC_SHA256 = 0, 1
_SIGNATURE_BYTES: Final = {_NO_SIGNATURE: 0, _HMAC_SHA256: 32}
_DIGEST_BYTES: Final = 16


def encode_update(
    update: WeightUpdate, *, values: ValuesChoice = "auto", signing_key: bytes | None = None, threads: int = 1
) -> bytes:
    """Encode an update into a container.

    Args:
        update: absolute patches (with `base_values` where differences may be sent), dense ones, or `delta` patches.
        values: the form to send: `auto` sends differences wherever they are known and smaller; the others insist.
        signing_key: signs the header, which then holds a SHA-256 per group.
        threads: groups that are encoded at once.

    Raises:
        PatchError: a patch breaks the policy (order, range, overlap), or names a change that is none.
        InputError: the update cannot be written in this form.
    """
    return b"".join(_encode(update, values, signing_key, threads))


def _encode(update: WeightUpdate, values: ValuesChoice, signing_key: bytes | None, threads: int) -> list[bytes]:
    """Return the pieces of a container, in file order."""
    patches = update.patches
    envelope = Envelope.of(update)
    check_parts(envelope, patches)
    sizes = [p.meta.num_words if p.box is None else check_box(p.meta, p.box) for p in patches]
    encoded = encode_patches(
        patches, fill_entries(patches), np.array(sizes, np.int64),
        np.array([patch.meta.row.word_bytes for patch in patches], np.int64),
        values=values, threads=threads, hash_groups=signing_key is not None,
    )  # fmt: skip
    stored = write_json(envelope, patches, encoded.layout, encoded.sha256)
    head = _PREFIX.pack(MAGIC, len(stored)) + stored
    padding = bytes(-len(head) % 8)
    signature = hmac.digest(signing_key, head, "sha256") if signing_key is not None else b""
    kind = _NO_SIGNATURE if signing_key is None else _HMAC_SHA256
    pieces = [head, padding, *encoded.payloads, _SIGNATURE.pack(kind, len(signature)), signature]
    checksum = xxhash.xxh3_128()
    for piece in pieces:
        checksum.update(piece)
    return [*pieces, checksum.digest()]


def write_update(
    update: WeightUpdate, path: str | os.PathLike[str], *, values: ValuesChoice = "auto",
    signing_key: bytes | None = None, threads: int = 1,
) -> int:  # fmt: skip
    """Write an update to a container file, replacing a file that is there; return the file's size in bytes.

    The bytes go to a temporary file in the same folder, are synced, and then renamed: readers see the old file, no
    file or the whole new one. Arguments and errors as `encode_update`, and OSError from the file system.
    """
    target = Path(path)
    pieces = _encode(update, values, signing_key, threads)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)
    return sum(map(len, pieces))


def read_update(
    path: str | os.PathLike[str], *, signing_key: bytes | None = None, threads: int = 1,
    max_decoded_bytes: int | None = None,
) -> WeightUpdate:  # fmt: skip
    """Read a container file; arguments and errors as `decode_update`, and OSError from the file system."""
    with Path(path).open("rb") as file:
        view = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data  # not zeroed first, unlike a bytearray
        filled = 0
        while filled < len(view) and (count := file.readinto(view[filled:])):
            filled += count
    return decode_update(view[:filled], signing_key=signing_key, threads=threads, max_decoded_bytes=max_decoded_bytes)


def read_header(buffer: ReadBuffer, *, signing_key: bytes | None = None) -> UpdateHeader:
    """Parse and check a container's header and frame without looking at the payload.

    Args:
        buffer: the whole file.
        signing_key: if given, the signature is checked before anything else is read.

    Raises:
        FormatError, ChecksumError: as `decode_update`; damage in the payload is not noticed.
    """
    view = memoryview(buffer).cast("B")
    stored = _stored_header(view)
    if signing_key is not None:
        _check_signature(view, stored, signing_key)
    return _parse(view, stored)[0]


def _parse(view: memoryview, stored: memoryview) -> tuple[UpdateHeader, Checked]:
    """Parse the header, check its tables, and check that groups and trailer fill the file."""
    header = read_json(stored)
    checked = check_layout(header.layout)
    payload_end = _payload_start(stored) + checked.payload_bytes
    if payload_end + _SIGNATURE.size + _DIGEST_BYTES > len(view):
        raise FormatError("the file ends within its groups or trailer", found=f"{len(view)} bytes")
    kind, size = _SIGNATURE.unpack_from(view, payload_end)
    if _SIGNATURE_BYTES.get(kind) != size:
        raise FormatError("unknown signature", expected="kind 0 of 0 bytes or 1 of 32", found=f"{kind} of {size}")
    if payload_end + _SIGNATURE.size + size + _DIGEST_BYTES != len(view):
        raise FormatError("the file has another size than its header says", found=f"{len(view)} bytes",
                          expected=payload_end + _SIGNATURE.size + size + _DIGEST_BYTES)  # fmt: skip
    if kind == _HMAC_SHA256 and any(group.sha256 is None for group in header.groups):
        raise FormatError("a signed header lacks the SHA-256 of a group")
    return replace(header, file_bytes=len(view), signed=kind == _HMAC_SHA256), checked


def _stored_header(view: memoryview) -> memoryview:
    """Return the compressed header, after checking magic, length and padding."""
    if len(view) < _PREFIX.size:
        raise FormatError("not a container: too short", expected=f"at least {_PREFIX.size} bytes", found=len(view))
    magic, size = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise FormatError("not a container: bad magic", expected=MAGIC.hex(), found=magic.hex(),
                          hint="A text-mode transfer also does this.")  # fmt: skip
    if size > len(view) - _PREFIX.size:
        raise FormatError("the file ends within its header", expected=f"{size} bytes of header", found=len(view))
    stored = view[_PREFIX.size : _PREFIX.size + size]
    if any(view[_PREFIX.size + size : _payload_start(stored)]):
        raise FormatError("the padding after the header is not zero")
    return stored


def _payload_start(stored: memoryview) -> int:
    end = _PREFIX.size + len(stored)
    return end + -end % 8


def _check_signature(view: memoryview, stored: memoryview, key: bytes) -> None:
    """Check the HMAC over magic, length and header; done before the header is parsed."""
    size = _SIGNATURE_BYTES[_HMAC_SHA256]
    start = len(view) - _DIGEST_BYTES - size - _SIGNATURE.size
    if start < _payload_start(stored) or _SIGNATURE.unpack_from(view, start) != (_HMAC_SHA256, size):
        raise ChecksumError("the container is not signed", hint="A signing key is configured, so it must be.")
    found = bytes(view[start + _SIGNATURE.size : start + _SIGNATURE.size + size])
    if not hmac.compare_digest(found, hmac.digest(key, view[: _PREFIX.size + len(stored)], "sha256")):
        raise ChecksumError("the container's signature does not fit its header and this key")


def decode_update(
    buffer: ReadBuffer, *, signing_key: bytes | None = None, threads: int = 1, max_decoded_bytes: int | None = None
) -> WeightUpdate:
    """Decode a container whose bytes are not trusted.

    Args:
        buffer: the whole file; not kept.
        signing_key: if given, the container must be signed with it; the header's signature is checked before the
            header is parsed, and every group's SHA-256 before the group is decoded.
        threads: groups that are decoded at once.
        max_decoded_bytes: refuse an update whose positions and words take more memory. Compressed bytes can stand for
            32,768 times as many; a reader that knows its model can allow 10 bytes per bf16 word of it.

    Returns:
        The update; its patches are in the form that was sent (`delta` or `absolute`). Their arrays are slices of a few
        that belong to this update alone.

    Raises:
        ChecksumError: a checksum or the signature does not fit.
        FormatError: the bytes break a rule of format 1.
    """
    header, checked, payload, sha256 = _opened(memoryview(buffer).cast("B"), signing_key)
    data = decode_entries(checked, payload, threads=threads, sha256=sha256, max_decoded_bytes=max_decoded_bytes)
    return as_format_error(lambda: header.envelope.with_patches(_patches(header.entries, data)), "the header")


def decode_portions(
    buffer: ReadBuffer, *, signing_key: bytes | None = None, threads: int = 1, max_decoded_bytes: int | None = None,
    max_changes: int = PORTION_CHANGES,
) -> tuple[WeightUpdate, Iterator[tuple[SparseWeightPatch, ...]]]:  # fmt: skip
    """Decode a container whose bytes are not trusted, some patches at a time: a large one takes little memory.

    Args:
        buffer: the whole file; kept until the last patches.
        signing_key: as `decode_update`, like the arguments after it.
        threads: groups that are decoded at once.
        max_decoded_bytes: bounds all patches together.
        max_changes: of the patches that are decoded together; more where large ones cannot be cut (portions.py).

    Returns:
        The update without its patches, and all of these in their order, some at a time: proven as they come, by
        group, and valid as long as they are held.

    Raises:
        ChecksumError, FormatError: as `decode_update`; what is wrong within a group is raised when its turn comes.
    """
    header, checked, payload, sha256 = _opened(memoryview(buffer).cast("B"), signing_key)
    check_decoded_size(checked, max_decoded_bytes)

    def decoded() -> Iterator[tuple[SparseWeightPatch, ...]]:
        for portion in cut_portions(checked, max_changes):
            data = decode_entries(
                portion.checked, payload[portion.payload], threads=threads, sha256=sha256[portion.groups]
            )
            yield _patches(header.entries[portion.entries], data)
            del data  # before the next ones are decoded

    return as_format_error(lambda: header.envelope.with_patches(()), "the header"), decoded()


def _opened(view: memoryview, signing_key: bytes | None) -> tuple[UpdateHeader, Checked, memoryview, Sequence[bytes]]:
    """Check a whole file but for its groups: header, tables, the groups' bytes, and the SHA-256 that each must have."""
    stored = _stored_header(view)
    if signing_key is not None:
        _check_signature(view, stored, signing_key)
    if len(view) < _payload_start(stored) + _SIGNATURE.size + _DIGEST_BYTES:
        raise FormatError("the file ends within its trailer", found=f"{len(view)} bytes")
    if xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES]) != bytes(view[-_DIGEST_BYTES:]):
        raise ChecksumError("the container does not have its checksum", hint="Fetch it again.")
    header, checked = _parse(view, stored)
    sha256 = [group.sha256 or b"" for group in header.groups] if signing_key is not None else []
    start = _payload_start(stored)
    return header, checked, view[start : start + checked.payload_bytes], sha256


def _patches(entries: Sequence[EntryHeader], data: Sequence[EntryData]) -> tuple[SparseWeightPatch, ...]:
    return tuple(_patch(entry, *mine) for entry, mine in zip(entries, data, strict=True))


def _patch(entry: EntryHeader, indices: NDArray[np.int64] | None, values: Words) -> SparseWeightPatch:
    if indices is not None and entry.box is not None:
        indices = to_global(indices, entry.meta, entry.box)
    return SparseWeightPatch(
        meta=entry.meta, indices=indices, values=values, fingerprint_after=entry.fingerprint_after,
        form="delta" if entry.values == lay.VALUE_FORMS[lay.DELTA] else "absolute", old_sum=entry.old_sum,
        fingerprint_before=entry.fingerprint_before, part=entry.part, box=entry.box, base_meta=entry.base_meta,
    )  # fmt: skip
