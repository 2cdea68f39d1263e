"""Update-level fields, and the strict JSON that they and a file's header are read from.

JSON from outside is read with typed getters only: a wrong type, a bool for an int, a number beyond 63 bits, a key
twice, NaN or a thousand brackets is a `FormatError` that names the field.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from deltacast.delta.errors import FormatError, InputError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.table import check_name

__all__ = ["Envelope", "Fields", "as_format_error", "dump_json", "load_json"]

T = TypeVar("T")

FORMAT: Final = 1
MAX_RUN_ID_BYTES: Final = 256
_MAX_INT: Final = (1 << 63) - 1
_DIGEST = re.compile(r"xxh3_128:[0-9a-f]{32}")
_DECIMAL_DIGITS: Final = 19


def dump_json(value: object) -> bytes:
    """Write compact JSON; non-ASCII names stay readable UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def load_json(raw: bytes, what: str) -> Fields:
    """Read a JSON object from bytes that are not trusted.

    Raises:
        FormatError: not UTF-8, not JSON, a key twice, a number that is not finite, too deep, or no object.
    """
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_int=_int, parse_float=_float, parse_constant=_constant
        )
    except FormatError as err:
        raise FormatError(f"{what}: {err.message}", found=err.found) from err
    except (ValueError, RecursionError) as err:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise FormatError(f"{what} is not valid JSON: {type(err).__name__}") from err
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object", found=type(value).__name__)
    return Fields(value, what)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise FormatError("a JSON key appears twice", found=ascii(twice))
    return value


