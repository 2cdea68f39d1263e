"""A server that quantises what it loads follows a trainer of the weights as they were: it equals a fresh one on these.

Only `fp8_per_channel` quantises linear layers in vLLM's CPU build where the processor has no AMX.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacast.delta.errors import InputError, RoundAbortedError
from deltacast.engines.vllm.engine import DeltacastEngine
from vllm_models import changed_bits, make_checkpoint, weights_of, with_weights
from vllm_offline import Offline, change, digest_of, offline, training

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings are its own

FP8 = "fp8_per_channel"
QKV = "model.layers.0.self_attn.qkv_proj"
KINDS: list[tuple[str, Callable[[str], bool]]] = [
    ("everything", lambda name: True),
    ("one layer", lambda name: ".1." in name),
    ("one member of a fused module", lambda name: name.endswith("0.self_attn.k_proj.weight")),
    ("norms", lambda name: "norm" in name),
    ("nothing", lambda name: False),
]


def fresh_answers(folder: Path) -> list[Any]:
    """What a quantised engine says that has nothing to do with deltacast."""
    with offline(folder, quantization=FP8, weight_transfer_config=None, worker_extension_cls="") as engine:
        return engine.answers()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_every_update_gives_what_a_fresh_engine_gives(tmp_path: Path, load_format: str) -> None:
    """Tokens and log-probabilities are those of quantising the trainer's weights; digests are of the weights."""
    base = make_checkpoint(tmp_path / "base", "qwen3", 0)
    weights = weights_of(base)
    checkpoints, served = [base], []
    with offline(base, quantization=FP8, load_format=load_format) as engine, training(weights, engine) as trainer:
        assert (engine.status()["version"], engine.status()["strategy"]) == (0, "reload")
        served.append(engine.answers())
        for step, (kind, touched) in enumerate(KINDS):
            change(weights, filter(touched, weights), step)
            report = trainer.send_weights()
            status = engine.status()
            assert (status["serves"], status["error"]) == (True, "")
            assert (status["version"], status["digest"]) == (report.target_version, digest_of(weights))
            served.append(engine.answers())
            new = with_weights(tmp_path / kind, base, weights) if report.num_changed else checkpoints[-1]
            checkpoints.append(new)
        assert engine.model.get_parameter(f"{QKV}.weight").dtype == torch.float8_e4m3fn
    fresh = {checkpoint: fresh_answers(checkpoint) for checkpoint in dict.fromkeys(checkpoints)}
    assert served == [fresh[checkpoint] for checkpoint in checkpoints]
    assert served[0] != served[1]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "base", "qwen3", 0)


@pytest.fixture
def engine(base: Path) -> Iterator[Offline]:
    with offline(base, quantization=FP8) as engine:
        yield engine


def test_a_reload_that_fails_leaves_the_old_version(base: Path, engine: Offline) -> None:
    """Some modules were quantised anew already; they are put back, and the next round is right."""
    weights, before, load = weights_of(base), engine.answers(), engine.model.load_weights

    def fail_once(given: Iterable[tuple[str, torch.Tensor]]) -> None:
        engine.model.load_weights = load
        load(list(given)[:5])  # type: ignore[operator]
        raise RuntimeError("out of memory, say")

    with training(weights, engine) as trainer:
        engine.model.load_weights = fail_once  # type: ignore[assignment]
        change(weights, weights, 1)
        with pytest.raises(RoundAbortedError, match="out of memory, say"):
            trainer.send_weights()
        assert (engine.status()["serves"], engine.status()["version"]) == (True, 0)
        assert engine.answers() == before
        trainer.send_weights()
        assert engine.status()["digest"] == digest_of(weights)
        assert engine.answers() != before


@pytest.mark.parametrize("damaged", ["weight", "weight_scale"])
def test_quantised_weights_that_are_not_those_of_the_copy_are_found_and_mended(
    base: Path, engine: Offline, damaged: str
) -> None:
    """A flipped bit is named by module, and no longer served; the next handshake quantises anew."""
    before = engine.answers()
    assert engine.worker.audit_runtime() == []
    engine.model.get_parameter(f"{QKV}.{damaged}").detach().view(torch.uint8)[3] ^= 1
    assert engine.worker.audit_runtime() == [QKV]
    assert not engine.status()["serves"]
    with training(weights_of(base), engine):
        assert engine.status()["serves"]
    assert engine.worker.audit_runtime() == []
    assert engine.answers() == before


def test_weights_of_any_bits_are_quantised_and_read_back(base: Path, engine: Offline) -> None:
    """NaN, infinities and minus zero too: quantising them gives the same bits each time."""
    weights = weights_of(base)
    with training(weights, engine) as trainer:
        for name, changed in changed_bits(weights, seed=1).items():
            weights[name].copy_(changed)
        trainer.send_weights()
    assert (engine.status()["digest"], engine.status()["error"]) == (digest_of(weights), "")


def test_a_checkpoint_that_is_quantised_itself_is_refused_by_name(base: Path) -> None:
    """Its files hold scales and packed weights, which are not what a trainer has."""
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="fp8"), offline(base):
        pass


@pytest.mark.parametrize("what", ["tensor parallelism", "experts"])
def test_what_is_not_proven_of_quantised_servers_is_refused_by_name(engine: Offline, what: str) -> None:
    """No such server starts on a CPU, so that a running one is made to look like it."""
    from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod

    config = copy.copy(engine.llm.llm_engine.vllm_config)
    if what == "experts":
        layer: Any = engine.model.get_submodule("model.layers.0.mlp")
        layer.quant_method = Int8OnlineMoEMethod.__new__(Int8OnlineMoEMethod)
    else:
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(InputError, match=f"--quantization {FP8} .*{what}"):
        DeltacastEngine(config.weight_transfer_config, config, torch.device("cpu"), engine.model)
