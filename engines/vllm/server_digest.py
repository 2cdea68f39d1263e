"""Whether what the ranks of a server hold is a checkpoint, by the fingerprints of their parts.

A fingerprint is a sum over positions in the whole parameter (docs/fingerprint.md), so those of parts add up, in any
cut. Parts with the same place are replicas, and must agree; those with different places must be apart and, together,
all of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from deltacast.delta.boxes import check_box, check_disjoint
from deltacast.delta.checkpoint_digest import CheckpointDigest
from deltacast.delta.errors import FormatError, PatchError
from deltacast.delta.fingerprint import Box, add, format_sum, parse_sum
from deltacast.delta.table import ParamMeta

__all__ = ["HeldPart", "PartFault", "compare_parts"]

_MAX_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank holds of one parameter.

    Attributes:
        rank: of the server's workers.
        name: the parameter's, as the checkpoint has it.
        shape: the shape that `box` is in: the parameter's, or another of as many elements in the same order.
        box: `[lo, hi)` per dim.
        fingerprint: of these bits at their places in the whole parameter.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    box: Box
    fingerprint: int

    @classmethod
    def of(cls, rank: int, row: Any) -> HeldPart:
        """Read what `DeltacastExtension.deltacast_parts` says in one row.

        Raises:
            FormatError: it is none.
        """
        try:
            name, shape, box, fingerprint = row
            whole = (*shape, *(edge for edges in box for edge in edges))
            if not isinstance(name, str) or not all(type(number) is int and number >= 0 for number in whole):
                raise TypeError("a name and counts")  # noqa: TRY301 - one error for whatever is wrong
            return cls(rank, name, tuple(shape), tuple((lo, hi) for lo, hi in box), parse_sum(fingerprint))
        except (TypeError, ValueError) as err:
            raise FormatError(f"not a part of a parameter: {err}", rank=rank, found=repr(row)[:200]) from err


@dataclass(frozen=True, slots=True)
class PartFault:
    """Why a server does not hold one parameter.

    Attributes:
        name: the parameter's.
        kind: `missing` (no rank has any of it), `unknown` (the checkpoint has none of that name), `cut` (the parts are
            not all of it, each element once), `replicas` (ranks disagree about the same elements) or `bits`.
        detail: what was found, in words.
    """

    name: str
    kind: str
    detail: str


def compare_parts(checkpoint: CheckpointDigest, parts: Iterable[HeldPart]) -> list[PartFault]:
    """Compare what a server's ranks hold with a checkpoint.

    Args:
        checkpoint: what it should hold.
        parts: of all ranks, in any order.

    Returns:
        One fault per parameter that is not held, in table order, then those that the checkpoint does not have; empty
        if the server holds the checkpoint.
    """
    held: dict[str, list[HeldPart]] = {}
    for part in parts:
        held.setdefault(part.name, []).append(part)
    faults = []
    for meta, fingerprint in zip(checkpoint.table, checkpoint.fingerprints, strict=True):
        found = held.pop(meta.name, None)
        if found is None:
            faults.append(PartFault(meta.name, "missing", "no rank has any of it"))
        elif (fault := _fault(meta, int(fingerprint), found)) is not None:
            faults.append(fault)
    return faults + [PartFault(name, "unknown", _at(found)) for name, found in sorted(held.items())]


def _fault(meta: ParamMeta, fingerprint: int, parts: Sequence[HeldPart]) -> PartFault | None:
    try:
        shape, places = _places(meta, parts)
        check_disjoint(meta.name, [*places])
    except PatchError as err:
        return PartFault(meta.name, "cut", str(err))
    numel = sum(_volume(box) for box in places)
    if numel != meta.numel:
        return PartFault(meta.name, "cut", f"{numel:,} of {meta.numel:,} elements, in {list(shape)}, {_at(parts)}")
    total = 0
    for box, replicas in places.items():
        if len({part.fingerprint for part in replicas}) > 1:
            return PartFault(meta.name, "replicas", f"{[list(edges) for edges in box]}: {_votes(replicas)}")
        total = add(total, replicas[0].fingerprint)
    if total != fingerprint:
        return PartFault(meta.name, "bits", f"{format_sum(fingerprint)} -> {format_sum(total)}, {_at(parts)}")
    return None


def _places(meta: ParamMeta, parts: Sequence[HeldPart]) -> tuple[tuple[int, ...], dict[Box, list[HeldPart]]]:
    """Return the parts by their place, in one shape: the one that all are in, else flat.

    Raises:
        PatchError: a part lies outside the parameter, or parts in different shapes are not runs of elements.
    """
    for part in parts:
        if math.prod(part.shape) != meta.numel:
            raise PatchError("another number of elements", expected=list(meta.shape), found=list(part.shape))
        check_box(replace(meta, shape=part.shape), part.box)
    shapes = {part.shape for part in parts}
    flat = len(shapes) > 1
    places: dict[Box, list[HeldPart]] = {}
    for part in parts:
        places.setdefault(_run(part) if flat else part.box, []).append(part)
    return ((meta.numel,) if flat else shapes.pop()), places


def _run(part: HeldPart) -> Box:
    """Return a box as a run of elements in the flat parameter.

    Raises:
        PatchError: it is several.
    """
    extents = [hi - lo for lo, hi in part.box]
    cut = max((dim for dim, size in enumerate(part.shape) if extents[dim] != size), default=0)
    if any(extent != 1 for extent in extents[:cut]):
        raise PatchError("ranks cut it in different shapes, and not into runs of elements", found=part.box)
    first = sum(lo * math.prod(part.shape[dim + 1 :]) for dim, (lo, _) in enumerate(part.box))
    return ((first, first + _volume(part.box)),)


def _volume(box: Box) -> int:
    return math.prod(hi - lo for lo, hi in box)


def _at(parts: Sequence[HeldPart]) -> str:
    ranks = sorted({part.rank for part in parts})
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"at rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"


def _votes(replicas: Sequence[HeldPart]) -> str:
    votes: dict[int, list[HeldPart]] = {}
    for part in replicas:
        votes.setdefault(part.fingerprint, []).append(part)
    return ", ".join(f"{format_sum(fingerprint)} {_at(parts)}" for fingerprint, parts in votes.items())
