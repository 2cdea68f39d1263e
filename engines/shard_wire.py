"""The `container` wire into a rank's pieces: what moves the version is proven by all ranks before the first write.

Seeds and repairs may be for one rank alone: they send whole parameters, which it proves by itself. In a round that
moves the version every rank of the server speaks once, receiver or not, in `stage` or at the latest in `rollback`:
one that cannot take part keeps nobody waiting (`shards.py` speaks for what fails before `stage` has).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deltacast.delta.codec import decode_round
from deltacast.delta.shard_apply import ShardTransaction
from deltacast.delta.shard_cover import Cover
from deltacast.delta.shards import ShardState
from deltacast.engines.container_wire import ContainerDrain, ContainerIncoming
from deltacast.engines.payload import Limits
from deltacast.engines.protocol import Propose
from deltacast.engines.shard_exchange import Turn

__all__ = ["ShardDrain", "ShardIncoming"]


class ShardIncoming(ContainerIncoming):
    """A container for this rank.

    Args:
        propose: what the trainer said.
        rows: what came beside it.
        state: what this rank holds.
        limits: what may be used; undo is counted as if all changes were here.
        on_write: called right before the first write.
        cover: of the server's ranks.
        turn: of a round that moves the version; else None.

    Raises:
        As `ContainerIncoming`.
    """

    def __init__(
        self,
        propose: Propose,
        rows: bytes,
        state: ShardState,
        limits: Limits,
        on_write: Callable[[], None],
        *,
        cover: Cover,
        turn: Turn | None,
    ) -> None:
        super().__init__(propose, rows, state, limits, on_write)
        self._shards, self._cover, self._turn = state, cover, turn

    def rollback(self) -> None:
        """See `Incoming`."""
        if self._turn is not None:
            self._turn.excuse("it has left the round")
        super().rollback()

    def _staged(self) -> ShardTransaction:
        update = decode_round(self._rows, self._buffer.numpy().data, self._state.table, threads=self._limits.threads)
        staged = ShardTransaction.stage(self._shards, update, undo=not update.is_seed)
        if self._turn is None:
            staged.prove_alone()
            self.repairs = () if update.is_seed else tuple(patch.name for patch in update.patches)
        else:
            said = self._turn.gather(staged.sums.astype("<u8").tobytes())
            staged.prove_together(self._cover, [np.frombuffer(sums, "<u8").reshape(-1, 2) for sums in said])
        return staged


class ShardDrain(ContainerDrain):
    """A payload that moves the version of other workers, other ranks of this server maybe among them.

    Args:
        propose: what the trainer said.
        turn: in which this rank says that it has no part.
    """

    def __init__(self, propose: Propose, turn: Turn) -> None:
        super().__init__(propose)
        self._turn = turn

    def stage(self) -> None:
        """See `Incoming`."""
        self._turn.excuse("the round is not for it")

    def rollback(self) -> None:
        """See `Incoming`."""
        self._turn.excuse("the round is not for it")
