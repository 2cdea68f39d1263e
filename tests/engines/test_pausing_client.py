"""Engines that are paused, or asleep, around an update: always resumed, and never too early."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from deltacast.delta.errors import InputError, RoundAbortedError, StateError, TransportError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.base import Client, Pausing
from deltacast.engines.clients import HttpClient, InProcessClient, PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer, SparseNcclWorker
from engine_processes import Policy, weights_of
from engine_setups import in_process, info, trainer_of
from http_workers import TOKEN, http_workers

pytestmark = pytest.mark.timeout(60)


class Engine(SparseNcclWorker):
    """A worker that can be paused and put to sleep; it notes each call with the version that its weights are.

    `failing` is what it fails at, after it has done it.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(ModuleSource(policy))
        self.calls: list[tuple[str, int | None]] = []
        self.failing: set[str] = set()

    def start_weight_update(self) -> None:
        self._note("start")

    def finish_weight_update(self) -> None:
        self._note("finish")

    def pause(self, mode: str = "none") -> None:
        self._note(f"pause {mode}")

    def resume(self) -> None:
        self._note("resume")

    def sleep(self, level: int) -> None:
        self._note(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self._note(f"wake {' '.join(tags)}")

    def _note(self, call: str) -> None:
        self.calls.append((call, self.status.version))
        if call in self.failing:
            raise OSError(f"cannot {call}")

    def heard(self) -> list[str]:
        """Return the names of the calls since the last time."""
        calls, self.calls = self.calls, []
        return [call for call, _ in calls]


@contextmanager
def setting(**options: Any) -> Iterator[tuple[Policy, Engine, PausingClient, SparseNcclTrainer]]:
    """A trainer and one engine, which has forgotten the calls of its init."""
    policy = Policy(0)
    engine = Engine(Policy(0))
    client = PausingClient(InProcessClient([engine]), **options)
    try:
        with trainer_of(policy, client, 1) as trainer:
            engine.heard()
            policy.step(0)
            yield policy, engine, client, trainer
    finally:
        engine.shutdown()


def test_weights_move_while_the_engine_is_paused() -> None:
    """It has the old version when it is paused and the new one when it resumes."""
    with setting() as (_, engine, client, trainer):
        assert isinstance(client, Client)
        assert trainer.send_weights().num_verified == 1
        assert engine.calls == [("pause keep", 0), ("start", 0), ("finish", 1), ("resume", 1)]


def test_a_seed_at_init_is_within_a_pause() -> None:
    """The handshake may write every weight, and no forward pass may run meanwhile."""
    engine = Engine(Policy(5))
    client = PausingClient(InProcessClient([engine]), mode="wait")
    with trainer_of(Policy(0), client, 1):
        assert engine.calls == [("pause wait", None), ("resume", 0)]
    engine.shutdown()


def test_a_report_says_for_how_long_an_engine_was_paused() -> None:
    """At least as long as the engine knows of, and no longer than the call; nothing with a client that cannot pause."""

    class Timed(Engine):
        def _note(self, call: str) -> None:
            super()._note(call)
            at[call] = time.monotonic()

    at: dict[str, float] = {}
    policy, engine = Policy(0), Timed(Policy(0))
    client = PausingClient(InProcessClient([engine]))
    assert client.paused_s is None
    with trainer_of(policy, client, 1) as trainer:
        started = time.monotonic()
        report = trainer.send_weights()
        took_s, paused_s = time.monotonic() - started, report.times.paused_s
    assert paused_s is not None
    assert at["resume"] - at["pause keep"] <= paused_s <= took_s
    assert report.line().endswith(f"paused {paused_s * 1e3:.0f} ms")
    with in_process(Policy(0)) as (_, plain), trainer_of(policy, plain, 1) as trainer:
        assert trainer.send_weights().times.paused_s is None
    engine.shutdown()


def test_within_a_pause_there_is_no_other() -> None:
    """A handshake in `paused`, as a trainer has it, is one pause; it ends whatever fails in it, and both are told."""
    engine = Engine(Policy(0))
    client = PausingClient(InProcessClient([engine]))
    assert isinstance(client, Pausing)
    with pytest.raises(InputError, match="bad worker init info"), client.paused():
        client.init_transfer_engine({"host": "nobody"})
    assert engine.heard() == ["pause keep", "resume"]
    engine.failing = {"resume"}
    with pytest.raises(TransportError, match="what was done; then: cannot resume"), client.paused():
        raise StateError("what was done")
    assert engine.heard() == ["pause keep", "resume"]


def test_an_engine_that_fails_at_init_is_resumed() -> None:
    """The trainer calls no finish there."""
    engine = Engine(Policy(0))
    client = PausingClient(InProcessClient([engine]), mode=None)
    with pytest.raises(InputError, match="bad worker init info"):
        client.init_transfer_engine({"host": "nobody"})
    assert engine.heard() == ["pause none", "resume"]


def test_it_sleeps_wakes_the_weights_and_then_the_kv_cache() -> None:
    """The weights are there when the update comes, and the KV cache takes its memory once it is over."""
    with setting(sleep_level=1, mode="abort") as (_, engine, _, trainer):
        assert trainer.send_weights().committed
        assert engine.calls == [
            *[("pause abort", 0), ("sleep 1", 0), ("wake weights", 0), ("start", 0)],
            *[("finish", 1), ("wake kv_cache", 1), ("resume", 1)],
        ]


def test_an_engine_that_sleeps_already_is_only_woken() -> None:
    """`sleep` before a training step; the next update after that begins with sleep again."""
    with setting(sleep_level=1) as (policy, engine, client, trainer):
        client.sleep()
        assert engine.heard() == ["pause keep", "sleep 1"]
        assert trainer.send_weights().committed
        assert engine.heard() == ["wake weights", "start", "finish", "wake kv_cache", "resume"]
        policy.step(1)
        assert trainer.send_weights().committed
        assert engine.heard()[:3] == ["pause keep", "sleep 1", "wake weights"]
        client.sleep()
        client.wake()
        assert engine.heard() == ["pause keep", "sleep 1", "wake weights", "wake kv_cache", "resume"]


def test_it_resumes_when_a_round_aborts() -> None:
    """With the weights that it had."""
    with setting() as (_, engine, _, trainer):
        engine._undo_budget_bytes = 0
        with pytest.raises(RoundAbortedError):
            trainer.send_weights()
        assert engine.calls == [("pause keep", 0), ("start", 0), ("finish", 0), ("resume", 0)]


@pytest.mark.parametrize(
    ("fails", "heard"),
    [
        ("pause keep", ["pause keep", "finish", "wake kv_cache", "resume"]),
        ("sleep 1", ["pause keep", "sleep 1", "wake weights", "finish", "wake kv_cache", "resume"]),
        ("start", ["pause keep", "sleep 1", "wake weights", "start", "finish", "wake kv_cache", "resume"]),
        (
            "wake weights",
            ["pause keep", "sleep 1", "wake weights", "wake weights", "finish", "wake kv_cache", "resume"],
        ),
        ("finish", ["pause keep", "sleep 1", "wake weights", "start", "finish", "wake kv_cache", "resume"]),
        ("wake kv_cache", ["pause keep", "sleep 1", "wake weights", "start", "finish", "wake kv_cache", "resume"]),
    ],
)
def test_it_resumes_whatever_fails(fails: str, heard: list[str]) -> None:
    """Some engines may have done what others failed at, so all are woken and resumed; the error is the first one."""
    with setting(sleep_level=1) as (_, engine, _, trainer):
        engine.failing = {fails}
        with pytest.raises(TransportError, match=f"cannot {fails}"):
            trainer.send_weights()
        assert engine.heard() == heard
        engine.failing = set()
        assert trainer.send_weights().committed
        assert engine.heard()[-1] == "resume"


def test_an_error_at_resume_does_not_hide_the_one_before() -> None:
    """Both are in the message, in their order, and the first is the cause."""
    with setting() as (_, engine, _, trainer):
        engine.failing = {"finish", "resume"}
        with pytest.raises(TransportError, match="cannot finish; then: cannot resume") as caught:
            trainer.send_weights()
        assert caught.value.version == 1
        engine.failing = {"start", "resume"}
        with pytest.raises(TransportError, match="could not start the update: cannot start"):
            trainer.send_weights()
        assert engine.heard()[-1] == "resume"


@pytest.mark.parametrize("at", ["start", "finish", "source"])
def test_it_resumes_after_an_interrupt(at: str) -> None:
    """Ctrl-C in the middle of a call, or of the trainer's own work: the engine runs, the interrupt is what comes."""

    class Interrupted(InProcessClient):
        def start_weight_update(self) -> None:
            super().start_weight_update()
            interrupt_at("start")

        def finish_weight_update(self) -> None:
            super().finish_weight_update()
            interrupt_at("finish")

    class Source(ModuleSource):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            interrupt_at("source")
            return super().tensors()

    def interrupt_at(place: str) -> None:
        if armed and place == at:
            signal.raise_signal(signal.SIGINT)

    armed = False
    policy, engine = Policy(0), Engine(Policy(0))
    trainer = SparseNcclTrainer.trainer_init(info(1), Source(policy), PausingClient(Interrupted([engine])))
    try:
        engine.heard()
        armed = True
        with pytest.raises(KeyboardInterrupt):
            trainer.send_weights()
        paused = ["pause keep", "start", "finish", "resume"]
        assert engine.heard() == ([] if at == "source" else paused)  # nobody is paused for the diff
        armed = False
        assert trainer.send_weights().committed
    finally:
        trainer.shutdown()
        engine.shutdown()


def test_servers_are_called_as_vllm_has_it() -> None:
    """Paths and query parameters, two servers, a committed round."""
    policy = Policy(0)
    with http_workers(0, 5) as servers:
        http = HttpClient([server.url for server in servers], token=TOKEN, paths={"resume": "/continue"})
        client = PausingClient(http, mode="wait", sleep_level=1)
        with trainer_of(policy, client, 2) as trainer:
            policy.step(0)
            assert trainer.send_weights().num_verified == 2
        for server in servers:
            assert server.ask("asked") == [
                *["/pause?mode=wait", "/init_weight_transfer_engine", "/continue"],
                *["/pause?mode=wait", "/sleep?level=1", "/wake_up?tags=weights", "/start_weight_update"],
                "/update_weights",
                *["/finish_weight_update", "/wake_up?tags=kv_cache", "/continue"],
            ]
            assert server.ask("weights") == weights_of(policy)


def test_servers_resume_though_one_of_them_cannot_pause() -> None:
    """The error names it; the other has paused, and must go on."""
    policy = Policy(0)
    with http_workers(0, 0) as servers:
        client = PausingClient(HttpClient([server.url for server in servers], token=TOKEN))
        with trainer_of(policy, client, 2) as trainer:
            servers[1].ask("fail", {"/pause": "no scheduler"})
            with pytest.raises(TransportError, match=f"{servers[1].url}: status 500: no scheduler"):
                trainer.send_weights()
            for server in servers:
                assert server.ask("asked")[-3:] == ["/pause?mode=keep", "/finish_weight_update", "/resume"]
            servers[1].ask("fail", {})
            assert trainer.send_weights().num_verified == 2


def test_what_would_lose_the_base_or_cannot_be_called_is_refused() -> None:
    """Level 2 throws the weights away; a client that never sleeps has nothing to wake by `sleep`."""
    inner = InProcessClient([Engine(Policy(0))])
    with pytest.raises(InputError, match="An update needs its base"):
        PausingClient(inner, sleep_level=2)
    with pytest.raises(StateError, match="does not sleep"):
        PausingClient(inner).sleep()
    with pytest.raises(InputError, match="Engine has no method 'hibernate'"):
        inner.call("hibernate")
