"""Records of versions: what they say comes back, and what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltacast.delta.errors import ChecksumError, DeltacastError, FormatError, InputError
from deltacast.store.fetch import ObjectRef, content_digest
from deltacast.store.names import fold_path, update_path
from deltacast.store.records import (
    MAX_VERSION_FILE_BYTES,
    RunRecord,
    SnapshotRef,
    UpdateRef,
    VersionFile,
    VersionRecord,
)
from deltacast.store.sealed import seal

KEY = b"key"
HEX = "0123456789abcdef" * 2
DIGEST = f"xxh3_128:{HEX}"
Fields = dict[str, Any]


def first(version: int = 0) -> VersionRecord:
    path = f"snapshots/{version:020}-{'ab' * 8}/manifest.json"
    return VersionRecord(
        run_id="run", epoch=1, writer="ab" * 8, version=version, state_digest=DIGEST, table_digest=DIGEST, num_words=9,
        published="2026-11-30T08:00:00Z", optimizer_step=None, update=None,
        snapshot=SnapshotRef(path, 10, DIGEST, 1000), previous=None,
    )  # fmt: skip


def after(record: VersionRecord, *, epoch: int = 1) -> VersionRecord:
    version = record.version + 1
    ref = ObjectRef(update_path(version - 1, version, DIGEST), 100, DIGEST)
    return replace(record, version=version, epoch=epoch, update=UpdateRef(ref, version - 1, 5), snapshot=None,
                   optimizer_step=7, previous=DIGEST)  # fmt: skip


def chain(num: int) -> list[VersionRecord]:
    """Records of versions 0 to num - 1."""
    records = [first()]
    while len(records) < num:
        records.append(after(records[-1]))
    return records


def file_of(num: int) -> VersionFile:
    records = chain(num)[::-1]
    return VersionFile(records[0], tuple(records[1:65]))


@pytest.mark.parametrize("num", [1, 2, 65, 80])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_version_file_comes_back(num: int, key: bytes | None) -> None:
    """A version file holds its record and those before it, and knows the digest of its own bytes."""
    file = file_of(num)
    raw = file.to_bytes(key)
    read = VersionFile.from_bytes(raw, key, num - 1)
    assert read == file
    assert (file.digest, read.digest) == (None, content_digest(raw))
    assert len(raw) < MAX_VERSION_FILE_BYTES


def test_the_largest_version_file_is_within_its_bound() -> None:
    """With the longest run id of awkward characters and the largest numbers, 65 records still fit the bound."""
    big = 2**63 - 70
    run_id = "\x01" * 256
    records = [replace(first(big), run_id=run_id, num_words=2**62, optimizer_step=2**62)]
    for _ in range(64):
        records.append(replace(after(records[-1]), num_words=2**62))
    raw = VersionFile(records[-1], tuple(records[-2::-1])).to_bytes(KEY)
    assert VersionFile.from_bytes(raw, KEY, big + 64).record == records[-1]
    assert len(raw) < MAX_VERSION_FILE_BYTES


def test_a_run_record_comes_back() -> None:
    """`run.json` says the run's id and where its versions begin."""
    run = RunRecord("modèle", "2026-11-30T08:00:00Z", 17)
    assert RunRecord.from_bytes(run.to_bytes(KEY), KEY) == run
    with pytest.raises(ChecksumError):
        RunRecord.from_bytes(run.to_bytes(None), KEY)
    for bad in ({"run_id": ""}, {"run_id": "x" * 257}, {"created": "now"}, {"first_version": -1}):
        with pytest.raises(InputError):
            replace(run, **bad)


@pytest.mark.parametrize(
    "changes",
    [{"run_id": ""}, {"run_id": "a\0b"}, {"run_id": "é" * 129}, {"epoch": -1}, {"epoch": True}, {"version": 2**63},
     {"writer": "AB" * 8}, {"writer": "ab"}, {"state_digest": HEX}, {"table_digest": DIGEST + "0"},
     {"num_words": -1}, {"published": "2026-11-30 08:00:00"}, {"published": "\uff12026-11-30T08:00:00Z"},
     {"optimizer_step": -1}, {"optimizer_step": 1.5}, {"previous": "x"},
     {"update": None}, {"previous": None}, {"version": 3}],
)  # fmt: skip
def test_records_that_cannot_be_are_refused(changes: Fields) -> None:
    """Each field is checked when a record is made, whoever makes it."""
    record = after(after(first()))
    with pytest.raises(InputError):
        replace(record, **changes)


