"""A model that vLLM compiles: nothing of the weights that it was compiled with stays in the code.

To be run in a process in which few engines were before: after many, on CPUs, two fresh engines that vLLM compiles for
one checkpoint differ in the last digits, without deltacast.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_models import ON_GPU, make_checkpoint, plain_layouts, weights_of, with_weights
from vllm_offline import STRATEGIES, Weights, change, digest_of, fresh_answers, offline, training

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

MODE = "VLLM_COMPILE" if ON_GPU else "DYNAMO_TRACE_ONCE"
UPDATES = ("", "norm", "embed_tokens")  # what the names of changed parameters contain


def update(weights: Weights, seed: int) -> None:
    change(weights, [name for name in weights if UPDATES[seed] in name], seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_model_gives_what_a_fresh_one_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Compiled with dummy weights, seeded, updated: tokens and log-probabilities are those of one compiled anew."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    base = make_checkpoint(tmp_path / "base", "qwen3", 0, tie_word_embeddings=True)
    weights, last = weights_of(base), weights_of(base)
    for seed in range(len(UPDATES)):
        update(last, seed)
    new = with_weights(tmp_path / "new", base, last)
    with plain_layouts() if strategy == "direct" else nullcontext():
        fresh = fresh_answers(new, enforce_eager=False)  # first, so that it can have nothing of the other one
        with offline(base, enforce_eager=False, load_format="dummy") as engine, training(weights, engine) as trainer:
            assert engine.llm.llm_engine.vllm_config.compilation_config.mode.name == MODE
            assert engine.status()["strategy"] == strategy
            served = [engine.answers()]
            for seed in range(len(UPDATES)):
                update(weights, seed)
                trainer.send_weights()
                served.append(engine.answers())
            assert engine.status()["digest"] == digest_of(last)
    assert served[-1] == fresh
    assert all(old != new for old, new in pairwise(served))
