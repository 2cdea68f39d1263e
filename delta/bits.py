"""Tensors as bits: the integer views that everything else compares, hashes, stores and sends.

`words(t)` is the flat row-major sequence of a tensor's words (delta/dtypes.py); complex elements give two.
Values are never looked at as floats, so `-0.0`, NaN payloads and subnormals are just bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from deltacast.delta.dtypes import DType, dtype_of
from deltacast.delta.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Words", "from_words", "numpy_words", "strided_words", "words"]

Words: TypeAlias = "NDArray[Any]"
"""A numpy array of unsigned little-endian words (uint8, uint16, uint32 or uint64)."""


def strided_words(tensor: torch.Tensor, *, name: str = "tensor") -> torch.Tensor:
    """View a tensor as integer words in its own strides; no copy, so writes reach the tensor.

    Args:
        tensor: any dtype of the table, any layout; may require grad (the view does not).
        name: what error messages call it.

    Returns:
        An integer view: the tensor's shape, with a trailing axis of 2 for complex dtypes.

    Raises:
        DTypeError: the dtype has no addressable bits.
        InputError: the tensor has no plain memory (meta, sparse), or its conj or neg bit is set.
    """
    tensor = tensor.detach()
    dtype = dtype_of(tensor.dtype, name=name)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise InputError(
            "a tensor without plain memory",
            parameter=name,
            expected="a strided tensor with data",
            found=f"layout {'nested' if tensor.is_nested else tensor.layout} on {tensor.device}",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InputError(
            "a lazily conjugated or negated view", parameter=name, hint="Call resolve_conj().resolve_neg()."
        )
    if dtype.words_per_element == 2:
        tensor = torch.view_as_real(tensor)
    return tensor.view(dtype.torch_word)


def words(tensor: torch.Tensor, *, name: str = "tensor") -> torch.Tensor:
    """Return a tensor's words, flat and row-major, on its own device.

    Zero-copy for a contiguous tensor; anything else (transposed, strided, expanded, lazily conjugated) is copied
    into row-major order first. Integer dtype `DType.torch_word`.

    Raises:
        DTypeError, InputError: as `strided_words`.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return strided_words(tensor, name=name).contiguous().view(-1)


def numpy_words(tensor: torch.Tensor, *, name: str = "tensor") -> Words:
    """Return a CPU tensor's words as a flat unsigned numpy array; shares memory when the tensor is contiguous.

    A tensor on another device is copied to the host.

    Raises:
        DTypeError, InputError: as `strided_words`.
    """
    row = dtype_of(tensor.dtype, name=name)
    array: Words = words(tensor, name=name).cpu().numpy()
    return array.view(row.numpy_word)


def copy_bits(target: torch.Tensor, source: torch.Tensor, *, name: str = "tensor") -> None:
    """Copy bits between tensors of one dtype and shape, wherever they are and however they are laid out.

    As integers: a float copy may quieten a signalling NaN. Lazily conjugated or negated sources are resolved. On the
    host the bits are there on return; on a GPU they are for whatever follows on the current stream, and a page-locked
    source must stay as it is until then.

    Raises:
        DTypeError, InputError: `source` has no plain memory; nothing was written.
    """
    plain = source.detach().resolve_conj().resolve_neg()
    strided_words(target).copy_(strided_words(plain, name=name), non_blocking=target.device.type != "cpu")


def from_words(array: Words, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """View words as a tensor of `dtype` and `shape`; shares the array's memory, which must be writable.

    Raises:
        InputError: the words are of another size than the dtype's, or their number does not fit the shape.
    """
    if array.dtype.itemsize != dtype.word_bytes:
        raise InputError("words of another size", expected=dtype.numpy_word, found=array.dtype)
    expected = int(np.prod(shape, dtype=object)) * dtype.words_per_element
    if array.size != expected:
        raise InputError("words do not fill the shape", expected=expected, found=array.size)
    flat = torch.from_numpy(
        np.ascontiguousarray(array).view(np.dtype(f"<i{dtype.word_bytes}") if dtype.word_bytes > 1 else np.uint8)
    )
    if dtype.words_per_element == 2:
        return torch.view_as_complex(flat.view(dtype.torch_part).view(*shape, 2))
    return flat.view(dtype.torch_dtype).view(shape)