@pytest.mark.parametrize(
    "path",
    ["updates/../../etc/passwd", update_path(0, 1, DIGEST), update_path(1, 2, "xxh3_128:" + "0" * 32), "HEAD",
     fold_path(1, 2, DIGEST)],
)  # fmt: skip
def test_an_update_can_only_be_where_its_versions_and_digest_put_it(path: str) -> None:
    """A path from a version file is never followed anywhere else."""
    record = after(after(first()))
    assert record.update is not None
    with pytest.raises(InputError, match="does not lead to its version"):
        replace(record, update=replace(record.update, object=replace(record.update.object, path=path)))


@pytest.mark.parametrize("path", ["snapshots/../run.json", "snapshots/00000000000000000000-ab/x/manifest.json", "/a"])
def test_a_snapshot_can_only_be_among_snapshots(path: str) -> None:
    """Likewise for manifests, which are of the record's version."""
    ref = first().snapshot
    assert ref is not None
    with pytest.raises(InputError):
        replace(ref, path=path)
    with pytest.raises(InputError, match="another version's snapshot"):
        replace(first(), version=1)


def test_recent_records_follow_one_another() -> None:
    """A file cannot skip a version, reorder, fall back to a lower epoch, mix runs, or hold more than 64."""
    records = chain(70)[::-1]
    other_run = [replace(record, run_id="other") for record in records]
    low = after(records[1], epoch=0)
    for record, recent in (
        (records[0], ()), (records[0], records[2:]), (records[0], records[2:0:-1]), (records[0], records[1:67]),
        (records[-1], records[:1]), (records[0], other_run[1:5]), (low, records[1:5]),
        (records[-3], [records[-2], records[-1], records[-1]]),
    ):  # fmt: skip
        with pytest.raises(InputError):
            VersionFile(record, tuple(recent))


def changed(change: Callable[[Fields], object]) -> bytes:
    """A well-sealed version file of version 2 with changed fields."""
    fields = json.loads(file_of(3).to_bytes(None))
    del fields["checksum"], fields["signature"]
    change(fields)
    return seal(fields, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(format=2),
        lambda f: f.pop("format"),
        lambda f: f.pop("record"),
        lambda f: f.update(record=[]),
        lambda f: f.update(recent={}),
        lambda f: f.update(recent=[1]),
        lambda f: f["recent"].reverse(),
        lambda f: f["recent"].pop(0),
        lambda f: f.update(record=f["recent"][0], recent=f["recent"][1:]),
        lambda f: f["record"].pop("run_id"),
        lambda f: f["record"].update(version="2"),
        lambda f: f["record"].update(epoch=True),
        lambda f: f["record"].update(num_words=2**63),
        lambda f: f["record"].update(num_words=1.0),
        lambda f: f["record"].update(previous=1),
        lambda f: f["record"].update(update=1),
        lambda f: f["record"]["update"].pop("object"),
        lambda f: f["record"]["update"]["object"].update(num_bytes=-1),
        lambda f: f["record"]["update"]["object"].update(path="../x"),
        lambda f: f["record"].pop("update"),
        lambda f: f["recent"][-1]["snapshot"].update(path="snapshots/x"),
    ],
)
def test_a_sealed_file_of_wrong_fields_is_refused(change: Callable[[Fields], object]) -> None:
    """Right checksums do not make wrong fields right; the error names the file."""
    with pytest.raises(FormatError):
        VersionFile.from_bytes(changed(change), None, 2)


def test_unknown_fields_are_passed_over() -> None:
    """A later writer may say more; what it says is kept out, and the digest is that of its bytes."""
    raw = changed(lambda f: (f.update(more=[1]), f["record"].update(mood="good")))
    read = VersionFile.from_bytes(raw, None, 2)
    assert read == file_of(3)
    assert read.digest == content_digest(raw)


@pytest.mark.parametrize("key", [None, KEY])
def test_every_flipped_byte_of_a_version_file_is_noticed(key: bytes | None) -> None:
    """One bit anywhere: a named error, with a key or without."""
    raw = file_of(3).to_bytes(KEY)
    for at in range(len(raw)):
        with pytest.raises(DeltacastError):
            VersionFile.from_bytes(raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :], key, 2)
