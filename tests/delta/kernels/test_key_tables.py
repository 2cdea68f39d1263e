"""Keys in torch's signed arithmetic. Right values: plain Python integers, and the numpy keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltacast.delta.fingerprint import keys
from deltacast.delta.kernels.key_tables import KeyTables, unit_keys
from fingerprint_twin import unit_key

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_keys_are_those_of_the_fingerprint(device: str) -> None:
    """Row ends and rows far apart."""
    positions = [0, 1, 1023, 1024, 1025, 2047, 123456, (1 << 20) - 1]
    tables = KeyTables.on(torch.device(device), 1024)
    found = unit_keys(tables, torch.tensor(positions, device=device)).cpu().numpy().view(np.uint64)
    assert found.tolist() == [unit_key(position) for position in positions]
    assert found.tolist() == keys(np.array(positions, np.int64)).tolist()
