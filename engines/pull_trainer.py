"""The trainer of workers that pull: it publishes to a store, tells them, and asks what they then hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from deltacast.delta.errors import InputError, StoreError
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.sources import WeightSource
from deltacast.engines.base import Client, Pausing, ServingStatus, TrainerInitInfo, WorkerStatus
from deltacast.engines.control import Deadline
from deltacast.engines.protocol import check_step
from deltacast.engines.publishing import publisher_of
from deltacast.engines.pulling import PullRequest
from deltacast.engines.report import RoundReport, StageTimes, WorkerVerdict
from deltacast.engines.resuming import begin_run
from deltacast.store.records import VersionRecord

if TYPE_CHECKING:
    from deltacast.engines.vllm.client import ServerStatus

__all__ = ["AskWorkers", "PullingTrainer", "statuses_of_servers"]

_LOG: Final = logging.getLogger(__name__)

AskWorkers: TypeAlias = Callable[[], Mapping[str, WorkerStatus]]
"""Asks every worker what it holds: name -> status. One that cannot be asked is `empty`, and `last_error` says why."""


class PullingTrainer:
    """Publishes versions to a store and has workers pull them. No connection to any worker; one thread calls it.

    A version stands once the store has it, whoever holds it then: a worker that failed, or comes late, gets it with
    the next one, or by `update_workers`. An empty store gets the source's weights as its first version; with one that
    has versions, the trainer goes on from the newest.

    Args:
        init_info: with a store. Of the rest count `run_id`, `placement`, `baseline_folder`, `anchors`, `timeout_s` (for
            the store) and `threads`.
        source: the trainer's weights; read now and at every `send_weights`.
        client: how workers are told.
        ask: how they are asked; None to ask nobody, so that reports tell of no worker.
        where: the store, as the workers' configuration calls it; None for what it is called here.

    Attributes:
        baseline: the newest version's weights; read it, never move it.

    Raises:
        InputError: no store, or another run's.
        TableError: the store's weights have other parameters than the source.
        StoreError, FencedError: the store failed, or other trainers take it over as well.
    """

    def __init__(
        self,
        init_info: TrainerInitInfo,
        source: WeightSource,
        client: Client,
        ask: AskWorkers | None = None,
        *,
        where: str | None = None,
    ) -> None:
        if init_info.store is None:
            raise InputError("workers cannot pull without a store", hint="Give one.")
        self._store, self._source, self._client, self._ask = init_info.store, source, client, ask
        self._where = self._store.backend.url if where is None else where
        beginning = begin_run(init_info, source)
        assert beginning.head is not None
        self._info, self.baseline, self._head = beginning.info, beginning.baseline, beginning.head
        self._publisher = publisher_of(self._info, self._head)
        self._num_rounds = 0

    def send_weights(self, *, optimizer_step: int | None = None) -> RoundReport:
        """Publish the source's present weights as the next version, and have every worker pull it. Blocks.

        Args:
            optimizer_step: metadata, from 0 on.

        Returns:
            What was published, and of each worker whether its own status has that version with the digest that the
            store's record says. `error` is what went wrong with the client's calls; the version stands nevertheless,
            so `committed` is always true.

        Raises:
            InputError: the source broke its contract or changed its parameters, or a step out of range. Nothing was
                published.
            StoreError: the version is certainly not published, or its record could not be read back and nobody was
                told: call again. Or nobody knows whether it is published, and this trainer has ended.
            FencedError: another trainer has taken over the store's run.
        """
        started = time.perf_counter()
        step = None if optimizer_step is None else check_step(optimizer_step)
        self._publisher.make_room(Deadline(self._info.timeout_s))
        update = self.baseline.diff(self._source, optimizer_step=step)
        diff_s = time.perf_counter() - started
        self._publish(update)
        publish_s = time.perf_counter() - started - diff_s
        error, workers = self._update_workers()
        paused_s = self._client.paused_s if isinstance(self._client, Pausing) else None
        total_s = time.perf_counter() - started
        times = StageTimes(diff_s=diff_s, publish_s=publish_s, total_s=total_s, paused_s=paused_s)
        report = self._report(update, workers, error, times)
        _LOG.info("%s", report.line())
        return report

    def update_workers(self) -> tuple[WorkerVerdict, ...]:
        """Have every worker pull the newest version, whatever it holds now; those that hold it do nothing. Blocks.

        Returns:
            What each of them then holds. What went wrong with the client's calls is logged.
        """
        return self._update_workers()[1]

    def shutdown(self) -> None:
        """End the threads; may be called twice. Workers and store keep what they have."""
        self._publisher.close(self._info.timeout_s)

    def _publish(self, update: WeightUpdate) -> None:
        version = update.target_version
        staged = self.baseline.stage(update)
        error = self._publisher.publish(version, lambda: update, Deadline(self._info.timeout_s))
        if error:
            raise StoreError(error, version=version)
        self.baseline.advance(staged)
        self._head = self._store.record(version)

    def _update_workers(self) -> tuple[str, tuple[WorkerVerdict, ...]]:
        head = self._head
        pull = PullRequest(where=self._where, run_id=head.run_id, base=None, target=head.version)
        errors = list[str]()
        try:
            errors += [_error_of(self._client.start_weight_update)]
            errors += [_error_of(lambda: self._client.update_weights(pull.as_dict()))]  # whoever can be reached
        finally:  # after an interrupt too, so that nobody stays paused
            errors += [_error_of(self._client.finish_weight_update)]
        statuses = {} if self._ask is None else self._ask()
        verdicts = (_verdict(rank, name, status, head) for rank, (name, status) in enumerate(statuses.items(), 1))
        return "; ".join(filter(None, errors)), tuple(verdicts)

    def _report(
        self, update: WeightUpdate, workers: tuple[WorkerVerdict, ...], error: str, times: StageTimes
    ) -> RoundReport:
        head, table = self._head, self.baseline.state.table
        assert update.base_version is not None
        self._num_rounds += 1
        return RoundReport(
            run_id=head.run_id,
            epoch=head.epoch,
            generation=0,
            round=self._num_rounds,
            base_version=update.base_version,
            target_version=head.version,
            committed=True,
            wire="pull",
            num_changed=update.num_changed,
            num_words=table.num_words,
            num_parameters=len(update.patches),
            dense_bytes=table.nbytes,
            sent_bytes=0 if head.update is None else head.update.object.num_bytes,
            times=times,
            workers=workers,
            error=error,
            optimizer_step=update.optimizer_step,
            published_through=self._publisher.published_through,
        )


def _error_of(call: Callable[[], None]) -> str:
    """Make one of the client's calls; return what went wrong: the version stands, whoever was told."""
    try:
        call()
    except Exception as err:  # noqa: BLE001 - the user's code
        _LOG.warning("deltacast: the client failed: %s", err)
        return f"{type(err).__name__}: {err}"
    return ""


