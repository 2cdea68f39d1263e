"""What an anchor takes over from the snapshot that it replaces. Right values: the files' bytes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import store_setups as setups
from deltacast.store.objects import ObjectBackend
from deltacast.store.snapshots import read_manifest
from deltacast.store.version_store import VersionStore


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> VersionStore:
    """Versions 0 to 2; a config beside the weights of 0."""
    config = tmp_path / "config.json"
    config.write_bytes(b"{}")
    backend: ObjectBackend = setups.new_backend(request.param, tmp_path)
    made = setups.new_store(backend)
    weights = [setups.first_weights()]
    made.publish_snapshot(setups.source_of(weights[0]), extra_files={"config.json": config})
    for version in range(2):
        weights.append(setups.next_weights(weights[-1], version))
        made.publish_update(setups.update_between(weights[-2], weights[-1], version))
    return made


def anchor(store: VersionStore, version: int, folder: Path, extra_files: dict[str, Path] | None = None) -> list[str]:
    """Anchor a version, make it, and return the names of the folder's files beside the weights."""
    weights = setups.first_weights()
    for step in range(version):
        weights = setups.next_weights(weights, step)
    store.add_anchor(version, setups.source_of(weights), extra_files=extra_files)
    plan = store.plan(None, version)
    assert plan.snapshot is not None
    assert plan.snapshot.version == version
    store.materialize(version, folder, threads=1)
    assert setups.same(setups.folder_weights(folder), weights)
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if "safetensors" not in name)


def test_an_anchor_keeps_the_files_beside_the_weights(store: VersionStore, tmp_path: Path) -> None:
    """Who pulls from it gets the config, anchor after anchor."""
    assert anchor(store, 1, tmp_path / "one") == ["config.json"]
    assert anchor(store, 2, tmp_path / "two") == ["config.json"]
    assert (tmp_path / "two" / "config.json").read_bytes() == b"{}"


def test_other_files_may_be_given_or_none(store: VersionStore, tmp_path: Path) -> None:
    """What is given is all that there is."""
    other = tmp_path / "tokenizer.json"
    other.write_bytes(b"[]")
    assert anchor(store, 1, tmp_path / "one", {"tokenizer.json": other}) == ["tokenizer.json"]
    assert anchor(store, 2, tmp_path / "two", {}) == []


def test_damaged_files_are_taken_from_an_older_snapshot(
    store: VersionStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names what is damaged."""
    anchor(store, 1, tmp_path / "one")
    plan = store.plan(None, 1)
    assert plan.snapshot is not None
    manifest = read_manifest(store.backend, plan.snapshot.path)
    config = next(manifest.object_name(file) for file in manifest.files if file.name == "config.json")
    store.backend.replace(config, b"()")
    with caplog.at_level(logging.WARNING):
        assert anchor(store, 2, tmp_path / "two") == ["config.json"]
    assert config in caplog.text
    assert (tmp_path / "two" / "config.json").read_bytes() == b"{}"
