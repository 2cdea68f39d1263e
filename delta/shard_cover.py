"""Which pieces of which ranks make up each parameter exactly once, and sums over such a cover.

Linear fingerprints add up over disjoint pieces. A piece that several ranks hold (norms, KV heads) counts once, for the
lowest of them; what the others say of it must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.boxes import check_disjoint
from deltacast.delta.errors import CorruptionError, InputError, PatchError
from deltacast.delta.fingerprint import format_sum
from deltacast.delta.pieces import Lattice, Piece, disjoint
from deltacast.delta.shards import Claim
from deltacast.delta.table import ParameterTable

__all__ = ["Cover"]

U64: TypeAlias = NDArray[np.uint64]
I64: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class _Box:
    """A box that is held, and by which ranks, ascending."""

    claim: Claim
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Held:
    """One rank's pieces, in the order of its claims.

    Attributes:
        places: int64, of their parameters.
        boxes: int64 number of the box that each is.
        leads: whether it is the one that counts.
    """

    places: I64
    boxes: I64
    leads: NDArray[np.bool_]


class Cover:
    """The pieces of a server's ranks, checked: per parameter they cover each element, in boxes that are apart or equal.

    Args:
        table: the parameters; the same on every rank.
        claims: of each rank, by rank, each in table order.

    Raises:
        InputError: two boxes of a parameter overlap without being equal, or some of it is nowhere. It says which ranks
            hold any of it.
    """

    def __init__(self, table: ParameterTable, claims: Sequence[Sequence[Claim]]) -> None:
        self._table, self._claims = table, claims
        by_place: list[dict[Lattice, _Box]] = [{} for _ in table]
        numbers: dict[tuple[int, Lattice], int] = {}
        held = []
        for rank, mine in enumerate(claims):
            boxes, leads = [], []
            for claim in mine:
                lattice = _lattice(claim)
                numbers.setdefault((claim.place, lattice), len(numbers))
                box = by_place[claim.place].setdefault(lattice, _Box(claim))
                boxes.append(numbers[claim.place, lattice])
                leads.append(not box.ranks)
                box.ranks.append(rank)
            places = np.array([claim.place for claim in mine], np.int64)
            held.append(_Held(places, np.array(boxes, np.int64), np.array(leads, np.bool_)))
        for place, found in enumerate(by_place):
            _check_parameter(table, place, found)
        self._held, self._num_boxes = held, len(numbers)

    def totals(self) -> U64:
        """Return the parameters' fingerprints, uint64 in table order, as the claims add up.

        Raises:
            CorruptionError: two ranks hold other bits of one box; it names them and the parameter.
        """
        partials = [np.array([[claim.partial] for claim in mine], np.uint64).reshape(-1, 1) for mine in self._claims]
        totals: U64 = self.add_up(np.arange(len(self._table)), partials)[:, 0]
        return totals

    def add_up(self, places: I64, sums: Sequence[U64]) -> U64:
        """Add up sums over each parameter's cover.

        Args:
            places: int64, ascending: the parameters that the sums are of.
            sums: by rank: uint64 [that rank's pieces of these parameters, in the order of its claims; columns].

        Returns:
            uint64 [places, columns], modulo 2^64.

        Raises:
            InputError: a rank's sums are of another number of pieces.
            CorruptionError: as `totals`.
        """
        columns, changed = sums[0].shape[1], np.zeros(len(self._table), np.bool_)
        changed[places] = True
        boxes = np.zeros((self._num_boxes, columns), np.uint64)
        totals = np.zeros((len(self._table), columns), np.uint64)
        for rank, (held, mine) in enumerate(zip(self._held, sums, strict=True)):
            asked = np.flatnonzero(changed[held.places])
            if mine.shape != (asked.size, columns):
                raise InputError(f"rank {rank} of this server tells of other pieces than it holds",
                                 expected=(asked.size, columns), found=mine.shape)  # fmt: skip
            led = held.leads[asked]
            boxes[held.boxes[asked[led]]] = mine[led]
            np.add.at(totals, held.places[asked[led]], mine[led])
            differs = np.flatnonzero((boxes[held.boxes[asked]] != mine).any(axis=1))
            if differs.size:
                raise self._other_bits(rank, int(asked[differs[0]]), boxes, mine[differs[0]])
        return totals[places]

    def _other_bits(self, rank: int, number: int, boxes: U64, found: U64) -> CorruptionError:
        box, place = int(self._held[rank].boxes[number]), int(self._held[rank].places[number])
        first = next(other for other, held in enumerate(self._held) if (held.boxes[held.leads] == box).any())
        return CorruptionError(
            f"ranks {first} and {rank} of this server hold other bits of the same piece",
            parameter=self._table.metas[place].name,
            expected=" ".join(format_sum(value) for value in boxes[box].tolist()),
            found=" ".join(format_sum(value) for value in found.tolist()),
        )


def _lattice(claim: Claim) -> Lattice:
    """Return the elements of a box in a form that is one for all cuts of the parameter."""
    here = Piece("", claim.shape, claim.box, 0, ()).here
    if here.numel == 0:
        return Lattice(0, (0,), (1,))
    dims: list[tuple[int, int]] = []
    for extent, stride in zip(here.extents, here.strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == stride * extent:  # runs on
            extent *= dims.pop()[0]  # noqa: PLW2901 - the dims are one
        dims.append((extent, stride))
    return Lattice(here.offset, tuple(extent for extent, _ in dims), tuple(stride for _, stride in dims))


def _check_parameter(table: ParameterTable, place: int, found: Mapping[Lattice, _Box]) -> None:
    meta, boxes = table.metas[place], [box for lattice, box in found.items() if lattice.numel]
    count = sum(lattice.numel for lattice in found)
    if count == meta.numel and _apart(meta.name, boxes):
        return
    ranks = sorted({rank for box in boxes for rank in box.ranks})
    what = "overlap" if count > meta.numel or not _apart(meta.name, boxes) else "leave some of it out"
    raise InputError(
        f"the pieces that ranks {ranks} of this server hold {what}",
        parameter=meta.name,
        expected=f"{meta.numel} elements, each once or in equal boxes",
        found="; ".join(f"{box.claim.box} of {list(box.claim.shape)} on {box.ranks}" for box in boxes[:8]),
    )


def _apart(name: str, boxes: Sequence[_Box]) -> bool:
    """Whether boxes are disjoint: by their bounds if the parameter is cut alike in all, else element by element."""
    if len({box.claim.shape for box in boxes}) > 1:
        return disjoint([Piece("", box.claim.shape, box.claim.box, 0, ()).here for box in boxes])
    try:
        check_disjoint(name, [box.claim.box for box in boxes])
    except PatchError:
        return False
    return True
