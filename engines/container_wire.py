"""The `container` wire: an update's groups (docs/format.md), encoded whole, sent in one piece, staged, then applied.

For any tensors on any device, and any density: the update is made and applied on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self

import numpy as np
import torch

from deltacast.delta.apply import Transaction
from deltacast.delta.codec import EncodedRound, RoundRows, decode_round, encode_round, read_rows
from deltacast.delta.errors import BaseError, InputError, ProtocolError
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.shard_apply import ShardTransaction
from deltacast.delta.state import WeightState
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup
from deltacast.engines.history import KeptUpdate
from deltacast.engines.payload import Inbox, Incoming, Limits, Outgoing, Route, StagedIncoming
from deltacast.engines.protocol import Propose
from deltacast.store.baseline import Baseline

__all__ = ["ContainerDrain", "ContainerIncoming", "ContainerOutgoing"]


class ContainerOutgoing(Outgoing):
    """An encoded update.

    Args:
        update: what it holds: it leads from the baseline as it is to a new version, or ends there.
        encoded: its rows and groups.
        baseline: what `advance` moves.
    """

    wire = "container"

    def __init__(self, update: WeightUpdate, encoded: EncodedRound, baseline: Baseline) -> None:
        self._update, self._encoded, self._baseline = update, encoded, baseline
        self._staged: Transaction | None = None
        self.base_version, self.target_version = update.base_version, update.target_version
        self.target_digest = update.target_digest
        self.header = encoded.rows
        self.payload_bytes = sum(len(group) for group in encoded.groups)
        self.num_changed, self.num_parameters = update.num_changed, len(update.patches)
        self.sent_bytes = encoded.num_bytes

    @classmethod
    def of(
        cls, update: WeightUpdate, baseline: Baseline, *, values: Literal["auto", "delta", "absolute"], threads: int
    ) -> Self:
        """Encode an update.

        Args:
            update: as for the class.
            baseline: likewise.
            values: the form of the values on the wire (docs/format.md).
            threads: for the codec.

        Raises:
            TableError: it is about another parameter table than the baseline's.
            PatchError, InputError: it breaks the patch policy.
        """
        return cls(update, encode_round(update, baseline.state.table, values=values, threads=threads), baseline)

    def send(self, route: Route) -> None:
        """See `Outgoing`."""
        route.group.broadcast(_joined(self._encoded.groups), route.deadline)

    def stage(self) -> None:
        """See `Outgoing`. Seeds, repairs and replays leave the baseline where it is."""
        if self.target_version != self._baseline.version:
            self._staged = self._baseline.stage(self._update)
            update = self._update  # and not the payload, which has the encoded bytes as well
            self.update = KeptUpdate(lambda: update, _nbytes(update.patches))

    def advance(self) -> None:
        """See `Outgoing`."""
        if self._staged is not None:
            self._baseline.advance(self._staged)


class ContainerIncoming(StagedIncoming):
    """A container's rows, checked against the state, and the buffer that its groups will fill.

    Args:
        propose: what the trainer said.
        rows: what came beside it.
        state: the weights.
        limits: what may be used.
        on_write: called right before the first write.

    Raises:
        FormatError, TableError, ProtocolError, BaseError: the rows are not a round for this state.
        InputError: undo would exceed its budget.
    """

    def __init__(
        self, propose: Propose, rows: bytes, state: WeightState, limits: Limits, on_write: Callable[[], None]
    ) -> None:
        super().__init__(on_write)
        self._state, self._limits = state, limits
        self._rows = read_rows(rows, state.table)
        self._check(propose, self._rows)
        header = self._rows.envelope
        self.is_seed = header.base_version is None
        self.publishes = not self.is_seed and header.base_version != header.target_version
        self._buffer = torch.empty(propose.payload_bytes, dtype=torch.uint8)
        self.buffer_bytes = propose.payload_bytes + self._rows.values_bytes

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:  # noqa: ARG002
        """See `Incoming`."""
        group.broadcast(self._buffer, deadline)

    def _staged(self) -> Transaction | ShardTransaction:
        update = decode_round(self._rows, self._buffer.numpy().data, self._state.table, threads=self._limits.threads)
        if update.base_version == update.target_version:
            self.repairs = tuple(patch.name for patch in update.patches)
        return Transaction.stage(
            self._state, update, undo=not update.is_seed, undo_budget_bytes=self._limits.undo_budget_bytes
        )

    def _check(self, propose: Propose, rows: RoundRows) -> None:
        state, header, budget = self._state, rows.envelope, self._limits.undo_budget_bytes
        base = -1 if header.base_version is None else header.base_version
        told = propose.run_id, propose.base_version, propose.target_version, propose.target_digest
        if told != (found := (header.run_id, base, header.target_version, header.target_digest)):
            raise ProtocolError("rows of another round", expected=told, found=found)
        if rows.checked.payload_bytes != propose.payload_bytes:
            raise ProtocolError(
                "rows of another payload", expected=propose.payload_bytes, found=rows.checked.payload_bytes
            )
        if header.base_version is None:
            return
        if header.base_version != state.version or header.base_digest != state.digest:
            raise BaseError(
                "wrong base",
                version=header.target_version,
                expected=f"version {state.version} with {state.digest}",
                found=f"version {header.base_version} with {header.base_digest}",
            )
        if budget is not None and rows.values_bytes > budget:
            raise InputError(
                "undo would exceed its budget", expected=f"at most {budget} bytes", found=rows.values_bytes
            )


class ContainerDrain(Incoming):
    """A payload that is for other workers."""

    publishes = False
    drains = True

    def __init__(self, propose: Propose) -> None:
        self._buffer = torch.empty(propose.payload_bytes, dtype=torch.uint8)
        self.buffer_bytes = propose.payload_bytes

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:  # noqa: ARG002
        """See `Incoming`."""
        group.broadcast(self._buffer, deadline)

    def apply(self) -> None:
        """Nothing of it is ours."""

    def commit(self) -> None:
        """Nothing of it is ours."""

    def rollback(self) -> None:
        """Nothing of it is ours."""


def _nbytes(patches: Iterable[SparseWeightPatch]) -> int:
    arrays = (array for patch in patches for array in (patch.indices, patch.values, patch.base_values))
    return sum(array.nbytes for array in arrays if array is not None)


def _joined(groups: Sequence[bytes]) -> torch.Tensor:
    buffer = np.empty(sum(len(group) for group in groups), np.uint8)
    place = 0
    for group in groups:
        buffer[place : place + len(group)] = np.frombuffer(group, np.uint8)
        place += len(group)
    return torch.from_numpy(buffer)
