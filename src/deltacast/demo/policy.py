"""A small decoder-only transformer, and the sampler that every model of the demo goes through.

`Policy` is a small Llama: RMSNorm before each block, rotary positions, causal attention, SwiGLU, no biases, and the
token embedding tied to the output head. Its parameters have the names that Hugging Face gives them, so what the demo
publishes looks like a real checkpoint. One class serves both sides: the trainer holds it in fp32, each worker a
`.to(torch.bfloat16)` copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation spells it

__all__ = ["KvCache", "LanguageModel", "Policy", "PolicyConfig", "sample"]


class LanguageModel(Protocol):
    """What the sampler and the trainer ask of a model; `Policy` and `HfPolicy` both give it.

    Weights are reached through `module`, so that the names which are published are the model's own, whatever wraps it.
    """

    @property
    def module(self) -> nn.Module:
        """Give the module whose `named_parameters()` are the weights to train and to publish."""
        ...

    @property
    def pad_id(self) -> int:
        """Give the token that fills prompts on the left and ended completions on the right."""
        ...

    @property
    def eos_id(self) -> int | None:
        """Give the token that ends a completion, or None if all have the same length."""
        ...

    def new_cache(self) -> Any:
        """Give an empty key-value cache, to be passed to every call of one generation."""
        ...

    def __call__(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Compute next-token logits, shape (batch, length, vocabulary), for int64 tokens of shape (batch, length).

        With a cache, which is updated in place, `tokens` are only those that it has not seen: the prompt, then one
        token at a time.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The shape of a `Policy`; by default 2.4 million parameters.

    It is wide rather than deep, and its last norm starts with a large gain, so that many small movements of weights
    add up in the logits. A learning rate that rarely reaches the next bf16 value then still moves the policy, as it
    does in models a thousand times larger.

    Attributes:
        vocab_size: number of tokens, padding included.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU block.
        num_layers: number of transformer blocks.
        num_heads: number of attention heads; they divide `hidden_size` into parts of even width.
        pad_id: the padding token.
        final_norm_gain: what the weights of the last norm are at first; those of the others are 1.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square before its root.
    """

    vocab_size: int = 13
    hidden_size: int = 384
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 12
    pad_id: int = 12
    final_norm_gain: float = 12.0
    rope_theta: float = 100.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 * num_heads = {2 * self.num_heads}, got {self.hidden_size}"
            )

    @property
    def head_size(self) -> int:
        """Give the width of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(slots=True)
class KvCache:
    """Keys and values of the tokens seen so far.

    Attributes:
        layers: keys and values of each layer, of shape (batch, heads, tokens, head size).
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Give the number of tokens held for each sequence."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens to a layer, and give all that it holds then."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = self.layers[layer]
            self.layers[layer] = (torch.cat((old_keys, keys), dim=2), torch.cat((old_values, values), dim=2))
        return self.layers[layer]


