"""The small policy against transformers' Llama, and the sampler against the probabilities it should draw from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltacast.demo.policy import Policy, PolicyConfig, sample

SMALL = PolicyConfig(hidden_size=32, intermediate_size=48, num_heads=4)


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def _bits(module: nn.Module) -> list[bytes]:
    return [weight.detach().contiguous().view(torch.uint8).numpy().tobytes() for weight in module.parameters()]


class _Scripted:
    """A language model whose next token depends on the last one alone: `table[last]` are its logits."""

    def __init__(self, table: Tensor, eos_id: int | None = None) -> None:
        self.table = table
        self.eos_id = eos_id
        self.pad_id = 0
        self.module = nn.Module()

    def new_cache(self) -> None:
        return None

    def __call__(self, tokens: Tensor, cache: Any = None) -> Tensor:
        return self.table[tokens]


def test_default_size_and_names() -> None:
    """One to four million parameters, under the names that Llama checkpoints use."""
    policy = Policy()
    assert 1e6 < sum(weight.numel() for weight in policy.parameters()) < 4e6
    names = [name for name, _ in policy.named_parameters()]
    assert names[0] == "model.embed_tokens.weight"
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert "model.norm.weight" in names
    assert "lm_head.weight" not in names


def test_weights_depend_on_the_seed_alone() -> None:
    """The global random state does not matter."""
    torch.manual_seed(1)
    first = _bits(Policy(SMALL, seed=3))
    torch.manual_seed(2)
    assert _bits(Policy(SMALL, seed=3)) == first
    assert _bits(Policy(SMALL, seed=4)) != first


def test_head_and_embedding_stay_one_tensor() -> None:
    """In the state dict they are two names; copies and casts keep them tied."""
    policy = Policy(SMALL)
    served = copy.deepcopy(policy).to(torch.bfloat16)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= policy.state_dict().keys()
    for module in (policy, served):
        assert module.lm_head.weight is module.model.embed_tokens.weight
    assert served.lm_head.weight.data_ptr() != policy.lm_head.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_llama(dtype: torch.dtype) -> None:
    """The Llama of transformers accepts the state dict as it is, and computes the same."""
    transformers = pytest.importorskip("transformers")
    policy = Policy(SMALL, seed=1).to(dtype)
    config = transformers.LlamaConfig(
        vocab_size=SMALL.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, rms_norm_eps=SMALL.norm_eps, tie_word_embeddings=True, attention_bias=False,
        rope_theta=100.0, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config)
    llama.load_state_dict(policy.state_dict())
    rotary = llama.model.rotary_emb.inv_freq.clone()
    llama = llama.to(dtype).eval()
    llama.model.rotary_emb.inv_freq = rotary
    tokens = _tokens(3, 9)
    with torch.no_grad():
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(policy(tokens), llama(tokens).logits, rtol=0, atol=tolerance)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    """Attention is causal."""
    policy = Policy(SMALL)
    tokens = _tokens(2, 6)
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = policy(tokens), policy(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=1e-5)
    assert not torch.allclose(after[:, 4:], before[:, 4:], atol=1e-2)


def test_a_cache_changes_nothing() -> None:
    """A prompt and then single tokens through a cache give the logits of the whole sequence."""
    policy = Policy(SMALL)
    tokens = _tokens(2, 7)
    cache = policy.new_cache()
    with torch.no_grad():
        whole = policy(tokens)
        parts = [policy(tokens[:, :4], cache), *(policy(tokens[:, i : i + 1], cache) for i in range(4, 7))]
    assert cache.num_tokens == 7
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-4)


def test_a_filled_cache_takes_one_token_at_a_time() -> None:
    """Two would need another mask; the cache stays as it was."""
    policy = Policy(SMALL)
    cache = policy.new_cache()
    with torch.no_grad():
        policy(_tokens(1, 3), cache)
        with pytest.raises(ValueError, match="one more at a time, got 2"):
            policy(_tokens(1, 2), cache)
    assert cache.num_tokens == 3


def test_config_checks_the_heads() -> None:
    """Rotary positions turn pairs, so heads have even widths."""
    with pytest.raises(ValueError, match="multiple of 2 \\* num_heads = 8, got 36"):
        PolicyConfig(hidden_size=36, num_heads=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_are_reproducible(dtype: torch.dtype) -> None:
    """The generator's state decides, and nothing else."""
    policy = Policy(SMALL).to(dtype)
    prompts = _tokens(3, 4)
    first, again = (
        sample(policy, prompts, 5, 1.0, torch.Generator().manual_seed(7), max_new_tokens=6) for _ in range(2)
    )
    assert first.shape == (3, 5, 6)
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    other = sample(policy, prompts, 5, 1.0, torch.Generator().manual_seed(8), max_new_tokens=6)
    assert not torch.equal(first, other)


def test_cold_samples_are_the_greedy_ones() -> None:
    """At a temperature near 0 every sample of a prompt is the argmax of whole forward passes."""
    policy = Policy(SMALL)
    prompts = _tokens(3, 4)
    greedy = prompts
    with torch.no_grad():
        for _ in range(5):
            greedy = torch.cat((greedy, policy(greedy)[:, -1:].argmax(dim=2)), dim=1)
    drawn = sample(policy, prompts, 2, 1e-5, torch.Generator().manual_seed(0), max_new_tokens=5)
    assert torch.equal(drawn, greedy[:, None, 4:].expand(3, 2, 5))


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.1, 0.2, 0.7]), (2.0, [0.198, 0.279, 0.523])])
def test_frequencies_are_the_probabilities(temperature: float, expected: list[float]) -> None:
    """Halving logits takes the square root of probabilities: 0.316, 0.447 and 0.837, to be divided by their sum."""
    model = _Scripted(torch.tensor([[0.1, 0.2, 0.7]]).log().expand(3, 3))
    drawn = sample(model, torch.tensor([[1]]), 20_000, temperature, torch.Generator().manual_seed(0), max_new_tokens=1)
    shares = drawn.flatten().bincount(minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor(expected), rtol=0, atol=0.015)


def test_after_the_end_there_is_padding() -> None:
    """Token 1 leads to 2, 2 to 3, and 3 ends; drawing stops once all samples have ended."""
    table = torch.full((5, 5), -1e9)
    for last, following in ((0, 4), (1, 2), (2, 3), (3, 4), (4, 4)):
        table[last, following] = 0.0
    model = _Scripted(table, eos_id=3)
    drawn = sample(model, torch.tensor([[1], [2]]), 2, 1.0, torch.Generator(), max_new_tokens=9)
    assert drawn.tolist() == [[[2, 3], [2, 3]], [[3, 0], [3, 0]]]


@pytest.mark.parametrize(("num_samples", "temperature", "tokens"), [(0, 1.0, 1), (1, 0.0, 1), (1, 1.0, 0)])
def test_sample_refuses_what_it_cannot_draw(num_samples: int, temperature: float, tokens: int) -> None:
    """Before anything is drawn."""
    with pytest.raises(ValueError, match="must be above 0"):
        sample(Policy(SMALL), _tokens(1, 2), num_samples, temperature, torch.Generator(), max_new_tokens=tokens)
