"""The trainer's side of streamed rounds between rounds: which wire is next, and the buffers that are kept."""

from __future__ import annotations

import logging
import math
from typing import Final

import torch

from deltacast.delta.chunks import ChunkCoder, ChunkSender, even_chunk_bytes
from deltacast.delta.errors import TableError
from deltacast.delta.sources import WeightSource
from deltacast.delta.table import ParamMeta
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.chunk_wire import ChunkOutgoing
from deltacast.engines.membership import Membership
from deltacast.engines.payload import Outgoing
from deltacast.engines.report import RoundReport
from deltacast.engines.wires import STREAMED, LastRound, choose_wire
from deltacast.store.baseline import Baseline

__all__ = ["Streams"]

_LOG: Final = logging.getLogger(__name__)


class Streams:
    """Makes the payloads of streamed rounds, in buffers that are allocated at the first one.

    Args:
        info: the trainer's.
        source: the new weights.
        baseline: what every worker holds.
    """

    def __init__(self, info: TrainerInitInfo, source: WeightSource, baseline: Baseline) -> None:
        self._info, self._source, self._baseline = info, source, baseline
        self._sender: ChunkSender | None = None
        self._coder: ChunkCoder | None = None
        self._density: float | None = None
        self._too_dense = False
        self._metas: tuple[ParamMeta, ...] | None = None  # as they were last, and their places
        self._places: tuple[int, ...] = ()

    def payload(self, workers: Membership) -> Outgoing | None:
        """Return the next round's payload if it is to be streamed, else None; its target version is to be set.

        Raises:
            InputError: a wire was asked for that a worker cannot receive.
            TableError: the source no longer has the baseline's parameters.
        """
        if self._too_dense:
            return None
        info, table = self._info, self._baseline.state.table
        choice = choose_wire(
            info.wire,
            workers=[(member.name, member.hello.wires) for member in workers.members],
            device=torch.device(info.device),
            num_words=table.num_words,
            max_density=info.max_density,
            threads=info.threads,
            last=LastRound(self._density, workers.link_bytes_per_s),
        )
        _LOG.info("deltacast wire for the next version: %s (%s)", choice.wire, choice.reason)
        if choice.wire not in STREAMED:
            return None
        coded = choice.wire == "coded"
        sender = self._sender_for(coded=coded)
        return ChunkOutgoing(
            sender,
            self._source,
            self._baseline,
            target_version=self._baseline.version + 1,
            overlaps=info.overlap_apply,
            coder=self._coder if coded else None,
            keep_bytes=info.history_bytes if info.store is None else math.inf,
        )

    def close(self) -> None:
        """End the coder's threads; may be called twice."""
        if self._coder is not None:
            self._coder.close()

    def note(self, report: RoundReport) -> None:
        """Learn from a round."""
        self._density, self._too_dense = report.density, False

    def note_too_dense(self) -> None:
        """Learn that a round had more changes than there is room for: until one is sent it is to be a container."""
        self._too_dense = True

    def _sender_for(self, *, coded: bool) -> ChunkSender:
        order = self._order()
        if self._sender is None or (self._sender.plan.order, self._sender.keeps_old) != (order, coded):
            self.close()
            self._sender = self._coder = None  # first, so that their memory is free
            self._sender = ChunkSender(
                self._baseline.state,
                order,
                torch.empty(0, device=self._info.device).device,
                chunk_bytes=even_chunk_bytes(self._baseline.state.table, self._info.chunk_bytes),
                max_density=self._info.max_density,
                keeps_old=coded,
                threads=self._info.threads,
            )
        if coded and self._coder is None:
            sender, table = self._sender, self._baseline.state.table
            capacities = sender.header().capacities
            self._coder = ChunkCoder(
                table, sender.plan, sender.groups, threads=self._info.threads, capacities=capacities
            )
        return self._sender

    def _order(self) -> tuple[int, ...]:
        """Return the places of the source's parameters, once it is sure that they are the baseline's."""
        table, metas = self._baseline.state.table, tuple(self._source.metas())
        if metas == self._metas:
            return self._places
        for meta in metas:
            if table[meta.name] != meta:
                raise TableError(
                    "a parameter changed its dtype or shape", parameter=meta.name, expected=table[meta.name], found=meta
                )
        places = tuple(table.index(meta.name) for meta in metas)
        missing = next(iter(set(range(len(table))) - set(places)), None)
        if missing is not None:
            raise TableError("the new weights lack a parameter", parameter=table.metas[missing].name)
        self._metas, self._places = metas, places
        return places
