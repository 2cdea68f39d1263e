"""A writer that is held up for longer than gc waits: what it publishes is whole, or it says that it is not.

Right values: the weights that the test made, read by the stock library.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import store_setups as setups
from deltacast.delta.errors import StoreError
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.names import version_path
from deltacast.store.objects import Buffer
from deltacast.store.version_store import VersionStore


class HeldUp(MemoryBackend):
    """Before it creates an object whose name begins so, once, something else happens."""

    beginning = "nothing"
    meanwhile: Callable[[], object] = staticmethod(lambda: None)
    refuses = "nothing"

    def create(self, name: str, data: Buffer) -> None:
        if name.startswith(self.beginning):
            self.beginning = "nothing"
            self.meanwhile()
        super().create(name, data)

    def write(self, name: str, pieces: Iterable[Buffer]) -> int:
        if name.startswith(self.refuses):
            raise StoreError("no space left")
        return super().write(name, pieces)


@pytest.fixture
def backend() -> HeldUp:
    return HeldUp(secrets.token_hex(8))


def collect(backend: HeldUp, beginning: str) -> None:
    """What gc does to what no version names: remove the newest object of that kind."""
    backend.delete(max(info.name for info in backend.list("") if info.name.startswith(beginning)))


def test_an_update_that_gc_took_is_written_again(
    backend: HeldUp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the object and the version file: the publish succeeds, and the version can be had."""
    store, weights = setups.filled_store(backend, 1)
    weights.append(setups.next_weights(weights[1], 5))
    backend.beginning, backend.meanwhile = version_path(2), lambda: collect(backend, "updates/")
    assert store.publish_update(setups.update_between(weights[1], weights[2], 1)).version == 2
    assert "written again" in caplog.text
    store.materialize(2, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[2])


def test_an_update_that_cannot_be_written_again_is_no_success(backend: HeldUp, tmp_path: Path) -> None:
    """The version exists without it: the publish fails until one that is repeated mends it."""
    store, weights = setups.filled_store(backend, 1)
    weights.append(setups.next_weights(weights[1], 5))
    update = setups.update_between(weights[1], weights[2], 1)

    def meanwhile() -> None:
        collect(backend, "updates/")
        backend.refuses = "updates/"

    backend.beginning, backend.meanwhile = version_path(2), meanwhile
    for _ in range(2):
        with pytest.raises(StoreError, match="no space left"):
            store.publish_update(update)
    backend.refuses = "nothing"
    assert store.publish_update(update).version == 2
    store.materialize(2, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[2])


@pytest.mark.parametrize("write", [
    lambda store, weights: store.publish_snapshot(setups.source_of(weights)),
    lambda store, weights: store.add_anchor(1, setups.source_of(weights)),
], ids=["published", "anchor"])  # fmt: skip
def test_a_snapshot_that_lost_a_file_is_no_success(
    backend: HeldUp, write: Callable[[VersionStore, setups.Weights], object], tmp_path: Path
) -> None:
    """Before its manifest was there: the error names the file, no version is published, and nobody misses it."""
    store, weights = setups.filled_store(backend, 1)
    backend.beginning, backend.meanwhile = "snapshots/", lambda: collect(backend, "snapshots/")
    with pytest.raises(StoreError, match=r"snapshots/.* was removed while its snapshot was written"):
        write(store, weights[1])
    assert store.versions() == range(2)
    reader = VersionStore.open(backend)
    reader.materialize(1, tmp_path / "out", threads=1)
    assert setups.same(setups.folder_weights(tmp_path / "out"), weights[1])
    assert store.publish_snapshot(setups.source_of(weights[0])).version == 2
