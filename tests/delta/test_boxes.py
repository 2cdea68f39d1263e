"""Positions within a box and within the parameter, against numpy's own slicing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.boxes import check_box, check_disjoint, to_global, to_local
from deltacast.delta.errors import PatchError
from deltacast.delta.fingerprint import Box
from deltacast.delta.table import ParamMeta


@st.composite
def boxes(draw: st.DrawFn) -> tuple[ParamMeta, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    box = tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)
    return ParamMeta("w", draw(st.sampled_from(["bfloat16", "complex64"])), shape), box  # type: ignore[return-value]


@given(boxes())
@settings(deadline=None)
def test_against_slicing(case: tuple[ParamMeta, Box]) -> None:
    """Every word of any box maps to where numpy finds it, and back."""
    meta, box = case
    grid = np.arange(meta.num_words).reshape(*meta.shape, meta.row.words_per_element)
    inside = grid[tuple(slice(lo, hi) for lo, hi in box)].reshape(-1)
    assert check_box(meta, box) == inside.size
    local = np.arange(inside.size)
    assert to_global(local.copy(), meta, box).tolist() == inside.tolist()
    assert to_local(inside, meta, box).tolist() == local.tolist()
    outside = np.setdiff1d(grid.reshape(-1), inside)
    for index in outside.tolist():
        if inside.size:
            with pytest.raises(PatchError, match="outside the part's box"):
                to_local(np.array([index]), meta, box)


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple)] * 2), max_size=5))
@settings(deadline=None, max_examples=200)
def test_disjoint_against_painting(cuts: list[Box]) -> None:
    """Boxes overlap exactly where painting them hits a cell twice."""
    grid = np.zeros((6, 6), np.int64)
    for (a, b), (c, d) in cuts:
        grid[a:b, c:d] += 1
    if grid.max(initial=0) > 1:
        with pytest.raises(PatchError, match="overlap"):
            check_disjoint("w", list(cuts))
    else:
        check_disjoint("w", list(cuts))


def test_too_many_parts() -> None:
    """Checking overlaps may not take quadratic time without a bound."""
    with pytest.raises(PatchError, match="too many parts"):
        check_disjoint("w", [((i, i + 1),) for i in range(4097)])
