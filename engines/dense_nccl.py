"""Whole tensors in a few large broadcasts: for seeds and repairs, and as what sparse syncs are compared with.

The tensors' bits lie one after another on a tape, each from the next multiple of 16 bytes on, and the tape is cut
into slabs. Both sides compute the cuts from the sizes alone. Slabs are used in turn: the sender packs one while
the one before is under way, the receiver copies one out while those after it arrive.

Each slab is broadcast on a CUDA stream of its own, and the *thread* waits for that before it touches the slab. So the
stream that weights are read and written on never waits for a peer, and of a broadcast that failed nothing is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from deltacast.delta.bits import strided_words
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.overlap import overlaps_itself
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup

__all__ = ["DenseReceiver", "DenseSender", "Piece", "filled_bytes", "slab_cuts"]

_ALIGN: Final = 16  # what the widest vector loads of copy kernels need; torch's own allocations have it
_BATCHED_BYTES: Final = 1 << 20  # at a GPU's TB/s, copying less takes less time than launching it: share launches


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes that lies in one slab.

    Attributes:
        tensor: the tensor's number.
        start: its first byte, in the tensor's row-major bytes.
        offset: its first byte in the slab; a multiple of 16.
        num_bytes: how many; never 0.
    """

    tensor: int
    start: int
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """One past its last byte in the tensor."""
        return self.start + self.num_bytes


