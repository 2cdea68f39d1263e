"""The manifest of a snapshot: which files make it up, what their bytes must be, and which weights they are.

The manifest is written last and read first: without it nobody sees a snapshot, and nothing of a snapshot is used that
its manifest does not list. File names in it become paths on other machines, so they are held to a rule here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import xxhash

from deltacast.delta.checkpoint_files import INDEX_NAME
from deltacast.delta.codec.envelope import Fields, as_format_error
from deltacast.delta.errors import ChecksumError, FormatError, InputError
from deltacast.delta.patching import is_weights_name
from deltacast.delta.table import check_name
from deltacast.store.fetch import ObjectRef, content_digest, fetch
from deltacast.store.names import MANIFEST_NAME, SNAPSHOTS, parse_manifest_path
from deltacast.store.objects import Buffer, ObjectBackend, is_object_name
from deltacast.store.sealed import check_digest, check_number, check_run_id, seal, unseal

__all__ = [
    "MAX_EXTRA_BYTES",
    "MAX_MANIFEST_BYTES",
    "FileHash",
    "Manifest",
    "Role",
    "SnapshotFile",
    "is_extra_name",
    "list_snapshots",
    "read_manifest",
    "shard_name",
]

MAX_MANIFEST_BYTES: Final = 8 << 20
"""A file takes up to 400 bytes with its SHA-256, a tied name some 200: 10,000 shards and 20,000 ties. Reading one of
this size takes 20 times its memory, from whoever can write to the store."""
MAX_EXTRA_BYTES: Final = 64 << 20
"""Of one file that is no weights: a tokenizer takes 30 MB."""

Role: TypeAlias = Literal["weights", "index", "extra"]

_FORMAT: Final = 1
_MAX_INDEX_BYTES: Final = 256 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def shard_name(number: int, num_shards: int) -> str:
    """Return the name of a shard, counted from 1, as transformers and vLLM expect them beside an index."""
    return f"weights-{number:05}-of-{num_shards:05}.safetensors"


def is_extra_name(name: str) -> bool:
    """Say whether a file of this name may go along with the weights.

    One safe part of a path, not a name of ours, and no weights in any format: what is not in the index would be stale,
    and some loaders unpickle what they find.
    """
    if not is_object_name(name) or "/" in name or name in (MANIFEST_NAME, INDEX_NAME):
        return False
    return not is_weights_name(name)


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot.

    Attributes:
        name: its name beside the manifest and in a downloaded folder: one part of a path, never hidden.
        num_bytes: its size.
        digest: content digest, `xxh3_128:<hex>` of its bytes.
        role: `weights` (a safetensors shard), `index` (which tensor is in which shard), or `extra` (config, tokenizer).
        sha256: hex digits; there if the manifest is signed, because xxh3 can be forged.

    Raises:
        InputError: a field that cannot be, or a name that this role must not have.
    """

    name: str
    num_bytes: int
    digest: str
    role: Role
    sha256: str | None = None

    def __post_init__(self) -> None:
        ObjectRef(self.name, self.num_bytes, self.digest)  # checks size and digest
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise InputError("bad sha256", expected=_SHA256.pattern, found=ascii(self.sha256)[:80])
        if self.role == "extra" and not is_extra_name(self.name):
            raise InputError("a file that must not go along with weights", found=ascii(self.name)[:200])
        if self.role == "index" and self.name != INDEX_NAME:
            raise InputError("bad name of an index", expected=INDEX_NAME, found=ascii(self.name)[:200])
        highest = {"index": _MAX_INDEX_BYTES, "extra": MAX_EXTRA_BYTES}.get(self.role)
        if highest is not None and self.num_bytes > highest:
            raise InputError(f"{self.name} is too large", expected=f"at most {highest} bytes", found=self.num_bytes)

    @classmethod
    def from_fields(cls, fields: Fields) -> Self:
        """Read a file's entry.

        Raises:
            FormatError: a field is missing or of another type.
            InputError: as the class.
        """
        roles: tuple[Role, ...] = get_args(Role)
        sha256 = fields.text("sha256") if fields.has("sha256") else None
        role = roles[fields.one_of("role", roles)]
        return cls(fields.text("name"), fields.number("num_bytes"), fields.text("digest"), role, sha256)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; without `sha256` where it is None."""
        value = {"name": self.name, "num_bytes": self.num_bytes, "digest": self.digest, "role": self.role}
        return value if self.sha256 is None else value | {"sha256": self.sha256}


class FileHash:
    """What a manifest says of a file, from its bytes as they pass.

    Args:
        secure: also take a SHA-256.
    """

    def __init__(self, *, secure: bool) -> None:
        self._num_bytes = 0
        self._xxh3 = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if secure else None

    def update(self, piece: Buffer) -> None:
        """Take the next bytes."""
        self._num_bytes += len(piece)
        self._xxh3.update(piece)
        if self._sha256 is not None:
            self._sha256.update(piece)

    def file(self, name: str, role: Role) -> SnapshotFile:
        """Return the entry of a file of these bytes.

        Raises:
            InputError: as `SnapshotFile`.
        """
        sha256 = None if self._sha256 is None else self._sha256.hexdigest()
        return SnapshotFile(name, self._num_bytes, f"xxh3_128:{self._xxh3.hexdigest()}", role, sha256)

    def require(self, file: SnapshotFile, path: str) -> None:
        """Raise unless these are the bytes of a file.

        Raises:
            ChecksumError: naming `path`.
        """
        found = self.file(file.name, file.role)
        for expected, seen in ((file.digest, found.digest), (file.sha256, found.sha256)):
            if seen != expected:
                raise ChecksumError(f"{path} does not have its content digest", expected=expected, found=seen)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a folder of files a snapshot of one version.

    Attributes:
        path: the manifest's own name in the store.
        run_id: the lineage of versions.
        version: which version the weights are.
        state_digest: theirs.
        table_digest: of their parameter table.
        num_words: words of their parameter table.
        files: every file; shards first, in their order.
        aliases: names of tied tensors that are in no file -> the name that is.

    Raises:
        InputError: a field that cannot be; shards that are not 1 to N of N; not exactly one index; a name twice.
    """

    path: str
    run_id: str
    version: int
    state_digest: str
    table_digest: str
    num_words: int
    files: tuple[SnapshotFile, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        check_number(self.version, "version")
        if parse_manifest_path(self.path) != self.version:
            raise InputError("another version's path", version=self.version, found=ascii(self.path)[:200])
        for digest in (self.state_digest, self.table_digest):
            check_digest(digest)
        for name in (*self.aliases, *self.aliases.values()):
            check_name(name)
        shards = [file.name for file in self.files if file.role == "weights"]
        if not shards or shards != [shard_name(number + 1, len(shards)) for number in range(len(shards))]:
            raise InputError("shards are missing or out of order", found=ascii(shards)[:200])
        if [file.role for file in self.files].count("index") != 1:
            raise InputError("a snapshot has exactly one index")
        if len({file.name for file in self.files}) != len(self.files):
            raise InputError("a file is listed twice")

    @property
    def weights_bytes(self) -> int:
        """Bytes of all files: what there is to fetch."""
        return sum(file.num_bytes for file in self.files)

    def object_name(self, file: SnapshotFile) -> str:
        """Return the name of a file in the store."""
        return self.path.removesuffix(MANIFEST_NAME) + file.name

    def to_bytes(self, key: bytes | None) -> bytes:
        """Return the sealed manifest.

        Raises:
            InputError: it would take more than 8 MiB.
        """
        files = [file.to_json() for file in self.files]
        raw = seal(
            {
                "path": self.path, "format": _FORMAT, "run_id": self.run_id, "version": self.version,
                "state_digest": self.state_digest, "table_digest": self.table_digest, "num_words": self.num_words,
                "files": files, "aliases": dict(self.aliases),
            },
            key,
        )  # fmt: skip
        if len(raw) > MAX_MANIFEST_BYTES:
            raise InputError(
                "the manifest is too large", expected=f"at most {MAX_MANIFEST_BYTES} bytes", found=len(raw)
            )
        return raw

    @classmethod
    def from_bytes(cls, raw: bytes, key: bytes | None, path: str) -> Self:
        """Read a manifest that was found under `path`.

        Raises:
            ChecksumError: as `unseal`; or, with a key, a file without a SHA-256, which a signature does not cover.
            FormatError: a field that is missing or cannot be.
        """
        fields = unseal(raw, key, path)
        if fields.number("format") != _FORMAT:
            raise fields.wrong("format", _FORMAT)
        manifest = as_format_error(
            lambda: cls(
                path, fields.text("run_id"), fields.number("version"), fields.text("state_digest"),
                fields.text("table_digest"), fields.number("num_words"),
                tuple(SnapshotFile.from_fields(each) for each in fields.objects("files")), fields.mapping("aliases"),
            ),
            path,
        )  # fmt: skip
        unsealed = [file.name for file in manifest.files if file.sha256 is None]
        if key is not None and unsealed:
            raise ChecksumError(f"{path} is signed, but not what {unsealed[0]} holds", expected="a sha256")
        return manifest


def read_manifest(
    backend: ObjectBackend, path: str, signing_key: bytes | None = None, *, digest: str | None = None
) -> Manifest:
    """Read one snapshot's manifest.

    Args:
        backend: the store.
        path: the manifest's name.
        signing_key: with one, the manifest must be signed with it.
        digest: content digest that its bytes must have, where a record says it.

    Raises:
        MissingObjectError: there is none.
        ChecksumError: damaged, unsigned, wrongly signed, or another one than `digest` says.
        FormatError: too large, or not a manifest. The message names the path.
    """
    raw = fetch(backend, path, max_bytes=MAX_MANIFEST_BYTES)
    if digest is not None and content_digest(raw) != digest:
        raise ChecksumError(f"{path} does not have its content digest", expected=digest, found=content_digest(raw))
    if parse_manifest_path(path) is None:
        raise FormatError("not the path of a manifest", found=ascii(path)[:200])
    return Manifest.from_bytes(raw, signing_key, path)


def list_snapshots(backend: ObjectBackend) -> list[tuple[int, str]]:
    """Return version and manifest path of every snapshot, by version; one listing.

    A folder without a manifest is no snapshot: it is being written, or its writer died.
    """
    listed = ((parse_manifest_path(info.name), info.name) for info in backend.list(SNAPSHOTS))
    return [(version, path) for version, path in listed if version is not None]
