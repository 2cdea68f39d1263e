"""Cut a container's tables into portions of whole entries, each decoded alone, so that little is held at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from deltacast.delta.codec.decode import Checked, check_layout

__all__ = ["Portion", "cut_portions"]


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Groups that carry whole entries.

    Attributes:
        entries: which entries of the container.
        groups: which groups of it.
        payload: which of the groups' bytes.
        checked: the portion's own tables, its entries, groups and bytes counted from 0.
    """

    entries: slice
    groups: slice
    payload: slice
    checked: Checked


def cut_portions(checked: Checked, max_changes: int) -> Iterator[Portion]:
    """Yield the portions of a container in order, each as long as `max_changes` allow.

    Neither entries nor groups are cut: a portion holds more where an entry does, or where entries that are split over
    groups share one with each other, end to end.

    Args:
        checked: the whole container's tables.
        max_changes: of one portion.
    """
    groups = checked.layout.groups
    ends_entry = np.ones(len(groups), np.bool_)
    ends_entry[:-1] = groups["first"][1:] == groups["end"][:-1]
    changes = np.cumsum(checked.layout.entries["num_changed"])[groups["end"].astype(np.int64) - 1]
    start, taken, last = 0, 0, 0
    for end in (np.flatnonzero(ends_entry) + 1).tolist():  # the groups that a portion may end after
        if last > start and changes[end - 1] - taken > max_changes:
            yield _portion(checked, start, last)
            start, taken = last, changes[last - 1]
        last = end
    if last:
        yield _portion(checked, start, last)


def _portion(checked: Checked, start: int, end: int) -> Portion:
    layout, groups = checked.layout, checked.layout.groups[start:end].copy()
    entries = slice(int(groups["first"][0]), int(groups["end"][-1]))
    groups["first"] -= np.uint32(entries.start)
    groups["end"] -= np.uint32(entries.start)
    spans = layout.spans[(layout.spans["entry"] >= entries.start) & (layout.spans["entry"] < entries.stop)].copy()
    spans["entry"] -= np.uint32(entries.start)
    alone = replace(
        layout, entries=layout.entries[entries], positions=layout.positions[entries],
        word_bytes=layout.word_bytes[entries], groups=groups, spans=spans,
        streams=layout.streams[int(checked.streams[start]) : int(checked.streams[end])],
        name_of=lambda entry: layout.name_of(entry + entries.start),
    )  # fmt: skip
    payload = slice(int(checked.offsets[start]), int(checked.offsets[end]))
    return Portion(entries, slice(start, end), payload, check_layout(alone))
