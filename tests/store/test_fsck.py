"""fsck: it names what is damaged, and says of every version what a reader will find.

Right values: which versions damage costs is written down by hand; what a reader finds is tried out, bit by bit.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from crashing_store import FailingDisk
from deltacast.delta.codec import encode_update
from deltacast.delta.errors import DeltacastError, FormatError, MissingObjectError, ObjectExistsError
from deltacast.store.backends import open_backend
from deltacast.store.fetch import ObjectRef, content_digest
from deltacast.store.fsck import FsckReport, check, find_log
from deltacast.store.names import RUN_PATH, fold_path, update_path, version_path
from deltacast.store.records import UpdateRef, VersionFile
from deltacast.store.snapshots.manifest import read_manifest
from deltacast.store.version_store import VersionStore
from store_setups import (
    KEY,
    Weights,
    filled_store,
    folder_weights,
    new_backend,
    next_weights,
    same,
    source_of,
    update_between,
)

NEWEST: Final = 10
ALL: Final = tuple(range(NEWEST + 1))
TRIED: Final = (0, 2, 4, 5, 6, 8, 10)
"""Versions that a reader tries to get: at and between the snapshots, at the end of the fold, the newest."""

COSTS: Final[dict[str, tuple[int, ...]]] = {
    "run.json": (),
    "HEAD": (),
    "readers/": (),
    "folds/": (),
    "snapshots/0": (0, 1, 2, 3, 4),
    "snapshots/5": (),
    **{f"updates/{version}": tuple(range(version, 5)) for version in range(1, 5)},
    "updates/5": (),
    "updates/6": (6, 7),
    "updates/7": (7,),
    "updates/8": (),
    "updates/9": (9, 10),
    "updates/10": (10,),
    **{f"versions/{version}": () for version in range(NEWEST)},
    "versions/10": (10,),
}
"""Versions that damage to an object costs: snapshots of 0 and 5, a fold of 0 to 8, the newest version 10."""


def label(name: str) -> str:
    """What an object is, without digest and nonce: `updates/7`, `snapshots/5`, `folds/`."""
    folder, _, rest = name.partition("/")
    if folder in ("folds", "readers"):
        return f"{folder}/"
    digits = rest.removesuffix(".json").split("/")[0].split("-")
    return f"{folder}/{int(digits[1 if folder == 'updates' else 0])}" if rest else name


@pytest.fixture(scope="module", params=[None, KEY], ids=["unsigned", "signed"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bytes | None, list[Weights]]:
    """A store of a folder, its key, and the weights of its versions; to be copied."""
    root = tmp_path_factory.mktemp("whole")
    with FailingDisk(root):  # without a fault it only spares the waiting for fsync
        store, weights = filled_store(open_backend(root), NEWEST, key=request.param)
        store.add_anchor(5, source_of(weights[5]))
        store.register_reader("reader", 3, 60)
    return root, request.param, weights


@pytest.fixture
def store(whole: tuple[Path, bytes | None, list[Weights]], tmp_path: Path) -> VersionStore:
    """A copy of that store."""
    root = tmp_path / "store"
    shutil.copytree(whole[0], root)
    return VersionStore.open(root, signing_key=whole[1])


def paths(store: VersionStore) -> list[str]:
    return [info.name for info in store.backend.list("")]


def obtained(store: VersionStore, weights: list[Weights], scratch: Path) -> list[int]:
    """Return which of the versions that are tried a reader gets; each is right, bit by bit, or an error of ours."""
    found: list[int] = []
    scratch.mkdir(exist_ok=True)
    with FailingDisk(scratch):
        for version in TRIED:
            out = scratch / str(version)
            try:
                store.materialize(version, out, threads=1)
            except DeltacastError:
                assert not out.exists()
            else:
                assert same(folder_weights(out), weights[version])
                found.append(version)
                shutil.rmtree(out)
    return found


def assert_names(report: FsckReport, name: str) -> None:
    """Assert that one object is named, with the versions that it costs, and that no other version is given up."""
    costs = COSTS[label(name)]
    assert {damage.path for damage in report.damaged} == {name}
    assert report.damaged[0].versions == costs
    assert report.lost == costs
    assert report.materialisable == tuple(version for version in ALL if version not in costs)
    assert name in str(report.damaged[0])


def test_a_whole_store_has_nothing_damaged_and_nothing_stray(store: VersionStore) -> None:
    """Every version can be made; everything that is there is named by something, and was read."""
    read: list[int] = []
    assert store.fsck(progress=read.append) == FsckReport((), (), ALL, ())
    there = [info for info in store.backend.list("") if info.name.split("/")[0] not in ("run.json", "HEAD", "readers")]
    manifests = [info for info in there if info.name.endswith("/manifest.json")]
    assert sum(read) == sum(info.num_bytes for info in there) - sum(info.num_bytes for info in manifests)


def flip(path: Path, at: int) -> bytes:
    """Flip a bit of a file; return what the file was."""
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x04]) + raw[at + 1 :])
    return raw


def files(store: VersionStore) -> Iterator[tuple[str, Path]]:
    """The objects of a store, and their files."""
    for name in paths(store):
        path = store.backend.path(name)
        assert path is not None
        yield name, path


def test_a_flipped_bit_in_any_object_is_named(store: VersionStore) -> None:
    """At the beginning, in the middle, at the end: fsck names that object alone, and what it costs."""
    for name, path in files(store):
        for share in (0, 0.5, 1):
            raw = flip(path, int(share * (path.stat().st_size - 1)))
            assert_names(store.fsck(), name)
            path.write_bytes(raw)
    assert store.fsck() == FsckReport((), (), ALL, ())


@pytest.mark.parametrize("whole", [None], indirect=True, ids=["unsigned"])
def test_a_reader_finds_what_fsck_says(
    store: VersionStore, whole: tuple[Path, bytes | None, list[Weights]], tmp_path: Path
) -> None:
    """Whatever object is damaged, what a reader gets is right, and it gets the versions that fsck says can be made."""
    for _, path in files(store):
        raw = flip(path, path.stat().st_size // 2)
        report = store.fsck()
        expected = [version for version in TRIED if version in report.materialisable]
        assert obtained(store, whole[2], tmp_path / "scratch") == expected
        path.write_bytes(raw)


def test_an_object_that_vanished_is_named(store: VersionStore) -> None:
    """So is what it costs. A fold, a lease and HEAD are only missed; so is an anchor, whose files are then stray."""
    for name, path in files(store):
        raw, what = path.read_bytes(), label(name)
        path.unlink()
        report = store.fsck()
        if what in ("HEAD", "folds/", "readers/") or (what == "snapshots/5" and "manifest" in name):
            assert (report.damaged, report.materialisable) == ((), ALL)
            assert len(report.stray) == (2 if what == "snapshots/5" else 0)
        elif not what.startswith("versions/"):
            assert_names(report, name)
        path.write_bytes(raw)


@pytest.mark.parametrize(
    ("version", "named", "materialisable"),
    [
        (10, "HEAD", range(10)),  # the one before it is the newest then
        (8, version_path(8), range(0)),  # no snapshot is left among those that a walk from the newest finds
        (4, version_path(4), range(5, 11)),
        (0, None, range(5, 11)),  # as after a collection that was interrupted
    ],
)
def test_a_version_file_that_vanished_hides_those_before_it(
    store: VersionStore, version: int, named: str | None, materialisable: range
) -> None:
    """Versions that have a file in a row up to the newest are all that a reader sees."""
    store.backend.delete(version_path(version))
    report = store.fsck()
    assert [damage.path for damage in report.damaged] == ([] if named is None else [named])
    assert report.materialisable == tuple(materialisable)
    hidden = range(version + 1) if named == version_path(version) else range(0)
    for damage in report.damaged:
        assert [lost for lost in damage.versions if lost in hidden] == list(hidden)


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_what_later_files_say_of_a_lost_version_is_told(store: VersionStore, gone: bool) -> None:
    """The record that a lost version file held, from the files after it; of the newest one nothing is left."""
    for version in (8, NEWEST):
        expected = None if version == NEWEST else store.record(version)
        path, raw = version_path(version), store.backend.read(version_path(version))
        if version == NEWEST or not gone:
            store.backend.replace(path, raw[:-9] + b"!" + raw[-8:])
        else:
            store.backend.delete(path)
        (damage,) = store.fsck().damaged
        assert (damage.path, damage.record) == (path, expected)
        store.backend.replace(path, raw)


def test_a_forged_file_of_a_signed_snapshot_is_named(tmp_path: Path) -> None:
    """Its XXH3 and fingerprints can be made to fit; fsck holds it to the SHA-256 that the signed manifest states."""
    store, weights = filled_store(new_backend("memory", tmp_path), 1, key=KEY)
    ref = store.add_anchor(1, source_of(weights[1]))
    manifest = read_manifest(store.backend, ref.path, KEY)
    index = next(file for file in manifest.files if file.role == "index")
    other = hashlib.sha256(b"what was there before the forger came").hexdigest()
    files = tuple(replace(file, sha256=other) if file is index else file for file in manifest.files)
    store.backend.replace(ref.path, replace(manifest, files=files).to_bytes(KEY))
    (damage,) = store.fsck().damaged
    assert (damage.path, damage.expected) == (manifest.object_name(index), other)


def test_several_objects_are_damaged_at_once(store: VersionStore) -> None:
    """Each is named with what it costs; between them, a version that has a snapshot is made."""
    for name, path in files(store):
        if label(name) in ("updates/2", "updates/4", "folds/", "updates/7"):
            flip(path, 100)
    report = store.fsck()
    assert {label(damage.path): damage.versions for damage in report.damaged} == {
        "updates/2": (2, 3, 4), "updates/4": (4,), "folds/": (), "updates/7": (7, 8, 9, 10),
    }  # fmt: skip
    assert report.materialisable == (0, 1, 5, 6)
    assert report.lost == (2, 3, 4, 7, 8, 9, 10)


def test_what_no_version_names_is_stray_and_no_damage(store: VersionStore) -> None:
    """Leftovers of dead writers, whole or not, cost nothing."""
    left = [
        f"folds/{2:020}-{50:020}-{'0' * 32}.dcu",
        "other.txt",
        f"snapshots/{3:020}-{'0' * 16}/model.safetensors.index.json",
        f"updates/{10:020}-{11:020}-{'0' * 32}.dcu",
        "versions/name.json",
    ]
    for name in left:
        store.backend.write(name, [b"?"])
    assert store.fsck() == FsckReport((), tuple(left), ALL, ())


Change = Callable[[VersionStore, list[Weights]], str]
"""Publishes something whose every checksum is right, and which is not what it says; returns what is to be named."""


def _other_update(store: VersionStore, weights: list[Weights]) -> str:
    head = store.version_log.head()
    assert head is not None
    update = update_between(weights[2], next_weights(weights[2], 5), NEWEST, epoch=head.record.epoch)
    data = encode_update(update, values="delta", signing_key=store.signing_key)
    digest = content_digest(data)
    ref = ObjectRef(update_path(NEWEST, NEWEST + 1, digest), len(data), digest)
    store.backend.write(ref.path, [data])
    record = replace(
        head.record, version=NEWEST + 1, update=UpdateRef(ref, NEWEST, update.num_changed),
        previous=content_digest(head.to_bytes(store.signing_key)),
    )  # fmt: skip
    _publish(store, VersionFile(record, (head.record, *head.recent)))
    return ref.path


def _other_fold(store: VersionStore, weights: list[Weights]) -> str:
    update = update_between(weights[0], next_weights(weights[0], 5), 0, target_version=2)
    data = encode_update(update, values="delta", signing_key=store.signing_key)
    path = fold_path(0, 2, content_digest(data))
    store.backend.write(path, [data])
    return path


def _other_recent(store: VersionStore, weights: list[Weights]) -> str:
    head = store.version_log.head()
    assert head is not None
    recent = list(head.recent)
    recent[4] = replace(recent[4], optimizer_step=12345)
    file = VersionFile(head.record, tuple(recent))
    store.backend.replace(file.path, file.to_bytes(store.signing_key))
    return file.path


def _other_weights(store: VersionStore, weights: list[Weights]) -> str:
    ref = store.add_anchor(6, source_of(weights[6]))
    there = read_manifest(store.backend, ref.path, store.signing_key)
    path = there.path.replace(f"{6:020}-", f"{7:020}-")
    moved = replace(there, path=path, version=7, state_digest=store.record(7).state_digest)
    for file in there.files:
        store.backend.write(moved.object_name(file), [store.backend.read(there.object_name(file))])
    store.backend.create(path, moved.to_bytes(store.signing_key))
    return path


def _publish(store: VersionStore, file: VersionFile) -> None:
    store.backend.create(file.path, file.to_bytes(store.signing_key))


@pytest.mark.parametrize(
    ("change", "lost"),
    [(_other_update, (11,)), (_other_fold, ()), (_other_recent, ()), (_other_weights, ())],
)  # fmt: skip
def test_what_is_whole_and_not_what_it_says_is_named(
    store: VersionStore, whole: tuple[Path, bytes | None, list[Weights]], change: Change, lost: tuple[int, ...]
) -> None:
    """An update or fold of other weights, a repeated record that was changed, a snapshot whose files are another's."""
    path = change(store, whole[2])
    report = store.fsck()
    assert [(damage.path, damage.versions) for damage in report.damaged] == [(path, lost)]
    assert (report.lost, report.materialisable) == (lost, ALL)


