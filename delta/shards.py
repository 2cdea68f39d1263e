"""What one rank of a server holds of a checkpoint: pieces of its parameters, in the very memory that it runs with.

The ranks of a server (tensor parallel ranks, say) hold one model together. What a rank's own bits should be it can tell
alone, by a running fingerprint for each piece, so that audits need nobody. What a whole parameter's fingerprint is
they can only tell together: `shard_cover.py` adds up what each of them counts, `shard_apply.py` proves an update by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.bits import Words
from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError, StateError, TableError
from deltacast.delta.fingerprint import Box, add, shard_fingerprint, words_fingerprint
from deltacast.delta.memory import WordMemory
from deltacast.delta.pieces import Piece, View
from deltacast.delta.scan import Scan
from deltacast.delta.state import Damage, StateLabel, WeightState
from deltacast.delta.table import ParameterTable, ParamMeta
from deltacast.delta.threads import in_order

__all__ = ["Claim", "Shard", "ShardLabel", "ShardState"]

_RUN_WORDS: Final = 1 << 16
_BLOCK_WORDS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """What a rank says of one piece that it holds.

    Attributes:
        place: the parameter's, in the table.
        shape: the parameter's shape, cut anew (`View.shape`).
        box: `[lo, hi)` per dim of `shape`.
        partial: the piece's share of the parameter's fingerprint.
    """

    place: int
    shape: tuple[int, ...]
    box: Box
    partial: int


class Shard(NamedTuple):
    """One piece, addressed.

    Attributes:
        place: the parameter's, in the table.
        slot: the piece's own, among the running fingerprints of pieces.
        piece: its box, and positions in it: flat, row-major, in words.
        memory: its words.
    """

    place: int
    slot: int
    piece: Piece
    memory: WordMemory

    def cut(self, words: Words) -> Words:
        """Return the box of a whole parameter's words, flat; shares memory where the box is one run of it."""
        box = tuple(slice(low, high) for low, high in self.piece.box)
        return np.ascontiguousarray(words.reshape(self.piece.shape)[box]).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class ShardLabel(StateLabel):
    """What a shard state says of its words at one time.

    Attributes:
        is_known: whether the parameters' fingerprints are known.
        pieces: what it says of its pieces.
    """

    is_known: bool
    pieces: StateLabel


