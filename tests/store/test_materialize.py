"""A version as a folder: whole or not at all, and by another way where an object is damaged.

Right values: the weights that the test made, read by the stock library.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

import store_setups as setups
from deltacast.delta.errors import ChecksumError, FormatError, InputError, StoreError, VerificationError
from deltacast.delta.module_source import StateDictSource
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.objects import ObjectBackend
from deltacast.store.snapshots import read_manifest
from deltacast.store.version_store import VersionStore


@pytest.fixture
def memory(tmp_path: Path) -> ObjectBackend:
    return setups.new_backend("memory", tmp_path)


def test_a_published_version_that_is_not_what_it_says_never_appears(memory: ObjectBackend, tmp_path: Path) -> None:
    """A trainer that published a wrong digest: the folder does not appear, and the error names the version."""
    store, weights = setups.filled_store(memory, 1)
    new = setups.next_weights(weights[1], 5)
    update = setups.update_between(weights[1], new, 1)
    store.publish_update(replace(update, target_digest=setups.state_digest(weights[0])))
    with pytest.raises(VerificationError, match=r"updates/.*does not make the version that it says.*version 2"):
        store.materialize(2, tmp_path / "out")
    store.materialize(1, tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_folder_is_made_once_and_nowhere_else(memory: ObjectBackend, tmp_path: Path) -> None:
    """Materialising over something, or into a folder that is not there, touches nothing."""
    store, weights = setups.filled_store(memory, 1)
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        store.materialize(1, tmp_path / "there")
    with pytest.raises(FileNotFoundError):
        store.materialize(1, tmp_path / "no" / "out")
    with pytest.raises(StoreError, match="versions 0 to 1"):
        store.materialize(2, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    seen: list[int] = []
    record = store.materialize(1, tmp_path / "out", progress=seen.append)
    assert record == store.head()
    assert sum(seen) > 0
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[1])


def test_tied_parameters_are_kept_once(memory: ObjectBackend, tmp_path: Path) -> None:
    """A tied tensor is in the folder under one name, as transformers has it, and the digest counts it once."""
    tensors = setups.tensors_of(setups.first_weights())
    store = setups.new_store(memory)
    store.publish_snapshot(StateDictSource(tensors | {"zz.tied": tensors["w"]}))
    weights = setups.first_weights()
    new = setups.next_weights(weights, 1)
    store.publish_update(setups.update_between(weights, new, 0))
    store.materialize(None, tmp_path / "out")
    assert setups.same(setups.folder_weights(tmp_path / "out"), new)


def test_an_object_that_goes_while_a_folder_is_made_costs_a_second_plan(memory: ObjectBackend, tmp_path: Path) -> None:
    """Retention removes what the first plan needs; the second begins with a newer snapshot."""
    store, weights = setups.filled_store(memory, 4)

    class Collected(MemoryBackend):
        done = False

        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if name.startswith("updates/") and not self.done:
                self.done = True
                store.add_anchor(3, setups.source_of(weights[3]))
                for version in range(3):
                    self.delete(f"versions/{version:020}.json")
                for info in list(self.list("updates/")):
                    if int(info.name[29:49]) <= 3:
                        self.delete(info.name)
            super().read_into(name, start, out)

    reader = VersionStore.open(Collected(memory.url.removeprefix("memory://")))
    reader.materialize(4, tmp_path / "out")
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[4])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def named(backend: ObjectBackend, beginning: str) -> str:
    """The one object whose name begins so."""
    (found,) = (info.name for info in backend.list("") if info.name.startswith(beginning))
    return found


def damage(backend: ObjectBackend, name: str) -> None:
    """Flip a bit in the middle of an object."""
    raw = bytearray(backend.read(name))
    raw[len(raw) // 2] ^= 4
    backend.replace(name, raw)


def weights_file(backend: ObjectBackend, version: int) -> str:
    folder = f"snapshots/{version:020}-"
    (found,) = (info.name for info in backend.list("snapshots/") if re.match(f"{folder}.*/weights", info.name))
    return found


def update_file(backend: ObjectBackend, version: int) -> str:
    return named(backend, f"updates/{version - 1:020}-")


@pytest.fixture
def anchored(memory: ObjectBackend) -> tuple[VersionStore, list[setups.Weights]]:
    """Versions 0 to 9, a fold of 0 to 8, and snapshots of 0 and 5."""
    store, weights = setups.filled_store(memory, 9)
    store.add_anchor(5, setups.source_of(weights[5]))
    return store, weights


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
@pytest.mark.parametrize("what", ["anchor", "update after it", "anchor and fold"])
def test_another_way_is_taken_where_there_is_one(
    anchored: tuple[VersionStore, list[setups.Weights]],
    what: str,
    gone: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An older snapshot with the fold, or with all updates: the version is there, and a warning names what failed."""
    store, weights = anchored
    backend = store.backend
    failing = [update_file(backend, 7)] if what == "update after it" else [weights_file(backend, 5)]
    if what == "anchor and fold":
        failing.append(named(backend, "folds/"))
    for name in failing:
        backend.delete(name) if gone else damage(backend, name)
    with caplog.at_level(logging.WARNING):
        store.materialize(9, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[9])
    assert all(name in caplog.text for name in failing if not (gone and name.startswith("folds/")))  # or never listed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_object_that_cannot_be_read_is_done_without(memory: ObjectBackend, tmp_path: Path) -> None:
    """A disk that fails at one place costs no version that there is another way to."""
    store, weights = setups.filled_store(memory, 3)
    store.add_anchor(2, setups.source_of(weights[2]))
    bad = weights_file(memory, 2)

    class OneBadSector(MemoryBackend):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if name == bad:
                raise StoreError(f"cannot read {name}: Input/output error")
            super().read_into(name, start, out)

    reader = VersionStore.open(OneBadSector(memory.url.removeprefix("memory://")))
    reader.materialize(3, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[3])