def test_a_signed_store_takes_nothing_that_is_not_signed(tmp_path: Path) -> None:
    """Read with a key, every object of an unsigned store is damaged; read with none, a signed store is whole."""
    unsigned, _ = filled_store(new_backend("memory", tmp_path), 3)
    unsigned.version_log.key = KEY
    report = unsigned.fsck()
    assert {damage.path for damage in report.damaged} >= {"run.json", *map(version_path, range(4))}
    assert report.materialisable == ()
    signed, _ = filled_store(new_backend("memory", tmp_path), 3, key=KEY)
    assert VersionStore.open(signed.backend).fsck() == FsckReport((), (), (0, 1, 2, 3), ())


@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_a_store_without_its_first_file_is_checked(store: VersionStore, gone: bool) -> None:
    """Which run it is of is in every version file: that `run.json` cannot be read is the one thing that is wrong."""
    raw = store.backend.read(RUN_PATH)
    store.backend.delete(RUN_PATH)
    if not gone:
        store.backend.replace(RUN_PATH, raw[:-3] + b"?" + raw[-2:])
    store.backend.replace(version_path(NEWEST), b"?")
    report = check(find_log(store.backend, store.signing_key))
    assert [damage.path for damage in report.damaged] == [version_path(NEWEST), RUN_PATH]
    assert report.materialisable == ALL[:-1]
    with pytest.raises(ObjectExistsError, match=r"run\.json is lost" if gone else "there is a store"):
        VersionStore.create(store.backend)


