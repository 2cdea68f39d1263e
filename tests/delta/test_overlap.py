"""Whether tensors share memory. Right values: every cell of every index tuple, counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltacast.delta.errors import InputError
from deltacast.delta.overlap import overlaps_itself, require_apart


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3), st.integers(0, 3), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_overlap_is_what_counting_cells_says(dims: list[tuple[int, int]], offset: int, other: int) -> None:
    """Any strides: a tensor overlaps itself, or another one, exactly if two index tuples reach one cell."""
    shape, strides = [n for n, _ in dims], [s for _, s in dims]
    store = torch.zeros(100)
    tensor = store.as_strided(shape, strides, offset)
    cells = _cells(tensor)
    assert overlaps_itself(tensor) == (len(set(cells)) < len(cells))
    neighbour = store.as_strided((2, other), (5, 3), 6)
    shared = bool(set(cells) & set(_cells(neighbour)))
    if shared:
        with pytest.raises(InputError, match="share memory"):
            require_apart([("a", tensor), ("b", neighbour)])
    else:
        require_apart([("a", tensor), ("b", neighbour)])


def _cells(tensor: torch.Tensor) -> list[int]:
    return [
        int(tensor.storage_offset()) + sum(i * s for i, s in zip(place, tensor.stride(), strict=True))
        for place in np.ndindex(*tensor.shape)
    ]


def test_views_that_interleave_are_apart_and_ties_are_named() -> None:
    """Column slices of a fused weight may be two parameters; a tie or an overlapping slice may not."""
    fused = torch.zeros(4, 10)
    columns = [("q", fused[:, :4]), ("k", fused[:, 4:7]), ("v", fused[:, 7:])]
    require_apart([*columns, ("other", torch.zeros(3)), ("empty", fused[:0])])
    with pytest.raises(InputError, match="'v'") as caught:
        require_apart([*columns, ("extra", fused[2:3, 9:])])
    assert caught.value.parameter == "extra"
    for second in (fused, fused.view(-1)[5:6], fused.view(torch.int32), fused.t()):
        with pytest.raises(InputError, match="share memory"):
            require_apart([("head", fused), ("embed", second)])
