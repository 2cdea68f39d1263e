"""Reading and writing the words of one tensor in place, wherever it lives and however it is laid out.

A `WordMemory` addresses a tensor by flat row-major word positions. Contiguous tensors on any device go through
one flat view; strided ones (transposed, sliced) through their own strides, so that nothing is ever written to a
copy and `data_ptr()` stays what it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import Words, numpy_words, strided_words
from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError
from deltacast.delta.fingerprint import fingerprint
from deltacast.delta.overlap import overlaps_itself

__all__ = ["WordMemory"]


class WordMemory:
    """The words of one live tensor.

    Args:
        tensor: any dtype of the table, any device; may require grad. Not copied, not owned.
        name: what error messages call it.

    Raises:
        DTypeError, InputError: the bits cannot be addressed, or several elements share one memory cell
            (an expanded tensor, overlapping windows), so that a write to one would change others.
    """

    __slots__ = ("_flat", "_view", "name", "num_words", "numpy_word", "tensor")

    def __init__(self, tensor: torch.Tensor, *, name: str = "tensor") -> None:
        self.name = name
        self.tensor = tensor.detach()
        self._view = strided_words(tensor, name=name)
        if overlaps_itself(self._view):
            raise InputError(
                "an expanded or overlapping tensor cannot be written in place",
                parameter=name,
                hint="Pass its base, or a contiguous copy.",
            )
        self._flat = self._view.view(-1) if self._view.is_contiguous() else None
        self.num_words = self._view.numel()
        self.numpy_word = dtype_of(tensor.dtype).numpy_word

    def read(self, positions: NDArray[np.int64]) -> Words:
        """Gather words at flat positions, which must be in range; returns host memory of its own."""
        index = torch.from_numpy(_plain(positions)).to(self._view.device)
        picked = self._flat.index_select(0, index) if self._flat is not None else self._view[self._unravel(index)]
        words: Words = picked.cpu().numpy()
        return words.view(self.numpy_word)

    def write(self, positions: NDArray[np.int64], words: Words) -> None:
        """Scatter words to flat positions, which must be in range and unique."""
        index = torch.from_numpy(_plain(positions)).to(self._view.device)
        source = self._as_torch(words)
        if self._flat is not None:
            self._flat.scatter_(0, index, source)
        else:
            self._view[self._unravel(index)] = source

    def read_all(self) -> Words:
        """Return all words, row-major; shares memory with a contiguous CPU tensor."""
        return numpy_words(self.tensor, name=self.name)

    def write_all(self, words: Words) -> None:
        """Overwrite every word, row-major."""
        if self._flat is not None and self._flat.device.type == "cpu":
            np.copyto(self._flat.numpy().view(self.numpy_word), words)
        else:
            self._view.copy_(self._as_torch(words).view(self._view.shape))

    def fingerprint(self) -> int:
        """Rescan every word and return the fingerprint."""
        return fingerprint(self.tensor, name=self.name)

    def _as_torch(self, words: Words) -> torch.Tensor:
        signed = _plain(words).view(np.uint8 if words.itemsize == 1 else f"<i{words.itemsize}")
        return torch.from_numpy(signed).to(self._view.device)

    def _unravel(self, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.unravel_index(index, self._view.shape)


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array that torch takes: it warns about read-only ones and refuses negative strides."""
    return np.require(array, requirements=["C", "W"])
