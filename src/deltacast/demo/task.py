"""What the demo's policy is asked, and the verifier that says whether it answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["SortTask", "Task"]


class Task(Protocol):
    """What rollouts ask of a task: prompts, and a reward for each completion. `SortTask`, `AdditionTask` are two."""

    @property
    def max_new_tokens(self) -> int:
        """Give the most tokens that a completion may have."""
        ...

    def prompts(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Draw prompts: int64, shape (num_prompts, length), padded on the left."""
        ...

    def score(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Verify completions of shape (prompts, samples, length): fp32 rewards in [0, 1], shape (prompts, samples)."""
        ...

    def text(self, tokens: Tensor) -> str:
        """Write one sequence of tokens, shape (length,), for a person to read."""
        ...


@dataclass(frozen=True, slots=True)
class SortTask:
    """Sort a few digits upwards: `3 1 4` is to be followed by `< 1 3 4`.

    A completion names a direction, `<` for upwards or `>` for downwards, and then gives the digits. The demonstrations
    show both, and only upwards is rewarded. So a policy that has learned from them starts like a pretrained language
    model under RL: it can do what is wanted, does it some of the time, and has to find out that it should.

    The tokens are the digits 0 to 9 under their own values, then `<`, `>` and the padding, which is never drawn.

    Attributes:
        num_digits: how many digits a prompt has.
        share_upwards: the share of demonstrations that sort upwards.
    """

    num_digits: int = 3
    share_upwards: float = 0.4

    def __post_init__(self) -> None:
        if self.num_digits < 2:
            raise ValueError(f"num_digits must be at least 2, for there to be something to sort; got {self.num_digits}")
        if not 0 < self.share_upwards < 1:
            raise ValueError(f"share_upwards must be between 0 and 1, both excluded; got {self.share_upwards}")

    @property
    def vocab_size(self) -> int:
        """Give the number of tokens, padding included."""
        return 13

    @property
    def upwards_id(self) -> int:
        """Give the token `<`."""
        return 10

    @property
    def downwards_id(self) -> int:
        """Give the token `>`."""
        return 11

    @property
    def pad_id(self) -> int:
        """Give the padding token."""
        return 12

    @property
    def max_new_tokens(self) -> int:
        """Give the length of every completion: the direction, then the digits."""
        return 1 + self.num_digits

    def prompts(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Draw prompts.

        Args:
            num_prompts: How many.
            generator: A CPU generator; the only source of randomness.

        Returns:
            Digits, int64, shape (num_prompts, num_digits).
        """
        return torch.randint(10, (num_prompts, self.num_digits), generator=generator)

    def demonstrations(self, prompts: Tensor) -> Tensor:
        """Complete prompts as the demonstrators do: exactly `share_upwards` of them, rounded, upwards; the rest down.

        Args:
            prompts: From `prompts`. The first ones get the upward completions.

        Returns:
            Completions, int64, shape (prompts, max_new_tokens).
        """
        num_upwards = round(self.share_upwards * len(prompts))
        upwards = (torch.arange(len(prompts)) < num_upwards).unsqueeze(1)
        ascending = prompts.sort(dim=1).values
        directions = torch.where(upwards, self.upwards_id, self.downwards_id)
        return torch.cat((directions, torch.where(upwards, ascending, ascending.flip(1))), dim=1)

    def score(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Reward a completion with 1 if its digits are the prompt's in ascending order, else with 0.

        The direction token is not looked at: the outcome is rewarded, not what was said about it.

        Args:
            prompts: Shape (prompts, num_digits).
            completions: Shape (prompts, samples, max_new_tokens).

        Returns:
            Rewards, fp32, shape (prompts, samples).
        """
        wanted = prompts.sort(dim=1).values.unsqueeze(1)
        return (completions[:, :, 1:] == wanted).all(dim=2).float()

    def text(self, tokens: Tensor) -> str:
        """Write tokens as `3 1 4 < 1 3 4`; padding as `_`."""
        return " ".join("0123456789<>_"[token] for token in tokens.tolist())
