"""The trainer's baseline: the weights that every worker holds, bit for bit, and their fingerprints.

It moves only with a committed update, by applying what was *sent*: the source may already be one optimizer step
further when the decision falls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from deltacast.delta.apply import Transaction
from deltacast.delta.diff import diff_state, seed
from deltacast.delta.errors import CorruptionError, InputError
from deltacast.delta.fingerprint import format_sum
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource, checked, matched
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParameterTable
from deltacast.store.placement import FlatMemory, Placement

__all__ = ["Baseline", "Placement"]


class Baseline:
    """A private copy of the published weights at one version.

    What the copy of a model of M bytes costs, beside at most 15 bytes of padding per parameter:

    ======== ============================================================================================
    cpu      M of ordinary host memory.
    pinned   M of page-locked host memory, which cannot be swapped; GPUs read it at the speed of their bus.
    mmap     M of disk, in a file without a name that goes with the process. Its pages take host memory as long as
             there is any to spare; an update's pages are written to the disk.
    cuda     M of the current GPU's memory; `cuda:N` of that GPU's. Scans keep 64 bytes there per 65,536 words, and
             for each set of parameters that they repeat 8 bytes per 1024 fingerprint units of its longest.
    ======== ============================================================================================

    Args:
        source: the weights at `version`; read once, one parameter at a time, never kept.
        run_id: the lineage of versions.
        epoch: this writer's number in the lineage.
        version: the version that `source` now is.
        placement: where the copy lives.
        folder: for `mmap`: an existing folder on the disk to use.
        threads: for scans, diffs and applies on the CPU.

    Attributes:
        memory: the copy itself: flat buffers, and where each parameter begins, in the source's order. Whoever writes
            to it says so with `adopt`.
        state: the same memory as weights under their names, with version and running fingerprints.

    Raises:
        InputError: a placement that is unknown or not to be had here, negative epoch or version, or a source that
            breaks its contract. Nothing is left behind.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        run_id: str,
        epoch: int = 0,
        version: int = 0,
        placement: Placement = "cpu",
        folder: str | os.PathLike[str] | None = None,
        threads: int = 1,
    ) -> None:
        if epoch < 0 or version < 0:
            raise InputError("epoch and version count from 0", found=f"epoch {epoch}, version {version}")
        self.run_id = run_id
        self.epoch = epoch
        metas, aliases = tuple(source.metas()), dict(source.aliases)
        ParameterTable(metas, aliases)  # names are checked before memory is taken
        self.memory = FlatMemory(metas, placement, folder=folder)
        for meta, tensor in matched(metas, source.tensors()):
            self.memory.write(meta.name, tensor)
        tensors = {name: self.memory.tensor(name) for name in self.memory.extents}
        self.state = WeightState(tensors, aliases=aliases, version=version, threads=threads)

    @property
    def version(self) -> int:
        """The version that the baseline is."""
        assert self.state.version is not None
        return self.state.version

    @property
    def digest(self) -> str:
        """The baseline's state digest."""
        return self.state.digest

    def diff(
        self, source: WeightSource, *, target_version: int | None = None, optimizer_step: int | None = None
    ) -> WeightUpdate:
        """Make the update from the baseline to a source's present bits; moves nothing.

        The update owns its memory: the source may change as soon as this returns.

        Raises:
            InputError: the source breaks its contract.
            TableError: it no longer has the baseline's parameters.
        """
        return diff_state(
            self.state,
            checked(source),
            run_id=self.run_id,
            epoch=self.epoch,
            target_version=target_version,
            optimizer_step=optimizer_step,
        )

    def require_sound(self, names: Iterable[str] | None = None) -> None:
        """Rescan the baseline, or some parameters of it; changes nothing.

        Raises:
            CorruptionError: its bits are not what its fingerprints say; for the first such parameter.
            TableError: no such parameter.
        """
        for damage in self.state.audit(names):
            raise CorruptionError(
                "the trainer's baseline is damaged",
                parameter=damage.parameter,
                expected=format_sum(damage.expected),
                found=format_sum(damage.found),
                hint="Restart this trainer from its weights; workers keep theirs.",
            )

    def seed(self, names: Iterable[str] | None = None) -> WeightUpdate:
        """Make a dense update of the baseline itself: a seed, or a repair of the parameters named.

        Raises:
            TableError: no such parameter.
        """
        return seed(self.state, run_id=self.run_id, epoch=self.epoch, names=names)

    def stage(self, update: WeightUpdate) -> Transaction:
        """Check an update of ours and stage it; `advance` finishes it once the decision is COMMIT.

        Raises:
            StateError, InputError: it is not made for this baseline. Nothing moved.
        """
        return Transaction.stage(self.state, update)

    def advance(self, staged: Transaction) -> None:
        """Move to the target version. Call only after every worker's digest earned the COMMIT."""
        staged.write()
        staged.commit()

    def adopt(self, version: int, fingerprints: NDArray[np.uint64]) -> None:
        """Move to a version whose words are in `memory` already, version and running fingerprints together.

        For whoever applies an update by other means than `advance` (a kernel), once every worker's digest earned the
        COMMIT, and who has written exactly the words that give these fingerprints. Nothing is rescanned, and nothing
        counts as audited.

        Args:
            version: newer than the present one.
            fingerprints: uint64 [parameters], in table order; copied.

        Raises:
            InputError: an older version or the same, or not one uint64 per parameter. Nothing moved.
        """
        if version <= self.version:
            raise InputError("a baseline only moves forward", expected=f"above {self.version}", found=version)
        self.state.advance(version, fingerprints)
