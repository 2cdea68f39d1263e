"""Names of objects: what is made is recognised, and nothing else is. Right values: written by hand."""

from __future__ import annotations

import pytest
import xxhash

from deltacast.store.names import (
    fold_path,
    is_lease_path,
    lease_path,
    manifest_path,
    parse_fold_path,
    parse_manifest_path,
    parse_version_path,
    snapshot_folder,
    update_path,
    version_path,
)

HEX = "0123456789abcdef" * 2
DIGEST = f"xxh3_128:{HEX}"


def test_paths_sort_by_version_and_come_back() -> None:
    """Names are padded, so that a listing is in order of versions; other names are not taken for versions or folds."""
    assert version_path(7) == "versions/00000000000000000007.json"
    assert parse_version_path(version_path(2**63 - 1)) == 2**63 - 1
    assert update_path(3, 4, DIGEST) == f"updates/00000000000000000003-00000000000000000004-{HEX}.dcu"
    assert parse_fold_path(fold_path(3, 11, DIGEST)) == (3, 11, DIGEST)
    for name in ("versions/7.json", "versions/00000000000000000007.json.tmp", "HEAD", "versions/" + "9" * 20 + ".json",
                 "versions/0000000000000000000\u0667.json", "versions/0000000000000000007 .json"):  # fmt: skip
        assert parse_version_path(name) is None, name
    for name in (update_path(3, 4, DIGEST), fold_path(4, 4, DIGEST), fold_path(5, 4, DIGEST), "folds/x",
                 fold_path(1, 10**19, DIGEST)):  # fmt: skip
        assert parse_fold_path(name) is None, name


def test_a_snapshot_is_known_by_its_manifest() -> None:
    """A manifest's name says its version; every file beside it is in the same folder."""
    path = manifest_path(7, "ab" * 8)
    assert path == "snapshots/00000000000000000007-abababababababab/manifest.json"
    assert parse_manifest_path(path) == 7
    folder = "snapshots/00000000000000000007-abababababababab/"
    assert [snapshot_folder(folder + name) for name in ("manifest.json", "config.json")] == [folder, folder]
    assert [snapshot_folder(name) for name in ("run.json", "snapshots/x", "folds/a/b")] == [None] * 3


@pytest.mark.parametrize(
    "path",
    ["snapshots/7-abababababababab/manifest.json", "snapshots/00000000000000000007-ab/manifest.json",
     "snapshots/00000000000000000007-ABABABABABABABAB/manifest.json", "snapshots/../manifest.json",
     "snapshots/99999999999999999999-abababababababab/manifest.json",
     "snapshots/00000000000000000007-abababababababab/config.json",
     "snapshots/00000000000000000007-abababababababab/x/manifest.json"],
)  # fmt: skip
def test_other_names_are_no_manifest(path: str) -> None:
    """Nor is a version above 2^63 - 1."""
    assert parse_manifest_path(path) is None


def test_no_name_of_a_reader_becomes_a_path() -> None:
    """A lease is named by a digest, whatever its reader is called."""
    for reader in ("worker 3", "../../etc/passwd", "gew\u00f6hnlich"):
        path = lease_path(reader)
        assert path == f"readers/{xxhash.xxh3_128(reader.encode()).hexdigest()}.json"
        assert is_lease_path(path)
    assert not is_lease_path("readers/worker.json")
