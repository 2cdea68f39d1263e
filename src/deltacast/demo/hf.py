"""The demo's other policy: a causal language model from a Hugging Face folder, asked to add two numbers.

`HfPolicy` gives what `LanguageModel` asks, `AdditionTask` what `Task` asks, so sampling and training are the same code
as for the small policy. transformers is imported when a folder is loaded, not before.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["AdditionTask", "HfCache", "HfPolicy", "load_hf"]


@dataclass(slots=True)
class HfCache:
    """One generation's state.

    Attributes:
        past: transformers' key-value cache, None before the first call.
        attended: which tokens seen so far are not left padding, shape (batch, tokens); None before the first call.
    """

    past: Any = None
    attended: Tensor | None = None


class HfPolicy:
    """A causal language model of transformers behind the interface of `LanguageModel`.

    Prompts of different lengths are padded on the left; the leading run of padding is masked, and positions are
    counted from the first token after it.

    Args:
        model: any causal language model of transformers.
        tokenizer: its tokenizer. Without a padding token of its own, the end token serves as padding.

    Raises:
        ValueError: the tokenizer has neither a padding token nor an end token.
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._model = model
        # transformers renamed the argument and the output after 5.20, and warns about the old name.
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        eos_id: int | None = tokenizer.eos_token_id
        pad_id: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_id
        if pad_id is None:
            raise ValueError("the tokenizer has no padding token and no end token; set one of them in its folder")
        self._eos_id = eos_id
        self._pad_id = pad_id

    @property
    def module(self) -> nn.Module:
        """Give the model itself: the `named_parameters()` of its checkpoint."""
        return self._model

    @property
    def pad_id(self) -> int:
        """Give the padding token, which may be the end token."""
        return self._pad_id

    @property
    def eos_id(self) -> int | None:
        """Give the tokenizer's end token, if it has one."""
        return self._eos_id

    def new_cache(self) -> HfCache:
        """Give an empty cache for one generation."""
        return HfCache()

    def __call__(self, tokens: Tensor, cache: HfCache | None = None) -> Tensor:
        """Compute the next-token logits of every position.

        Args:
            tokens: int64, shape (batch, length); with a cache, only those that it has not seen.
            cache: from `new_cache`, updated in place; None to compute without.

        Returns:
            Logits, shape (batch, length, vocabulary), in the dtype of the weights.
        """
        if cache is None or cache.attended is None:
            attended = (tokens != self._pad_id).long().cumsum(dim=1).clamp(max=1)
        else:
            attended = torch.cat((cache.attended, torch.ones_like(tokens)), dim=1)
        positions = (attended.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        past = {} if cache is None else {self._cache_name: cache.past}
        output = self._model(
            input_ids=tokens, attention_mask=attended, position_ids=positions, use_cache=cache is not None, **past
        )
        if cache is not None:
            cache.past, cache.attended = getattr(output, self._cache_name), attended
        logits: Tensor = output.logits
        return logits


@dataclass(frozen=True, slots=True)
class AdditionTask:
    """Ask `What is 17 + 5?`; reward a completion whose last number is right.

    A tokenizer with a chat template gets the question as a user's message.

    Attributes:
        tokenizer: of the model that is asked.
        pad_id: the padding token, `HfPolicy.pad_id`.
        max_operand: numbers are drawn from 0 to this one.
        max_new_tokens: the most tokens of a completion.
    """

    tokenizer: Any
    pad_id: int
    max_operand: int = 99
    max_new_tokens: int = 16

    def prompts(self, num_prompts: int, generator: torch.Generator) -> Tensor:
        """Draw questions.

        Args:
            num_prompts: how many.
            generator: a CPU generator; the only source of randomness.

        Returns:
            Tokens, int64, shape (num_prompts, length of the longest), padded on the left.
        """
        operands = torch.randint(self.max_operand + 1, (num_prompts, 2), generator=generator).tolist()
        encoded = [self._encode(f"What is {first} + {second}?") for first, second in operands]
        longest = max(map(len, encoded))
        return torch.tensor([[self.pad_id] * (longest - len(ids)) + ids for ids in encoded])

    def score(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """Reward a completion with 1 if the last number in its text is the sum that its prompt asks for, else with 0.

        Args:
            prompts: shape (prompts, length).
            completions: shape (prompts, samples, length).

        Returns:
            Rewards, fp32, shape (prompts, samples).
        """
        return torch.tensor(list(self._scores(prompts, completions)))

    def text(self, tokens: Tensor) -> str:
        """Decode tokens, without the special ones."""
        decoded: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return decoded

    def _encode(self, question: str) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None):
            message = [{"role": "user", "content": question}]
            question = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer.encode(question, add_special_tokens=False))
        return list(self.tokenizer.encode(question + " "))

    def _scores(self, prompts: Tensor, completions: Tensor) -> Iterator[list[float]]:
        for prompt, group in zip(prompts, completions, strict=True):
            operands = re.findall(r"(\d+)\s*\+\s*(\d+)", self.text(prompt))[-1]
            total = sum(map(int, operands))
            yield [float(_last_number(self.text(completion)) == total) for completion in group]


def load_hf(directory: Path, dtype: torch.dtype = torch.float32) -> HfPolicy:
    """Load a causal language model and its tokenizer from a local folder; nothing is downloaded.

    Args:
        directory: what `save_pretrained` wrote, for both.
        dtype: of the weights: fp32 for the trainer, bf16 for a worker.

    Returns:
        The policy, on the CPU and without dropout.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ModuleNotFoundError: transformers is not installed.
        ValueError: the tokenizer has neither a padding token nor an end token.
    """
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} is not a Hugging Face model folder: it has no config.json")
    try:
        import transformers
        from transformers.utils import logging
    except ModuleNotFoundError as err:
        if err.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"loading {directory} needs transformers: pip install transformers", name="transformers"
        ) from err
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the demo's table is the progress
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    # Not `.to(dtype)` afterwards: that would also round the rotary frequencies, which are no parameters.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return HfPolicy(model.eval(), tokenizer)


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None
