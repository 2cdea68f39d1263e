"""Nothing is left of an engine that was shut down, or that raised: no thread, process, port, descriptor or file."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltacast.delta.errors import (
    AuthenticationError,
    DeadlineError,
    InputError,
    RoundAbortedError,
    StateError,
    TableError,
    TransportError,
)
from deltacast.delta.module_source import ModuleSource
from deltacast.engines import opening
from deltacast.engines.clients import InProcessClient
from deltacast.engines.membership import Membership
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from deltacast.store.anchors import Anchors
from deltacast.store.version_store import VersionStore
from engine_processes import Policy
from engine_setups import EVERY_WIRE, RUN, Footprint, in_process, info, nothing_left_since, raised, trainer_of
from stored_runs import failing_store

pytestmark = pytest.mark.timeout(60)
SOON_S = 0.3
STRANGE = "00" * 32  # a secret that is nobody's


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have temporary files made where no other process makes some."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leaves_nothing(what: Callable[[], None]) -> bool:
    """Do it twice: the first time torch opens what it keeps."""
    what()
    before = Footprint.now()
    what()
    return nothing_left_since(before) and not list(Path(tempfile.gettempdir()).iterdir())


def server_error(*_: Any) -> None:
    raise OSError("503 from http://worker-0")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def other_table() -> Policy:
    policy = Policy(0)
    policy.up = type(policy.up)(policy.up.data[:, :95].clone())
    return policy


# After shutdown.


@pytest.mark.parametrize("seed_wire", ["container", "dense"])
@pytest.mark.parametrize("wire", EVERY_WIRE)
def test_nothing_is_left_after_shutdown(wire: str, seed_wire: str) -> None:
    """Of a trainer and of workers that were seeded and updated."""

    def run() -> None:
        policy = Policy(0)
        with (
            in_process(Policy(1), Policy(0)) as (_, client),
            trainer_of(policy, client, 2, wire=wire, seed_wire=seed_wire) as trainer,
        ):
            policy.step(0)
            assert trainer.send_weights().num_verified == 2

    assert leaves_nothing(run)


@pytest.mark.parametrize("durability", ["after_commit", "before_commit"])
@pytest.mark.parametrize("placement", ["cpu", "mmap"])
def test_nothing_is_left_after_shutdown_of_a_trainer_with_a_store(placement: str, durability: str) -> None:
    """Snapshots are put together in a temporary folder and a mapped baseline has a file; both are gone."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, VersionStore.create(Path(folder, "store"), run_id=RUN) as store:
            options: dict[str, Any] = {"store": store, "durability": durability, "anchors": Anchors(every=1)}
            options |= {"placement": placement, "baseline_folder": folder if placement == "mmap" else None}
            policy = Policy(0)
            with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, **options) as trainer:
                for step in range(3):
                    policy.step(step)
                    trainer.send_weights()
            assert {file.name for file in Path(folder).iterdir()} == {"store"}

    assert leaves_nothing(run)


# After an exception. There is no trainer to shut down after one out of `trainer_init`.


def start(source: Policy, client: InProcessClient, **options: Any) -> SparseNcclTrainer:
    return SparseNcclTrainer.trainer_init(info(1, **options), ModuleSource(source), client)


def client_fails() -> None:
    with in_process(Policy(0)) as (_, client), pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "init_transfer_engine", server_error)
        with pytest.raises(TransportError, match="503"):
            start(Policy(0), client)


def nobody_comes() -> None:
    with pytest.raises(DeadlineError):
        start(Policy(0), InProcessClient([]), join_timeout_s=SOON_S)


def a_table_is_refused() -> None:
    with in_process(other_table()) as (_, client), pytest.raises(TableError):
        start(Policy(0), client)


class Misled(InProcessClient):
    """Its workers are told another secret."""

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        super().init_transfer_engine(init_info | {"secret": STRANGE})


def a_worker_has_another_secret() -> None:
    with in_process(Policy(0)) as (workers, _), pytest.raises(TransportError):
        start(Policy(0), Misled(workers))


def the_port_is_taken() -> None:
    with in_process(Policy(0)) as (_, client), trainer_of(Policy(0), client, 1) as trainer:
        taken = trainer.worker_init_info["port"]
        with pytest.raises(TransportError, match="cannot listen"):
            start(Policy(0), client, port=taken)


def the_store_keeps_another_run() -> None:
    store, _ = failing_store()
    with in_process(Policy(0)) as (_, client), trainer_of(Policy(0), client, 1, store=store):
        pass
    with in_process(Policy(0)) as (_, client), pytest.raises(InputError):
        start(Policy(0), client, store=store, run_id="other")


def a_worker_cannot_be_seeded() -> None:
    with in_process(Policy(1)) as (workers, client):
        workers[0]._max_payload_bytes = 0
        with pytest.raises(TransportError):
            start(Policy(0), client)


def the_user_interrupts_an_admission() -> None:
    with in_process(Policy(0)) as (_, client), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "welcome", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start(Policy(0), client)


@pytest.mark.parametrize(
    "what",
    [
        client_fails,
        nobody_comes,
        a_table_is_refused,
        a_worker_has_another_secret,
        the_port_is_taken,
        the_store_keeps_another_run,
        a_worker_cannot_be_seeded,
        the_user_interrupts_an_admission,
    ],
)
def test_nothing_is_left_after_an_exception_out_of_trainer_init(what: Callable[[], None]) -> None:
    """There is no trainer that could be shut down."""
    assert leaves_nothing(what)


