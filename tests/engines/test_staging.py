"""Workers that stage an update while their weights are read: the pause comes late, and it can be given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from deltacast.delta.errors import DeadlineError, RoundAbortedError, StateError, TransportError
from deltacast.engines.base import ServingStatus
from deltacast.engines.clients import InProcessClient, PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.engines.staging import Staging
from engine_processes import Policy, weights_of
from engine_setups import EVERY_WIRE, in_process, trainer_of

pytestmark = pytest.mark.timeout(60)


class Server:
    """A worker as a server has it; it notes each call with the bits that were there. `failing` is what it fails at."""

    def __init__(self, worker: SparseNcclWorker, module: Policy, patience_s: float) -> None:
        self.worker, self._module = worker, module
        self.staging, self.patience_s = Staging(self._receive), patience_s
        self.noted: list[tuple[str, dict[str, bytes]]] = []
        self.failing: set[str] = set()
        self.error = ""
        self.over = threading.Event()

    def note(self, call: str) -> None:
        self.noted.append((call, weights_of(self._module)))
        if call in self.failing:
            raise OSError(f"cannot {call}")

    def _receive(self, update_info: Mapping[str, Any], before_write: Callable[[], object] | None) -> None:
        self.error = ""
        self.over.clear()
        try:
            self.worker.receive_weights(update_info, before_write=before_write)
        except Exception as err:  # noqa: BLE001 - handed to the test
            self.error = str(err)
        finally:
            self.over.set()


class ServerClient(InProcessClient):
    """A `StagingClient` of servers in this process."""

    def __init__(self, *servers: Server) -> None:
        super().__init__([server.worker for server in servers])
        self.servers = servers

    def call(self, verb: str, **_: Any) -> None:
        for server in self.servers:
            server.note(verb)

    def start_weight_update(self) -> None:
        self.call("start")

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        for server in self.servers:
            server.staging.stage(update_info, server.patience_s)
        for server in self.servers:
            assert server.staging.wait(20) != "receiving"
        self.call("staged")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update")
        with ThreadPoolExecutor(len(self.servers)) as pool:  # each ends when all have
            list(pool.map(lambda server: server.staging.receive(update_info), self.servers))

    def finish_weight_update(self) -> None:
        self.call("finish")


@contextmanager
def setting(
    *, num: int = 1, patience_s: float = 30.0, stage: bool = True, **options: Any
) -> Iterator[tuple[Policy, tuple[Server, ...], SparseNcclTrainer]]:
    """A trainer and servers that have forgotten the calls of its init."""
    policy, modules = Policy(0), [Policy(0) for _ in range(num)]
    with in_process(*modules) as (workers, _):
        servers = tuple(Server(worker, module, patience_s) for worker, module in zip(workers, modules, strict=True))
        client = PausingClient(ServerClient(*servers), stage=stage)
        with trainer_of(policy, client, num, **options) as trainer:
            for server in servers:
                server.noted.clear()
            policy.step(0)
            yield policy, servers, trainer


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_workers_are_paused_once_the_update_is_staged(wire: str) -> None:
    """Two servers: until the update call both have the old bits; the pause is what the report says of it."""
    with setting(num=2, wire=wire) as (policy, servers, trainer):
        before = weights_of(Policy(0))
        report = trainer.send_weights()
        after = weights_of(policy)
        assert report.num_verified == 2
        assert report.times.paused_s is not None
        assert report.times.paused_s < report.times.total_s
        for server in servers:
            old = [(call, before) for call in ("start", "staged", "pause", "update")]
            assert server.noted == [*old, ("finish", after), ("resume", after)]
            assert server.staging.state == ""


def test_staging_can_be_left_out() -> None:
    """Then the pause comes first."""
    with setting(stage=False) as (_, [server], trainer):
        assert trainer.send_weights().num_verified == 1
        assert [call for call, _ in server.noted] == ["pause", "start", "update", "finish", "resume"]


@pytest.mark.parametrize("step", ["staged", "pause", "update"])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_a_call_that_fails_between_staging_and_writing_leaves_the_old_version(wire: str, step: str) -> None:
    """The round aborts, what was staged is given up, and the next call goes on from there."""
    with setting(num=2, wire=wire) as (policy, servers, trainer):
        before = weights_of(Policy(0))
        servers[1].failing = {step}
        with pytest.raises((RoundAbortedError, TransportError), match=f"cannot {step}"):
            trainer.send_weights()
        assert [call for call, _ in servers[0].noted][-2:] == ["finish", "resume"]
        for server in servers:
            assert server.over.wait(20)
            assert (server.worker.status.status, server.worker.status.version) == (ServingStatus.SERVING, 0)
            assert server.noted[-1][1] == before
        servers[1].failing = set()
        assert trainer.send_weights().num_verified == 2
        assert [server.noted[-1][1] for server in servers] == [weights_of(policy)] * 2


@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_what_nobody_has_written_is_given_up_after_a_while(wire: str) -> None:
    """A client that goes away after staging leaves a worker that votes against the round, and serves on."""
    with setting(wire=wire, patience_s=0.2) as (_, [server], trainer):
        trainer._client = PausingClient(Absent(server))
        with pytest.raises(RoundAbortedError, match=r"no leave to write.*within 0\.2 s"):
            trainer.send_weights()
        assert server.over.wait(20)
        assert (server.worker.status.status, server.worker.status.version) == (ServingStatus.SERVING, 0)
        assert server.noted[-1][1] == weights_of(Policy(0))


class Absent(ServerClient):
    """Stages, and then writes only once the worker has given that up."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.servers[0].over.wait(20)
        super().update_weights(update_info)


