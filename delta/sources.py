"""Where weights come from: the protocol that every trainer adapter implements, and the check that holds it to it.

Ready-made sources: `ModuleSource` and `StateDictSource` (delta/module_source.py), `CheckpointSource`
(delta/checkpoint.py).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

import torch

from deltacast.delta.dtypes import dtype_named, dtype_of
from deltacast.delta.errors import DTypeError, InputError, TableError
from deltacast.delta.table import ParameterTable, ParamMeta

__all__ = [
    "KEPT_BY_DEFAULT",
    "ServingDType",
    "VLLMSource",
    "WeightSource",
    "checked",
    "matched",
    "matches_any",
    "named",
    "table_of",
]


class WeightSource(Protocol):
    """What a trainer brings: its weights under the serving checkpoint's names, whole and in their wire dtype.

    Two channels that list the same parameters in the same order. The split is vLLM's (`metadata()` and
    `__iter__` there): the table can be agreed on before a byte is read. Gathering shards, re-fusing experts,
    dequantising and renaming happen inside a source. It stops at two methods and two attributes on purpose:
    anything more (devices, batching, transport) would tie every trainer adapter to one engine.

    A source can be iterated again and again; each pass reads the weights as they are then. Tensors may be live
    views of the trainer's memory: use or copy each before the optimizer runs, and do not write to it. Each must
    keep its bits until the pass is over: a streamed round reads several at a time, so one buffer for all will not do.
    """

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied tensors that do not travel: alias -> the name that does."""
        ...

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the model holds and this source does not send, by name."""
        ...

    def metas(self) -> Sequence[ParamMeta]:
        """List names, wire dtypes and full shapes; moves no data, and is no collective if shapes are known."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` in exactly the order of `metas()`; may be a collective over trainer ranks."""
        ...


def checked(source: WeightSource) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
    """Iterate a source and hold it to its contract, one element at a time.

    Yields:
        Each parameter's meta with its tensor.

    Raises:
        TableError: as `matched`; parameters before the one that is named have been yielded already.
    """
    yield from matched(source.metas(), source.tensors())


def named(source: WeightSource, names: Iterable[str]) -> Iterator[torch.Tensor]:
    """Yield a source's tensors, holding it to names in order and nothing else: who takes them checks what they are.

    Raises:
        TableError: the first tensor that is missing, extra or out of order; those before it have been yielded.
    """
    pairs = source.tensors()
    for expected in names:
        name, tensor = next(pairs, (None, None))
        if name is None or tensor is None:
            raise TableError("a source ended before a parameter that it lists", parameter=expected)
        if name != expected:
            raise TableError("a source does not keep to its own order", expected=repr(expected), found=repr(name))
        yield tensor
    extra = next(pairs, None)
    if extra is not None:
        raise TableError("a source yields a parameter that it does not list", parameter=extra[0])


