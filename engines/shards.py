"""A worker that is one rank of a server: its weights are pieces of the checkpoint's parameters, in any layout.

Every rank is a worker of the trainer's group and hears the same broadcast, in the checkpoint's coordinates; it writes
what it holds, and together the ranks prove the trainer's digest (`shard_wire.py`). The trainer takes the ranks of a
server in together, and lets them go together. Start with `ShardWorker`.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch

from deltacast.delta.errors import ProtocolError, TableError
from deltacast.delta.pieces import View
from deltacast.delta.shard_cover import Cover
from deltacast.delta.shards import Claim, ShardState
from deltacast.delta.table import ParamMeta
from deltacast.engines.base import ServingStatus
from deltacast.engines.payload import Incoming, Limits
from deltacast.engines.protocol import Hello, Propose
from deltacast.engines.shard_exchange import Exchange, Turn
from deltacast.engines.shard_wire import ShardDrain, ShardIncoming
from deltacast.engines.worker import RoundWorker

__all__ = ["ShardWorker"]

_LOG: Final = logging.getLogger(__name__)


class ShardWorker(RoundWorker):
    """One rank. Making one is collective over the server's ranks: they tell one another what they hold.

    It receives the `container` wire, in host memory (`device="cpu"`, Gloo) or through a GPU (`cuda:N`, NCCL); where
    the views' memory is does not matter. A round of changes costs host time and memory by what changed. Seeds and
    repairs need host memory for all that is sent, on every rank.

    The rank's own bits are audited as any worker's. A damaged rank is repaired alone; what differs from the replica on
    another rank is named as soon as a round changes it.

    Args:
        metas: the checkpoint's parameters, each storage once; the same on every rank.
        aliases: alias -> name, of tied parameters.
        views: name -> what this rank holds of it (`View`: the parameter's shape cut anew, a box of it, and the live
            memory in the box's extents), each element once; written in place. Over all ranks of the server each
            element of a parameter is held, in boxes that are apart or equal.
        exchange: over the server's ranks.
        loaded: whether the ranks hold one checkpoint now. False (dummy weights): nothing is claimed of their bits, and
            the trainer sends everything.
        device: as for `RoundWorker`.
        undo_budget_bytes: likewise; what counts is the whole update's words, wherever they are written.
        max_payload_bytes: likewise.
        threads: likewise.

    Raises:
        InputError, DTypeError, TableError: views that are no boxes of their parameters, or do not cover them.
        CorruptionError: `loaded`, and two ranks hold other bits of the same piece.
        StateError: another rank could not say what it holds.
        TransportError: another rank is gone, or did not answer in time.
    """

    def __init__(
        self,
        metas: Iterable[ParamMeta],
        aliases: Mapping[str, str],
        views: Mapping[str, Sequence[View]],
        exchange: Exchange,
        *,
        loaded: bool = True,
        device: str = "cpu",
        undo_budget_bytes: int | None = None,
        max_payload_bytes: int | None = None,
        threads: int = 1,
    ) -> None:
        turn = exchange.turn("cover")
        try:
            state = ShardState(metas, views, aliases=aliases, threads=threads)
            said = turn.gather(_introduction(state), exchange.patience_s)
        except BaseException as err:
            turn.excuse(err)
            raise
        super().__init__(state, device=device, undo_budget_bytes=undo_budget_bytes, max_payload_bytes=max_payload_bytes)
        self._shards, self._exchange = state, exchange
        self._turn: Turn | None = None  # of the present round, if it moves the version
        self._cover = Cover(state.table, [_claims(state, rank, raw) for rank, raw in enumerate(said)])
        if loaded:
            state.adopt(self._cover.totals())

    @property
    def state(self) -> ShardState:
        """What this rank holds, and the whole parameters' fingerprints; read it between rounds only."""
        return self._shards

    def _receive_on(self, device: torch.device) -> None:
        self._device, self._wires = device, ["container"]

    def _hello(self) -> Hello:
        """Say what the server holds: what all its ranks say alike, or nothing, so that all are seeded."""
        hello = super()._hello()
        mine = [hello.run_id, hello.version, hello.digest]
        raw = json.dumps([secrets.token_hex(8), mine]).encode()
        said = [json.loads(theirs) for theirs in self._exchange.gather("hello", raw, self._exchange.patience_s)]
        server, rank, num_ranks = said[0][0], self._exchange.rank, self._exchange.num_ranks  # a new name each time
        hello = replace(hello, server=server, server_rank=rank, num_ranks=num_ranks)
        if all(theirs == mine for _, theirs in said):
            return hello
        _LOG.warning("deltacast: the ranks of this server hold different versions: %s", [theirs for _, theirs in said])
        self._serving = ServingStatus.EMPTY
        self._shards.forget()
        return replace(hello, version=-1, digest="", damaged=[])

    def _asks_first(self, propose: Propose) -> bool:
        # While they generate, ranks run collectives of their own; two communicators of NCCL may wait for each other.
        return propose.overlaps or self._device.type == "cuda"

    def _incoming(self, propose: Propose, header: bytes) -> Incoming:
        if propose.wire != "container":
            raise ProtocolError("unknown wire", expected="container", found=propose.wire)
        turn = self._turn = None
        if propose.base_version not in {-1, propose.target_version}:
            turn = self._turn = self._exchange.turn(json.dumps([propose.run_id, asdict(propose.key)]))
        if self._rank in propose.receivers:
            limits = Limits(self._undo_budget_bytes, self._max_payload_bytes, self._shards.threads)
            return ShardIncoming(
                propose, header, self._shards, limits, self._stop_serving, cover=self._cover, turn=turn
            )
        return super()._incoming(propose, header) if turn is None else ShardDrain(propose, turn)

    def _stage(self, current: Any) -> None:
        try:
            super()._stage(current)
        except Exception as err:
            if self._turn is not None:  # the others must not wait for what this rank has to say
                self._turn.excuse(f"{type(err).__name__}: {err}")
            raise


def _introduction(state: ShardState) -> bytes:
    claims = [[claim.place, claim.shape, claim.box, claim.partial] for claim in state.claims()]
    return json.dumps({"table": state.table.digest, "claims": claims}).encode()


def _claims(state: ShardState, rank: int, raw: bytes) -> list[Claim]:
    body: dict[str, Any] = json.loads(raw)
    if body["table"] != state.table.digest:
        raise TableError(f"rank {rank} of this server has another parameter table", expected=state.table.digest,
                         found=body["table"])  # fmt: skip
    return [
        Claim(place, tuple(shape), tuple((low, high) for low, high in box), partial)
        for place, shape, box, partial in body["claims"]
    ]
