"""The worker engine in a vLLM of this process: what it serves equals a fresh vLLM, whatever is changed or fails.

On CPUs everything with both strategies: `reload` is vLLM's CPU build as it is, `direct` the layout of its GPU builds.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deltacast.delta.errors import InputError, RoundAbortedError, StateError, TransportError
from deltacast.delta.fingerprint import fingerprint
from deltacast.delta.module_source import StateDictSource
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.plugin import register
from engine_setups import info
from vllm_models import changed_bits, make_checkpoint, plain_layouts, weights_of, with_weights
from vllm_offline import (
    STRATEGIES,
    Offline,
    Weights,
    change,
    digest_of,
    fresh_answers,
    offline,
    packs_weights,
    training,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings are its own

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {}),
}
KINDS: list[tuple[str, Callable[[str], bool]]] = [
    ("everything", lambda name: True),
    ("one layer", lambda name: ".1." in name),
    ("one member of a fused module", lambda name: name.endswith("0.self_attn.k_proj.weight")),
    ("one expert", lambda name: ".0.mlp.experts.2." in name),
    ("the embedding", lambda name: "embed_tokens" in name),
    ("norms", lambda name: "norm" in name),
    ("nothing", lambda name: False),
]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    with plain_layouts() if request.param == "direct" else nullcontext():
        yield request.param


@pytest.mark.parametrize("model", MODELS)
def test_every_update_gives_what_a_fresh_engine_gives(tmp_path: Path, model: str, strategy: str) -> None:
    """Dummy weights, a seed, updates of all kinds: tokens, log-probabilities and digests are the checkpoint's."""
    family, changes = MODELS[model]
    base = make_checkpoint(tmp_path / "base", family, 0, **changes)
    weights = weights_of(base)
    checkpoints, served = [base], []
    with offline(base, load_format="dummy") as engine, training(weights, engine) as trainer:
        assert (engine.status()["version"], engine.status()["strategy"]) == (0, strategy)
        served.append(engine.answers())
        for step, (kind, touched) in enumerate(KINDS):
            change(weights, filter(touched, weights), step)
            report = trainer.send_weights()
            status = engine.status(nonce=kind)
            assert (status["nonce"], status["serves"], status["error"]) == (kind, True, "")
            assert (status["version"], status["digest"]) == (report.target_version, digest_of(weights))
            served.append(engine.answers())
            new = with_weights(tmp_path / kind, base, weights) if report.num_changed else checkpoints[-1]
            checkpoints.append(new)
        assert engine.held == {name: fingerprint(weight) for name, weight in weights.items()}
    fresh = {checkpoint: fresh_answers(checkpoint) for checkpoint in dict.fromkeys(checkpoints)}
    assert served == [fresh[checkpoint] for checkpoint in checkpoints]
    assert served[0] != served[1]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "base", "qwen3", 0)


@pytest.fixture
def engine(base: Path, strategy: str) -> Iterator[Offline]:
    with offline(base) as engine:
        assert engine.status()["strategy"] == strategy
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
    """NaN payloads, minus zero and infinities are in the running tensors, bit by bit; so is whatever else is sent."""
    weights = weights_of(base)
    bits = [0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001]
    words = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    names = ("model.norm.weight", "model.embed_tokens.weight")
    with training(weights, engine) as trainer:
        for name, changed in changed_bits(weights, seed=1).items():
            weights[name].copy_(changed)
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


only_reload = pytest.mark.parametrize("strategy", ["reload"], indirect=True)


@packs_weights
@only_reload
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


@packs_weights
@only_reload
@pytest.mark.usefixtures("strategy")
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


@packs_weights
@only_reload
@pytest.mark.parametrize("trained", [False, True], ids=["as loaded", "updated"])
def test_running_weights_that_are_not_those_of_the_copy_are_found_and_mended(
    base: Path, engine: Offline, trained: bool
) -> None:
    """A flipped bit, and a packed matrix that is another layer's: named by module, no longer served, then reloaded."""
    weights = weights_of(base)
    if trained:
        with training(weights, engine) as trainer:
            change(weights, weights, 1)
            trainer.send_weights()
    before = engine.answers()
    assert engine.worker.audit_runtime() == []
    layers = engine.model.get_submodule("model.layers")
    layers[0].mlp.down_proj.cpu_linear = layers[1].mlp.down_proj.cpu_linear  # type: ignore[index]
    engine.model.get_parameter("model.norm.weight").data.view(torch.int16)[3] ^= 1
    assert engine.worker.audit_runtime() == ["model.layers.0.mlp.down_proj", "model.norm"]
    assert not engine.status()["serves"]
    with pytest.raises(StateError, match="other weights"):
        _ = engine.held
    with training(weights, engine):
        assert engine.status()["serves"]
    assert engine.worker.audit_runtime() == []
    assert engine.answers() == before


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


def test_what_the_running_model_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    """A head in the checkpoint of a tied model is loaded into nothing: the server does not start."""
    tied = make_checkpoint(tmp_path / "tied", "qwen3", 0, tie_word_embeddings=True)
    weights = weights_of(tied)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    folder = with_weights(tmp_path / "with head", tied, weights)
    with pytest.raises(InputError, match=r"no place for lm_head\.weight"), offline(folder):
        pass


def test_replicas_behind_one_server_are_refused(base: Path) -> None:
    """VLLM says what its first replica holds, and labels them all: another one might serve an older version."""
    from vllm.engine.arg_utils import EngineArgs

    from deltacast.engines.vllm.engine import DeltacastEngine

    config = EngineArgs(model=str(base), skip_tokenizer_init=True, data_parallel_size=2).create_engine_config()
    config.parallel_config.data_parallel_index = 1  # so does vLLM where it starts the second replica
    config.parallel_config.reconfigure_for_independent_dp_rank()
    with pytest.raises(InputError, match="--data-parallel-size"):
        DeltacastEngine(config.weight_transfer_config, config, torch.device("cpu"), nn.Module())


def test_the_plugin_may_be_called_again() -> None:
    """VLLM calls it once in each process; whoever imports it may do so too."""
    register()
    register()
