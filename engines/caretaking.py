"""What makes a store cheap to read, made beside training: folds and anchors of versions that are published.

Both are made from what the store has, on a thread of their own: the baseline has moved on, and neither a round nor the
next version waits for them. What fails is logged; the next version is the next chance.
"""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
from pathlib import Path
from typing import Final

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.store.anchors import Anchors
from deltacast.store.version_store import VersionStore

__all__ = ["Caretaker"]

_LOG: Final = logging.getLogger(__name__)


class Caretaker:
    """Folds what can be folded, and adds a snapshot of the newest version when it is time for one.

    Args:
        store: only read, and added to where no version is made.
        anchors: when it is time.
        folder: where an anchor's weights are put together, on a disk with room for them; None for the system's
            folder of temporary files.
        threads: for the codec, reads and scans.
    """

    def __init__(self, store: VersionStore, *, anchors: Anchors, folder: str | None, threads: int) -> None:
        self._store, self._anchors, self._folder, self._threads = store, anchors, folder, threads
        self._versions: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deltacast-care", daemon=True)
        self._thread.start()

    def note(self, version: int) -> None:
        """Say that a version was published; returns at once."""
        self._versions.put(version)

    def close(self, timeout_s: float) -> None:
        """End the thread once it has cared for what was noted, or leave it behind; may be called twice."""
        self._versions.put(None)
        self._thread.join(max(0.0, timeout_s))

    def _run(self) -> None:
        while (version := self._versions.get()) is not None:
            try:
                self._store.fold_aligned(version, threads=self._threads)
                if self._versions.empty() and self._store.anchor_due(self._anchors):
                    self._add_anchor(version)
            except Exception as err:  # noqa: BLE001 - a thread's boundary: the store is whole without it
                _LOG.warning("deltacast could not fold or anchor version %d: %s", version, err)

    def _add_anchor(self, version: int) -> None:
        with tempfile.TemporaryDirectory(prefix="deltacast-anchor-", dir=self._folder) as folder:
            out = Path(folder, "weights")
            self._store.materialize(version, out, threads=self._threads)
            with CheckpointSource(out) as source:
                self._store.add_anchor(version, source, threads=self._threads)
