"""The parameter table: which parameters there are, in the order that every digest and round counts on.

Entries are ordered by the UTF-8 bytes of their names. The table's digest travels with every update, so the
parameters' names, dtypes and shapes need to travel only once. Byte layout: docs/fingerprint.md.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltacast.delta.dtypes import DType, dtype_named
from deltacast.delta.errors import InputError, TableError

__all__ = ["ParamMeta", "ParameterTable", "check_name"]

_MAX_NUMEL = 1 << 60
_MAX_NDIM = 64


def check_name(name: object) -> str:
    """Return a parameter name that may be used, from a source that is not trusted.

    Raises:
        InputError: not a non-empty str of at most 65,535 UTF-8 bytes without NUL or lone surrogates.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError("bad parameter name", expected="a non-empty str without NUL", found=repr(name))
    try:
        size = len(name.encode())
    except UnicodeEncodeError as err:
        raise InputError("bad parameter name", expected="valid Unicode", found=ascii(name)) from err
    if size > 65535:
        raise InputError("bad parameter name", expected="at most 65535 bytes", found=f"{size} bytes")
    return name


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """What a parameter is, without its bits.

    Attributes:
        name: its name in the checkpoint that is served.
        dtype: torch's dtype name without the prefix (`bfloat16`).
        shape: its full (unsharded) shape.

    Raises:
        InputError: bad name, negative or absurd shape.
        DTypeError: unknown dtype name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_name(self.name)
        dtype_named(self.dtype)
        shape = self.shape
        if not isinstance(shape, tuple) or len(shape) > _MAX_NDIM or not all(type(n) is int and n >= 0 for n in shape):
            raise InputError("bad shape", parameter=self.name, expected="a tuple of ints >= 0", found=repr(shape))
        if math.prod(max(n, 1) for n in shape) > _MAX_NUMEL:
            raise InputError("shape too large", parameter=self.name, expected="at most 2^60 elements", found=shape)

    @property
    def row(self) -> DType:
        """The dtype table's row."""
        return dtype_named(self.dtype)

    @property
    def numel(self) -> int:
        """Elements of the full shape."""
        return math.prod(self.shape)

    @property
    def num_words(self) -> int:
        """Words that patches address: numel, twice that for complex dtypes."""
        return self.numel * self.row.words_per_element

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return self.numel * self.row.itemsize

    def table_entry(self) -> bytes:
        """Return the bytes that stand for this parameter in the table digest (docs/fingerprint.md)."""
        raw = self.name.encode()
        shape = struct.pack(f"<I{len(self.shape)}q", len(self.shape), *self.shape)
        return struct.pack("<I", len(raw)) + raw + self.dtype.encode() + b"\0" + shape


class ParameterTable:
    """An ordered, immutable set of `ParamMeta`, its digest, and aliases of tied parameters.

    Args:
        metas: the parameters, each storage once.
        aliases: alias name -> name in the table, for tied tensors. Recorded, not hashed.

    Attributes:
        metas: the parameters, in order of the bytes of their names.
        aliases: as given, sorted.
        nbytes: bytes of all parameters: what a dense transfer would send.
        num_words: words of all parameters: what densities are shares of.

    Raises:
        TableError: a name twice, or an alias that is also a parameter or points to none.
    """

    __slots__ = ("_digest", "_index", "aliases", "metas", "nbytes", "num_words")

    def __init__(self, metas: Iterable[ParamMeta], aliases: Mapping[str, str] | None = None) -> None:
        self.metas: tuple[ParamMeta, ...] = tuple(sorted(metas, key=lambda meta: meta.name.encode()))
        self._index = {meta.name: i for i, meta in enumerate(self.metas)}
        if len(self._index) != len(self.metas):
            names = [meta.name for meta in self.metas]
            twice = next(a for a, b in itertools.pairwise(names) if a == b)
            raise TableError("a parameter is listed twice", parameter=twice)
        self.aliases: dict[str, str] = dict(sorted((aliases or {}).items()))
        for alias, name in self.aliases.items():
            if check_name(alias) in self._index or name not in self._index:
                raise TableError(f"alias {alias!r} must be another name of a listed parameter", parameter=name)
        self._digest = xxhash.xxh3_128_digest(b"".join(meta.table_entry() for meta in self.metas))
        self.nbytes = sum(meta.nbytes for meta in self.metas)
        self.num_words = sum(meta.num_words for meta in self.metas)

    def __len__(self) -> int:
        return len(self.metas)

    def __iter__(self) -> Iterator[ParamMeta]:
        return iter(self.metas)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> ParamMeta:
        return self.metas[self.index(name)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParameterTable) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def index(self, name: str) -> int:
        """Return a parameter's place in the table; aliases resolve.

        Raises:
            TableError: no such parameter.
        """
        place = self._index.get(self.aliases.get(name, name))
        if place is None:
            raise TableError("no such parameter in the table", parameter=name)
        return place

    @property
    def digest(self) -> str:
        """The table digest, written `xxh3_128:<hex>`."""
        return f"xxh3_128:{self._digest.hex()}"

    def state_digest(self, fingerprints: NDArray[np.uint64]) -> str:
        """Return the digest of a whole state from its parameters' fingerprints, in table order.

        Raises:
            TableError: not one fingerprint per parameter.
        """
        if len(fingerprints) != len(self.metas):
            raise TableError("wrong number of fingerprints", expected=len(self.metas), found=len(fingerprints))
        state = xxhash.xxh3_128(self._digest)
        state.update(np.ascontiguousarray(fingerprints, dtype="<u8").tobytes())
        return f"xxh3_128:{state.hexdigest()}"

    def to_json(self) -> bytes:
        """Write the table for a peer: `[[name, dtype, shape], ...]` and the aliases."""
        rows = [[meta.name, meta.dtype, meta.shape] for meta in self.metas]
        return json.dumps({"parameters": rows, "aliases": self.aliases}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> ParameterTable:
        """Read what `to_json` wrote, from a peer that is not trusted to be right.

        Raises:
            TableError: it is not a parameter table.
            InputError, DTypeError: a parameter of it cannot be.
        """
        try:
            body = json.loads(raw)
            metas = [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in body["parameters"]]
            aliases = {str(alias): str(name) for alias, name in body["aliases"].items()}
        except (KeyError, TypeError, AttributeError, RecursionError) as err:
            raise TableError("not a parameter table") from err
        except ValueError as err:
            if isinstance(err, InputError):
                raise
            raise TableError("not a parameter table") from err
        return cls(metas, aliases)

    def require_equal(self, other: ParameterTable, *, who: str) -> None:
        """Raise unless `other` lists the same parameters, naming the first that differs.

        Raises:
            TableError: names, dtypes or shapes differ.
        """
        if self == other:
            return
        mine = {meta.name: meta for meta in self.metas}
        theirs = {meta.name: meta for meta in other.metas}
        for name in sorted(mine.keys() | theirs.keys(), key=str.encode):
            if mine.get(name) != theirs.get(name):
                raise TableError(
                    f"{who} has another parameter table",
                    parameter=name,
                    expected=_describe(mine.get(name)),
                    found=_describe(theirs.get(name)),
                )


def _describe(meta: ParamMeta | None) -> str:
    return f"{meta.dtype}{list(meta.shape)}" if meta else "no such parameter"
