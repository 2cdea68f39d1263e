"""A vLLM that pulls from a store: it serves what a fresh one serves, and only reads stores that it was started for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from deltacast.delta.errors import InputError
from deltacast.delta.module_source import ModuleSource, StateDictSource
from deltacast.engines.base import TrainerInitInfo, WorkerStatus
from deltacast.engines.clients import PausingClient
from deltacast.engines.pull_trainer import PullingTrainer, statuses_of_servers
from deltacast.engines.pulling import PullRequest
from deltacast.engines.vllm.client import ServerStatus, VllmClient
from deltacast.store.version_store import VersionStore
from vllm_faults import FAULTY
from vllm_models import make_checkpoint, plain_layouts, weights_of, with_weights
from vllm_offline import Offline, Weights, change, fresh_answers, needs_gpus, offline, packs_weights

SUPPORT = Path(__file__).resolve().parents[2] / "support"

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings are its own


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "base", "qwen3", 0)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore.create(tmp_path / "stores" / "run", run_id="run")


def pulling(store: VersionStore) -> dict[str, Any]:
    """How an engine is started that may read that store, and others beside it."""
    return {"additional_config": {"deltacast": {"pull": {"allowed": [str(Path(store.backend.url).parent)]}}}}


@contextmanager
def training(weights: Weights, store: VersionStore, engine: Offline) -> Iterator[PullingTrainer]:
    info = TrainerInitInfo(num_workers=1, store=store)

    def ask() -> Any:
        return statuses_of_servers([ServerStatus("offline", (engine.status(),))])

    trainer = PullingTrainer(info, StateDictSource(weights), engine, ask)
    try:
        yield trainer
    finally:
        trainer.shutdown()


def test_updates_from_a_store_give_what_a_fresh_engine_gives(base: Path, tmp_path: Path, store: VersionStore) -> None:
    """With weights repacked, and in their plain layout: first whole, then by updates, verified by digest."""
    weights = weights_of(base)
    served: list[Any] = []
    with offline(base, load_format="dummy", **pulling(store)) as engine, training(weights, store, engine) as trainer:
        assert [worker.verified for worker in trainer.update_workers()] == [True]
        served.append(engine.answers())
        change(weights, weights, 1)
        report = trainer.send_weights(optimizer_step=7)
        assert (report.error, report.num_verified, engine.status()["optimizer_step"]) == ("", 1, 7)
        served.append(engine.answers())
    with plain_layouts(), offline(base, **pulling(store)) as late:
        pull(late, store, 1)
        status = late.status()
        assert (status["strategy"], status["version"], status["serves"], status["error"]) == ("direct", 1, True, "")
        assert status["digest"] == store.record(1).state_digest
        plain = late.answers()
    new = with_weights(tmp_path / "new", base, weights)
    assert served == [fresh_answers(base), fresh_answers(new)]
    with plain_layouts():
        assert plain == fresh_answers(new)


def pull(engine: Offline, store: VersionStore, target: int, **changes: Any) -> None:
    call = PullRequest(where=store.backend.url, run_id="run", base=None, target=target).as_dict()
    engine.start_weight_update()
    engine.update_weights({"pull": call["pull"] | changes})
    engine.finish_weight_update()


@packs_weights
def test_a_refused_or_broken_pull_leaves_what_was_served(base: Path, store: VersionStore) -> None:
    """Nothing is raised into vLLM; the status says why."""
    weights = weights_of(base)
    with offline(base, **pulling(store)) as engine, training(weights, store, engine) as trainer:
        assert [worker.verified for worker in trainer.update_workers()] == [True]
        before = engine.answers()
        pull(engine, store, 0, where="/etc")
        assert "does not allow that store" in engine.status()["error"]
        pull(engine, store, 5)
        assert "does not have that version" in engine.status()["error"]
        change(weights, weights, 1)
        fail_once(engine)
        assert trainer.send_weights().num_verified == 0
        status = engine.status()
        assert (status["version"], status["serves"]) == (0, True)
        assert "out of memory, say" in status["error"]
        assert engine.answers() == before
        assert [worker.verified for worker in trainer.update_workers()] == [True]
        assert engine.answers() != before


def fail_once(engine: Offline) -> None:
    """Make the next reload fail half way."""
    load: Any = engine.model.load_weights

    def failing(weights: Iterable[Any]) -> None:
        engine.model.load_weights = load
        load(list(weights)[:5])
        raise RuntimeError("out of memory, say")

    engine.model.load_weights = failing  # type: ignore[assignment]


def test_an_engine_with_bad_settings_does_not_start(base: Path) -> None:
    """A name that nobody knows may have been meant to forbid something."""
    with (
        pytest.raises(InputError, match="bad settings of pulls"),
        offline(base, additional_config={"deltacast": {"pull": {"alowed": []}}}),
    ):
        pass


@needs_gpus(2)
def test_a_server_of_two_ranks_pulls_over_http(
    example: ModuleType, tmp_path: Path, store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank pulls for itself and is verified; if one cannot, the server keeps its version as a whole."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default wants two NUMA nodes
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    policy = example.make_model(tmp_path / "model")
    settings = ("--additional-config", json.dumps(pulling(store)["additional_config"]))
    transfer = ("--weight-transfer-config", '{"backend": "deltacast"}', "--worker-extension-cls", FAULTY)
    options = ("--load-format", "dummy", "--tensor-parallel-size", "2", *settings, *transfer)
    with example.serving(tmp_path / "model", *options) as url:
        client = VllmClient([url])
        info = TrainerInitInfo(num_workers=2, store=store)
        ask = partial(asked, client)
        trainer = PullingTrainer(info, ModuleSource(policy), PausingClient(client), ask)
        example.train(policy, 1)
        report = trainer.send_weights()
        assert (report.error, report.num_verified, len(report.workers)) == ("", 2, 2)
        assert report.times.paused_s is not None
        assert example.label(url) == "1"
        served = example.complete(url, tmp_path / "model")
        forget = {"method": "forget_stores", "args": [1]}
        httpx.post(f"{url}/collective_rpc", json=forget, timeout=60).raise_for_status()
        example.train(policy, 2)
        report = trainer.send_weights()
        trainer.shutdown()
        assert report.num_verified == 0
        first, second = (worker.error for worker in report.workers)
        assert "called off: another rank of this server" in first
        assert "does not allow that store" in second
        [status] = client.status()
        assert (status.serves, status.version, example.label(url)) == (True, 1, "1")
        assert example.complete(url, tmp_path / "model") == served


def asked(client: VllmClient) -> dict[str, WorkerStatus]:
    return statuses_of_servers(client.status())