class ShardState(WeightState):
    """A state of whole parameters of which only pieces are here.

    `table`, `fingerprints` and `digest` are of the whole parameters, as in any `WeightState`. The fingerprints are what
    all ranks agreed on (`adopt`), or what an update proved; until then `digest` is empty. `audit` compares the pieces
    with running fingerprints of their own, which count positions within the piece.

    Args:
        metas: the checkpoint's parameters, each storage once; the same on every rank.
        views: name -> what this rank holds of it, each element once; live memory, on any device; a 0-d parameter cut
            as (1,). A parameter without any is other ranks' alone.
        aliases: alias -> name, of tied parameters.
        threads: for scans on the host.

    Attributes:
        shards: the pieces, in table order.

    Raises:
        TableError: views of a parameter that is not in the table, or of an alias.
        InputError, DTypeError: a view is not of its parameter, is complex, or shares memory with another.
    """

    def __init__(
        self,
        metas: Iterable[ParamMeta],
        views: Mapping[str, Sequence[View]],
        *,
        aliases: Mapping[str, str] | None = None,
        threads: int = 1,
    ) -> None:
        self.table = ParameterTable(metas, aliases)
        unknown = next((name for name in views if name in self.table.aliases or name not in self.table), None)
        if unknown is not None:
            raise TableError("a view of what is no parameter of the table", parameter=unknown)
        held: list[tuple[str, int, View]] = []
        for place, meta in enumerate(self.table):
            for number, view in enumerate(views.get(meta.name, ())):
                _check(meta, view)
                held.append((f"{meta.name}[{number}]", place, view))
        self._pieces = WeightState({name: view.tensor for name, _, view in held}, threads=threads)
        self.shards = tuple(self._shard(*item) for item in held)
        self._starts = np.searchsorted([place for _, place, _ in held], np.arange(len(self.table) + 1)).tolist()
        self.memories = ()  # of whole parameters
        self.version: int | None = None
        self.threads, self._begun = self._pieces.threads, None
        self.audited_versions = np.full(len(self.table), -1, np.int64)
        self.fingerprints = np.zeros(len(self.table), np.uint64)
        self.is_known = False

    @property
    def digest(self) -> str:
        """State digest of the whole parameters; empty while their fingerprints are not known."""
        return super().digest if self.is_known else ""

    @property
    def piece_fingerprints(self) -> NDArray[np.uint64]:
        """Running fingerprints of the pieces, uint64 by `Shard.slot`, a copy."""
        return self._pieces.fingerprints.copy()

    def of(self, place: int) -> tuple[Shard, ...]:
        """Return the pieces of the parameter at a place of the table."""
        return self.shards[self._starts[place] : self._starts[place + 1]]

    def claims(self) -> list[Claim]:
        """Say what is held, from the bits in memory now, in the order of `shards`. Reads all of it, on the host."""

        def claim(shard: Shard) -> Claim:
            return Claim(shard.place, shard.piece.shape, shard.piece.box, _partial(shard))

        return list(in_order(claim, self.shards, self.threads))

    def adopt(self, fingerprints: NDArray[np.uint64]) -> None:
        """Take the parameters' fingerprints, uint64 in table order, from what all ranks' pieces add up to; copied."""
        self.fingerprints[:] = fingerprints
        self.is_known = True

    def move(self, version: int, fingerprints: NDArray[np.uint64], pieces: NDArray[np.uint64]) -> None:
        """Move to a version whose words are written: parameters' and pieces' fingerprints together. As `advance`.

        Args:
            version: what the words now are.
            fingerprints: uint64 [parameters], in table order; copied.
            pieces: uint64 by `Shard.slot`; copied.
        """
        self.advance(version, fingerprints)
        self._pieces.fingerprints[:] = pieces
        self.is_known = True

    def memory(self, name: str) -> WordMemory:
        """Refuse: no whole parameter is here.

        Raises:
            StateError: always.
        """
        raise StateError("a rank holds pieces of parameters only", parameter=name, hint="Use `shards`.")

    def rescan(self) -> None:
        """Set the pieces' fingerprints from the bits that are there; what the parameters' are is not known any more."""
        self._pieces.rescan()
        self.fingerprints[:] = 0
        self.is_known = False

    def label(self) -> ShardLabel:
        """Return what the state says of its words now."""
        label = super().label()
        return ShardLabel(
            label.version, label.fingerprints, label.audited_versions, self.is_known, self._pieces.label()
        )

    def restore(self, label: StateLabel) -> None:
        """Say again what was said then; whoever calls it has put the words back."""
        assert isinstance(label, ShardLabel)
        super().restore(label)
        self._pieces.restore(label.pieces)
        self.is_known = label.is_known

    def begin_rolling(self, step: int, of: int) -> None:
        """Nothing: `audit_rolling` does it all."""

    def prepare_rolling(self, of: int) -> None:
        """Nothing: likewise."""

    def _audit_places(self, places: Sequence[int], begun: Scan | None = None) -> list[Damage]:
        del begun  # there never is one
        owners = {shard.piece.runtime: self.table.metas[place].name for place in places for shard in self.of(place)}
        damage: dict[str, Damage] = {}
        for found in self._pieces.audit(owners):
            damage.setdefault(owners[found.parameter], replace(found, parameter=owners[found.parameter]))
        if not damage:
            self._mark_audited(places)
        return list(damage.values())

    def _shard(self, name: str, place: int, view: View) -> Shard:
        _check(self.table.metas[place], view)
        strides = tuple(math.prod(view.tensor.shape[dim + 1 :]) for dim in range(view.tensor.ndim))
        piece = Piece(name, view.shape, view.box, 0, strides)
        return Shard(place, self._pieces.table.index(name), piece, self._pieces.memory(name))


def _partial(shard: Shard) -> int:
    """Return a piece's share of the parameter's fingerprint, from the bits in memory now.

    Columns of a matrix are many short runs, each of which costs as much as a row of `_RUN_WORDS`. It is faster to sum
    whole rows in which zeros stand for what is elsewhere: a zero adds nothing.
    """
    (shape, box), extents = (shard.piece.shape, shard.piece.box), shard.piece.extents
    row_words, run = math.prod(shape[1:]), 1
    for extent, size in zip(reversed(extents), reversed(shape), strict=True):
        run *= extent
        if extent != size:
            break
    if not run or math.prod(extents) // run * _RUN_WORDS <= extents[0] * row_words:
        return shard_fingerprint(shard.memory.tensor, shape, box)
    words, step, total = shard.memory.read_all().reshape(extents), max(1, _BLOCK_WORDS // row_words), 0
    inner = tuple(slice(low, high) for low, high in box[1:])
    for first in range(0, extents[0], step):
        rows = words[first : first + step]
        whole = np.zeros((len(rows), *shape[1:]), words.dtype)
        whole[(slice(None), *inner)] = rows
        total = add(total, words_fingerprint(whole.reshape(-1), (box[0][0] + first) * row_words))
    return total


def _check(meta: ParamMeta, view: View) -> None:
    """Raise unless a view is a box of its parameter."""
    dtype, extents = dtype_of(view.tensor.dtype, name=meta.name), tuple(high - low for low, high in view.box)
    fits = len(extents) == len(view.shape) > 0 and math.prod(view.shape) == meta.numel
    fits = fits and all(0 <= low <= high <= n for (low, high), n in zip(view.box, view.shape, strict=True))
    if dtype.name != meta.dtype or not fits or tuple(view.tensor.shape) != extents:
        raise InputError("a view that is no box of its parameter", parameter=meta.name,
                         expected=f"{meta.dtype}{list(meta.shape)}, cut as {list(view.shape)}",
                         found=f"{dtype.name}{list(view.tensor.shape)} for box {view.box}")  # fmt: skip
    if dtype.words_per_element != 1:
        raise InputError("complex parameters cannot be held in pieces", parameter=meta.name, found=meta.dtype)
