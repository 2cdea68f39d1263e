"""Stores to version folders and back: bits are held against numpy and a naive reader of the folders."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

import made_updates as made
import store_setups as setups
from deltacast.delta.diff import dense_patch
from deltacast.delta.errors import BaseError, ChecksumError, FormatError, InputError, TableError, VerificationError
from deltacast.delta.module_source import StateDictSource
from deltacast.store.backends import open_backend
from deltacast.store.disk_delta import DeltaEncoding
from deltacast.store.disk_delta_exchange import export_versions, import_versions
from deltacast.store.version_store import VersionStore
from golden_checkpoint import Raw, write_raw
from naive_disk_delta import pulled, tensors_of
from store_setups import METAS, Weights

CODES = {"bfloat16": "BF16", "float32": "F32", "int64": "I64"}


def as_bytes(weights: Weights) -> dict[str, bytes]:
    return {name: words.tobytes() for name, words in weights.items()}


def new_store(folder: Path, first_version: int = 0) -> VersionStore:
    return setups.new_store(open_backend(folder / "store", create=True), first_version=first_version)


def digests(store: VersionStore) -> list[str]:
    return [record.state_digest for record in store.log()]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_naive_reader_gets_every_version(tmp_path: Path, kind: str, encoding: DeltaEncoding) -> None:
    """From any first version, and each index states the version's digest."""
    store, weights = setups.filled_store(setups.new_backend(kind, tmp_path), 5)
    exported = list(export_versions(store, tmp_path / "out", first=1, last=4, encoding=encoding, threads=2))
    assert [(one.version, one.kind) for one in exported] == [(1, "full"), (2, "delta"), (3, "delta"), (4, "delta")]
    for version in range(1, 5):
        assert pulled(tmp_path / "out", version) == as_bytes(weights[version])
        assert exported[version - 1].state_digest == setups.state_digest(weights[version])
    index = json.loads((tmp_path / "out" / "weight_v000003" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["deltacast_state_digest"] == setups.state_digest(weights[3])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"weight_v00000{v}" for v in range(1, 5)]


def test_every_form_of_a_patch_is_exported(tmp_path: Path) -> None:
    """Whole parameters, and a writer's claim that changes nothing."""
    store, weights = setups.filled_store(setups.new_backend("local", tmp_path), 0)
    new = setups.next_weights(weights[0], 1, num_changed=30)
    tensors = setups.tensors_of(new)
    update = setups.update_between(weights[0], new, 0)
    whole = tuple(
        dense_patch(patch.meta, tensors[patch.name], before=patch.fingerprint_before) for patch in update.patches
    )
    store.publish_update(replace(update, patches=whole))
    VersionStore.open(store.backend).claim()
    list(export_versions(store, tmp_path / "out", first=0))
    assert pulled(tmp_path / "out", 1) == pulled(tmp_path / "out", 2) == as_bytes(new)
    empty = tmp_path / "out" / "weight_v000002"
    assert [path.name for path in empty.iterdir()] == ["model.safetensors.index.json"]


def test_a_version_published_whole_is_a_full_folder(tmp_path: Path) -> None:
    """Another parameter table in the middle of a range; deltas go on from it."""
    store, weights = setups.filled_store(setups.new_backend("local", tmp_path), 1)
    other = {"only": weights[0]["w"]}
    store.publish_snapshot(StateDictSource({"only": setups.tensors_of(weights[0])["w"]}))
    exported = list(export_versions(store, tmp_path / "out", first=0))
    assert [one.kind for one in exported] == ["full", "delta", "full"]
    assert pulled(tmp_path / "out", 2) == as_bytes(other)


def test_nothing_is_exported_over_anything(tmp_path: Path) -> None:
    """The whole range is looked at first; versions that are not there are said."""
    store, _ = setups.filled_store(setups.new_backend("local", tmp_path), 3)
    taken = tmp_path / "out" / "weight_v000002"
    taken.mkdir(parents=True)
    with pytest.raises(InputError, match="version 2"):
        list(export_versions(store, tmp_path / "out", first=0))
    assert list((tmp_path / "out").iterdir()) == [taken]
    for first, last in ((2, 1), (0, 4), (4, None)):
        with pytest.raises(InputError, match="versions 0 to 3"):
            list(export_versions(store, tmp_path / "new", first=first, last=last))
    assert not (tmp_path / "new").exists()


def test_a_damaged_update_ends_the_export_after_whole_folders(tmp_path: Path) -> None:
    """Nothing half-made is left beside them."""
    store, weights = setups.filled_store(setups.new_backend("local", tmp_path), 3)
    update = store.record(2).update
    assert update is not None
    path = store.backend.path(update.object.path)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ChecksumError):
        list(export_versions(store, tmp_path / "out", first=0))
    assert sorted(found.name for found in (tmp_path / "out").iterdir()) == ["weight_v000000", "weight_v000001"]
    assert pulled(tmp_path / "out", 1) == as_bytes(weights[1])


