"""GRPO against values worked out by hand, a naive twin of its gradient, and a short run that has to get better."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from deltacast.demo.grpo import (
    GrpoStats,
    Rollout,
    collect_rollout,
    completion_mask,
    group_advantages,
    grpo_step,
    make_optimizer,
    token_logprobs,
    warm_start,
)
from deltacast.demo.policy import Policy, PolicyConfig
from deltacast.demo.task import SortTask

SMALL = PolicyConfig(hidden_size=32, intermediate_size=48, num_heads=4)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rollout(policy: Policy, num_prompts: int, seed: int = 0) -> Rollout:
    """Samples with rewards that vary within each group."""
    task = SortTask()
    drawn = collect_rollout(policy, task, task.prompts(num_prompts, _generator(seed)), 4, _generator(seed))
    return Rollout(drawn.prompts, drawn.completions, torch.rand(drawn.rewards.shape, generator=_generator(seed)))


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def test_sort_task_by_hand() -> None:
    """The digits decide, in ascending order with repeats; the direction token does not."""
    prompts = torch.tensor([[3, 1, 4], [2, 2, 0]])
    completions = torch.tensor(
        [
            [[10, 1, 3, 4], [11, 4, 3, 1], [11, 1, 3, 4], [10, 1, 4, 3]],
            [[10, 0, 2, 2], [10, 0, 0, 2], [10, 2, 2, 0], [12, 12, 12, 12]],
        ]
    )
    task = SortTask()
    assert task.score(prompts, completions).tolist() == [[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert task.text(torch.cat((prompts[0], completions[0, 0]))) == "3 1 4 < 1 3 4"
    assert task.text(completions[1, 3]) == "_ _ _ _"


def test_prompts_come_from_the_generator() -> None:
    """Equal seeds give equal prompts, of digits only."""
    task = SortTask(num_digits=5)
    prompts = task.prompts(200, _generator(1))
    assert prompts.shape == (200, 5)
    assert set(prompts.flatten().tolist()) == set(range(10))
    assert torch.equal(prompts, task.prompts(200, _generator(1)))
    assert not torch.equal(prompts, task.prompts(200, _generator(2)))


def test_demonstrations_by_hand() -> None:
    """The first 40 % go up, the others down."""
    prompts = torch.tensor([[3, 1, 4]] * 5)
    assert SortTask(share_upwards=0.4).demonstrations(prompts).tolist() == [[10, 1, 3, 4]] * 2 + [[11, 4, 3, 1]] * 3


def test_task_and_policy_agree_by_default() -> None:
    """A worker builds both from their defaults."""
    task, config = SortTask(), PolicyConfig()
    assert (task.vocab_size, task.pad_id) == (config.vocab_size, config.pad_id)


@pytest.mark.parametrize("options", [{"num_digits": 1}, {"share_upwards": 0.0}, {"share_upwards": 1.0}])
def test_sort_task_refuses_what_makes_no_sense(options: dict[str, float]) -> None:
    """Nothing to sort, or nothing to learn."""
    with pytest.raises(ValueError, match="must be"):
        SortTask(**options)  # type: ignore[arg-type]


def test_rollouts_pass_through_a_pipe() -> None:
    """Pickled and back, the tensors are equal."""
    rollout = _rollout(Policy(SMALL), 3)
    again: Rollout = pickle.loads(pickle.dumps(rollout))
    assert torch.equal(again.prompts, rollout.prompts)
    assert torch.equal(again.completions, rollout.completions)
    assert torch.equal(again.rewards, rollout.rewards)


@pytest.mark.parametrize(
    ("prompts", "completions", "rewards"),
    [((3,), (3, 2, 4), (3, 2)), ((3, 5), (6, 4), (3, 2)), ((3, 5), (2, 2, 4), (3, 2)), ((3, 5), (3, 2, 4), (3, 3)),
     ((3, 5), (3, 1, 4), (3, 1))],
)  # fmt: skip
def test_rollout_checks_its_shapes(
    prompts: tuple[int, ...], completions: tuple[int, ...], rewards: tuple[int, ...]
) -> None:
    """Ranks, number of prompts, number of samples, and groups of at least two."""
    with pytest.raises(ValueError, match="got"):
        Rollout(torch.zeros(prompts).long(), torch.zeros(completions).long(), torch.zeros(rewards))


def test_advantages_by_hand() -> None:
    """One success in four: mean 1/4, standard deviation 1/2 (with 3 degrees of freedom)."""
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[1.5, -0.5, -0.5, -0.5], [0.0] * 4]), rtol=0, atol=1e-3)


def test_mask_by_hand() -> None:
    """The first end token counts, nothing after it does; without an end token, everything does."""
    tokens = torch.tensor([[5, 9, 0], [5, 6, 7], [9, 9, 9]])
    assert completion_mask(tokens, 9).tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert completion_mask(tokens, None).all()


def test_logprobs_are_those_of_single_steps() -> None:
    """Token by token: the softmax after the tokens before it."""
    policy = Policy(SMALL)
    prompts, completions = torch.tensor([[1, 2, 3]]), torch.tensor([[10, 4, 0]])
    with torch.no_grad():
        logprobs = token_logprobs(policy, prompts, completions)
        for position in range(3):
            seen = torch.cat((prompts, completions[:, :position]), dim=1)
            expected = policy(seen)[0, -1].log_softmax(dim=0)[completions[0, position]]
            torch.testing.assert_close(logprobs[0, position], expected, rtol=0, atol=1e-4)


def test_the_gradient_is_that_of_a_naive_loop() -> None:
    """Minus the mean over tokens of advantage times log-probability, one completion at a time."""
    policy = Policy(SMALL)
    rollout = _rollout(policy, 3)
    twin = copy.deepcopy(policy)
    parts = []
    for prompt, group, rewards in zip(rollout.prompts, rollout.completions, rollout.rewards, strict=True):
        for completion, reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-4)
            parts.append(advantage * token_logprobs(twin, prompt[None], completion[None]))
    loss = -torch.stack(parts).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.cat([weight.grad.flatten() for weight in twin.parameters() if weight.grad is not None]).norm()

    stats = grpo_step(policy, torch.optim.SGD(policy.parameters(), lr=1.0), [rollout])
    assert stats.loss == pytest.approx(loss.item(), abs=1e-4)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    scale = min(1.0, 1.0 / norm.item())
    for weight, other in zip(policy.parameters(), twin.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(weight, other - scale * other.grad, rtol=0, atol=1e-5)


def test_how_rollouts_are_divided_does_not_matter() -> None:
    """Two workers or one, in large passes or small: the same step, up to the order of sums."""
    policy = Policy(SMALL)
    rollout = _rollout(policy, 6)
    halves = [
        Rollout(rollout.prompts[part], rollout.completions[part], rollout.rewards[part])
        for part in (slice(0, 2), slice(2, 6))
    ]
    results, weights = [], []
    for rollouts, size in (([rollout], 256), (halves, 256), (halves, 5)):
        trained = copy.deepcopy(policy)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
        results.append(grpo_step(trained, optimizer, rollouts, micro_batch_size=size))
        weights.append(_flat(trained))
    for stats, flat in zip(results[1:], weights[1:], strict=True):
        assert (stats.num_completions, stats.num_tokens, stats.num_informative) == (24, 96, 6)
        assert stats.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
        torch.testing.assert_close(flat, weights[0], rtol=0, atol=1e-5)


def test_equal_rewards_teach_nothing() -> None:
    """The gradient is exactly 0, though AdamW's decay may still touch weights."""
    policy = Policy(SMALL)
    rollout = _rollout(policy, 2)
    same = Rollout(rollout.prompts, rollout.completions, torch.ones_like(rollout.rewards))
    stats = grpo_step(policy, make_optimizer(policy), [same])
    assert stats == GrpoStats(1.0, 0.0, 0.0, num_completions=8, num_tokens=32, num_informative=0)


