"""Train a policy by GRPO on what a live vLLM server samples, which follows it step by step.

    python examples/vllm_rl_loop.py          # CPU or GPU; needs vllm and deltacast[http], no network; about a minute

Serves the tiny random model of vllm_http_sync.py. Each step asks the server for completions of random prompts with its
current weights, rewards the share of tokens whose number is below 32, takes one optimizer step of fp32 masters, and
sends the server what changed of their bf16 rounding. So small a model learns only at a rate that changes most weights
in every step; at the rates of real models it is about 1 %. Ends with status 0 only if

- the log-probabilities that the server sampled with are the trainer's own, but for the rounding of its arithmetic;
- its label is the number of steps after each of them;
- the reward rose from below 0.1 to over 0.5;
- a fresh server on the checkpoint of the last step gives the same tokens and log-probabilities.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import httpx
import torch
from transformers import Qwen3ForCausalLM
from vllm_http_sync import TRANSFER, complete, label, make_model, serving

from deltacast import ModuleSource, ServingDType, TrainerInitInfo, trainer_engine
from deltacast.engines.clients import PausingClient
from deltacast.engines.vllm.client import VllmClient

STEPS = 16
NUM_PROMPTS, PROMPT_TOKENS = 8, 6
NUM_SAMPLES, NUM_TOKENS = 16, 16
GOOD_TOKENS = 32
LEARNING_RATE = 3e-3
MAX_RATIO = 2.0


def sample(url: str, model: Path, prompts: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Have the server complete each prompt `NUM_SAMPLES` times.

    Returns:
        Tokens, int64, and the log-probabilities that they were drawn with, fp32; both of shape
        (prompts * samples, tokens), the completions of a prompt one after the other.
    """
    body = {
        "model": str(model), "prompt": prompts.tolist(), "n": NUM_SAMPLES, "max_tokens": NUM_TOKENS, "temperature": 1,
        "seed": seed, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    tokens = torch.tensor([choice["token_ids"] for choice in choices])
    return tokens, torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """Return the share of good tokens in each completion."""
    return (tokens < GOOD_TOKENS).float().mean(dim=1)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Compare each completion with the others of its prompt."""
    groups = rewards.view(-1, NUM_SAMPLES)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def own_logprobs(policy: Qwen3ForCausalLM, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the trainer's log-probabilities of completions."""
    sequences = torch.cat([prompts.repeat_interleave(NUM_SAMPLES, dim=0), tokens], dim=1)
    logits = policy(sequences[:, :-1]).logits[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def train(policy: Qwen3ForCausalLM, url: str, model: Path) -> list[float]:
    """Take all steps; returns the mean reward before each. Raises if the server does not keep up."""
    source = ModuleSource(policy, serving_dtype=ServingDType(default="bfloat16", keep=()))
    client = PausingClient(VllmClient([url]))
    trainer = trainer_engine("sparse_nccl").trainer_init(TrainerInitInfo(num_workers=1), source, client)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    random, rewards = torch.Generator().manual_seed(0), []
    for step in range(1, STEPS + 1):
        prompts = torch.randint(1, policy.config.vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=random)
        tokens, sampled = sample(url, model, prompts, seed=step)
        rewards.append(reward(tokens).mean().item())
        own = own_logprobs(policy, prompts, tokens)
        gap = (own - sampled).abs().mean().item()
        assert gap < 0.1, f"the server samples from another policy: {gap}"  # one step behind: 0.35 and more
        ratio = (own - sampled).exp().clamp(max=MAX_RATIO)  # of the two ways to compute one policy
        optimizer.zero_grad()
        (-ratio * group_advantages(reward(tokens)).unsqueeze(1)).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        report = trainer.send_weights(optimizer_step=step)
        assert report.num_verified == 1
        assert label(url) == str(report.target_version) == str(step)
        print(f"step {step}: reward {rewards[-1]:.3f}, log-probabilities differ by {gap:.4f}; {report.line()}")
    trainer.shutdown()
    return rewards


def main() -> None:
    """Run it; raises if anything is not as promised."""
    with tempfile.TemporaryDirectory(prefix="vllm_rl_loop-") as scratch:
        model = Path(scratch, "model")
        policy = make_model(model).float()
        with serving(model, *TRANSFER, "--max-num-seqs", "64") as url:
            rewards = train(policy, url, model)
            answers = complete(url, model)
        policy.bfloat16().save_pretrained(model)
        with serving(model, "--max-num-seqs", "64") as url:
            assert complete(url, model) == answers, "a fresh server says something else"
    assert rewards[0] < 0.1, rewards
    assert rewards[-1] > 0.5, rewards
    print(
        f"the reward rose from {rewards[0]:.3f} to {rewards[-1]:.3f}; a fresh server on the last weights says the same"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its server ends too
    main()
