"""The one table of dtypes: torch's name, its torch dtype, and how its bits are addressed.

A *word* is what a patch addresses: one element, or one real part of a complex element. A *unit* is what the
fingerprint sums: an unsigned 16-bit piece of a word, or the byte of a 1-byte word.

`float4_e2m1fn_x2` is handled as bytes in torch's own shape (two values to a byte). Quantised, `bits*` and
sub-byte shell dtypes are refused by name: torch cannot address their bits as plain memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from deltacast.delta.errors import DTypeError

__all__ = ["DTYPES", "DType", "dtype_named", "dtype_of", "dtype_of_safetensors"]

_UNSIGNED: Final[dict[int, np.dtype[np.unsignedinteger]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
_TORCH_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class DType:
    """One storage dtype.

    Attributes:
        name: torch's name without the prefix, as it stands in tables and containers (`bfloat16`).
        torch_dtype: the torch dtype itself.
        word_bytes: bytes of a word, 1, 2, 4 or 8.
        words_per_element: 2 for complex dtypes, else 1.
        signed_magnitude: True where the sign bit sits above a magnitude, as in IEEE floats of 8 to 64 bits;
            the codec then takes differences of the *ordered* integer (docs/format.md, "Values").
        safetensors: the code in a safetensors header, or None where that format has none.
    """

    name: str
    torch_dtype: torch.dtype
    word_bytes: int
    words_per_element: int
    signed_magnitude: bool
    safetensors: str | None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.word_bytes * self.words_per_element

    @property
    def unit_bytes(self) -> int:
        """Bytes of one fingerprint unit: 1 for 1-byte words, else 2."""
        return min(self.word_bytes, 2)

    @property
    def units_per_word(self) -> int:
        """Fingerprint units in one word."""
        return self.word_bytes // self.unit_bytes

    @property
    def numpy_word(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned little-endian numpy dtype of a word."""
        return _UNSIGNED[self.word_bytes]

    @property
    def torch_word(self) -> torch.dtype:
        """The torch integer dtype of a word (signed above one byte: torch's unsigned kernels are few)."""
        return _TORCH_SIGNED[self.word_bytes]

    @property
    def torch_part(self) -> torch.dtype:
        """The dtype of one word as a value: the real part of a complex dtype, else the dtype itself."""
        return _REAL_PART.get(self.torch_dtype, self.torch_dtype)


_REAL_PART: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def _rows() -> list[DType]:
    floats = [
        ("bfloat16", 2, "BF16"),
        ("float16", 2, "F16"),
        ("float32", 4, "F32"),
        ("float64", 8, "F64"),
        ("float8_e4m3fn", 1, "F8_E4M3"),
        ("float8_e5m2", 1, "F8_E5M2"),
        ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    ]
    plain = [
        ("float8_e8m0fnu", 1, "F8_E8M0"),
        ("float4_e2m1fn_x2", 1, "F4"),
        ("uint8", 1, "U8"),
        ("int8", 1, "I8"),
        ("uint16", 2, "U16"),
        ("int16", 2, "I16"),
        ("uint32", 4, "U32"),
        ("int32", 4, "I32"),
        ("uint64", 8, "U64"),
        ("int64", 8, "I64"),
        ("bool", 1, "BOOL"),
    ]
    complexes = [("complex32", 2, None), ("complex64", 4, "C64"), ("complex128", 8, None)]
    return [
        *(DType(n, getattr(torch, n), size, 1, signed_magnitude=True, safetensors=code) for n, size, code in floats),
        *(DType(n, getattr(torch, n), size, 1, signed_magnitude=False, safetensors=code) for n, size, code in plain),
        *(DType(n, getattr(torch, n), size, 2, signed_magnitude=True, safetensors=code) for n, size, code in complexes),
    ]


DTYPES: Final[dict[str, DType]] = {row.name: row for row in _rows()}
_BY_TORCH: Final = {row.torch_dtype: row for row in DTYPES.values()}
_BY_SAFETENSORS: Final = {row.safetensors: row for row in DTYPES.values() if row.safetensors}


def dtype_named(name: str) -> DType:
    """Return the table row of a dtype name that came from outside.

    Raises:
        DTypeError: the name is not in the table.
    """
    row = DTYPES.get(name) if isinstance(name, str) else None
    if row is None:
        raise DTypeError("unknown dtype name", expected=f"one of {', '.join(DTYPES)}", found=repr(name))
    return row


def dtype_of(torch_dtype: torch.dtype, *, name: str | None = None) -> DType:
    """Return the table row of a torch dtype.

    Args:
        torch_dtype: any dtype of torch.
        name: the parameter that has it, for the error.

    Raises:
        DTypeError: torch cannot address this dtype's bits (quantised, bits and shell dtypes).
    """
    row = _BY_TORCH.get(torch_dtype)
    if row is None:
        raise DTypeError(
            f"dtype {torch_dtype} has no addressable bits",
            parameter=name,
            hint="Send the dequantised weight, or view the storage as uint8 first.",
        )
    return row


def dtype_of_safetensors(code: str) -> DType:
    """Return the table row of a dtype code in a safetensors header.

    Raises:
        DTypeError: the code is not one that deltacast reads.
    """
    row = _BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if row is None:
        raise DTypeError("unknown safetensors dtype", expected=f"one of {', '.join(_BY_SAFETENSORS)}", found=repr(code))
    return row
