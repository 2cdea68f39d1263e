"""A group of parameters that one launch handles, and the descriptor table that the kernels read.

Blocks of 65,536 words restart at each parameter and are numbered through the group; parameter `i` has blocks
`first_blocks[i]` to `first_blocks[i + 1]`. Everything else (diff, apply, audit) takes a range of block numbers, so a
group of many gigabytes is worked off in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import strided_words
from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.kernels.key_tables import KeyTables

__all__ = ["BLOCK_WORDS", "ParamGroup"]

BLOCK_WORDS = 65536
_MAX_BLOCKS = 2**31 - 1


class ParamGroup:
    """Parameters of one word width on one device, each with its baseline and perhaps its new bits.

    The group holds the tensors, whose memory must stay where it is (`data_ptr()`); writes to them are seen. It owns
    its tables: 32 bytes per block, 8 bytes per 1024 units of the longest parameter.

    Args:
        baseline: what diffs start from, and what apply, undo and audit work on. Any dtypes whose words have one width
            (`by_word_bytes` sorts others); contiguous, on any one device; aligned to their element only is enough,
            16 bytes is faster. Complex tensors are twice as many words.
        new: the new tensors, of the same dtypes, shapes and device; None if the group never diffs.
        names: what error messages call the parameters; by default their numbers.

    Attributes:
        device: where all tensors are.
        word_bytes: 1, 2, 4 or 8.
        baseline, new: the flat words (integer views) of each parameter; `new` is `baseline` where there is none.
        has_new: whether the group can diff.
        num_words: words of each parameter.
        first_blocks: int64 [num_params + 1] on the host.
        blocks: int64 [num_blocks, 4] on the device: address of the new words, of the baseline's,
            parameter << 32 | number of words, first row of outer keys.
        keys: the key tables.

    Raises:
        InputError: no parameters, or one that is not contiguous, has no plain memory, or is on another device.
        DTypeError: a dtype without addressable bits.
        TableError: words of different widths, or a new tensor of another dtype or shape than its baseline.
    """

    def __init__(
        self,
        baseline: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor] | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        if not baseline:
            raise InputError("a group without parameters")
        names = [str(number) for number in range(len(baseline))] if names is None else names
        if len(names) != len(baseline) or (new is not None and len(new) != len(baseline)):
            raise InputError("lists of different lengths", expected=len(baseline), found=f"{names}, {new and len(new)}")
        self.device = baseline[0].device
        self.word_bytes = dtype_of(baseline[0].dtype, name=names[0]).word_bytes
        self.has_new = new is not None
        self.baseline = tuple(self._words(tensor, name) for tensor, name in zip(baseline, names, strict=True))
        self.new = self.baseline
        if new is not None:
            for old, tensor, name in zip(baseline, new, names, strict=True):
                _check_same(old, tensor, name)
            self.new = tuple(self._words(tensor, name) for tensor, name in zip(new, names, strict=True))
        self.num_words = tuple(words.numel() for words in self.baseline)
        self.first_blocks: NDArray[np.int64] = np.zeros(len(baseline) + 1, np.int64)
        np.cumsum([-(-count // BLOCK_WORDS) for count in self.num_words], out=self.first_blocks[1:])
        if self.num_blocks > _MAX_BLOCKS:
            raise InputError("too many blocks for one group", expected=f"at most {_MAX_BLOCKS}", found=self.num_blocks)
        rows_per_block = BLOCK_WORDS * self.units_per_word // 1024
        self.blocks = torch.from_numpy(self._table(rows_per_block)).to(self.device)
        self.keys = KeyTables.on(self.device, int(np.diff(self.first_blocks).max()) * rows_per_block)

    @property
    def num_params(self) -> int:
        """Parameters in the group."""
        return len(self.baseline)

    @property
    def num_blocks(self) -> int:
        """Blocks in the group."""
        return int(self.first_blocks[-1])

    @property
    def units_per_word(self) -> int:
        """Fingerprint units in a word."""
        return (self.word_bytes + 1) // 2

    @property
    def torch_word(self) -> torch.dtype:
        """The integer dtype of a word."""
        return self.baseline[0].dtype

    def block_range(self, first_block: int, num_blocks: int | None) -> tuple[int, int]:
        """Check a range of blocks and return `(first, number)`; None means all that follow.

        Raises:
            InputError: the range does not lie in the group.
        """
        count = self.num_blocks - first_block if num_blocks is None else num_blocks
        if not 0 <= first_block <= first_block + count <= self.num_blocks:
            raise InputError(
                "no such blocks", expected=f"in [0, {self.num_blocks})", found=f"{first_block} and {num_blocks} more"
            )
        return first_block, count

    def _words(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.device != self.device:
            raise InputError("a tensor on another device", parameter=name, expected=self.device, found=tensor.device)
        if not tensor.is_contiguous():
            raise InputError("a tensor that is not contiguous", parameter=name, hint="Pass tensor.contiguous().")
        found = dtype_of(tensor.dtype, name=name).word_bytes
        if found != self.word_bytes:
            raise TableError("words of another width", parameter=name, expected=self.word_bytes, found=found)
        return strided_words(tensor, name=name).view(-1)

    def _table(self, rows_per_block: int) -> NDArray[np.int64]:
        """Build `blocks` on the host."""
        per_param = np.diff(self.first_blocks)
        param = np.repeat(np.arange(self.num_params, dtype=np.int64), per_param)
        number = np.arange(self.num_blocks, dtype=np.int64) - self.first_blocks[param]
        words = np.array(self.num_words, np.int64)[param] - number * BLOCK_WORDS
        step = number * (BLOCK_WORDS * self.word_bytes)
        new, baseline = (
            np.array([words.data_ptr() for words in side], np.uint64).view(np.int64)[param] + step
            for side in (self.new, self.baseline)
        )
        size = param << 32 | np.minimum(words, BLOCK_WORDS)
        return np.stack([new, baseline, size, number * rows_per_block], axis=1)


def _check_same(old: torch.Tensor, new: torch.Tensor, name: str) -> None:
    if new.dtype != old.dtype or new.shape != old.shape:
        raise TableError(
            "a tensor changed its dtype or shape",
            parameter=name,
            expected=f"{old.dtype}{list(old.shape)}",
            found=f"{new.dtype}{list(new.shape)}",
        )