def full(root: Path, version: int, weights: Weights, extra: Mapping[str, Raw] | None = None) -> Path:
    """A full version as a foreign trainer writes it."""
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    raw = {name: (CODES[METAS[name].dtype], METAS[name].shape, words.tobytes()) for name, words in weights.items()}
    write_raw(folder / "model.safetensors", {**raw, **(extra or {})})
    (folder / "config.json").write_text("{}")
    return folder


def delta(root: Path, version: int, old: Weights, new: Weights, **metadata: str) -> Path:
    """A delta as two ranks of slime write it: every second changed tensor in the second file."""
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    changed = [name for name in new if (old[name] != new[name]).any()]
    weight_map = {name: f"model-{number % 2:05d}-of-00002.safetensors" for number, name in enumerate(changed)}
    for file in set(weight_map.values()):
        names = [name for name in changed if weight_map[name] == file]
        xors = {name: bytes(np.frombuffer((old[name] ^ new[name]).tobytes(), np.uint8)) for name in names}
        packed = {name: zstandard.ZstdCompressor(level=1).compress(raw) for name, raw in xors.items()}
        checksums = {name: xxhash.xxh3_128(new[name].tobytes()).hexdigest() for name in names}
        write_raw(folder / file, {name: ("U8", [len(raw)], raw) for name, raw in packed.items()}, checksums)
    said = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": "xor",
        "compression_format": "zstd", "checksum_format": "xxh3-128",
    }  # fmt: skip
    index = {"metadata": said | metadata, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def steps(num: int) -> list[Weights]:
    weights = [setups.first_weights()]
    for seed in range(num):
        weights.append(setups.next_weights(weights[-1], seed))
    return weights


def test_a_foreign_stream_becomes_a_store(tmp_path: Path) -> None:
    """The engines' checkpoint first, then what is there, later what is new; every version has the twin's digest."""
    weights = steps(3)
    base, shared = full(tmp_path / "base", 0, weights[0]), tmp_path / "shared"
    for version, (old, new) in enumerate(pairwise(weights[:3]), start=1):
        delta(shared, version, old, new)
    store = new_store(tmp_path)
    imported = list(import_versions(store, shared, base=base, threads=2))
    assert [(one.version, one.kind) for one in imported] == [(0, "full"), (1, "delta"), (2, "delta")]
    assert list(import_versions(store, shared)) == []
    delta(shared, 3, weights[2], weights[3])
    assert [one.version for one in import_versions(store, shared)] == [3]
    assert digests(store) == [setups.state_digest(each) for each in reversed(weights)]
    assert [record.update is None for record in store.log()] == [False, False, False, True]
    store.materialize(3, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == as_bytes(weights[3])
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_a_full_version_is_stored_as_what_changed(tmp_path: Path) -> None:
    """A stream of nothing but full checkpoints makes a store of updates; the lowest begins it."""
    weights = steps(2)
    for number, each in enumerate(weights):
        full(tmp_path / "shared", number + 4, each)
    store = new_store(tmp_path, first_version=4)
    assert [one.kind for one in import_versions(store, tmp_path / "shared")] == ["full"] * 3
    assert [record.update is None for record in store.log()] == [False, False, True]
    assert digests(store) == [setups.state_digest(each) for each in reversed(weights)]


def test_another_parameter_table_is_published_whole(tmp_path: Path) -> None:
    """And the stream goes on from it."""
    weights = steps(3)
    shared, more = tmp_path / "shared", {"more": ("U8", [2], b"xy")}
    full(shared, 0, weights[0])
    delta(shared, 1, weights[0], weights[1])
    full(shared, 2, weights[2], more)
    delta(shared, 3, weights[2], weights[3])
    store = new_store(tmp_path)
    assert [one.kind for one in import_versions(store, shared)] == ["full", "delta", "full", "delta"]
    store.materialize(3, tmp_path / "out")
    assert tensors_of(tmp_path / "out") == as_bytes(weights[3]) | {"more": b"xy"}


def test_an_import_ends_at_the_last_version_or_the_first_gap(tmp_path: Path) -> None:
    """Nothing is taken out of order."""
    weights = steps(4)
    full(tmp_path / "shared", 0, weights[0])
    for version in (1, 2, 4):
        delta(tmp_path / "shared", version, weights[version - 1], weights[version])
    store = new_store(tmp_path)
    assert [one.version for one in import_versions(store, tmp_path / "shared", last=1)] == [0, 1]
    assert [one.version for one in import_versions(store, tmp_path / "shared")] == [2]


def test_what_was_exported_comes_back(tmp_path: Path) -> None:
    """Digest by digest."""
    store, _ = setups.filled_store(setups.new_backend("local", tmp_path), 9)
    list(export_versions(store, tmp_path / "shared", first=0))
    copy = new_store(tmp_path / "copy")
    list(import_versions(copy, tmp_path / "shared"))
    assert digests(copy) == digests(store)


def test_long_imports_get_anchors(tmp_path: Path) -> None:
    """As pushes do: whoever pulls need not begin at the first version."""
    weights = steps(1)
    full(tmp_path / "shared", 0, weights[0])
    for version in range(1, 5):
        weights.append({name: made.random_words(np.random.default_rng(version), METAS[name]) for name in METAS})
        full(tmp_path / "shared", version, weights[-1])
    store = new_store(tmp_path)
    list(import_versions(store, tmp_path / "shared"))
    snapshot = store.plan(None).snapshot
    assert snapshot is not None
    assert snapshot.version > 0
    assert any(name.name == "config.json" for name in snapshot.files)


@pytest.mark.parametrize("damage", ["bits", "base", "name", "digest", "versions", "gone"])
def test_a_folder_that_does_not_fit_is_never_published(tmp_path: Path, damage: str) -> None:
    """Versions before it are, and the import can go on once it is mended."""
    weights = steps(3)
    shared = tmp_path / "shared"
    full(shared, 0, weights[0])
    delta(shared, 1, weights[0], weights[1])
    wrong = delta(shared, 2, weights[0] if damage == "base" else weights[1], weights[2], **(
        {"deltacast_state_digest": "xxh3_128:" + "0" * 32} if damage == "digest" else
        {"base_version": "000000"} if damage == "versions" else {}
    ))  # fmt: skip
    shard = wrong / "model-00000-of-00002.safetensors"
    errors: dict[str, type[Exception]] = {
        "bits": FormatError, "base": ChecksumError, "name": TableError, "digest": VerificationError,
        "versions": BaseError, "gone": FileNotFoundError,
    }  # fmt: skip
    if damage == "bits":
        shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 0x10]))
    elif damage == "name":
        for file in (shard, wrong / "model.safetensors.index.json"):
            file.write_bytes(file.read_bytes().replace(b'"w"', b'"v"'))
    elif damage == "gone":
        shard.unlink()
    store = new_store(tmp_path)
    with pytest.raises(errors[damage]):
        list(import_versions(store, shared))
    assert digests(store) == [setups.state_digest(each) for each in (weights[1], weights[0])]
    for file in wrong.iterdir():
        file.unlink()
    wrong.rmdir()
    delta(shared, 2, weights[1], weights[2])
    assert [one.version for one in import_versions(store, shared)] == [2]