def slab_cuts(sizes: Sequence[int], slab_bytes: int) -> list[list[Piece]]:
    """Cut tensors into slabs.

    Args:
        sizes: bytes of each tensor, in order; empty ones have no piece.
        slab_bytes: bytes of a slab, a multiple of 16.

    Returns:
        The pieces of each slab, in order. No slab is empty.
    """
    slabs: list[list[Piece]] = []
    begin = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            slab, offset = divmod(begin + start, slab_bytes)
            if slab == len(slabs):
                slabs.append([])
            num_bytes = min(size - start, slab_bytes - offset)
            slabs[slab].append(Piece(tensor, start, offset, num_bytes))
            start += num_bytes
        begin += -(-size // _ALIGN) * _ALIGN
    return slabs


def filled_bytes(pieces: Sequence[Piece]) -> int:
    """Return how much of a slab these pieces of it fill, from its start on."""
    return pieces[-1].offset + pieces[-1].num_bytes


class _DenseEnd:
    """What both ends have: the group, and slabs of it that are used in turn.

    Attributes:
        slab_bytes: bytes of one slab.
        nbytes: bytes of all slabs, on the group's device, for as long as this object lives.
    """

    def __init__(self, group: PayloadGroup, slab_bytes: int = 256 << 20, num_slabs: int = 3) -> None:
        if slab_bytes <= 0 or slab_bytes % _ALIGN:
            raise InputError("bad slab size", expected=f"a positive multiple of {_ALIGN}", found=slab_bytes)
        if num_slabs < 1:
            raise InputError("bad number of slabs", expected="at least 1", found=num_slabs)
        self.slab_bytes, self.nbytes = slab_bytes, slab_bytes * num_slabs
        self._group = group
        self._slabs = [_Slab(group, slab_bytes) for _ in range(num_slabs)]

    def _slab(self, number: int) -> _Slab:
        return self._slabs[number % len(self._slabs)]


class DenseSender(_DenseEnd):
    """Rank 0: packs tensors and broadcasts them. One thread uses it.

    Args:
        group: met already. Any failure ends it; then make another group and sender.
        slab_bytes: bytes of a slab; the same on every rank.
        num_slabs: how many slabs to allocate; 3 keep one under way while one is packed and one waits.

    Raises:
        InputError: a slab size that is not a positive multiple of 16, or no slabs.
    """

    def send(self, tensors: Iterable[torch.Tensor], sizes: Sequence[int], deadline: Deadline) -> None:
        """Broadcast the bits of tensors. Collective; blocks until they have left.

        An iterable is consumed once, a slab's worth at a time, and nothing of it is held longer: temporaries may be
        yielded one by one. With CUDA its tensors are read on the current stream.

        Args:
            tensors: any dtypes, strides and devices; only read, and not to be written to before this returns.
            sizes: bytes of each, as every receiver has them.
            deadline: for all of it. With NCCL a peer that is gone shows when somebody calls the group's `abort`.

        Raises:
            InputError, DTypeError: a tensor without plain memory, or without addressable bits.
            TableError: a tensor of another size than announced, or another number of them.
            DeadlineError, TransportError: the payload did not leave.

        Before the first collective a sequence is checked whole, and the group stays usable. Whatever is raised later
        (all of it with an iterator, whatever the iterator itself raises included) has aborted the group.
        """
        views = _word_views(tensors, sizes)
        if isinstance(tensors, Sequence):
            views = iter(list(views))
        cuts = slab_cuts(sizes, self.slab_bytes)
        parts = _parts((piece for pieces in cuts for piece in pieces), views)
        try:
            for number, pieces in enumerate(cuts):
                slab = self._slab(number)
                slab.wait(deadline)
                _copy([(slab.part(piece), next(parts)) for piece in pieces])
                slab.post(pieces, deadline)
            next(parts, None)  # has the rest of the iterable looked at
            for slab in self._slabs:
                slab.wait(deadline)
        except BaseException:
            self._group.abort()
            raise


class DenseReceiver(_DenseEnd):
    """Rank 1 and up: takes what a `DenseSender` sends. One thread uses it; arguments and errors as there."""

    def receive(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int], deadline: Deadline) -> None:
        """Overwrite tensors with the sender's bits, in place. Collective; blocks until they are there.

        With CUDA they are written on the current stream. A tensor whose memory has gaps, or another order than its
        rows', is gathered in a copy of its own size first.

        Args:
            tensors: any dtypes, strides and devices; no two that share memory.
            sizes: bytes of each, as the sender has them.
            deadline: for all of it. With NCCL a peer that is gone shows when somebody calls the group's `abort`.

        Raises:
            InputError, DTypeError: a tensor without plain memory or addressable bits, a lazily conjugated one, or
                one whose elements share memory. Nothing was written, and the group is usable.
            TableError: a tensor of another size than announced, or another number of them; likewise.
            DeadlineError, TransportError: the payload did not come whole; each tensor holds the old bits, the new
                ones, or both. The group has been aborted.
        """
        landings = [_Landing(view, number) for number, view in enumerate(_word_views(tensors, sizes, lazy=False))]
        try:
            for slab, pieces in self._arrivals(sizes, deadline):
                _copy([(landings[piece.tensor].part(piece), slab.part(piece)) for piece in pieces])
                for piece in pieces:
                    landings[piece.tensor].settle(piece)
            for device in {self._group.device, *(tensor.device for tensor in tensors)}:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        except BaseException:
            self._group.abort()
            raise

    def drain(self, sizes: Sequence[int], deadline: Deadline) -> None:
        """Take a payload that is for other ranks, and keep nothing of it. Collective; blocks until it is through.

        Raises:
            DeadlineError, TransportError: as `receive`. The group has been aborted.
        """
        try:
            for _ in self._arrivals(sizes, deadline):
                pass
        except BaseException:
            self._group.abort()
            raise

    def _arrivals(self, sizes: Sequence[int], deadline: Deadline) -> Iterator[tuple[_Slab, list[Piece]]]:
        """Yield each slab once it is there; it is used again as soon as the next one is asked for."""
        cuts = slab_cuts(sizes, self.slab_bytes)
        ahead = len(self._slabs)
        for number, pieces in enumerate(cuts[:ahead]):
            self._slab(number).post(pieces, deadline)
        for number, pieces in enumerate(cuts):
            slab = self._slab(number)
            slab.wait(deadline)
            yield slab, pieces
            if number + ahead < len(cuts):
                slab.post(cuts[number + ahead], deadline)


