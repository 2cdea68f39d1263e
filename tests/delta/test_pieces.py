"""Where elements of a parameter are in a runtime tensor: the arithmetic against views of counted tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from deltacast.delta.pieces import Lattice, Piece

SHAPE = (6, 8, 10)
NUMEL = 480
Cut = Callable[[torch.Tensor], torch.Tensor]

CUTS: dict[str, Cut] = {
    "everything": lambda t: t,
    "rows": lambda t: t[2:5],
    "columns": lambda t: t[:, :, 3:7],
    "one column": lambda t: t[:, :, 4:5],
    "one row": lambda t: t[3, 5],
    "one element": lambda t: t[3, 5, 7],
    "a box": lambda t: t[1:3, 2:8, 5:10],
    "turned": lambda t: t[:, 2:4].transpose(0, 2),
    "every second": lambda t: t[::2, :, 1::2],
}


@pytest.mark.parametrize("name", CUTS)
def test_every_element_of_a_cut_is_found_where_it_was_copied_to(name: str) -> None:
    """Into rows of a larger tensor, in the cut's own order; what is outside the cut is nowhere."""
    here = CUTS[name](torch.arange(NUMEL).view(SHAPE))
    target = torch.arange(here.numel() + 7)[5:-2].view(here.shape)  # an offset on either side
    piece = Piece.between(Lattice.of(here), NUMEL, "runtime", Lattice.of(target))
    assert piece is not None
    located = piece.locate(np.arange(NUMEL))
    wanted = sorted(zip(here.flatten().tolist(), target.flatten().tolist(), strict=True))
    assert list(zip(located.which.tolist(), located.positions.tolist(), strict=True)) == wanted
    runtime = torch.arange(here.numel() + 7)
    parameter = torch.arange(NUMEL).view(piece.shape)[tuple(slice(low, high) for low, high in piece.box)]
    viewed = dict(zip(parameter.flatten().tolist(), piece.view(runtime).flatten().tolist(), strict=True))
    assert viewed == dict(wanted)


def test_only_the_elements_asked_for_are_located() -> None:
    """`which` counts in what was asked, not in the parameter."""
    columns = torch.arange(NUMEL).view(SHAPE)[:, :, 3:7]
    piece = Piece.between(Lattice.of(columns), NUMEL, "runtime", Lattice.of(torch.arange(192).view(6, 8, 4)))
    assert piece is not None
    located = piece.locate(np.array([2, 3, 16, 17, 479]))
    assert (located.which.tolist(), located.positions.tolist()) == ([1, 2], [0, 7])
