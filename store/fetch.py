"""Objects whose bytes are not trusted: what they must be, and how they are read: bounded by size, held to a digest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.store.objects import Buffer, ObjectBackend
from deltacast.store.sealed import check_digest, check_number

__all__ = ["ObjectRef", "content_digest", "fetch", "fetch_ref"]


def content_digest(data: Buffer) -> str:
    """Return the digest of an object's bytes, written `xxh3_128:<hex>`."""
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object, and what its bytes must be.

    Attributes:
        path: its name in the store.
        num_bytes: its size.
        digest: content digest, `xxh3_128:<hex>` of its bytes.

    Raises:
        InputError: a size or digest that cannot be.
    """

    path: str
    num_bytes: int
    digest: str

    def __post_init__(self) -> None:
        check_number(self.num_bytes, "size")
        check_digest(self.digest)


def fetch(backend: ObjectBackend, path: str, *, max_bytes: int) -> bytes:
    """Return a small object.

    Raises:
        MissingObjectError: there is none.
        FormatError: it is larger than `max_bytes`; nothing of it was read.
        StoreError: the store failed.
    """
    num_bytes = backend.stat(path).num_bytes
    if num_bytes > max_bytes:
        raise FormatError(f"{path} is too large", expected=f"at most {max_bytes} bytes", found=num_bytes)
    return bytes(_read(backend, path, num_bytes))


def fetch_ref(backend: ObjectBackend, ref: ObjectRef) -> memoryview:
    """Return the bytes of an object that a record names; the caller's own memory.

    Raises:
        MissingObjectError: it is gone.
        ChecksumError: it has another size (nothing was read) or another content digest.
        StoreError: the store failed.
    """
    num_bytes = backend.stat(ref.path).num_bytes
    if num_bytes != ref.num_bytes:
        raise ChecksumError(f"{ref.path} has another size", expected=ref.num_bytes, found=num_bytes)
    data = _read(backend, ref.path, num_bytes)
    found = content_digest(data)
    if found != ref.digest:
        raise ChecksumError(f"{ref.path} does not have its content digest", expected=ref.digest, found=found)
    return data


def _read(backend: ObjectBackend, path: str, num_bytes: int) -> memoryview:
    data = np.empty(num_bytes, np.uint8).data  # not zeroed first, unlike a bytearray
    backend.read_into(path, 0, data)
    return data
