"""Read objects whose bytes are not trusted: bounded by size first, then held to their content digest."""

from __future__ import annotations

import numpy as np

from deltacast.delta.errors import ChecksumError, FormatError
from deltacast.store.objects import ObjectBackend
from deltacast.store.records import ObjectRef, content_digest

__all__ = ["fetch", "fetch_ref"]


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
