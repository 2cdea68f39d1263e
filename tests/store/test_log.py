"""The log of versions: what a reader finds while others are at work, and where version files are damaged.

Right values: weights are the test's own; which versions must be found is written down by hand.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import store_setups as setups
from deltacast.delta.codec import decode_update
from deltacast.delta.errors import FormatError, StoreError
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.log import head_hint
from deltacast.store.names import HEAD_PATH, UPDATES, VERSIONS, version_path
from deltacast.store.objects import ObjectBackend, ObjectInfo
from deltacast.store.version_store import VersionStore
from failing_backend import FailingBackend


@pytest.fixture
def inner(tmp_path: Path) -> ObjectBackend:
    """The objects as everybody else sees them."""
    return setups.new_backend("memory", tmp_path)


@pytest.fixture
def backend(inner: ObjectBackend) -> FailingBackend:
    """The same objects as the reader sees them that is interrupted."""
    return FailingBackend(inner)


def once(backend: FailingBackend, call: str, prefix: str, action: Callable[[], object]) -> None:
    """Do something right before the first call of a kind."""
    ahead = [action]

    def before(found: str, name: str) -> None:
        if ahead and found == call and name.startswith(prefix):
            ahead.pop()()

    backend.before = before


def damage(backend: ObjectBackend, *versions: int) -> None:
    """Flip a bit of version files."""
    for version in versions:
        raw = bytearray(backend.read(version_path(version)))
        raw[len(raw) // 2] ^= 1
        backend.replace(version_path(version), raw)


def require_readable(store: VersionStore, weights: list[setups.Weights], versions: tuple[int, ...], out: Path) -> None:
    """Make versions, and hold them against what was published."""
    for version in versions:
        store.materialize(version, out / str(version))
        assert setups.same(setups.folder_weights(out / str(version)), weights[version])


@pytest.mark.parametrize("damaged", [(65,), (65, 66), (65, 66, 67, 90)])
def test_damaged_version_files_in_the_way_cost_no_version(
    inner: ObjectBackend, tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """The walk back reads 130, then 65; newer files repeat what 65 says, and are read where it is damaged."""
    store, weights = setups.filled_store(inner, 130, folds=False)
    damage(inner, *damaged)
    assert [record.version for record in store.log()] == list(range(130, -1, -1))
    require_readable(store, weights, (0, 64, 65, 66, 130), tmp_path)


def test_where_nothing_repeats_a_record_the_log_ends_with_an_error(inner: ObjectBackend) -> None:
    """Of 66 files between the newest and the rest not one is whole; the first is named."""
    store, _ = setups.filled_store(inner, 70, folds=False)
    damage(inner, *range(5, 70))
    found = store.log()
    assert [next(found).version for _ in range(65)] == list(range(70, 5, -1))
    with pytest.raises(FormatError, match=version_path(5)):
        next(found)


@pytest.mark.parametrize("damaged", [(10,), (9, 10)])
def test_a_damaged_newest_file_costs_its_version_only(
    inner: ObjectBackend, tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """Earlier versions can be had; who wants the newest, or to go on from it, is told which file and what to do."""
    store, weights = setups.filled_store(inner, 10)
    damage(inner, *damaged)
    lowest = damaged[0]
    require_readable(store, weights, (0, lowest - 1), tmp_path)
    assert store.plan(0, lowest - 1).want == store.record(lowest - 1).version == lowest - 1
    assert store.fsck().lost == damaged
    update = setups.update_between(weights[10], weights[10], 10)
    asked: list[Callable[[], object]] = [
        store.head, lambda: list(store.log()), lambda: store.plan(0), lambda: store.record(10), lambda: store.gc(1),
        lambda: store.materialize(None, tmp_path / "out"), lambda: next(store.follow(0)),
        lambda: VersionStore.open(inner).publish_update(update), VersionStore.open(inner).claim,
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(FormatError, match=rf"{version_path(10)}.*docs/store\.md"):
            ask()


def test_a_version_whose_file_is_damaged_is_published_again(inner: ObjectBackend, tmp_path: Path) -> None:
    """The way out that docs/store.md names: move the file aside, and publish its container's update again."""
    store, weights = setups.filled_store(inner, 10)
    damage(inner, 10)
    inner.delete(version_path(10))
    (container,) = (info.name for info in inner.list(UPDATES) if info.name.startswith(f"{UPDATES}{9:020}-"))
    VersionStore.open(inner).publish_update(decode_update(inner.read(container)))
    require_readable(store, weights, (9, 10), tmp_path)
    report = store.fsck()
    assert (report.damaged, report.lost, len(report.stray)) == ((), (), 1)


@pytest.mark.parametrize("ask", [
    lambda store, _: store.head(),
    lambda store, _: list(store.log()),
    lambda store, _: store.plan(2),
    lambda store, _: list(store.follow(2, timeout_s=0.01)),
    lambda store, folder: store.materialize(None, folder / "out"),
])  # fmt: skip
def test_a_reader_survives_that_the_head_is_superseded_and_removed(
    inner: ObjectBackend, backend: FailingBackend, tmp_path: Path, ask: Callable[[VersionStore, Path], object]
) -> None:
    """Between a reader's listing and its read, the newest version gets a successor with a snapshot, and is removed."""
    store, weights = setups.filled_store(inner, 3, folds=False)
    reader = VersionStore.open(backend)

    def supersede() -> None:
        new = setups.next_weights(weights[3], 9)
        store.publish_update(setups.update_between(weights[3], new, 3))
        store.add_anchor(4, setups.source_of(new))
        store.gc(1, min_age_s=0)

    once(backend, "stat", version_path(3), supersede)
    ask(reader, tmp_path)
    assert store.versions() == range(4, 5)


def test_a_head_that_shrinks_while_it_is_read_changes_nothing(inner: ObjectBackend, backend: FailingBackend) -> None:
    """An older writer's hint takes the place of a longer one between the look at its size and the read."""
    store, _ = setups.filled_store(inner, 10)
    once(backend, "read_into", HEAD_PATH, lambda: inner.replace(HEAD_PATH, head_hint(9)))
    assert VersionStore.open(backend).head() == store.head()


def test_a_listing_that_misses_a_version_makes_no_follower_skip_it() -> None:
    """A version that came while the listing was made may be missing in it, though a newer one is there."""
    missed = [version_path(2)]

    class Late(MemoryBackend):
        def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
            found = list(super().list(prefix, after=after))
            late = [missed.pop()] if prefix == VERSIONS and missed else []
            return (info for info in found if info.name not in late)

    name = secrets.token_hex(8)
    setups.filled_store(MemoryBackend(name), 3)
    store = VersionStore.open(Late(name))
    assert [record.version for record in store.follow(1, timeout_s=0.0)] == [2, 3]
    assert missed == []


def test_a_store_that_fails_is_no_store_without_versions(inner: ObjectBackend, backend: FailingBackend) -> None:
    """That HEAD cannot be read is no error; that nothing can be listed is one."""
    store, _ = setups.filled_store(inner, 3)
    reader = VersionStore.open(backend)

    def refuse(*calls: tuple[str, str]) -> None:
        def before(call: str, name: str) -> None:
            if any(call == refused and name.startswith(prefix) for refused, prefix in calls):
                raise StoreError("cannot read: Input/output error")

        backend.before = before

    refuse(("stat", HEAD_PATH))
    assert reader.head() == store.head()
    refuse(("list", "versions/"))
    with pytest.raises(StoreError, match="Input/output"):
        reader.head()
