"""The digest of a checkpoint, against values of a naive big-integer twin and against live weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.checkpoint_digest import CheckpointDigest, digest_checkpoint
from deltacast.delta.errors import TableError
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from golden_checkpoint import GOLDEN, GOLDEN_FINGERPRINTS, GOLDEN_STATE_DIGEST, GOLDEN_TABLE_DIGEST, write_raw


@pytest.mark.parametrize("threads", [1, 3])
def test_the_golden_checkpoint_has_the_golden_digests(tmp_path: Path, threads: int) -> None:
    """Every dtype family, -0.0, NaN payloads, a scalar, an empty tensor: all as the twin computed them."""
    with CheckpointSource(write_raw(tmp_path / "golden.safetensors", GOLDEN)) as source:
        found = digest_checkpoint(source, threads=threads)
    assert {name: f"{found.fingerprint(name):016x}" for name in GOLDEN} == GOLDEN_FINGERPRINTS
    assert found.table.digest == GOLDEN_TABLE_DIGEST
    assert found.state_digest == GOLDEN_STATE_DIGEST


def test_a_sharded_folder_has_the_digest_of_the_single_file(tmp_path: Path) -> None:
    """Where a tensor lies does not count."""
    names = sorted(GOLDEN)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in shards.items():
        write_raw(tmp_path / file, {name: GOLDEN[name] for name in reversed(mine)})
    weight_map = {name: file for file, mine in shards.items() for name in mine}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with CheckpointSource(tmp_path) as source:
        assert digest_checkpoint(source).state_digest == GOLDEN_STATE_DIGEST


def test_it_is_the_digest_of_live_weights(tmp_path: Path) -> None:
    """A worker that loaded the file reports the same value."""
    tensors = {"w": torch.randn(33, 65).bfloat16(), "b": torch.randn(7)}
    save_file(tensors, tmp_path / "w.safetensors")
    with CheckpointSource(tmp_path / "w.safetensors") as source:
        assert digest_checkpoint(source).state_digest == WeightState(tensors).digest


def test_progress_adds_up_to_the_bytes(tmp_path: Path) -> None:
    """The callback hears of every byte once."""
    seen: list[int] = []
    with CheckpointSource(write_raw(tmp_path / "golden.safetensors", GOLDEN)) as source:
        digest_checkpoint(source, threads=2, progress=seen.append)
    assert sum(seen) == sum(len(data) for _, _, data in GOLDEN.values())


def test_fingerprints_are_put_in_table_order() -> None:
    """Whatever the order they come in."""
    metas = [ParamMeta(name, "uint8", ()) for name in ("b", "a")]
    found = CheckpointDigest.of(zip(metas, (2, 1), strict=True))
    assert found.fingerprints.tolist() == [1, 2]
    with pytest.raises(TableError):
        found.fingerprint("c")
