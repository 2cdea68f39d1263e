"""What a store says about its versions: records, and the files that hold them.

`run.json` says which run a store belongs to. `versions/<v>.json` is what makes version v: it says everything about v,
and repeats the records of the 64 versions before it, so that who walks back needs one read in 64. docs/store.md is
normative. No path is taken on trust: each is what the versions and the digest beside it make it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

from deltacast.delta.codec.envelope import Fields, as_format_error
from deltacast.delta.errors import InputError
from deltacast.store.fetch import ObjectRef, content_digest
from deltacast.store.names import RUN_PATH, parse_manifest_path, update_path, version_path
from deltacast.store.sealed import check_digest, check_number, check_run_id, seal, unseal

__all__ = [
    "MAX_RUN_FILE_BYTES",
    "MAX_VERSION_FILE_BYTES",
    "NUM_RECENT",
    "RunRecord",
    "SnapshotRef",
    "UpdateRef",
    "VersionFile",
    "VersionRecord",
]

NUM_RECENT: Final = 64
"""How many earlier records a version file repeats."""
MAX_VERSION_FILE_BYTES: Final = 1 << 20
MAX_RUN_FILE_BYTES: Final = 1 << 12

_FORMAT: Final = 1
_NONCE: Final = re.compile(r"[0-9a-f]{16}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def _check(value: object, pattern: re.Pattern[str], what: str) -> None:
    if type(value) is not str or not pattern.fullmatch(value):
        raise InputError(f"bad {what}", expected=pattern.pattern, found=ascii(value)[:80])


@dataclass(frozen=True, slots=True)
class UpdateRef:
    """The container that leads from the version before to a version.

    Attributes:
        object: where it is.
        base_version: the version before.
        num_changed: words that it sends.
    """

    object: ObjectRef
    base_version: int
    num_changed: int

    def __post_init__(self) -> None:
        check_number(self.base_version, "base version")
        check_number(self.num_changed, "number of changes")


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot: the manifest that is one, and how much there is to fetch.

    Attributes:
        path: of the manifest.
        num_bytes: of the manifest.
        digest: of the manifest's bytes.
        weights_bytes: of all files that the manifest lists.
    """

    path: str
    num_bytes: int
    digest: str
    weights_bytes: int

    def __post_init__(self) -> None:
        if type(self.path) is not str or parse_manifest_path(self.path) is None:
            raise InputError("not the path of a manifest", found=ascii(self.path)[:200])
        check_digest(self.digest)
        check_number(self.num_bytes, "size")
        check_number(self.weights_bytes, "size")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """All that is said about one version.

    Attributes:
        run_id: the lineage of versions.
        epoch: which writer of the run; never falls from one version to the next.
        writer: nonce of the writer that published it, 16 hex digits.
        version: its number, one more than that of the version before.
        state_digest: what weights of this version have.
        table_digest: of its parameter table.
        num_words: words of its parameter table, what changes are a share of.
        published: when, in UTC (`2026-11-30T08:00:00Z`). For people: no order is taken from it.
        optimizer_step: the trainer's own counter; metadata.
        update: what leads here from the version before; None where only a snapshot does.
        snapshot: what was published whole; None where only an update leads here.
        previous: content digest of the version file before; None for the first version of a run.

    Raises:
        InputError: a field that cannot be, or a path that is not its object's.
    """

    run_id: str
    epoch: int
    writer: str
    version: int
    state_digest: str
    table_digest: str
    num_words: int
    published: str
    optimizer_step: int | None
    update: UpdateRef | None
    snapshot: SnapshotRef | None
    previous: str | None

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        for number in (self.epoch, self.version, self.num_words, self.optimizer_step or 0):
            check_number(number, "version, epoch, step or number of words")
        for digest in (self.state_digest, self.table_digest, self.previous):
            if digest is not None:
                check_digest(digest)
        _check(self.writer, _NONCE, "writer")
        _check(self.published, _TIME, "time")
        if self.update is None and self.snapshot is None:
            raise InputError("a version with neither update nor snapshot", version=self.version)
        if self.update is not None:
            self._check_update(self.update)
        if self.snapshot is not None and parse_manifest_path(self.snapshot.path) != self.version:
            raise InputError("another version's snapshot", version=self.version, found=self.snapshot.path)

    def _check_update(self, update: UpdateRef) -> None:
        expected = update_path(self.version - 1, self.version, update.object.digest)
        if update.base_version != self.version - 1 or update.object.path != expected or self.previous is None:
            raise InputError("an update that does not lead to its version", version=self.version, expected=expected,
                             found=ascii(update.object.path)[:120])  # fmt: skip

    @classmethod
    def from_fields(cls, fields: Fields, what: str) -> Self:
        """Read a record from JSON that came from outside; `what` names it in errors.

        Raises:
            FormatError: a field is missing or cannot be.
        """
        return as_format_error(
            lambda: cls(
                fields.text("run_id"), fields.number("epoch"), fields.text("writer"), fields.number("version"),
                fields.text("state_digest"), fields.text("table_digest"), fields.number("num_words"),
                fields.text("published"), fields.optional_number("optimizer_step"), _read_update(fields),
                _read_snapshot(fields), fields.text("previous") if fields.has("previous") else None,
            ),
            what,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; what is None is left out."""
        return _plain(self)


def _plain(record: VersionRecord | UpdateRef | SnapshotRef | ObjectRef) -> dict[str, Any]:
    """Do what `dataclasses.asdict` does, which takes most of the time of writing a version file."""
    fields = ((name, getattr(record, name)) for name in record.__slots__)
    return {
        name: _plain(value) if isinstance(value, (UpdateRef, SnapshotRef, ObjectRef)) else value
        for name, value in fields
        if value is not None
    }


def _read_update(fields: Fields) -> UpdateRef | None:
    if not fields.has("update"):
        return None
    update = _nested(fields, "update")
    ref = _nested(update, "object")
    return UpdateRef(
        ObjectRef(ref.text("path"), ref.number("num_bytes"), ref.text("digest")),
        update.number("base_version"),
        update.number("num_changed"),
    )


def _read_snapshot(fields: Fields) -> SnapshotRef | None:
    if not fields.has("snapshot"):
        return None
    ref = _nested(fields, "snapshot")
    return SnapshotRef(ref.text("path"), ref.number("num_bytes"), ref.text("digest"), ref.number("weights_bytes"))


def _nested(fields: Fields, key: str) -> Fields:
    return Fields(fields.mapping(key), f"a record's {key}")


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A version file: its version's record, and those of the versions right before it.

    Attributes:
        record: the version's.
        recent: newest first, at most 64.
        digest: content digest of the bytes that this was read from; None if it was read from none.

    Raises:
        InputError: records that do not follow one another.
    """

    record: VersionRecord
    recent: tuple[VersionRecord, ...]
    digest: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.recent) > NUM_RECENT or (self.record.previous is not None) != bool(self.recent):
            raise InputError("wrong number of recent records", version=self.record.version, found=len(self.recent))
        for later, earlier in pairwise((self.record, *self.recent)):
            if (
                earlier.run_id != later.run_id
                or earlier.version != later.version - 1
                or earlier.epoch > later.epoch
                or later.previous is None
            ):
                raise InputError("a record that does not follow the one before it", version=later.version)

    @property
    def path(self) -> str:
        """The file's name in the store."""
        return version_path(self.record.version)

    def to_bytes(self, key: bytes | None) -> bytes:
        """Return the sealed file."""
        recent = [record.to_json() for record in self.recent]
        fields = {"path": self.path, "format": _FORMAT, "record": self.record.to_json(), "recent": recent}
        return seal(fields, key)

    @classmethod
    def from_bytes(cls, raw: bytes, key: bytes | None, version: int) -> Self:
        """Read a version's file.

        Raises:
            ChecksumError, FormatError: as `unseal`, and for every field that cannot be.
        """
        path = version_path(version)
        fields = unseal(raw, key, path)
        _check_format(fields)
        record = VersionRecord.from_fields(Fields(fields.mapping("record"), path), path)
        recent = tuple(VersionRecord.from_fields(each, path) for each in fields.objects("recent"))
        if record.version != version:
            raise fields.wrong("record", f"that of version {version}")
        return as_format_error(lambda: cls(record, recent, content_digest(raw)), path)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Which run a store belongs to: `run.json`.

    Attributes:
        run_id: the lineage of versions.
        created: when, in UTC; for people.
        first_version: the number of the run's first version. It is fixed when the store is made, so that two writers
            that both publish first want the same name, and one of them loses.
    """

    run_id: str
    created: str
    first_version: int = 0

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        _check(self.created, _TIME, "time")
        check_number(self.first_version, "first version")

    def to_bytes(self, key: bytes | None) -> bytes:
        """Return the sealed file."""
        fields = {"path": RUN_PATH, "format": _FORMAT, "run_id": self.run_id, "created": self.created,
                  "first_version": self.first_version}  # fmt: skip
        return seal(fields, key)

    @classmethod
    def from_bytes(cls, raw: bytes, key: bytes | None) -> Self:
        """Read the file.

        Raises:
            ChecksumError, FormatError: as `unseal`, and for every field that cannot be.
        """
        fields = unseal(raw, key, RUN_PATH)
        _check_format(fields)
        return as_format_error(
            lambda: cls(fields.text("run_id"), fields.text("created"), fields.number("first_version")), RUN_PATH
        )


def _check_format(fields: Fields) -> None:
    if fields.number("format") != _FORMAT:
        raise fields.wrong("format", _FORMAT)
