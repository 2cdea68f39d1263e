"""A group of parameters that one launch handles.

Blocks of 65,536 words restart at each parameter and are numbered through the group. Everything else (diff, apply,
audit) takes a range of block numbers, so a group of many gigabytes is worked off in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import strided_words
from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.kernels.block_table import BASELINE, BLOCK_WORDS, NEW, BlockTable, key_rows_per_block
from deltacast.delta.kernels.key_tables import KeyTables

__all__ = ["ParamGroup"]


class ParamGroup:
    """Parameters of one word width whose kernels run on one device.

    The group holds the tensors, whose memory must stay where it is (`data_ptr()`); writes to them are seen. It owns
    its table (32 bytes per block) and, unless they are given, its keys (8 bytes per 1024 units of the longest
    parameter).

    New tensors may be named at once or, one by one and each round elsewhere, by `point_new`. A baseline that cannot
    stay on the device is *staged*: its owner copies runs of blocks to the device and names them by `point_baseline`;
    the operations then accept blocks of the run that was named last.

    Args:
        baseline: what diffs start from, and what apply, undo and audit work on. Any dtypes whose words have one width
            (`dtypes.DType.word_bytes`); contiguous, on any one device; aligned to their element only is enough,
            16 bytes is faster. Complex tensors are twice as many words.
        new: the new tensors, as if given to `point_new` in order; None if they come later or never.
        device: where the kernels run, if the baseline is staged; None: it is used where it is.
        keys: key tables on that device with at least `key_rows` rows, to share among groups.
        names: what error messages call the parameters; by default their numbers.

    Attributes:
        device: where the kernels run.
        staged: whether the baseline is.
        word_bytes: 1, 2, 4 or 8.
        baseline: the flat words (integer views) of each parameter, where the caller keeps them.
        num_words: words of each parameter.
        table: where each block is; `table.blocks` is what the kernels read.
        keys: the key tables.

    Raises:
        InputError: no parameters, one that is not contiguous, has no plain memory, or is on another device, or keys
            that do not fit.
        DTypeError: a dtype without addressable bits.
        TableError: words of different widths, or a new tensor of another dtype or shape than its baseline.
    """

    def __init__(
        self,
        baseline: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
        keys: KeyTables | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not baseline:
            raise InputError("a group without parameters")
        names = [str(number) for number in range(len(baseline))] if names is None else names
        if len(names) != len(baseline) or (new is not None and len(new) != len(baseline)):
            raise InputError("lists of different lengths", expected=len(baseline), found=f"{names}, {new and len(new)}")
        self.names = tuple(names)
        home = baseline[0].device
        self.staged = device is not None
        self.device = torch.empty(0, device=device).device if device is not None else home
        self.word_bytes = dtype_of(baseline[0].dtype, name=names[0]).word_bytes
        self._metas = tuple((tensor.dtype, tensor.shape) for tensor in baseline)
        self.baseline = tuple(self._words(tensor, name, home) for tensor, name in zip(baseline, names, strict=True))
        self.num_words = tuple(words.numel() for words in self.baseline)
        self.table = BlockTable(self.num_words, self.word_bytes, self.device)
        self.keys = self._fitting_keys(keys)
        self._homes = np.concatenate([self.table.addresses(i, w.data_ptr()) for i, w in enumerate(self.baseline)])
        self._run: tuple[int, int, torch.Tensor] | None = None
        self._new: list[torch.Tensor | None] = [None] * len(baseline)
        self._new_address = [-1] * len(baseline)  # of where the table says that new words are
        if not self.staged:
            self.table.point(BASELINE, 0, self._homes)
        for param, tensor in enumerate(new or ()):
            self.point_new(param, tensor)

    @property
    def num_params(self) -> int:
        """Parameters in the group."""
        return len(self.baseline)

    @property
    def num_blocks(self) -> int:
        """Blocks in the group."""
        return int(self.first_blocks[-1])

    @property
    def first_blocks(self) -> NDArray[np.int64]:
        """The number of each parameter's first block, and of the end; int64 [num_params + 1] on the host."""
        return self.table.first_blocks

    @property
    def units_per_word(self) -> int:
        """Fingerprint units in a word."""
        return (self.word_bytes + 1) // 2

    @property
    def torch_word(self) -> torch.dtype:
        """The integer dtype of a word."""
        return self.baseline[0].dtype

    @property
    def key_rows(self) -> int:
        """Rows of outer keys that the longest parameter takes."""
        return int(np.diff(self.first_blocks).max()) * key_rows_per_block(self.word_bytes)

    @property
    def nbytes(self) -> int:
        """Device memory of the table; tensors and keys are counted by those who own them."""
        return self.table.blocks.nbytes

    @staticmethod
    def bytes_for(num_words: Sequence[int]) -> int:
        """Return the `nbytes` of a group of parameters with so many words."""
        return sum(-(-count // BLOCK_WORDS) for count in num_words) * 32

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

    def params_of(self, first_block: int, num_blocks: int) -> range:
        """Return the parameters that have words in a range of blocks, perhaps with empty ones between them."""
        begin = int(np.searchsorted(self.first_blocks, first_block, side="right")) - 1
        end = int(np.searchsorted(self.first_blocks, first_block + num_blocks, side="left"))
        return range(begin, end)

    def point_new(self, param: int, tensor: torch.Tensor) -> None:
        """Say where a parameter's new bits are, for diffs launched from now on; cheap, waits for nothing.

        The group keeps the tensor until `release_new`. Its bits must be there when the diff runs: made on the same
        stream, or waited for. It may be pointed again, elsewhere, between the diffs of two chunks.

        Args:
            param: the parameter's number.
            tensor: of the baseline's dtype and shape, contiguous, on the group's device.

        Raises:
            InputError: no such parameter, or a tensor that is not contiguous, has no plain memory, or is elsewhere;
                the parameter stays as it was.
            TableError: another dtype or shape than the baseline's; likewise.
        """
        if not 0 <= param < self.num_params:
            raise InputError("no such parameter", expected=f"in [0, {self.num_params})", found=param)
        if (tensor.dtype, tensor.shape) != self._metas[param]:
            raise TableError(
                "a tensor changed its dtype or shape",
                parameter=self.names[param],
                expected=_described(*self._metas[param]),
                found=_described(tensor.dtype, tensor.shape),
            )
        if not _is_plain(tensor, self.device):
            self._words(tensor, self.names[param], self.device)  # names what is wrong
        self._new[param] = tensor
        self._new_address[param] = tensor.data_ptr()
        self.table.point_param(NEW, param, tensor.data_ptr())

    def point_again(self, param: int, tensor: torch.Tensor) -> bool:
        """Point a parameter where it was pointed last, if that is where the tensor is; much faster than `point_new`.

        Returns:
            False, and nothing has changed, if it is not, or is not plain enough to tell at a glance.
        """
        same = tensor.data_ptr() == self._new_address[param] and (tensor.dtype, tensor.shape) == self._metas[param]
        if not same or not tensor.is_contiguous() or tensor.is_complex() or tensor.device != self.device:
            return False
        self._new[param] = tensor
        return True

    def release_new(self, params: Iterable[int] | None = None) -> None:
        """Let go of new tensors, by default of all; diffs refuse these parameters until they are pointed again.

        Diffs that were launched need no more of the group, but of the memory: torch's allocator hands it out again in
        the order of the stream that it was made on; on any other, wait first.
        """
        for param in range(self.num_params) if params is None else params:
            self._new[param] = None

    def baseline_run(self, first_block: int, num_blocks: int) -> torch.Tensor:
        """Return the words of consecutive blocks as they lie in the baseline's memory, gaps between them included.

        This is what a staged baseline's owner copies to the device, in one transfer (and back, once changed).

        Returns:
            Flat words [n] on the baseline's device, sharing its memory.

        Raises:
            InputError: no such blocks, or they do not lie in one allocation in the order of the parameters.
        """
        first_block, num_blocks = self.block_range(first_block, num_blocks)
        if num_blocks == 0:
            return self.baseline[0][:0]
        begins = self._homes[first_block : first_block + num_blocks]
        ends = begins + self.table.num_words[first_block : first_block + num_blocks] * self.word_bytes
        words = self.baseline[self.params_of(first_block, 1)[0]]
        memory = words.untyped_storage()
        if (begins[1:] < ends[:-1]).any() or ends[-1] > memory.data_ptr() + memory.nbytes():
            raise InputError(
                "a baseline that cannot be staged in one transfer",
                found=f"blocks {first_block} to {first_block + num_blocks - 1} apart in memory",
                hint="Make the parameters views of one buffer, in order, at multiples of 16 bytes.",
            )
        size, offset = (int(ends[-1] - begins[0]), int(begins[0]) - memory.data_ptr())
        return words.as_strided((size // self.word_bytes,), (1,), offset // self.word_bytes)

    def point_baseline(self, first_block: int, num_blocks: int, words: torch.Tensor) -> None:
        """Say where a staged baseline's blocks are, for operations launched from now on; waits for nothing.

        Only the run that was named last can be worked on; operations launched before keep the one that they had, so
        two buffers may take turns. The group keeps the last buffer.

        Args:
            first_block: the group's number of the first block.
            num_blocks: how many.
            words: flat words on the group's device; they begin with those of `baseline_run(first_block, num_blocks)`.

        Raises:
            InputError: the baseline is not staged, no such blocks, none that lie in one run, or another dtype, size
                or device; the run stays as it was.
        """
        if not self.staged:
            raise InputError("a baseline that is used where it is", hint="Make the group with device=...")
        size = self.baseline_run(first_block, num_blocks).numel()
        fits = words.dtype == self.torch_word and words.device == self.device and words.dim() == 1
        if not fits or not words.is_contiguous() or words.numel() < size:
            raise InputError(
                "unfit memory for a run of blocks",
                expected=f"{self.torch_word} [{size}], contiguous, on {self.device}",
                found=f"{words.dtype} {list(words.shape)} on {words.device}",
            )
        self._run = (first_block, num_blocks, words)
        homes = self._homes[first_block : first_block + num_blocks]
        if num_blocks:
            self.table.point(BASELINE, first_block, homes - homes[0] + words.data_ptr())

    def check_pointed(self, first_block: int, num_blocks: int, *, new: bool) -> None:
        """Raise unless a range of blocks can be worked on now; `new`: unless it can be diffed.

        Raises:
            InputError: a staged baseline whose last run does not hold the blocks, or no new tensor.
        """
        if self.staged and num_blocks:
            first, count, _ = self._run or (0, 0, None)
            if not first <= first_block <= first_block + num_blocks <= first + count:
                raise InputError(
                    "blocks of a staged baseline that are not on the device",
                    expected=f"blocks {first_block} to {first_block + num_blocks - 1}",
                    found=f"blocks {first} to {first + count - 1}" if count else "none",
                    hint="Call point_baseline.",
                )
        for param in self.params_of(first_block, num_blocks) if new else ():
            if self._new[param] is None and self.num_words[param]:
                raise InputError("no new tensor to diff", parameter=self.names[param], hint="Call point_new.")

    def upload(self, first_block: int, num_blocks: int) -> None:
        """Tell the device where a range of blocks is; every operation does so before it launches (`BlockTable`)."""
        self.table.upload(first_block, num_blocks)

    def new_words(self, param: int) -> torch.Tensor:
        """Return a parameter's new words, flat; it must have been pointed."""
        tensor = self._new[param]
        assert tensor is not None
        return strided_words(tensor).view(-1)

    def baseline_words(self, param: int, first_word: int, end_word: int) -> torch.Tensor:
        """Return baseline words, from the start of a block to the end of one, where the kernels find them."""
        if self._run is None:
            return self.baseline[param][first_word:end_word]
        first_block, _, words = self._run
        block = int(self.first_blocks[param]) + first_word // BLOCK_WORDS
        at = int(self._homes[block] - self._homes[first_block]) // self.word_bytes
        return words[at : at + end_word - first_word]

    def _words(self, tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
        if tensor.device != device:
            raise InputError("a tensor on another device", parameter=name, expected=device, found=tensor.device)
        if not tensor.is_contiguous():
            raise InputError("a tensor that is not contiguous", parameter=name, hint="Pass tensor.contiguous().")
        found = dtype_of(tensor.dtype, name=name).word_bytes
        if found != self.word_bytes:
            raise TableError("words of another width", parameter=name, expected=self.word_bytes, found=found)
        return strided_words(tensor, name=name).view(-1)

    def _fitting_keys(self, keys: KeyTables | None) -> KeyTables:
        if keys is None:
            return KeyTables.on(self.device, self.key_rows)
        if keys.outer.device != self.device or keys.outer.numel() < self.key_rows:
            raise InputError(
                "key tables of another group",
                expected=f"{self.key_rows} rows on {self.device}",
                found=f"{keys.outer.numel()} rows on {keys.outer.device}",
            )
        return keys


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Say what `ParamGroup._words` says of a tensor of a known dtype, in a fifth of the time: 0.7 us."""
    flat = tensor.layout == torch.strided and not tensor.is_nested and tensor.is_contiguous()
    return flat and tensor.device == device and not tensor.is_conj() and not tensor.is_neg()


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype}{list(shape)}"