class _Slab:
    """A buffer on the group's device and, with CUDA, the stream that its broadcasts are ordered on."""

    def __init__(self, group: PayloadGroup, num_bytes: int) -> None:
        self._group = group
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
        stream: Any = torch.cuda.Stream  # untyped in torch
        self._wire = stream(group.device) if group.device.type == "cuda" else None

    def part(self, piece: Piece) -> torch.Tensor:
        return self._bytes[piece.offset : piece.offset + piece.num_bytes]

    def post(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Broadcast what these pieces fill, once the current stream has reached this point."""
        deadline.left_s("the payload group")
        if self._wire is not None:
            self._wire.wait_stream(torch.cuda.current_stream(self._group.device))
        with self._on_wire():
            self._group.post([self._bytes[: filled_bytes(pieces)]], deadline)

    def wait(self, deadline: Deadline) -> None:
        """Block until this slab's broadcast, if there was one, is through."""
        with self._on_wire():
            self._group.wait(deadline)

    def _on_wire(self) -> AbstractContextManager[object]:
        return nullcontext() if self._wire is None else torch.cuda.stream(self._wire)


class _Landing:
    """Where one tensor's bytes arrive: in its own memory if that is row-major, else in a copy that is moved there."""

    __slots__ = ("_rows", "_view")

    def __init__(self, view: torch.Tensor, number: int) -> None:
        if overlaps_itself(view):
            raise InputError(
                "an expanded or overlapping tensor cannot be written in place",
                parameter=_name(number),
                hint="Pass its base, or a contiguous copy.",
            )
        self._view = view
        self._rows = view if view.is_contiguous() else None

    def part(self, piece: Piece) -> torch.Tensor:
        if self._rows is None:
            self._rows = torch.empty(self._view.shape, dtype=self._view.dtype, device=self._view.device)
        return _flat_bytes(self._rows)[piece.start : piece.end]

    def settle(self, piece: Piece) -> None:
        """Move the bits to their place if `piece`, which has been copied, was the last one."""
        if self._rows is not None and self._rows is not self._view and piece.end == self._view.nbytes:
            self._view.copy_(self._rows)
            self._rows = None


def _word_views(tensors: Iterable[torch.Tensor], sizes: Sequence[int], *, lazy: bool = True) -> Iterator[torch.Tensor]:
    """View tensors as words, one by one, and hold them to their sizes.

    With `lazy`, conjugated and negated views are resolved, which copies them; else they are refused.
    """
    for number, (tensor, size) in enumerate(itertools.zip_longest(tensors, sizes)):
        if tensor is None or size is None:
            found = f"{number}" if tensor is None else f"more than {number}"
            raise TableError("another number of tensors than announced", expected=len(sizes), found=found)
        resolved = tensor.detach().resolve_conj().resolve_neg() if lazy else tensor
        view = strided_words(resolved, name=_name(number))
        if view.nbytes != size:
            raise TableError(
                "a tensor of another size than announced",
                parameter=_name(number),
                expected=f"{size} bytes",
                found=f"{view.nbytes} bytes",
            )
        yield view


def _name(number: int) -> str:
    return f"tensor {number}"


def _parts(pieces: Iterable[Piece], views: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each piece's bytes; takes every view once and holds only the one at hand."""
    tensor, flat = -1, torch.empty(0, dtype=torch.uint8)
    for piece in pieces:
        while tensor < piece.tensor:  # empty tensors have no piece
            tensor, flat = tensor + 1, _flat_bytes(next(views).contiguous())
        yield flat[piece.start : piece.end]
    for _ in views:
        pass


def _flat_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View a row-major tensor as flat bytes. `view(-1)` would keep the odd stride of a lone element."""
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy bytes to the first of each pair from the second; copies from and to the host have been made on return."""
    batch: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        if source.numel() <= _BATCHED_BYTES and source.device == target.device:
            batch.append((target, source))
        else:
            target.copy_(source)
    if batch:
        torch.ops.aten._foreach_copy_([target for target, _ in batch], [source for _, source in batch])
