"""Leases of registered readers, by the store's clock, which these tests turn themselves."""

from __future__ import annotations

import math
import secrets

import pytest

from deltacast.delta.errors import InputError
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.readers import MAX_TTL_S, list_leases, register_reader, unregister_reader
from failing_backend import FailingBackend, only
from store_setups import KEY

NAMES = ["worker-0", "../../etc/passwd", "a/b c\n", "węzeł", "x" * 1000]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(clock: Clock) -> MemoryBackend:
    return MemoryBackend(secrets.token_hex(8), clock=clock)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_lease_says_who_holds_what_and_until_when(backend: MemoryBackend, clock: Clock, key: bytes | None) -> None:
    """Each reader has one lease, which a later call replaces; it ends its time after it was last written."""
    register_reader(backend, "a", 3, 60, signing_key=key)
    register_reader(backend, "b", 7, 0.5, signing_key=key)
    clock.now_s = 1010
    given = register_reader(backend, "a", 4, 60, signing_key=key)
    found = {lease.name: lease for lease in list_leases(backend, signing_key=key)}
    assert found == {"a": given, "b": found["b"]}
    assert (found["a"].version, found["a"].expires_s) == (4, 1070)
    assert (found["b"].version, found["b"].expires_s) == (7, 1000.5)


def test_no_object_is_named_by_a_reader(backend: MemoryBackend) -> None:
    """Any text is a name: it is in the lease, and a digest of it in the lease's own name."""
    for version, name in enumerate(NAMES):
        register_reader(backend, name, version, 60)
    leases = list_leases(backend)
    assert {lease.name: lease.version for lease in leases} == {name: version for version, name in enumerate(NAMES)}
    assert all(set(lease.path) <= set("readers/.json0123456789abcdef") for lease in leases)


def test_a_reader_that_unregisters_holds_nothing(backend: MemoryBackend) -> None:
    """Its lease is gone, another's is not; unregistering twice is fine."""
    register_reader(backend, "a", 3, 60)
    register_reader(backend, "b", 3, 60)
    unregister_reader(backend, "a")
    unregister_reader(backend, "a")
    assert [lease.name for lease in list_leases(backend)] == ["b"]


@pytest.mark.parametrize(
    ("name", "version", "ttl_s"),
    [
        ("", 0, 60), ("a\0b", 0, 60), ("\ud800", 0, 60), ("a", -1, 60), ("a", True, 60), ("a", 0, 0), ("a", 0, -1),
        ("a", 0, math.nan), ("a", 0, math.inf), ("a", 0, MAX_TTL_S + 1), ("a", 1 << 63, 60), ("a" * 4000, 0, 60),
    ],
)  # fmt: skip
def test_what_cannot_be_a_lease_is_refused(backend: MemoryBackend, name: str, version: int, ttl_s: float) -> None:
    """A bad name, version or time is an InputError, and nothing is written."""
    with pytest.raises(InputError):
        register_reader(backend, name, version, ttl_s)
    assert list(backend.list("")) == []


def test_a_lease_that_cannot_be_read_holds_everything_for_a_while(backend: MemoryBackend) -> None:
    """Whatever byte is damaged: it counts as one of version 0, and ends MAX_TTL_S after it was written."""
    path = register_reader(backend, "a", 3, 60, signing_key=KEY).path
    whole = backend.read(path)
    unsigned = register_reader(backend, "b", 3, 60).path
    for damaged in (
        *(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))),
        b"",
        whole * 99,
    ):
        backend.replace(path, damaged)
        for lease in list_leases(backend, signing_key=KEY):
            assert lease.path in (path, unsigned)
            assert (lease.name, lease.version, lease.expires_s) == (None, 0, 1000 + MAX_TTL_S)


def test_a_lease_that_the_disk_refuses_to_read_holds_everything(backend: MemoryBackend) -> None:
    """One of a user with a private umask, or on a bad sector, counts as one that is damaged."""
    register_reader(backend, "a user with umask 077", 6, 60)
    refusing = FailingBackend(backend)
    refusing.before = only("read", "readers/")
    assert [(lease.name, lease.version) for lease in list_leases(refusing)] == [(None, 0)]


def test_a_lease_that_was_copied_to_another_name_is_not_read(backend: MemoryBackend) -> None:
    """Signed as it is, it protects from where it was written only."""
    path = register_reader(backend, "a", 3, 60, signing_key=KEY).path
    backend.replace("readers/" + "0" * 32 + ".json", backend.read(path))
    assert sorted((lease.name or "", lease.version) for lease in list_leases(backend, signing_key=KEY)) == [
        ("", 0),
        ("a", 3),
    ]