def test_a_wrong_update_is_passed_by_way_of_a_later_snapshot(memory: ObjectBackend, tmp_path: Path) -> None:
    """What a trainer published under a wrong digest costs that version, and none that a right snapshot follows."""
    store, weights = setups.filled_store(memory, 1)
    wrong = replace(
        setups.update_between(weights[1], setups.next_weights(weights[1], 5), 1),
        target_digest=setups.state_digest(weights[0]),
    )
    store.publish_update(wrong)
    store.add_anchor(2, setups.source_of(weights[0]))  # the weights whose digest was published
    store.materialize(2, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[0])


def test_a_snapshot_of_other_weights_is_passed_over(memory: ObjectBackend, tmp_path: Path) -> None:
    """Its files are what its manifest says, and its manifest what the version says, but the files are another one's."""
    store, weights = setups.filled_store(memory, 2)
    there = read_manifest(memory, store.add_anchor(1, setups.source_of(weights[1])).path)
    path = there.path.replace(f"{1:020}-", f"{2:020}-")
    moved = replace(there, path=path, version=2, state_digest=setups.state_digest(weights[2]))
    for file in there.files:
        memory.write(moved.object_name(file), [memory.read(there.object_name(file))])
    memory.create(path, moved.to_bytes(None))
    store.materialize(2, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[2])


def test_the_error_names_every_object_that_failed(
    anchored: tuple[VersionStore, list[setups.Weights]], tmp_path: Path
) -> None:
    """Where no way is left: the anchor, the fold and the update; the error is of the first one's kind."""
    store, _ = anchored
    backend = store.backend
    failing = [weights_file(backend, 5), named(backend, "folds/"), update_file(backend, 3)]
    for name in failing:
        damage(backend, name)
    with pytest.raises(ChecksumError) as caught:
        store.materialize(9, tmp_path / "out", threads=1)
    assert all(name in str(caught.value) for name in failing)
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_retention_took_meanwhile_is_said_to_be_gone(memory: ObjectBackend, tmp_path: Path) -> None:
    """Not that its objects are missing, which is what followed from it."""
    store, weights = setups.filled_store(memory, 3)

    class Collected(MemoryBackend):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            if name.startswith("updates/") and len(store.versions()) == 4:
                store.publish_snapshot(setups.source_of(weights[3]))
                store.gc(1, min_age_s=0)
            super().read_into(name, start, out)

    reader = VersionStore.open(Collected(memory.url.removeprefix("memory://")))
    with pytest.raises(StoreError, match=r"version 3.*versions 4 to 4"):
        reader.materialize(3, tmp_path / "out", threads=1)
    assert list(tmp_path.iterdir()) == []


def test_not_every_way_is_tried(memory: ObjectBackend, tmp_path: Path) -> None:
    """Of ten damaged anchors eight are fetched: each may be a whole model."""
    store, weights = setups.filled_store(memory, 10, folds=False)
    for version in range(1, 11):
        store.add_anchor(version, setups.source_of(weights[version]))
        damage(memory, weights_file(memory, version))
    with pytest.raises(FormatError) as caught:
        store.materialize(10, tmp_path / "out", threads=1)
    told = [version for version in range(11) if weights_file(memory, version) in str(caught.value)]
    assert told == list(range(3, 11))


def test_a_full_disk_is_no_fault_of_the_store(memory: ObjectBackend, tmp_path: Path) -> None:
    """The error names the output and what to do; no other way is tried, and nothing is left."""
    store, weights = setups.filled_store(memory, 2, folds=False)
    store.add_anchor(1, setups.source_of(weights[1]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(StoreError, match=rf"cannot write {tmp_path}/out: File too large.*ulimit -f"):
            store.materialize(2, tmp_path / "out", threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_more_shards_than_files_may_be_open(memory: ObjectBackend, tmp_path: Path) -> None:
    """Before Python 3.13 a mapping keeps a descriptor: the error names a shard and the limit, and not the snapshot."""
    tensors = {f"p{number:03}": torch.full((4,), float(number)) for number in range(64)}
    store = setups.new_store(memory)
    store.publish_snapshot(StateDictSource(tensors), shard_bytes=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    room_for_32 = next(most for most in count(32) if most - sum(number < most for number in opened) == 32)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room_for_32, limits[1]))
    try:
        if sys.version_info >= (3, 13):
            store.materialize(0, tmp_path / "out", threads=1)
            return
        with pytest.raises(InputError, match=r"cannot map .*weights-000\d\d-of-00064.*: Too many open.*ulimit -n"):
            store.materialize(0, tmp_path / "out", threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert list(tmp_path.iterdir()) == []
