"""Which policy and task the demo runs with: what the trainer and each worker process build for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from deltacast.delta.errors import InputError
from deltacast.demo.grpo import Rollout, grpo_step, make_optimizer, warm_start
from deltacast.demo.hf import AdditionTask, HfPolicy, load_hf
from deltacast.demo.policy import LanguageModel, Policy
from deltacast.demo.task import SortTask, Task

__all__ = ["Learner", "Setting"]


@dataclass(frozen=True, slots=True)
class Learner:
    """The trainer's side.

    Attributes:
        model: fp32 masters.
        task: what is asked.
        optimizer: over all of the masters.
        generator: of the prompts.
        description: one line for people.
    """

    model: LanguageModel
    task: Task
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    description: str

    def draw_prompts(self, num_prompts: int) -> torch.Tensor:
        """Draw prompts: int64, one row each."""
        return self.task.prompts(num_prompts, self.generator)

    def learn(self, rollouts: Sequence[Rollout]) -> float:
        """Take one GRPO step; return the rollouts' mean reward, that of the weights that sampled them."""
        return grpo_step(self.model, self.optimizer, rollouts).reward


@dataclass(frozen=True, slots=True)
class Setting:
    """What every process of one demo agrees on.

    Attributes:
        directory: of a Hugging Face causal LM; None for the small policy.
        seed: of weights, prompts and samples.
        num_prompts: of one step, over all workers.
        num_samples: completions of each.

    Raises:
        InputError: the folder holds no model, or transformers is missing.
    """

    directory: Path | None
    seed: int
    num_prompts: int = 32
    num_samples: int = 8

    def __post_init__(self) -> None:
        if self.directory is None:
            return
        if not (self.directory / "config.json").is_file():
            raise InputError("no Hugging Face model there", expected="a folder with config.json", found=self.directory)
        if find_spec("transformers") is None:
            raise InputError("a Hugging Face model needs transformers", hint="pip install 'deltacast[hf]'")

    @property
    def worker_weights(self) -> str:
        """What the workers start with, in words."""
        return "random weights of its own" if self.directory is None else "the model of the folder"

    def make_learner(self) -> Learner:
        """Build the trainer's policy, which knows the task a little, and its optimizer.

        Raises:
            OSError, ValueError: the folder holds no causal LM that transformers can load.
        """
        if self.directory is not None:
            loaded = load_hf(self.directory)
            model: LanguageModel = loaded
            task: Task = _addition(loaded)
            what = f"policy: {self.directory.name}, asked to add two numbers"
        else:
            task = sorting = SortTask()
            model = Policy(seed=self.seed)
            warm_start(model, sorting, self.seed)
            what = (
                f"policy: a transformer that sorts {sorting.num_digits} digits up or down, "
                "as it was shown; only up is rewarded"
            )
        generator = torch.Generator().manual_seed(self.seed + 1)  # not the warm start's prompts again
        return Learner(model, task, make_optimizer(model), generator, what)

    def make_worker(self, number: int) -> tuple[LanguageModel, Task]:
        """Build a worker's bf16 policy, with random weights of its own where that is possible, and its task."""
        if self.directory is not None:
            served = load_hf(self.directory, torch.bfloat16)
            return served, _addition(served)
        policy = Policy(seed=self.seed + 1000 + number)
        policy.to(torch.bfloat16)
        return policy, SortTask()


def _addition(policy: HfPolicy) -> AdditionTask:
    return AdditionTask(policy.tokenizer, policy.pad_id)
