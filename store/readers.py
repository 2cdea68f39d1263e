"""Leases of registered readers: what retention must not take from under them.

A lease is one small object that its reader writes again and again; it ends by itself, by the store's clock, when the
reader stops doing so. It protects versions, it gives no right to anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from deltacast.delta.errors import FormatError, InputError, MissingObjectError, StoreError
from deltacast.delta.table import check_name
from deltacast.store.names import READERS, is_lease_path, lease_path
from deltacast.store.objects import ObjectBackend, ObjectInfo
from deltacast.store.sealed import check_number, seal, unseal

__all__ = ["MAX_TTL_S", "Lease", "list_leases", "register_reader", "unregister_reader"]

MAX_TTL_S: Final = 7 * 86400.0
"""How long a reader that is gone, or a lease that nobody can read, may keep old versions from being removed."""

_MAX_LEASE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Lease:
    """What one registered reader holds on to.

    Attributes:
        path: the lease's object.
        name: the reader's name; None where the lease cannot be read, which then protects every version.
        version: the version that the reader holds: it needs all updates after it.
        expires_s: when the lease ends, by the store's clock, in seconds since 1970.
        num_bytes: of the lease's object.
    """

    path: str
    name: str | None
    version: int
    expires_s: float
    num_bytes: int


def register_reader(
    backend: ObjectBackend, name: str, version: int, ttl_s: float, *, signing_key: bytes | None = None
) -> Lease:
    """Say that a reader holds `version` and will need what follows it; call it again before the lease ends.

    Register before planning. A reader that comes back under its name takes the place of its earlier lease.

    Args:
        backend: the store.
        name: any text that tells readers apart.
        version: the version that the reader holds, or the one it is about to fetch.
        ttl_s: seconds for which the lease holds from now on, at most `MAX_TTL_S`.
        signing_key: the store's.

    Raises:
        InputError: a bad name or one that is too long for a lease, a version that cannot be, a time that is not above 0
            or too long. Nothing was written.
        StoreError: the store could not write; an earlier lease is as it was.
    """
    check_number(version, "version")
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise InputError("a lease cannot last so long", expected=f"above 0 and at most {MAX_TTL_S} s", found=ttl_s)
    path = lease_path(check_name(name))
    fields = {"path": path, "name": name, "version": version, "ttl_ms": math.ceil(ttl_s * 1000)}
    lease = seal(fields, signing_key)
    if len(lease) > _MAX_LEASE_BYTES:
        raise InputError("a reader's name is too long", expected=f"a lease of at most {_MAX_LEASE_BYTES} bytes",
                         found=len(lease))  # fmt: skip
    backend.replace(path, lease)
    info = backend.stat(path)
    return Lease(path, name, version, info.modified_s + ttl_s, info.num_bytes)


def unregister_reader(backend: ObjectBackend, name: str) -> None:
    """End a reader's lease; that there is none is no error.

    Raises:
        InputError: not a name.
        StoreError: the store could not remove it; it ends by itself.
    """
    backend.delete(lease_path(check_name(name)))


def list_leases(backend: ObjectBackend, *, signing_key: bytes | None = None) -> tuple[Lease, ...]:
    """Return every lease there is, also those that have ended: compare `expires_s` with `backend.now_s()`.

    A lease that cannot be read (damaged, somebody's own, unsigned where a key is configured) counts as one of version 0
    for `MAX_TTL_S`: better to keep too much than to take from a reader what it needs.

    Raises:
        StoreError: the store could not list.
    """
    found = (_read_lease(backend, info, signing_key) for info in backend.list(READERS))
    return tuple(lease for lease in found if lease is not None)


def _read_lease(backend: ObjectBackend, info: ObjectInfo, signing_key: bytes | None) -> Lease | None:
    """Return a lease; None if its reader has unregistered meanwhile."""
    unreadable = Lease(info.name, None, 0, info.modified_s + MAX_TTL_S, info.num_bytes)
    if info.num_bytes > _MAX_LEASE_BYTES or not is_lease_path(info.name):
        return unreadable
    try:
        fields = unseal(backend.read(info.name), signing_key, info.name)
        name, version = fields.text("name"), fields.number("version")
        ttl_s = fields.number("ttl_ms", highest=int(MAX_TTL_S * 1000)) / 1000
    except MissingObjectError:
        return None
    except (FormatError, StoreError):  # damaged, or the disk or its owner does not let us
        return unreadable
    return Lease(info.name, name, version, info.modified_s + ttl_s, info.num_bytes)
