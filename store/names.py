"""What is where in a store: the names of its objects, made and recognised. docs/store.md, section 1, is normative.

Versions have 20 digits in names, so that a listing is in order of versions. What an object's name cannot be made from
is as important: no parameter's, run's or reader's name ever becomes a path.
"""

from __future__ import annotations

import re
from typing import Final

import xxhash

__all__ = [
    "FOLDS",
    "HEAD_PATH",
    "MANIFEST_NAME",
    "READERS",
    "RUN_PATH",
    "SNAPSHOTS",
    "UPDATES",
    "VERSIONS",
    "fold_path",
    "is_lease_path",
    "lease_path",
    "manifest_path",
    "parse_fold_path",
    "parse_manifest_path",
    "parse_version_path",
    "snapshot_folder",
    "update_path",
    "version_path",
]

RUN_PATH: Final = "run.json"
HEAD_PATH: Final = "HEAD"
VERSIONS: Final = "versions/"
UPDATES: Final = "updates/"
FOLDS: Final = "folds/"
SNAPSHOTS: Final = "snapshots/"
READERS: Final = "readers/"
MANIFEST_NAME: Final = "manifest.json"
_MAX_VERSION: Final = (1 << 63) - 1

_DIGEST_KIND: Final = "xxh3_128:"
_VERSION_PATH: Final = re.compile(r"versions/([0-9]{20})\.json")
_FOLD_PATH: Final = re.compile(r"folds/([0-9]{20})-([0-9]{20})-([0-9a-f]{32})\.dcu")
_MANIFEST_PATH: Final = re.compile(r"snapshots/([0-9]{20})-[0-9a-f]{8,64}/manifest\.json")
_SNAPSHOT_FOLDER: Final = re.compile(r"snapshots/[^/]+/")
_LEASE_PATH: Final = re.compile(r"readers/[0-9a-f]{32}\.json")


def version_path(version: int) -> str:
    """Return the name of a version's file."""
    return f"{VERSIONS}{version:020}.json"


def parse_version_path(path: str) -> int | None:
    """Return the version whose file has this name; None if it is no version file's name."""
    return _version(_VERSION_PATH, path)


def update_path(base: int, target: int, digest: str) -> str:
    """Return the name of an update's container, given the content digest of its bytes."""
    return f"{UPDATES}{base:020}-{target:020}-{digest.removeprefix(_DIGEST_KIND)}.dcu"


def fold_path(base: int, target: int, digest: str) -> str:
    """Return the name of a fold's container, given the content digest of its bytes."""
    return f"{FOLDS}{base:020}-{target:020}-{digest.removeprefix(_DIGEST_KIND)}.dcu"


def parse_fold_path(path: str) -> tuple[int, int, str] | None:
    """Return base, target and content digest of the fold of this name; None if it is no fold's name."""
    found = _FOLD_PATH.fullmatch(path)
    if found is None or not int(found[1]) < int(found[2]) <= _MAX_VERSION:
        return None
    return int(found[1]), int(found[2]), f"{_DIGEST_KIND}{found[3]}"


def manifest_path(version: int, nonce: str) -> str:
    """Return the name of a snapshot's manifest, given its writer's nonce in hex; the snapshot's files lie beside it."""
    return f"{SNAPSHOTS}{version:020}-{nonce}/{MANIFEST_NAME}"


def parse_manifest_path(path: str) -> int | None:
    """Return the version of the snapshot whose manifest has this name; None if it is no manifest's name."""
    return _version(_MANIFEST_PATH, path)


def snapshot_folder(path: str) -> str | None:
    """Return the folder among snapshots, with its slash, in which an object of this name is; None for others."""
    found = _SNAPSHOT_FOLDER.match(path)
    return found[0] if found else None


def lease_path(reader: str) -> str:
    """Return the name of a reader's lease: made from a digest of the reader's name."""
    return f"{READERS}{xxhash.xxh3_128_hexdigest(reader.encode())}.json"


def is_lease_path(path: str) -> bool:
    """Whether this is the name of some reader's lease."""
    return _LEASE_PATH.fullmatch(path) is not None


def _version(pattern: re.Pattern[str], path: str) -> int | None:
    found = pattern.fullmatch(path)
    return int(found[1]) if found and int(found[1]) <= _MAX_VERSION else None
