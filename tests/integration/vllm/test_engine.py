"""The worker engine in a vLLM of this process: what it serves equals a fresh vLLM, whatever is changed or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacast.delta.errors import InputError, RoundAbortedError, TransportError
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.state import WeightState
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.plugin import register
from engine_setups import info
from vllm_models import make_checkpoint, weights_of, with_weights
from vllm_offline import Offline, fresh_answers, offline, training

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings are its own

Weights = dict[str, torch.Tensor]


def digest_of(weights: Weights) -> str:
    return WeightState(weights).digest


def change(weights: Weights, names: Iterable[str], seed: int) -> None:
    """Replace 1 % of the elements of each."""
    random = torch.Generator().manual_seed(seed)
    for name in names:
        flat = weights[name].view(-1)
        places = torch.randperm(len(flat), generator=random)[: max(1, len(flat) // 100)]
        flat[places] = (torch.randn(len(places), generator=random) * 0.1).to(flat.dtype)


KINDS: list[tuple[str, Callable[[str], bool]]] = [
    ("everything", lambda name: True),
    ("one layer", lambda name: ".1." in name),
    ("one member of a fused module", lambda name: name.endswith("0.self_attn.k_proj.weight")),
    ("the embedding", lambda name: "embed_tokens" in name),
    ("norms", lambda name: "norm" in name),
    ("nothing", lambda name: False),
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_update_gives_what_a_fresh_engine_gives(tmp_path: Path, tied: bool) -> None:
    """Dummy weights, a seed, updates of all kinds: tokens, log-probabilities and digests are the checkpoint's."""
    base = make_checkpoint(tmp_path / "base", "qwen3", 0, tie_word_embeddings=tied)
    weights = weights_of(base)
    checkpoints, served = [base], []
    with offline(base, load_format="dummy") as engine, training(weights, engine) as trainer:
        assert engine.status()["version"] == 0
        served.append(engine.answers())
        for step, (kind, touched) in enumerate(KINDS):
            change(weights, filter(touched, weights), step)
            report = trainer.send_weights()
            status = engine.status(nonce=kind)
            assert (status["nonce"], status["serves"], status["error"]) == (kind, True, "")
            assert (status["version"], status["digest"]) == (report.target_version, digest_of(weights))
            served.append(engine.answers())
            checkpoints.append(with_weights(tmp_path / kind, base, weights))
    assert served == [fresh_answers(checkpoint) for checkpoint in checkpoints]
    assert served[0] != served[1]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "base", "qwen3", 0)


@pytest.fixture
def engine(base: Path) -> Iterator[Offline]:
    with offline(base) as engine:
        yield engine


def test_a_server_that_loaded_the_trainers_checkpoint_is_sent_nothing(base: Path, engine: Offline) -> None:
    """What vLLM loaded counts as the baseline, and may be served before any trainer came."""
    before = engine.answers()
    assert engine.status()["serves"]
    assert engine.status()["version"] is None
    with training(weights_of(base), engine) as trainer:
        report = trainer.send_weights()
        assert report.seeded == ()
        assert report.num_changed == 0
    assert engine.answers() == before


def test_special_values_arrive_as_sent(base: Path, engine: Offline) -> None:
    """NaN payloads, minus zero and infinities are in the running tensors, bit by bit."""
    weights = weights_of(base)
    bits = [0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001]
    words = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    names = ("model.norm.weight", "model.embed_tokens.weight")
    with training(weights, engine) as trainer:
        for name in names:
            weights[name].view(torch.int16).view(-1)[3:9] = words
        trainer.send_weights()
    for name in names:
        running = engine.model.get_parameter(name).detach().view(torch.int16).view(-1)
        assert [word & 0xFFFF for word in running[3:9].tolist()] == bits
    assert engine.status()["digest"] == digest_of(weights)


class Breaking:
    """Makes the model's loader fail after it was given some tensors, the next `times` times."""

    def __init__(self, engine: Offline, times: int) -> None:
        self.model, self.times = engine.model, times
        self.load: Any = self.model.load_weights
        self.model.load_weights = self  # type: ignore[assignment]

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        if not self.times:
            return self.load(weights)
        self.times -= 1
        self.load(list(weights)[:5])
        raise RuntimeError("out of memory, say")


def test_a_reload_that_fails_aborts_the_round_and_the_old_version_is_served(base: Path, engine: Offline) -> None:
    """The trainer hears why, half of the modules were new for a moment, and the next round is right."""
    weights = weights_of(base)
    before = engine.answers()
    with training(weights, engine) as trainer:
        Breaking(engine, times=1)
        change(weights, weights, 1)
        with pytest.raises(RoundAbortedError, match="out of memory, say"):
            trainer.send_weights()
        status = engine.status()
        assert (status["serves"], status["version"]) == (True, 0)
        assert "out of memory, say" in status["error"]
        assert engine.answers() == before
        trainer.send_weights()
        assert engine.status()["error"] == ""
        after = engine.answers()
    assert after != before


def test_a_reload_that_cannot_be_undone_leaves_nothing_to_serve_until_a_handshake(base: Path, tmp_path: Path) -> None:
    """The rank says that it serves nothing; nothing was raised into vLLM; a new handshake makes it whole."""
    weights = weights_of(base)
    with offline(base) as engine:
        served = served_after_a_mix(weights, engine)
    assert served == fresh_answers(with_weights(tmp_path / "new", base, weights))


def served_after_a_mix(weights: Weights, engine: Offline) -> list[Any]:
    with training(weights, engine) as trainer:
        breaking = Breaking(engine, times=10)
        change(weights, weights, 1)
        with pytest.raises((RoundAbortedError, TransportError)):
            trainer.send_weights()
        assert not engine.status()["serves"]
        breaking.times = 0
    with training(weights, engine):
        assert engine.status()["serves"]
        return engine.answers()


@pytest.mark.parametrize("fault", ["an unknown name", "another shape"])
def test_a_trainer_of_another_model_is_refused(base: Path, engine: Offline, fault: str) -> None:
    """The trainer's error says which parameter; the server goes on with what it had."""
    before, weights = engine.answers(), weights_of(base)
    if fault == "an unknown name":
        weights["model.extra.weight"] = torch.zeros(3)
    else:
        weights["model.norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    name = "model.extra.weight" if fault == "an unknown name" else "model.norm.weight"
    with pytest.raises(InputError, match=name):
        SparseNcclTrainer.trainer_init(info(1), StateDictSource(weights), engine)
    assert engine.status()["error"]
    assert engine.status()["serves"]
    assert engine.answers() == before


def test_a_call_without_a_trainer_is_an_error_of_the_status_only(engine: Offline) -> None:
    """Wrong arguments, calls out of turn: vLLM's RPC sees no exception."""
    engine.init_transfer_engine({"host": "nowhere"})
    assert "InputError" in engine.status()["error"]
    engine.start_weight_update()
    engine.update_weights({"call": 1})
    engine.finish_weight_update()
    assert "not connected" in engine.status()["error"]
    assert engine.status()["serves"]


def test_expert_weights_are_refused_by_name(tmp_path: Path) -> None:
    """On CPUs a second load of them is silently wrong: the server does not start."""
    folder = make_checkpoint(tmp_path / "moe", "qwen3_moe", 0)
    with pytest.raises(InputError, match=r"cannot update this model.*experts"), offline(folder):
        pass


def test_the_plugin_may_be_called_again() -> None:
    """VLLM calls it once in each process; whoever imports it may do so too."""
    register()
    register()