class Policy(nn.Module):
    """A causal language model with the parameter names of Hugging Face's Llama.

    The weights depend on `config` and `seed` alone: two processes that build the same policy hold the same bits.
    `lm_head.weight` and `model.embed_tokens.weight` are one parameter: twice in `state_dict()`, once in
    `named_parameters()`, and still one after `.to(torch.bfloat16)`.

    Args:
        config: the shape; the default fits the default `SortTask`.
        seed: of the initial weights, which are normal with variance 1 / fan-in.
    """

    def __init__(self, config: PolicyConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.config = PolicyConfig() if config is None else config
        self.model = _Decoder(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        self._draw_weights(torch.Generator().manual_seed(seed))

    @property
    def module(self) -> nn.Module:
        """Give the module whose `named_parameters()` are the weights to train and to publish: this one."""
        return self

    @property
    def pad_id(self) -> int:
        """Give the padding token. The model treats it like any other: prompts here all have the same length."""
        return self.config.pad_id

    @property
    def eos_id(self) -> int | None:
        """Give None: all completions have the same length."""
        return None

    def new_cache(self) -> KvCache:
        """Give an empty cache for one generation."""
        return KvCache()

    def forward(self, tokens: Tensor, cache: KvCache | None = None) -> Tensor:
        """Compute the next-token logits of every position.

        Args:
            tokens: int64, shape (batch, length); with a cache that holds tokens already, length 1.
            cache: From `new_cache`, updated in place; None to compute without.

        Returns:
            Logits, shape (batch, length, vocabulary), in the dtype of the weights.

        Raises:
            ValueError: More than one token for a cache that is not empty. The cache is as before.
        """
        if cache is not None and cache.num_tokens and tokens.shape[1] != 1:
            raise ValueError(f"a cache that holds tokens takes one more at a time, got {tokens.shape[1]}")
        logits: Tensor = self.lm_head(self.model(tokens, cache))
        return logits

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        for weight in self.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        self.model.norm.weight.fill_(self.config.final_norm_gain)


@torch.no_grad()
def sample(
    policy: LanguageModel, prompts: Tensor, num_samples: int, temperature: float, generator: torch.Generator,
    *, max_new_tokens: int,
) -> Tensor:  # fmt: skip
    """Draw completions of each prompt.

    Args:
        policy: the model, in any floating dtype; probabilities are computed and drawn in fp32.
        prompts: int64, shape (prompts, length), padded on the left.
        num_samples: completions of each prompt.
        temperature: divides the logits; 1 samples what the trainer's log-probabilities are about.
        generator: the only source of randomness, on the device of the logits.
        max_new_tokens: where to stop at the latest.

    Returns:
        Completions, int64, shape (prompts, num_samples, at most max_new_tokens). After `policy.eos_id` only padding.

    Raises:
        ValueError: `temperature` is not above 0, or `num_samples` or `max_new_tokens` are below 1.
    """
    if temperature <= 0 or num_samples < 1 or max_new_tokens < 1:
        raise ValueError(
            "temperature must be above 0, num_samples and max_new_tokens at least 1; "
            f"got {temperature}, {num_samples} and {max_new_tokens}"
        )
    tokens = prompts.repeat_interleave(num_samples, dim=0)
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    cache = policy.new_cache()
    drawn: list[Tensor] = []
    while len(drawn) < max_new_tokens and not bool(ended.all()):
        logits = policy(tokens, cache)[:, -1].float()
        tokens = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        tokens = tokens.masked_fill(ended.unsqueeze(1), policy.pad_id)
        drawn.append(tokens)
        if policy.eos_id is not None:
            ended |= tokens.squeeze(1) == policy.eos_id
    return torch.cat(drawn, dim=1).view(len(prompts), num_samples, -1)


class _Decoder(nn.Module):
    """Everything but the output head."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config, index) for index in range(config.num_layers))
        self.norm = _RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens: Tensor, cache: KvCache | None) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        cos, sin = self._rotations(0 if cache is None else cache.num_tokens, tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        normed: Tensor = self.norm(x)
        return normed

    def _rotations(self, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.head_size // 2
        frequencies = self.config.rope_theta ** -(torch.arange(half, device=like.device) / half)
        angles = torch.outer(torch.arange(start, start + length, device=like.device).float(), frequencies)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class _Block(nn.Module):
    """Attention and SwiGLU, each on a normed copy of the residual stream."""

    def __init__(self, config: PolicyConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config, index)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        mlp: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mlp


class _Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: PolicyConfig, index: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.index = index
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None) -> Tensor:
        batch, length, size = x.shape
        by_head = (batch, length, self.config.num_heads, self.config.head_size)
        queries = _rotated(self.q_proj(x).view(by_head).transpose(1, 2), cos, sin)
        keys = _rotated(self.k_proj(x).view(by_head).transpose(1, 2), cos, sin)
        values = self.v_proj(x).view(by_head).transpose(1, 2)
        if cache is not None:
            keys, values = cache.extend(self.index, keys, values)
        # Several tokens come only with an empty cache, where the causal mask is square; a single one may see them all.
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=length > 1)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, size))
        return out


class _Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _RMSNorm(nn.Module):
    """Divide by the root mean square, in fp32 whatever the dtype of the weights, as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + half]) of every head by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
