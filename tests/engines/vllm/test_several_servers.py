"""Servers that behave as vLLM's do, with real worker engines: one that fails keeps nobody waiting, or paused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from deltacast.delta.errors import InputError, TransportError
from deltacast.delta.module_source import ModuleSource
from deltacast.engines.clients import PausingClient
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.client import VllmClient
from engine_processes import Policy, weights_of
from engine_setups import info, trainer_of
from http_workers import TOKEN, HttpWorker, http_workers

pytestmark = pytest.mark.timeout(90)

HANDSHAKE = ["/pause?mode=keep", "/init_weight_transfer_engine", "/collective_rpc"]
RESUMED = ["/collective_rpc", "/resume"]


@pytest.fixture
def servers() -> Iterator[list[HttpWorker]]:
    with http_workers(5, 5, as_vllm=True) as workers:
        yield workers


def client_of(servers: list[HttpWorker]) -> PausingClient:
    return PausingClient(VllmClient([server.url for server in servers], token=TOKEN, timeout_s=20.0))


def test_two_servers_follow_and_are_paused_for_as_long_as_the_report_says(servers: list[HttpWorker]) -> None:
    """Both are labelled; the pause is a part of the call's time."""
    policy = Policy(0)
    with trainer_of(policy, client_of(servers), 2) as trainer:
        policy.step(0)
        started = time.monotonic()
        report = trainer.send_weights()
        took_s = time.monotonic() - started
    assert report.times.paused_s is not None
    assert 0 < report.times.paused_s < took_s
    assert re.search(r"workers in \d+ ms, paused \d+ ms$", report.line())
    assert [server.ask("weights") for server in servers] == [weights_of(policy)] * 2


def test_a_server_that_cannot_reach_the_trainer_fails_the_handshake_for_all_at_once(servers: list[HttpWorker]) -> None:
    """It says 200 and its status why; the other was waiting for it, is let go as it was, and both run again."""
    before, client = weights_of(Policy(5)), client_of(servers)
    servers[1].ask("misdirect", True)
    started = time.monotonic()
    with pytest.raises(TransportError, match=f"{servers[1].url}: rank 0: TransportError: cannot reach the trainer"):
        SparseNcclTrainer.trainer_init(info(2, join_timeout_s=60.0), ModuleSource(Policy(0)), client)
    assert time.monotonic() - started < 15  # neither for the worker that is missing, nor for a server that waits for it
    assert [server.ask("weights") for server in servers] == [before, before]
    for server in servers:
        asked = server.ask("asked")
        assert asked[:2] == HANDSHAKE[:2]
        assert asked[-2:] == RESUMED
    servers[1].ask("misdirect", False)
    policy = Policy(0)
    with trainer_of(policy, client, 2) as trainer:
        assert trainer.send_weights().num_verified == 2


def test_a_server_of_another_model_fails_the_handshake_for_all_at_once(servers: list[HttpWorker]) -> None:
    """The trainer refuses the first that comes, and says which parameter; nobody is waited for, all run again."""
    other = Policy(0)
    del other.router
    started = time.monotonic()
    with pytest.raises(InputError, match="router"):
        SparseNcclTrainer.trainer_init(info(2, join_timeout_s=60.0), ModuleSource(other), client_of(servers))
    assert time.monotonic() - started < 15
    assert [server.ask("weights") for server in servers] == [weights_of(Policy(5))] * 2
    assert [server.ask("asked")[-2:] for server in servers] == [RESUMED, RESUMED]


def test_a_server_that_refuses_the_call_fails_the_handshake_for_all_at_once(servers: list[HttpWorker]) -> None:
    """Its own text is in the error, and the other runs again with what it had."""
    servers[0].ask("fail", {"/init_weight_transfer_engine": "weight transfer is not configured"})
    started = time.monotonic()
    with pytest.raises(TransportError, match=f"{servers[0].url}: status 500: weight transfer is not configured"):
        SparseNcclTrainer.trainer_init(info(2, join_timeout_s=60.0), ModuleSource(Policy(0)), client_of(servers))
    assert time.monotonic() - started < 15
    assert servers[1].ask("weights") == weights_of(Policy(5))
    assert servers[1].ask("asked")[-2:] == RESUMED