def matched(
    metas: Iterable[ParamMeta], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
    """Pair metas with the tensors that should follow in the same order.

    Yields:
        Each meta with its tensor. A generator passed as `tensors` is closed when this one ends, in any way.

    Raises:
        TableError: the first violation by name: a parameter missing, extra, listed twice, out of order, of
            another dtype or shape, or without data.
    """
    pairs = iter(tensors)
    seen: set[str] = set()
    with ExitStack() as stack:
        if isinstance(pairs, Generator):
            stack.callback(pairs.close)
        for meta in metas:
            if meta.name in seen:
                raise TableError("a source lists a parameter twice", parameter=meta.name)
            seen.add(meta.name)
            name, tensor = next(pairs, (None, None))
            if name is None or tensor is None:
                raise TableError("a source ended before a parameter that it lists", parameter=meta.name)
            if name != meta.name:
                raise TableError("a source does not keep to its own order", expected=repr(meta.name), found=repr(name))
            _check_tensor(meta, tensor)
            yield meta, tensor
        extra = next(pairs, None)
        if extra is not None:
            raise TableError("a source yields a parameter that it does not list", parameter=extra[0])


def _check_tensor(meta: ParamMeta, tensor: torch.Tensor) -> None:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if (dtype, shape) != (meta.dtype, meta.shape):
        raise TableError("a source's tensor is not what it lists", parameter=meta.name,
                         expected=f"{meta.dtype}{list(meta.shape)}", found=f"{dtype}{list(shape)}")  # fmt: skip
    if tensor.device.type == "meta":
        raise TableError("a source's tensor has no data", parameter=meta.name, found="a meta tensor",
                         hint="Materialise the module first.")  # fmt: skip


class _VLLMMeta(Protocol):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _VLLMWeightSource(Protocol):
    def metadata(self) -> Sequence[_VLLMMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class VLLMSource:
    """A vLLM trainer-side `WeightSource` (`metadata()` and `__iter__`) as one of ours; vLLM is not imported.

    vLLM's sources know neither ties nor buffers, so `aliases` and `not_covered` are what the caller says.

    Args:
        source: anything with vLLM's two channels.
        aliases: tied names that the source leaves out -> the name that it sends.
        not_covered: what the model holds beyond that, by name.
    """

    def __init__(
        self,
        source: _VLLMWeightSource,
        *,
        aliases: Mapping[str, str] | None = None,
        not_covered: Iterable[str] = (),
    ) -> None:
        self._source = source
        self.aliases: Mapping[str, str] = dict(aliases or {})
        self.not_covered = tuple(not_covered)

    def metas(self) -> list[ParamMeta]:
        """List what `metadata()` lists.

        Raises:
            DTypeError: a dtype without addressable bits.
        """
        return [ParamMeta(m.name, dtype_of(m.dtype).name, tuple(m.shape)) for m in self._source.metadata()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what iterating yields, detached; a collective if the source's iteration is one."""
        for name, tensor in self._source:
            yield name, tensor.detach()


def table_of(source: WeightSource) -> ParameterTable:
    """Return the parameter table of a source, with its aliases.

    Raises:
        TableError: a name twice, or aliases that do not fit.
    """
    return ParameterTable(source.metas(), source.aliases)


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether a name matches one of the glob patterns (`*` crosses dots; case matters)."""
    return bool(patterns) and _compiled(patterns).match(name) is not None


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns))


KEPT_BY_DEFAULT: Final = (
    "router.*", "*.router.*", "*e_score_correction_bias", "*bias*",
    "*scale", "*_scale_inv", "*zero_point", "*running_mean", "*running_var", "*inv_freq", "*A_log",
)  # fmt: skip
"""Parameters that serving checkpoints commonly hold in fp32 next to bf16 weights."""

_CASTABLE: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ServingDType:
    """In which dtype a trainer's master weights travel, decided by name.

    `dtypes` wins over `keep`, `keep` over `default`. `default` only narrows: fp32 and fp64 become bf16 (say),
    while fp16, fp8, integers and bool stay what they are, because casting those would lose their scale or their
    meaning. Casting is torch's `Tensor.to`: round to nearest, ties to even (fp64 goes through fp32). A parameter
    that is not cast keeps its bits, NaN payloads included.

    Name patterns are a guess about what workers hold. Where the serving checkpoint is at hand, prefer
    `ServingDType.like(CheckpointSource(path).metas())`: it is exact.

    Attributes:
        default: `bfloat16`, `float16` or `float32`; None sends every parameter as it is.
        keep: glob patterns of parameters that `default` does not touch.
        dtypes: exact dtype by name.

    Raises:
        InputError: a default that weights cannot simply be rounded to.
        DTypeError: an unknown dtype name.
    """

    default: str | None = None
    keep: tuple[str, ...] = KEPT_BY_DEFAULT
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            raise InputError("`keep` takes a tuple of patterns", found=repr(self.keep))
        if self.default is not None and self.default not in ("bfloat16", "float16", "float32"):
            raise InputError("bad default serving dtype", expected="bfloat16, float16, float32 or None",
                             found=repr(self.default), hint="Quantise inside a source of your own.")  # fmt: skip
        for dtype in self.dtypes.values():
            dtype_named(dtype)

    @classmethod
    def like(cls, metas: Iterable[ParamMeta]) -> ServingDType:
        """Take each parameter's dtype from the checkpoint that is served; others travel as they are."""
        return cls(dtypes={meta.name: meta.dtype for meta in metas})

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter travels.

        Args:
            name: its name in the serving checkpoint.
            dtype: its dtype in the trainer.

        Raises:
            DTypeError: torch cannot address the dtype's bits; or `dtypes` asks for a cast that is not between
                fp16, bf16, fp32 and fp64.
        """
        try:
            have = dtype_of(dtype).name
        except DTypeError as err:
            raise DTypeError(err.message, parameter=name, hint=err.hint) from err
        want = self.dtypes.get(name)
        if want is not None and want != have:
            if want not in _CASTABLE or have not in _CASTABLE:
                raise DTypeError("a parameter cannot be cast to the dtype that is served", parameter=name,
                                 expected=want, found=have, hint="Quantise inside a source of your own.")  # fmt: skip
            return dtype_named(want).torch_dtype
        narrows = self.default is not None and _CASTABLE.get(have, 0) > _CASTABLE[self.default]
        if want is not None or self.default is None or not narrows or matches_any(name, self.keep):
            return dtype
        return dtype_named(self.default).torch_dtype
