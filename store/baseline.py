"""The trainer's baseline: the weights that every worker holds, bit for bit, and their fingerprints.

It moves only with a committed update, by applying what was *sent*: the source may already be one optimizer step
further when the decision falls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch

from deltacast.delta.apply import Transaction
from deltacast.delta.bits import strided_words
from deltacast.delta.diff import diff_state, seed
from deltacast.delta.errors import InputError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource, checked
from deltacast.delta.state import WeightState

__all__ = ["Baseline", "Placement"]

Placement: TypeAlias = Literal["cpu", "cuda"]


class Baseline:
    """A private copy of the published weights at one version.

    Args:
        source: the weights at `version`; read once, never kept.
        run_id: the lineage of versions.
        epoch: this writer's number in the lineage.
        version: the version that `source` now is.
        placement: where the copy lives. `cpu` costs the model's bytes of host memory, `cuda` of device memory.
        threads: for scans, diffs and applies on the CPU.

    Raises:
        InputError: unknown placement, negative epoch or version, or a source that breaks its contract.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        run_id: str,
        epoch: int = 0,
        version: int = 0,
        placement: Placement = "cpu",
        threads: int = 1,
    ) -> None:
        if placement not in ("cpu", "cuda"):
            raise InputError("unknown baseline placement", expected="cpu or cuda", found=repr(placement))
        if epoch < 0 or version < 0:
            raise InputError("epoch and version count from 0", found=f"epoch {epoch}, version {version}")
        self.run_id = run_id
        self.epoch = epoch
        copies = {meta.name: _own_copy(meta.name, tensor, placement) for meta, tensor in checked(source)}
        self.state = WeightState(copies, aliases=dict(source.aliases), version=version, threads=threads)

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


def _own_copy(name: str, tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    copy = torch.empty(plain.shape, dtype=plain.dtype, device=placement)
    strided_words(copy).copy_(strided_words(plain, name=name))  # as integers: a float copy may quieten a signalling NaN
    return copy