def test_a_store_of_which_no_file_says_the_run_is_none(tmp_path: Path) -> None:
    """The error is that of `run.json`."""
    backend = new_backend("memory", tmp_path)
    with pytest.raises(MissingObjectError, match=RUN_PATH):
        find_log(backend, None)
    backend.create(RUN_PATH, b"?")
    backend.create(version_path(0), b"?")
    with pytest.raises(FormatError, match=RUN_PATH):
        find_log(backend, None)


def test_an_empty_store_is_whole(tmp_path: Path) -> None:
    """There is nothing to be damaged."""
    store = VersionStore.create(new_backend("local", tmp_path))
    assert store.fsck() == FsckReport((), (), (), ())


def test_a_collection_in_between_is_no_damage(tmp_path: Path) -> None:
    """What retention removes while everything is read is not missed: it is read again, without it."""
    backend = new_backend("memory", tmp_path)
    store, weights = filled_store(backend, 6)
    store.add_anchor(4, source_of(weights[4]))
    collected: list[int] = []

    def collect_once(num_bytes: int) -> None:
        collected.append(num_bytes)
        if len(collected) == 7:  # the version files have been read
            store.gc(1, min_age_s=0)

    report = store.fsck(progress=collect_once)
    assert report == FsckReport((), (), (4, 5, 6), ())