OTHERS: dict[str, Callable[[Staging, dict[str, Any]], None]] = {
    "call_off": lambda staging, _: staging.call_off("enough"),
    "stage": lambda staging, other: staging.stage(other, 30.0),
    "receive": lambda staging, other: staging.receive(other),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_staged_can_be_called_off(what: str) -> None:
    """By name, or by another call; the worker is out of it when that returns, and the reason is its vote."""
    with setting(wire="container") as (policy, [server], trainer):

        class Meddling(ServerClient):
            def stage_weights(self, update_info: dict[str, Any]) -> None:
                super().stage_weights(update_info)
                OTHERS[what](server.staging, update_info | {"other": True})

        trainer._client = PausingClient(Meddling(server))
        with pytest.raises(RoundAbortedError, match=r"called off: (enough|another update)"):
            trainer.send_weights()
        assert server.worker.status.version == 0
        trainer._client = PausingClient(ServerClient(server))
        assert trainer.send_weights().num_verified == 1
        assert server.noted[-1][1] == weights_of(policy)


def test_a_worker_that_is_not_connected_is_over_at_once() -> None:
    """Its error is kept; nothing waits for it."""
    module = Policy(0)
    with in_process(module) as (workers, _):
        server = Server(workers[0], module, 30.0)
        server.staging.stage({"call": 1}, server.patience_s)
        assert server.staging.wait(20) == "over"
        assert "not connected" in server.error
        server.staging.receive({"call": 1})
        assert server.staging.state == ""


def test_a_call_that_the_trainer_has_given_up_pauses_nobody() -> None:
    """Staging took longer than the trainer waits: it finished the update, after which nobody would resume."""
    staging, over = threading.Event(), threading.Event()
    calls: list[str] = []

    class Slow(InProcessClient):
        def call(self, verb: str, **_: Any) -> None:
            calls.append(verb)

        def start_weight_update(self) -> None:
            calls.append("start")

        def stage_weights(self, _: dict[str, Any]) -> None:
            staging.set()
            over.wait(20)

        def finish_weight_update(self) -> None:
            calls.append("finish")

    client = PausingClient(Slow([]))
    client.start_weight_update()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(client.update_weights, {})
        assert staging.wait(20)
        client.finish_weight_update()
        over.set()
        with pytest.raises(StateError, match="the update is over"):
            late.result(20)
    assert calls == ["start", "finish", "resume"]


def test_a_staged_call_whose_trainer_is_silent_can_be_left() -> None:
    """Nothing comes: the worker is interrupted, and is out of it at once, at its version."""
    with setting() as (_, [server], _):
        server.staging.stage({"call": 1}, server.patience_s)
        server.worker.interrupt()
        server.staging.forget("a new handshake")
        assert "connection" in server.error
        assert (server.worker.status.status, server.worker.status.version) == (ServingStatus.STALE, 0)


def test_what_was_staged_and_given_up_is_done_from_its_beginning() -> None:
    """By the call itself, when it comes late; one that was called off does nothing."""
    begun: list[bool] = []

    def receive(_: Mapping[str, Any], before_write: Callable[[], object] | None) -> None:
        begun.append(before_write is not None)
        if before_write is not None:
            with suppress(DeadlineError, StateError):
                before_write()

    staging = Staging(receive)
    staging.stage({"call": 1}, 0.05)
    assert staging._call is not None
    staging._call._thread.join(20)
    staging.receive({"call": 1})
    assert begun == [True, False]
    staging.stage({"call": 2}, 30.0)
    staging.call_off("another rank cannot")
    staging.receive({"call": 2})
    assert begun == [True, False, True]
