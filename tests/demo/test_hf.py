"""A tiny Llama with a tokenizer made on the spot, saved, loaded, asked to add, and trained for a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deltacast.demo.grpo import collect_rollout, grpo_step, make_optimizer
from deltacast.demo.hf import AdditionTask, HfPolicy, load_hf
from deltacast.demo.policy import sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as `save_pretrained` writes it. One token a byte; the end token is also the padding."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{letter: number + 1 for number, letter in enumerate(alphabet)}}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end).save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def policy(folder: Path) -> HfPolicy:
    """The trainer's copy."""
    return load_hf(folder)


@pytest.fixture
def task(policy: HfPolicy) -> AdditionTask:
    """Sums of numbers with up to two digits, so that prompts differ in length."""
    return AdditionTask(policy.tokenizer, policy.pad_id, max_new_tokens=6)


def _completions(policy: HfPolicy, *texts: str) -> torch.Tensor:
    encoded = [policy.tokenizer.encode(text) for text in texts]
    longest = max(map(len, encoded))
    return torch.tensor([[ids + [policy.pad_id] * (longest - len(ids)) for ids in encoded]])


def test_weights_have_the_dtype_asked_for(folder: Path) -> None:
    """Names are the checkpoint's; the rotary frequencies stay fp32 in a bf16 copy."""
    trained, served = load_hf(folder), load_hf(folder, torch.bfloat16)
    assert {weight.dtype for weight in trained.module.parameters()} == {torch.float32}
    assert {weight.dtype for weight in served.module.parameters()} == {torch.bfloat16}
    assert "model.layers.0.self_attn.q_proj.weight" in dict(served.module.named_parameters())
    buffers = dict(served.module.named_buffers())
    assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32


def test_padding_on_the_left_changes_nothing(policy: HfPolicy, task: AdditionTask) -> None:
    """Each prompt alone, without padding, gives the logits that it gives in the batch."""
    prompts = task.prompts(8, torch.Generator().manual_seed(0))
    lengths = (prompts != policy.pad_id).sum(dim=1).tolist()
    assert min(lengths) < max(lengths)
    with torch.no_grad():
        batched = policy(prompts)
        for prompt, logits, length in zip(prompts, batched, lengths, strict=True):
            torch.testing.assert_close(logits[-length:], policy(prompt[None, -length:])[0], rtol=0, atol=1e-4)


def test_a_cache_changes_nothing(policy: HfPolicy, task: AdditionTask) -> None:
    """A padded prompt and then single tokens give the logits of the whole."""
    prompts = task.prompts(4, torch.Generator().manual_seed(0))
    more = torch.tensor([[3, 4, 5]] * 4)
    cache = policy.new_cache()
    with torch.no_grad():
        whole = policy(torch.cat((prompts, more), dim=1))
        last = [policy(prompts, cache)[:, -1:], *(policy(more[:, i : i + 1], cache) for i in range(3))]
    torch.testing.assert_close(torch.cat(last, dim=1), whole[:, -4:], rtol=0, atol=1e-4)


def test_greedy_samples_are_those_of_generate(policy: HfPolicy, task: AdditionTask) -> None:
    """The decoding of transformers decoding draws the same tokens from padded prompts."""
    prompts = task.prompts(5, torch.Generator().manual_seed(1))
    ours = sample(policy, prompts, 1, 1e-6, torch.Generator(), max_new_tokens=6)[:, 0]
    model: Any = policy.module
    theirs = model.generate(
        prompts, attention_mask=(prompts != policy.pad_id).long(), max_new_tokens=6, do_sample=False, pad_token_id=0
    )[:, prompts.shape[1] :]
    assert ours.tolist() == theirs.tolist()


def test_the_last_number_decides(policy: HfPolicy, task: AdditionTask) -> None:
    """Whatever else is said; no number is no answer."""
    prompt = torch.tensor([policy.tokenizer.encode("What is 17 + 5? ")])
    completions = _completions(policy, "22", "17 + 5 = 22", "22 is 5", "22?", "what", "")
    assert task.score(prompt, completions).tolist() == [[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]]


def test_a_chat_template_is_used(policy: HfPolicy) -> None:
    """The question becomes a user's message."""
    policy.tokenizer.chat_template = "{% for m in messages %}hats {{ m['content'] }}{% endfor %} = "
    task = AdditionTask(policy.tokenizer, policy.pad_id, max_operand=9)
    prompts = task.prompts(1, torch.Generator().manual_seed(0))
    assert task.text(prompts[0]).startswith("hats What is ")
    assert task.text(prompts[0]).endswith("? = ")


def test_a_step_of_training(folder: Path, policy: HfPolicy, task: AdditionTask) -> None:
    """The code of the small policy trains this one: rewarded completions become more likely."""
    served = load_hf(folder, torch.bfloat16)
    prompts = task.prompts(4, torch.Generator().manual_seed(0))
    rollout = collect_rollout(served, task, prompts, 4, torch.Generator().manual_seed(0))
    rollout.rewards[:, 0] = 1.0
    rollout.rewards[:, 1:] = 0.0
    first, second = (grpo_step(policy, make_optimizer(policy, 1e-3), [rollout]) for _ in range(2))
    assert first.num_completions == 16
    assert first.num_informative == 4
    assert first.grad_norm > 0
    assert second.loss < first.loss


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    """Said before transformers is asked."""
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_hf(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install transformers"):
        load_hf(tmp_path)


def test_a_tokenizer_without_an_end() -> None:
    """Neither padding nor end token: there is nothing to pad with."""

    class _Endless:
        eos_token_id = None
        pad_token_id = None

    with pytest.raises(ValueError, match="no padding token and no end token"):
        HfPolicy(torch.nn.Module(), _Endless())
