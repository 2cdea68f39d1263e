"""The fingerprint's keys as torch tensors: `key(i) = inner[i mod 1024] * outer[i div 1024]` (docs/fingerprint.md).

torch has no unsigned 64-bit arithmetic to speak of; int64 wraps the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KeyTables", "unit_keys"]

_SEED_INNER = 0x64656C7461636173
_SEED_OUTER = 0x7470617463686573
_ROW = 1024


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # logical


def _odd_keys(seed: int, index: torch.Tensor) -> torch.Tensor:
    """splitmix64(seed + index) | 1."""
    z = index + _signed(seed + 0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


@dataclass(frozen=True, slots=True)
class KeyTables:
    """Both factors of the keys, on one device.

    Attributes:
        inner: int64 [1024].
        outer: int64 [rows], enough for the longest parameter: 8 bytes for each 1024 of its units.
    """

    inner: torch.Tensor
    outer: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, num_rows: int) -> KeyTables:
        """Compute the tables on a device; groups whose `key_rows` are no more can share them."""
        inner = _odd_keys(_SEED_INNER, torch.arange(_ROW, dtype=torch.int64, device=device))
        outer = _odd_keys(_SEED_OUTER, torch.arange(num_rows, dtype=torch.int64, device=device))
        return cls(inner, outer)

    @property
    def nbytes(self) -> int:
        """Device memory of the tables: 8 KiB, and 8 bytes a row."""
        return self.inner.nbytes + self.outer.nbytes


def unit_keys(tables: KeyTables, positions: torch.Tensor) -> torch.Tensor:
    """Return key(i) for int64 unit positions, as int64 of the same shape."""
    return tables.inner[positions & (_ROW - 1)] * tables.outer[positions >> 10]
