"""Group-relative policy optimization (GRPO), strictly on-policy, and the supervised steps that come before it.

Workers call `collect_rollout` with the bf16 weights that they serve; the trainer calls `grpo_step` with what they sent
and then publishes its weights, rounded to bf16, before anybody samples again. Because no rollout is ever older than
that, the loss needs neither importance ratios nor clipping: it is REINFORCE, with each reward normalised within the
group of completions of its prompt (Shao et al. 2024, "DeepSeekMath", section 4.1).

The optimizer is torch's AdamW over all weights, in fp32, with its default betas, epsilon and weight decay; only the
learning rate is small. A weight changes its bf16 value in a step with a probability of about its movement divided by
the distance to the next bf16 value, and that alone makes updates sparse: nothing here masks or rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation spells it

from deltacast.demo.policy import LanguageModel, sample
from deltacast.demo.task import SortTask, Task

__all__ = [
    "GrpoStats",
    "Rollout",
    "collect_rollout",
    "completion_mask",
    "group_advantages",
    "grpo_step",
    "make_optimizer",
    "token_logprobs",
    "warm_start",
]

_MAX_GRAD_NORM = 1.0
_WARM_LEARNING_RATE = 3e-4
_WARM_RAMP_STEPS = 20
_WARM_DECAY_SHARE = 0.4


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What one worker sampled in one step. Picklable; the receiver owns the tensors.

    Attributes:
        prompts: int64, shape (prompts, prompt length), padded on the left.
        completions: int64, shape (prompts, samples, completion length), padded on the right.
        rewards: fp32 in [0, 1], shape (prompts, samples).
    """

    prompts: Tensor
    completions: Tensor
    rewards: Tensor

    def __post_init__(self) -> None:
        if self.prompts.dim() != 2 or self.completions.dim() != 3:
            raise ValueError(
                "prompts must be (prompts, length) and completions (prompts, samples, length), "
                f"got {tuple(self.prompts.shape)} and {tuple(self.completions.shape)}"
            )
        groups = (len(self.prompts), self.completions.shape[1])
        if self.completions.shape[:2] != groups or self.rewards.shape != groups or groups[1] < 2:
            raise ValueError(
                f"{groups[0]} prompts need completions and rewards of as many groups of 2 or more, "
                f"got {tuple(self.completions.shape)} and {tuple(self.rewards.shape)}"
            )


@dataclass(frozen=True, slots=True)
class GrpoStats:
    """One optimizer step.

    Attributes:
        reward: mean reward of the rollouts, that is, of the weights before the step.
        loss: what was minimised; its gradient is what matters, its value says little.
        grad_norm: norm of the gradient before it was clipped to 1.
        num_completions: completions in the rollouts.
        num_tokens: completion tokens in the loss.
        num_informative: prompts whose completions did not all get the same reward; the others add nothing.
    """

    reward: float
    loss: float
    grad_norm: float
    num_completions: int
    num_tokens: int
    num_informative: int


def collect_rollout(
    policy: LanguageModel, task: Task, prompts: Tensor, num_samples: int, generator: torch.Generator,
    *, temperature: float = 1.0,
) -> Rollout:  # fmt: skip
    """Sample completions of a worker's share of the prompts, and verify them.

    Args:
        policy: the model with the weights that the worker serves.
        task: asks and verifies.
        prompts: from `task.prompts`, or some rows of it.
        num_samples: completions of each prompt, at least 2.
        generator: the only source of randomness, advanced by the call. Workers need different ones.
        temperature: 1 keeps the rollouts on-policy.
    """
    completions = sample(policy, prompts, num_samples, temperature, generator, max_new_tokens=task.max_new_tokens)
    return Rollout(prompts, completions, task.score(prompts, completions))


def make_optimizer(policy: LanguageModel, learning_rate: float = 1.5e-6) -> torch.optim.AdamW:
    """Make the optimizer of `grpo_step`: AdamW over all weights of `policy`, all else as torch sets it."""
    return torch.optim.AdamW(policy.module.parameters(), lr=learning_rate)


