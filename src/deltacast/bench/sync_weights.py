"""Live weights of one rank, on its device: made, changed as RL fine-tuning changes them, and compared bit by bit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.dtypes import dtype_named
from deltacast.delta.errors import VerificationError
from deltacast.delta.table import ParamMeta
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup

__all__ = ["LiveWeights"]

_PIECE: Final = 1 << 24  # words in work at once: bounds the memory of `take_step` and `compare`
_ALIGN: Final = 256  # words: where allocators put tensors of their own, at multiples of 512 bytes
_NAN: Final = 0x7FC0  # between tensors: a word that no step moves
_STD: Final = 0.02
_TAIL: Final = (*[1] * 88, *[2] * 6, *[3] * 2, 4, 5, 9, 40)  # sizes of 100 steps, as in bench/generator.py


class LiveWeights:
    """A model's weights with made-up values; also the engine's `WeightSource`.

    The bf16 tensors are views of one block, as far apart as an allocator would put them: so a step over 20,000
    tensors takes a few launches. Tensors of other dtypes are zeros and never change.

    Args:
        metas: the parameters; at least one is bf16.
        device: where they live.
        seed: of the values; the same on every rank, so that all start with the same bits.

    Attributes:
        words: all bf16 words, int16, with what lies between tensors.
    """

    def __init__(self, metas: Sequence[ParamMeta], device: torch.device, seed: int) -> None:
        self._metas = tuple(metas)
        self._generator = torch.Generator(device).manual_seed(seed)
        places, size = [], 0
        for meta in self._metas:
            places.append(size)
            size += -(-meta.numel // _ALIGN) * _ALIGN if meta.dtype == "bfloat16" else 0
        self._places = places
        self.words = torch.full((size,), _NAN, dtype=torch.int16, device=device)
        self._tensors = [self._make(meta, place) for meta, place in zip(self._metas, places, strict=True)]

    @property
    def aliases(self) -> Mapping[str, str]:
        """None are tied."""
        return {}

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Everything is covered."""
        return ()

    @property
    def live(self) -> Sequence[torch.Tensor]:
        """The tensors, in the order of `metas()`."""
        return self._tensors

    @property
    def moving(self) -> Sequence[torch.Tensor]:
        """Those that are bf16: the only ones that change."""
        return [tensor for tensor in self._tensors if tensor.dtype == torch.bfloat16]

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each."""
        return [meta.nbytes for meta in self._metas]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, without what lies between them."""
        return sum(self.sizes)

    def metas(self) -> Sequence[ParamMeta]:
        """See `WeightSource`."""
        return self._metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WeightSource`."""
        return zip((meta.name for meta in self._metas), self._tensors, strict=True)

    def take_step(self, percent: float) -> None:
        """Move about so many percent of the bf16 words, in place, each time others.

        As under AdamW with fp32 masters: the chance that a stored word changes halves with each binade of |w|, and
        nine in ten changes are one step to a neighbouring value (bench/generator.py).
        """
        chance = torch.tensor(_chances(self._counts, percent / 100), dtype=torch.float32, device=self.words.device)
        tail = torch.tensor(_TAIL, dtype=torch.int32, device=self.words.device)
        for piece in _pieces(self.words):
            draws = torch.empty(piece.shape, device=piece.device).uniform_(generator=self._generator)
            at = (draws < chance[_exponents(piece)]).nonzero().flatten()
            old = piece[at].int()
            size, sign = (self._draw(at.numel(), bound) for bound in (len(_TAIL), 2))
            moved = _ordered(old) + tail[size] * (2 * sign - 1)
            piece.index_copy_(0, at, _ordered(moved).to(torch.int16))

    def compare(self, group: PayloadGroup, deadline: Deadline) -> None:
        """Hold every bf16 word against rank 0's, sent for this alone. Collective.

        Independent of digests, fingerprints and patches: a dense broadcast into fresh memory, and `torch.equal`.

        Raises:
            VerificationError: a word differs, naming the parameter; on the rank where it does.
        """
        for number, piece in enumerate(_pieces(self.words)):
            theirs = torch.empty_like(piece) if group.rank else piece
            group.post([theirs], deadline)
            group.wait(deadline)
            if not torch.equal(theirs, piece):
                at = number * _PIECE + int((theirs != piece).nonzero()[0])
                raise VerificationError("a worker's weights are not the trainer's", rank=group.rank,
                                        parameter=self._metas[bisect_right(self._places, at) - 1].name)  # fmt: skip

    def _make(self, meta: ParamMeta, place: int) -> torch.Tensor:
        if meta.dtype != "bfloat16":
            return torch.zeros(meta.shape, dtype=dtype_named(meta.dtype).torch_dtype, device=self.words.device)
        flat = self.words[place : place + meta.numel].view(torch.bfloat16)
        for piece in _pieces(flat):
            piece.normal_(0.0, _STD, generator=self._generator)
        return flat.view(meta.shape)

    @cached_property
    def _counts(self) -> NDArray[np.float64]:
        """How many words have each exponent; steps hardly change that."""
        counts = torch.zeros(256, dtype=torch.int64, device=self.words.device)
        for piece in _pieces(self.words):
            counts += torch.bincount(_exponents(piece), minlength=256)
        return counts.cpu().numpy().astype(np.float64)

    def _draw(self, count: int, bound: int) -> torch.Tensor:
        return torch.randint(bound, (count,), generator=self._generator, device=self.words.device)


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    return (flat[start : start + _PIECE] for start in range(0, flat.numel(), _PIECE))


def _exponents(words: torch.Tensor) -> torch.Tensor:
    return ((words >> 7) & 0xFF).int()


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """Map sign and magnitude in the low 16 bits to an integer in the order of the values, and back."""
    return words ^ ((words >> 15) & 0x7FFF)


def _chances(counts: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Return the chance of a change by exponent for a wanted share of the words; NaN and infinity stay."""
    exponents = np.arange(256.0)
    finite = np.where(exponents < 255, 1.0, 0.0)
    chance, low, high = finite, -64.0, 320.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        chance = np.minimum(finite, np.exp2(middle - exponents) * finite)
        low, high = (middle, high) if counts @ chance < share * (counts @ finite) else (low, middle)
    return chance
