"""Tensors from bytes and back, through torch storage and numpy strides only: no code under test in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta

WORDS: Final[dict[str, tuple[int, int]]] = {
    "bfloat16": (2, 1),
    "float16": (2, 1),
    "float32": (4, 1),
    "float64": (8, 1),
    "float8_e4m3fn": (1, 1),
    "float8_e5m2": (1, 1),
    "float8_e4m3fnuz": (1, 1),
    "float8_e5m2fnuz": (1, 1),
    "float8_e8m0fnu": (1, 1),
    "float4_e2m1fn_x2": (1, 1),
    "uint8": (1, 1),
    "int8": (1, 1),
    "uint16": (2, 1),
    "int16": (2, 1),
    "uint32": (4, 1),
    "int32": (4, 1),
    "uint64": (8, 1),
    "int64": (8, 1),
    "bool": (1, 1),
    "complex32": (2, 2),
    "complex64": (4, 2),
    "complex128": (8, 2),
}
"""Every dtype that deltacast stores: bytes of a word, words of an element; written by hand."""

SIGN_AND_MAGNITUDE: Final = {name for name in WORDS if name.startswith(("bfloat", "float", "complex"))} - {
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
}
"""The dtypes whose words are a sign bit above a magnitude."""


def element_bytes(dtype: str) -> int:
    """Bytes of one element."""
    word, per_element = WORDS[dtype]
    return word * per_element


def tensor_of(dtype: str, raw: bytes, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor that holds exactly these canonical bytes; it owns its memory."""
    if not raw:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(tuple(shape))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The canonical (row-major) bytes of a tensor in any layout, read from its storage."""
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    if not tensor.numel():
        return b""
    size = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    strides = [stride * size for stride in tensor.stride()]
    return as_strided(storage[tensor.storage_offset() * size :], (*tensor.shape, size), (*strides, 1)).tobytes()


def random_raw(rng: np.random.Generator, dtype: str, numel: int) -> bytes:
    """Random bits of a dtype: NaNs, infinities, subnormals and all."""
    if dtype == "bool":
        return rng.integers(0, 2, numel, np.uint8).tobytes()
    return rng.bytes(numel * element_bytes(dtype))


def random_tensor(rng: np.random.Generator, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of random bits."""
    return tensor_of(dtype, random_raw(rng, dtype, int(np.prod(shape, dtype=object))), shape)


def flipped(raw: bytes, bit: int) -> bytes:
    """The bytes with one bit flipped."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def listed(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
    """Metas with tensors, as a source gives them."""
    for name, tensor in tensors.items():
        yield ParamMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor


def state_bytes(state: WeightState) -> dict[str, bytes]:
    """What a state's tensors hold, by name."""
    return {memory.name: raw_bytes(memory.tensor) for memory in state.memories}


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bit-exact contiguous copies."""
    return {
        name: tensor_of(str(tensor.dtype).removeprefix("torch."), raw_bytes(tensor), tensor.shape)
        for name, tensor in tensors.items()
    }


def everything(state: WeightState) -> tuple[object, ...]:
    """All that a refused or rolled back update must leave as it was."""
    return (
        state_bytes(state),
        state.version,
        state.digest,
        state.fingerprints.tolist(),
        state.audited_versions.tolist(),
        state.audited_through,
        [memory.tensor.data_ptr() for memory in state.memories],
    )