def test_a_step_needs_rollouts() -> None:
    """Nothing is changed otherwise."""
    policy = Policy(SMALL)
    before = _flat(policy)
    with pytest.raises(ValueError, match="at least one rollout"):
        grpo_step(policy, make_optimizer(policy), [])
    assert torch.equal(_flat(policy), before)


def test_warm_start_is_deterministic_and_leaves_the_bf16_grid() -> None:
    """The same seed gives the same bits, and hardly any of them fits bf16."""
    first, again, other = (Policy(SMALL) for _ in range(3))
    for policy, seed in ((first, 1), (again, 1), (other, 2)):
        warm_start(policy, SortTask(), seed, num_steps=5)
    assert torch.equal(_flat(first), _flat(again))
    assert not torch.equal(_flat(first), _flat(other))
    rounded = _flat(first).bfloat16().float()
    assert (rounded == _flat(first)).float().mean() < 0.05


def test_the_whole_gets_better() -> None:
    """Demonstrations, then RL with bf16 copies of the weights that do the sampling: the reward rises."""
    task = SortTask(num_digits=2)
    policy = Policy(PolicyConfig(hidden_size=96, intermediate_size=128, num_heads=4))
    warm_start(policy, task, 0, num_steps=150)
    served = copy.deepcopy(policy).to(torch.bfloat16)
    optimizer = make_optimizer(policy, 2e-5)
    generator = _generator()
    rewards = []
    for _ in range(12):
        rollout = collect_rollout(served, task, task.prompts(32, generator), 8, generator)
        rewards.append(grpo_step(policy, optimizer, [rollout]).reward)
        served.load_state_dict(policy.state_dict())
    assert 0.15 < rewards[0] < 0.6
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.2