def grpo_step(
    policy: LanguageModel, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout], *, micro_batch_size: int = 256
) -> GrpoStats:
    """Take one optimizer step on rollouts that were sampled from the current weights, rounded to bf16.

    The log-probabilities are computed from the fp32 weights themselves. The policy that sampled differs from them by
    one rounding to bf16 and is never older, so a pass over a rounded view would cost a copy of the weights and change
    the gradient by less than sampling noise does.

    Args:
        policy: the trainer's model, in fp32. Its weights are updated in place.
        optimizer: from `make_optimizer`, the same one at each step.
        rollouts: of all workers. How they are divided among workers does not matter, up to rounding.
        micro_batch_size: sequences of one forward pass; gradients are accumulated, so it bounds memory, nothing else.

    Raises:
        ValueError: there are no rollouts. Nothing was changed.
    """
    if not rollouts:
        raise ValueError("a step needs at least one rollout")
    num_tokens = sum(int(completion_mask(rollout.completions, policy.eos_id).sum()) for rollout in rollouts)
    optimizer.zero_grad()
    loss = 0.0
    for prompts, completions, advantages in _micro_batches(rollouts, micro_batch_size):
        mask = completion_mask(completions, policy.eos_id)
        weighted = token_logprobs(policy, prompts, completions) * advantages.unsqueeze(1) * mask
        part = -weighted.sum() / num_tokens
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.module.parameters(), _MAX_GRAD_NORM)
    optimizer.step()
    rewards = torch.cat([rollout.rewards.flatten() for rollout in rollouts])
    informative = [rollout.rewards.amax(dim=1) > rollout.rewards.amin(dim=1) for rollout in rollouts]
    return GrpoStats(
        reward=rewards.mean().item(),
        loss=loss,
        grad_norm=grad_norm.item(),
        num_completions=len(rewards),
        num_tokens=num_tokens,
        num_informative=int(torch.cat(informative).sum()),
    )


def group_advantages(rewards: Tensor) -> Tensor:
    """Subtract each group's mean reward and divide by its standard deviation; 0 where all rewards are equal.

    Args:
        rewards: fp32, shape (prompts, samples).

    Returns:
        Advantages of the same shape.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


def completion_mask(completions: Tensor, eos_id: int | None) -> Tensor:
    """Tell tokens that were drawn, the first end token among them, from the padding after it.

    Args:
        completions: int64, shape (..., length).
        eos_id: the token that ends a completion (it may also be the padding), or None if nothing does.

    Returns:
        Booleans of the same shape.
    """
    if eos_id is None:
        return torch.ones_like(completions, dtype=torch.bool)
    ends = (completions == eos_id).long()
    return ends.cumsum(dim=-1) - ends == 0


def token_logprobs(policy: LanguageModel, prompts: Tensor, completions: Tensor) -> Tensor:
    """Compute the log-probability of each completion token, at temperature 1.

    Args:
        policy: the model; logits are widened to fp32.
        prompts: int64, shape (batch, prompt length).
        completions: int64, shape (batch, completion length).

    Returns:
        Log-probabilities, fp32, of the shape of `completions`.
    """
    tokens = torch.cat((prompts, completions), dim=1)
    logits = policy(tokens[:, :-1])[:, prompts.shape[1] - 1 :].float()
    return -F.cross_entropy(logits.transpose(1, 2), completions, reduction="none")


def warm_start(policy: LanguageModel, task: SortTask, seed: int, *, num_steps: int = 115, batch_size: int = 32) -> None:
    """Imitate the task's demonstrations, so that there is something for RL to reinforce.

    Afterwards the policy sorts well in both directions and picks upwards about as often as the demonstrators did. The
    weights are ordinary fp32 numbers, off the bf16 grid. The learning rate ramps up and, in the last steps, down to 0.

    Args:
        policy: the trainer's model, in fp32. Its weights are updated in place.
        task: gives prompts and demonstrations.
        seed: of the prompts, and with them of the result.
        num_steps: optimizer steps.
        batch_size: fresh demonstrations of each step.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        policy.module.parameters(), lr=_WARM_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    for step in range(num_steps):
        ramp = min(1.0, (step + 1) / _WARM_RAMP_STEPS, (num_steps - step) / (num_steps * _WARM_DECAY_SHARE))
        optimizer.param_groups[0]["lr"] = _WARM_LEARNING_RATE * ramp
        prompts = task.prompts(batch_size, generator)
        loss = -token_logprobs(policy, prompts, task.demonstrations(prompts)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), _MAX_GRAD_NORM)
        optimizer.step()


def _micro_batches(rollouts: Sequence[Rollout], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (prompts, completions, advantages) of at most `size` sequences, one row for each completion."""
    for rollout in rollouts:
        prompts = rollout.prompts.repeat_interleave(rollout.completions.shape[1], dim=0)
        completions = rollout.completions.flatten(0, 1)
        advantages = group_advantages(rollout.rewards).flatten()
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            yield prompts[rows], completions[rows], advantages[rows]
