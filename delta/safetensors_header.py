"""The header of a safetensors file, read strictly and written the way the stock library does.

Own code, because the stock library refuses dtypes that it cannot hand to torch, reads duplicate keys silently,
and tells neither offsets nor which tensor of which file is wrong. Format: 8 bytes length, JSON, data; see
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from deltacast.delta.dtypes import DType, dtype_of_safetensors
from deltacast.delta.errors import DTypeError, FormatError, InputError
from deltacast.delta.table import ParamMeta

__all__ = ["MAX_HEADER_BYTES", "SafetensorsHeader", "TensorSlot", "build_header", "parse_header", "strict_json"]

MAX_HEADER_BYTES: Final = 100_000_000
"""The stock library's own bound."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor's place in a file.

    Attributes:
        meta: its name, dtype and shape in torch's terms.
        begin: first byte, counted from the start of the file.
        end: one past its last byte.
    """

    meta: ParamMeta
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a file holds.

    Attributes:
        slots: in file order, without holes; the first begins where the header ends.
        metadata: the `__metadata__` entry.
        data_start: bytes of the length field and the JSON.
        data_end: size of the file.
    """

    slots: tuple[TensorSlot, ...]
    metadata: Mapping[str, str]
    data_start: int
    data_end: int


def strict_json(raw: bytes, *, where: str) -> dict[str, Any]:
    """Parse bytes that must be one JSON object without duplicate keys.

    Raises:
        FormatError: anything else, naming `where`.
    """
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as err:  # also bad UTF-8 and integers of absurd length
        raise FormatError(f"{where} is not strict JSON: {err}") from err
    if not isinstance(value, dict):
        raise FormatError(f"{where} is not a JSON object", found=type(value).__name__)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {twice!r}")
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def parse_header(file: memoryview, *, where: str) -> SafetensorsHeader:
    """Parse the header of a whole (mapped) file; reads nothing behind it.

    Every tensor lies inside the file, has exactly the bytes that its shape takes, and the data has neither holes,
    overlaps nor trailing bytes. `F4` shapes become torch's (`float4_e2m1fn_x2`: last dim halved).

    Args:
        file: the bytes of the file.
        where: the file's name for messages.

    Raises:
        FormatError: naming the file and the tensor.
    """
    size = len(file)
    (length,) = struct.unpack("<Q", file[:8]) if size >= 8 else (0,)
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise FormatError(f"{where}: bad header length", expected=f"at most {min(size - 8, MAX_HEADER_BYTES)}",
                          found=length if size >= 8 else f"a file of {size} bytes")  # fmt: skip
    raw = bytes(file[8 : 8 + length])
    if not raw.startswith(b"{"):
        raise FormatError(f"{where}: the header does not begin with '{{'")
    entries = strict_json(raw, where=f"{where}: header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: __metadata__ must map strings to strings")
    slots = [_slot(name, entry, 8 + length, where) for name, entry in entries.items()]
    slots.sort(key=lambda slot: (slot.begin, slot.end))
    at = 8 + length
    for slot in slots:
        if slot.begin != at:
            kind = "hole before" if slot.begin > at else "overlap at"
            raise FormatError(f"{where}: {kind} a tensor", parameter=slot.meta.name, expected=at, found=slot.begin)
        at = slot.end
    if at != size:
        raise FormatError(f"{where}: data ends elsewhere than the file", expected=at, found=size)
    return SafetensorsHeader(tuple(slots), metadata, 8 + length, size)


def _slot(name: str, entry: object, data_start: int, where: str) -> TensorSlot:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: bad tensor entry", parameter=name, expected="dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where}: bad data_offsets", parameter=name, expected="[begin, end]", found=offsets)
    if not _are_sizes(shape):
        raise FormatError(f"{where}: bad shape", parameter=name, expected="integers >= 0", found=shape)
    try:
        row = dtype_of_safetensors(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if row is None:
            raise FormatError(f"{where}: bad dtype", parameter=name, found=entry["dtype"])
        meta = ParamMeta(name, row.name, _torch_shape(name, row, shape, where))
    except InputError as err:
        raise FormatError(f"{where}: {err.message}", parameter=name, expected=err.expected, found=err.found) from err
    if meta.nbytes != offsets[1] - offsets[0]:
        raise FormatError(f"{where}: a tensor's bytes do not fill its shape", parameter=name,
                          expected=meta.nbytes, found=offsets[1] - offsets[0])  # fmt: skip
    return TensorSlot(meta, data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _torch_shape(name: str, row: DType, shape: list[int], where: str) -> tuple[int, ...]:
    if row.safetensors != "F4":
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise FormatError(f"{where}: F4 needs an even last dim", parameter=name, found=shape)
    return (*shape[:-1], shape[-1] // 2)


def build_header(
    metas: Iterable[ParamMeta], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, SafetensorsHeader]:
    """Lay a file out: widest dtype first, then by name, so that every tensor is aligned, as the stock library does.

    Returns:
        The length field and JSON, padded with spaces to 8 bytes, and the layout they describe.

    Raises:
        InputError: a name twice, a reserved name, or a header above 100 MB.
        DTypeError: a dtype that safetensors has no code for.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    placed: list[tuple[ParamMeta, int]] = []
    at = 0
    for meta in sorted(metas, key=lambda meta: (-meta.row.itemsize, meta.name.encode())):
        if meta.name in entries or meta.name == "__metadata__":
            raise InputError("a name is reserved or listed twice", parameter=meta.name)
        code, shape = meta.row.safetensors, list(meta.shape)
        if code is None or (code == "F4" and not shape):
            raise DTypeError("safetensors cannot hold this dtype", parameter=meta.name, found=f"{meta.dtype}{shape}")
        if code == "F4":
            shape[-1] *= 2
        entries[meta.name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + meta.nbytes]}
        placed.append((meta, at))
        at += meta.nbytes
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise InputError("too many tensors for one file", expected=f"{MAX_HEADER_BYTES} bytes", found=len(raw))
    start = 8 + len(raw)
    slots = tuple(TensorSlot(meta, start + begin, start + begin + meta.nbytes) for meta, begin in placed)
    return struct.pack("<Q", len(raw)) + raw, SafetensorsHeader(slots, dict(metadata or {}), start, start + at)