def _int(text: str) -> int:
    if len(text.lstrip("-")) > _DECIMAL_DIGITS:
        raise FormatError("a number is too large", found=f"{len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError("a number is not finite", found=text[:32])
    return value


def _constant(text: str) -> float:
    raise FormatError("a number is not finite", found=text)


class Fields:
    """Typed access to a JSON object that came from outside; `what` names it in errors."""

    __slots__ = ("_value", "_what")

    def __init__(self, value: Mapping[str, Any], what: str) -> None:
        self._value = value
        self._what = what

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._value.get(key) is not None

    def number(self, key: str, highest: int = _MAX_INT) -> int:
        """Return an integer from 0 to `highest`.

        Raises:
            FormatError: missing, another type (a bool is one), out of range.
        """
        value = self._value.get(key)
        if type(value) is not int or not 0 <= value <= highest:
            raise self.wrong(key, f"an integer from 0 to {highest}")
        return value

    def optional_number(self, key: str) -> int | None:
        """Return an integer, or None where the key is missing or null."""
        return self.number(key) if self.has(key) else None

    def text(self, key: str) -> str:
        """Return a string.

        Raises:
            FormatError: missing or another type.
        """
        value = self._value.get(key)
        if type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def one_of(self, key: str, names: tuple[str, ...]) -> int:
        """Return a string's place in `names`.

        Raises:
            FormatError: missing, another type, or a name that this reader does not know.
        """
        value = self.text(key)
        if value not in names:
            raise FormatError(f"{self._what}: unknown {key}", expected=f"one of {', '.join(names)}", found=ascii(value))
        return names.index(value)

    def hex_bytes(self, key: str, num_bytes: int) -> bytes:
        """Return the bytes of a string of lower-case hex digits.

        Raises:
            FormatError: another length or other characters.
        """
        value = self.text(key)
        if len(value) != 2 * num_bytes or not set(value) <= set("0123456789abcdef"):
            raise self.wrong(key, f"{2 * num_bytes} lower-case hex digits")
        return bytes.fromhex(value)

    def items(self, key: str) -> list[Any]:
        """Return a list; empty where the key is missing.

        Raises:
            FormatError: another type.
        """
        value = self._value.get(key, [])
        if type(value) is not list:
            raise self.wrong(key, "a list")
        return value

    def objects(self, key: str) -> list[Fields]:
        """Return a list of objects.

        Raises:
            FormatError: another type.
        """
        values = self.items(key)
        if not all(type(value) is dict for value in values):
            raise self.wrong(key, "a list of objects")
        return [Fields(value, f"{self._what}, {key}[{number}]") for number, value in enumerate(values)]

    def int_lists(self, key: str, length: int) -> list[list[int]]:
        """Return a list of lists of `length` integers from 0 to 2^63 - 1.

        Raises:
            FormatError: anything else.
        """
        values = self.items(key)
        for row in values:
            if type(row) is not list or len(row) != length or not all(type(n) is int and n >= 0 for n in row):
                raise self.wrong(key, f"a list of lists of {length} integers")
            if any(n > _MAX_INT for n in row):
                raise self.wrong(key, "integers below 2^63")
        return values

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object as it is; empty where the key is missing.

        Raises:
            FormatError: another type.
        """
        value = self._value.get(key, {})
        if type(value) is not dict:
            raise self.wrong(key, "an object")
        return value

    def wrong(self, key: str, expected: object) -> FormatError:
        """Return the error for a field that is not what it should be."""
        found = ascii(self._value.get(key))
        return FormatError(f"{self._what}: bad {key}", expected=expected, found=found[:80])


def as_format_error(make: Callable[[], T], what: str) -> T:
    """Return `make()`; what it says about its input is said about the bytes that the input was read from.

    Raises:
        FormatError: `make` raised an `InputError`.
    """
    try:
        return make()
    except InputError as err:
        raise FormatError(f"{what}: {err.message}", parameter=err.parameter, expected=err.expected,
                          found=err.found) from err  # fmt: skip


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an update says about itself, without its patches; fields as in `WeightUpdate`.

    Raises:
        InputError: a digest or a run id that format 1 cannot carry.
    """

    run_id: str
    epoch: int
    base_version: int | None
    target_version: int
    base_digest: str | None
    target_digest: str
    table_digest: str
    optimizer_step: int | None = None
    removed: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run_id = check_name(self.run_id)
        if len(run_id.encode()) > MAX_RUN_ID_BYTES:
            raise InputError("run_id is too long", expected=f"at most {MAX_RUN_ID_BYTES} bytes")
        for digest in (self.base_digest, self.target_digest, self.table_digest):
            if digest is not None and (type(digest) is not str or not _DIGEST.fullmatch(digest)):
                raise InputError("bad digest", expected="xxh3_128: and 32 hex digits", found=ascii(digest))
        numbers = (self.epoch, self.target_version, self.base_version or 0, self.optimizer_step or 0)
        if any(type(number) is not int or not 0 <= number <= _MAX_INT for number in numbers):
            raise InputError("a version, epoch or step is out of range", expected="0 to 2^63 - 1", found=numbers)
        for name in (*self.removed, *self.aliases, *self.aliases.values()):
            check_name(name)
        if len(set(self.removed)) != len(self.removed):
            raise InputError("a removed parameter is listed twice")
        if (self.base_version is None) != (self.base_digest is None):
            raise InputError("a base version and its digest go together", version=self.target_version)

    @classmethod
    def of(cls, update: WeightUpdate) -> Envelope:
        """Return an update's envelope.

        Raises:
            InputError: as the class.
        """
        return cls(
            update.run_id, update.epoch, update.base_version, update.target_version, update.base_digest,
            update.target_digest, update.table_digest, update.optimizer_step, update.removed, dict(update.aliases),
        )  # fmt: skip

    @classmethod
    def from_fields(cls, fields: Fields) -> Envelope:
        """Read an envelope from a header's JSON object.

        Raises:
            FormatError: wrong format number, an unknown requirement, or a bad field.
        """
        if fields.number("format") != FORMAT:
            raise fields.wrong("format", FORMAT)
        requires = fields.items("requires")
        if requires:
            raise FormatError("the header requires features that this reader lacks", found=ascii(requires)[:200])
        base_digest = fields.text("base_digest") if fields.has("base_digest") else None
        return as_format_error(
            lambda: cls(
                fields.text("run_id"), fields.number("epoch"), fields.optional_number("base_version"),
                fields.number("target_version"), base_digest, fields.text("target_digest"), fields.text("table_digest"),
                fields.optional_number("optimizer_step"), tuple(fields.items("removed")), fields.mapping("aliases"),
            ),
            "the header",
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; what is None or empty is left out."""
        value: dict[str, Any] = {"format": FORMAT}
        for key in ("run_id", "epoch", "base_version", "target_version", "base_digest", "target_digest",
                    "table_digest", "optimizer_step", "removed", "aliases"):  # fmt: skip
            mine = getattr(self, key)
            if mine is not None and mine not in ((), {}):
                value[key] = list(mine) if key == "removed" else mine
        return value

    def with_patches(self, patches: tuple[SparseWeightPatch, ...]) -> WeightUpdate:
        """Return the whole update.

        Raises:
            InputError: as `WeightUpdate`.
        """
        return WeightUpdate(
            run_id=self.run_id, epoch=self.epoch, base_version=self.base_version, target_version=self.target_version,
            base_digest=self.base_digest, target_digest=self.target_digest, table_digest=self.table_digest,
            patches=patches, optimizer_step=self.optimizer_step, removed=self.removed, aliases=dict(self.aliases),
        )  # fmt: skip