def test_an_import_needs_something_to_begin_with(tmp_path: Path) -> None:
    """A delta is none, and a base is for empty stores."""
    weights = steps(1)
    store = new_store(tmp_path)
    (tmp_path / "shared").mkdir()
    with pytest.raises(InputError, match="no full version"):
        list(import_versions(store, tmp_path / "shared"))
    delta(tmp_path / "shared", 1, weights[0], weights[1])
    with pytest.raises(InputError, match="no full version"):
        list(import_versions(store, tmp_path / "shared"))
    base = full(tmp_path / "base", 0, weights[0]) / "model.safetensors"
    list(import_versions(store, tmp_path / "shared", base=base))
    with pytest.raises(InputError, match="has versions already"):
        list(import_versions(store, tmp_path / "shared", base=base))


def test_the_header_of_a_shard_is_not_believed(tmp_path: Path) -> None:
    """A size that the file does not have is damage, not an allocation."""
    weights = steps(1)
    full(tmp_path / "shared", 0, weights[0])
    shard = delta(tmp_path / "shared", 1, weights[0], weights[1]) / "model-00000-of-00002.safetensors"
    shard.write_bytes(struct.pack("<Q", 1 << 60) + shard.read_bytes()[8:])
    with pytest.raises(FormatError, match="header length"):
        list(import_versions(new_store(tmp_path), tmp_path / "shared"))