def _verdict(rank: int, name: str, status: WorkerStatus, head: VersionRecord) -> WorkerVerdict:
    serves = status.status in (ServingStatus.SERVING, ServingStatus.STALE)
    held, wanted = (status.run_id, status.version, status.digest), (head.run_id, head.version, head.state_digest)
    through = -1 if status.audited_through is None else status.audited_through
    return WorkerVerdict(rank, name, serves and held == wanted, status.digest, through, status.last_error)


def statuses_of_servers(servers: Iterable[ServerStatus]) -> dict[str, WorkerStatus]:
    """Return what `VllmClient.status` found, rank by rank, for an `AskWorkers`."""
    statuses: dict[str, WorkerStatus] = {}
    for server in servers:
        if not server.ranks:
            statuses[server.server] = WorkerStatus(ServingStatus.EMPTY, "", None, "", None, server.error)
        for number, rank in enumerate(server.ranks):
            statuses[f"{server.server} rank {number}"] = _status_of_rank(rank)
    return statuses


def _status_of_rank(rank: Mapping[str, Any]) -> WorkerStatus:
    if not rank["serves"]:
        return WorkerStatus(ServingStatus.EMPTY, "", None, rank.get("digest", ""), None, rank["error"])
    state, step = ServingStatus(rank["state"]), rank["optimizer_step"]
    return WorkerStatus(
        state, rank["run_id"], rank["version"], rank["digest"], rank["audited_through"], rank["error"], step
    )