@dataclass
class Sides:
    """Both sides of a round that is to fail."""

    policy: Policy
    trainer: SparseNcclTrainer
    client: InProcessClient
    workers: list[SparseNcclWorker]

    def call_fails(self, name: str) -> None:
        setattr(self.client, name, server_error)

    def client_cannot_start(self) -> None:
        self.call_fails("start_weight_update")

    def client_fails(self) -> None:
        self.call_fails("update_weights")

    def client_cannot_finish(self) -> None:
        self.call_fails("finish_weight_update")

    def a_worker_refuses(self) -> None:
        self.workers[0]._max_payload_bytes = 0

    def the_workers_are_gone(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    def the_group_breaks(self) -> None:
        assert self.workers[0]._group is not None
        self.workers[0]._group.abort()

    def the_source_changes_its_parameters(self) -> None:
        self.policy.up = other_table().up

    def the_user_interrupts(self) -> None:
        self.trainer._hear_verdicts = interrupt  # type: ignore[assignment, method-assign]

    def the_trainer_is_shut_down(self) -> None:
        self.trainer.shutdown()


@pytest.mark.parametrize("wire", EVERY_WIRE)
@pytest.mark.parametrize(
    ("fault", "raised_as"),
    [
        (Sides.client_cannot_start, TransportError),
        (Sides.client_fails, (RoundAbortedError, TransportError)),
        (Sides.client_cannot_finish, TransportError),
        (Sides.a_worker_refuses, RoundAbortedError),
        (Sides.the_workers_are_gone, TransportError),
        (Sides.the_group_breaks, RoundAbortedError),
        (Sides.the_source_changes_its_parameters, InputError),
        (Sides.the_user_interrupts, KeyboardInterrupt),
        (Sides.the_trainer_is_shut_down, StateError),
    ],
)
def test_nothing_is_left_after_an_exception_out_of_send_weights(
    wire: str, fault: Callable[[Sides], None], raised_as: Any
) -> None:
    """But for a shutdown's work, and that is done then."""

    def run() -> None:
        policy = Policy(0)
        with (
            in_process(Policy(0), Policy(0)) as (workers, client),
            trainer_of(policy, client, 2, wire=wire, timeout_s=2.0) as trainer,
        ):
            trainer.send_weights()
            policy.step(0)
            fault(Sides(policy, trainer, client, workers))
            with pytest.raises(raised_as):
                trainer.send_weights()

    assert leaves_nothing(run)


NOWHERE = info(1).for_workers("127.0.0.1", 0).as_dict() | {"timeout_s": SOON_S, "idle_timeout_s": SOON_S}


def nobody_listens(worker: SparseNcclWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransportError, match="cannot reach"):
        worker.init_transfer_engine({**NOWHERE, "port": port})


def nobody_answers(worker: SparseNcclWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeadlineError):
        worker.init_transfer_engine({**NOWHERE, "port": silent.getsockname()[1]})


def the_user_interrupts_a_wait(worker: SparseNcclWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def press_ctrl_c() -> None:
            with silent.accept()[0] as connection:
                connection.sendall(opening._MAGIC + bytes(32))
                connection.recv(1)  # its proof: now it waits for ours
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                done.wait(20)

        done, thread = threading.Event(), threading.Thread(target=press_ctrl_c)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            worker.init_transfer_engine({**NOWHERE, "port": silent.getsockname()[1], "idle_timeout_s": 20.0})
        done.set()
        thread.join()


def at_a_trainer(
    worker: SparseNcclWorker, raised_as: type[Exception], *, sends: bool, told: dict[str, object], **options: Any
) -> None:
    """Have a worker knock at a trainer that has one already, and goes on or does not."""
    policy = Policy(0)
    with in_process(Policy(0)) as (_, client), trainer_of(policy, client, 1, **options) as trainer:
        errors = list[BaseException]()
        knock = threading.Thread(target=lambda: errors.append(raised(worker, trainer.worker_init_info | told)))
        knock.start()
        while sends and knock.is_alive():
            trainer.send_weights()
        knock.join()
        assert isinstance(errors[0], raised_as)


def the_secret_is_wrong(worker: SparseNcclWorker) -> None:
    at_a_trainer(worker, AuthenticationError, sends=True, told={"secret": STRANGE})


def nobody_admits(worker: SparseNcclWorker) -> None:
    at_a_trainer(worker, DeadlineError, sends=False, told={"idle_timeout_s": SOON_S})


def the_trainer_is_an_older_writer(worker: SparseNcclWorker) -> None:
    worker._run_id, worker._epoch = RUN, 1
    at_a_trainer(worker, StateError, sends=True, told={})


@pytest.mark.parametrize(
    "fault",
    [
        nobody_listens,
        nobody_answers,
        the_user_interrupts_a_wait,
        the_secret_is_wrong,
        nobody_admits,
        the_trainer_is_an_older_writer,
    ],
)
def test_nothing_is_left_after_an_exception_out_of_init_transfer_engine(
    fault: Callable[[SparseNcclWorker], None],
) -> None:
    """The worker is not even shut down: it may try again."""
    worker = SparseNcclWorker(ModuleSource(Policy(0)))
    assert leaves_nothing(lambda: fault(worker))


def test_nothing_is_left_of_a_worker_whose_trainer_is_gone() -> None:
    """Its call raises, and holds no connection and no group from then on; shut down or not."""
    kept = list[SparseNcclWorker]()

    def run() -> None:
        policy = Policy(0)
        with in_process(Policy(0)) as (workers, client):
            with trainer_of(policy, client, 1) as trainer:
                trainer.send_weights()
            with pytest.raises(TransportError):
                workers[0].receive_weights()
            before = Footprint.now()
            workers[0].shutdown()
            assert not before.exceeds(Footprint.now())
            kept.extend(workers)

    assert leaves_nothing(run)
