"""Weight sources over torch objects: a live `nn.Module`, or a state dict.

Both cover parameters and persistent buffers, send tied tensors once, and name what they leave out. They gather
nothing: a parameter of which this rank holds only a shard is refused by name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deltacast.delta.dtypes import dtype_of
from deltacast.delta.errors import InputError, TableError
from deltacast.delta.sources import ServingDType, matches_any
from deltacast.delta.table import ParamMeta

__all__ = ["ModuleSource", "StateDictSource"]

_WRAPPERS: Final = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
"""Wrapper class -> attribute that holds the wrapped module. By class name, so that nothing is imported for it."""

_WRAPPER_PARTS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})
_MARKS: Final = frozenset({"_is_flat_param", "ds_shape"})
"""Attributes by which FSDP1 and DeepSpeed mark parameters that `_local` must look at."""

_GATHER_HINT: Final = (
    "Gather it first (DTensor.full_tensor, FSDP full state dict, GatheredParameters) and pass a StateDictSource."
)

_Registered: TypeAlias = tuple[str, Mapping[str, Any], str, torch.Tensor]
"""One registered tensor: its name without wrappers, the live dict that holds it, its key there, the tensor."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """A tensor that travels, or is tied to one that does: where it is held, and what it was in the last walk."""

    holder: Mapping[str, Any]
    key: str
    meta: ParamMeta
    dtype: torch.dtype
    wire_dtype: torch.dtype

    def fits(self, holder: Mapping[str, Any], key: str, tensor: torch.Tensor) -> bool:
        """Tell whether all of this is still so; the rest follows from the name, the dtype and the shape."""
        return (
            holder is self.holder and key == self.key and tensor.dtype == self.dtype and tensor.shape == self.meta.shape
        )

    def now(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is registered now, as it is and whole."""
        raw = self.holder.get(self.key)
        if not isinstance(raw, torch.Tensor):
            raise TableError("a parameter is gone since the source was listed", parameter=self.meta.name)
        return raw, _whole(self.meta.name, raw)


class _TorchSource(ABC):
    """What the two sources share: selection, ties, serving dtype."""

    def __init__(
        self, *, prefix: str, include: Collection[str], exclude: Collection[str],
        serving_dtype: ServingDType | None, serving_names: Collection[str],
    ) -> None:  # fmt: skip
        if isinstance(include, str) or isinstance(exclude, str):
            raise InputError("include and exclude take a collection of patterns", found="a str")
        self._prefix = prefix
        self._include, self._exclude = tuple(include), tuple(exclude)
        self._serving_dtype = serving_dtype or ServingDType()
        self._serving_names = frozenset(serving_names)
        self._listed: dict[str, _Listed] = {}
        """By name, as of the last walk. Kept because every round walks: what still fits is not made anew."""
        self._groups: list[list[_Listed]] = []
        """Tied tensors together, the one that travels first."""
        self._preferred: dict[tuple[str, ...], str] = {}
        """Names of tied tensors -> the one that travels. Kept because asking every module costs another walk."""
        self.metas()

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied tensors that do not travel -> the name that does, as of the last `metas()`."""
        return {other.meta.name: first.meta.name for first, *others in self._groups for other in others}

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What is held but not sent, by name, as of now."""
        return (*self._unsendable(), *(name for name, *_ in self._walk() if not self._selects(name)))

    def metas(self) -> list[ParamMeta]:
        """Walk the model again and list what travels; `tensors` and `aliases` answer for this walk.

        Works on meta tensors too. No collective, no device synchronisation.

        Raises:
            TableError: two parameters have one name once wrappers are stripped.
            InputError: a parameter is sharded, not initialised, or a wrapper tensor subclass.
            DTypeError: a dtype without addressable bits.
        """
        listed: dict[str, _Listed] = {}
        groups: dict[Hashable, list[_Listed]] = {}
        for name, holder, key, raw in self._walk():
            if name in listed:
                raise TableError("two parameters have one name once wrappers are stripped", parameter=name)
            entry = self._listed.get(name)
            if entry is None and not self._selects(name):
                continue
            tensor = _whole(name, raw)
            if entry is None or not entry.fits(holder, key, tensor):
                wire = self._serving_dtype.of(name, tensor.dtype)
                meta = ParamMeta(name, dtype_of(wire).name, tuple(tensor.shape))
                entry = _Listed(holder, key, meta, tensor.dtype, wire)
            listed[name] = entry
            groups.setdefault((_place(raw, tensor), entry.wire_dtype), []).append(entry)
        self._groups = [group if len(group) == 1 else self._by_preference(group) for group in groups.values()]
        self._listed = listed
        return [group[0].meta for group in self._groups]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter as it is now: detached, any layout, cast one at a time.

        What is not cast is a live view of the trainer's memory.

        Raises:
            TableError: since `metas()` a parameter was removed or changed its dtype, or tied ones were untied.
        """
        hint = "Call metas() again and agree on the new table."
        for first, *others in self._groups:
            name, (raw, tensor) = first.meta.name, first.now()
            if tensor.dtype != first.dtype:
                raise TableError("a parameter changed its dtype", parameter=name, expected=first.dtype,
                                 found=tensor.dtype, hint=hint)  # fmt: skip
            for other in others:
                if _place(*other.now()) != _place(raw, tensor):
                    raise TableError(f"{other.meta.name!r} is no longer tied to it", parameter=name, hint=hint)
            tensor = tensor.detach()
            yield name, tensor if tensor.dtype == first.wire_dtype else tensor.to(first.wire_dtype)

    def _selects(self, name: str) -> bool:
        return (not self._include or matches_any(name, self._include)) and not matches_any(name, self._exclude)

    def _by_preference(self, group: list[_Listed]) -> list[_Listed]:
        names = tuple(entry.meta.name for entry in group)
        if names not in self._preferred:
            self._preferred[names] = self._preferred_of(names)
        first = self._preferred[names]
        return sorted(group, key=lambda entry: entry.meta.name != first)

    def _preferred_of(self, names: tuple[str, ...]) -> str:
        served = [name for name in names if name in self._serving_names]
        tied = list(self._tied())
        return (served or [name for name in names if not _is_alias(name, tied)] or names)[0]

    @abstractmethod
    def _walk(self) -> Iterator[_Registered]:
        """Yield every registered tensor."""

    @abstractmethod
    def _unsendable(self) -> Iterator[str]:
        """Yield the names of what is held and not registered as a tensor that could be sent."""

    def _tied(self) -> Iterator[tuple[str, str]]:
        """Yield (prefix, key) of what the model itself says that checkpoints leave out."""
        yield from ()


class ModuleSource(_TorchSource):
    """The weights of a live module: parameters and persistent buffers, in registration order.

    Names are those of `named_parameters()` without the parts that wrapper *classes* add (DDP, `torch.compile`,
    FSDP, activation checkpointing, EMA); a submodule of yours that is called `module` keeps its name. A model
    whose `state_dict()` renames parameters needs a `StateDictSource`.

    Tensors are tied when device, address, shape, strides and dtype are all equal. They travel once: under
    the name in `serving_names`, else the one that Hugging Face's `_tied_weights_keys` does not call tied, else the
    first registered. Views of one storage that differ in any of these travel separately.

    `not_covered` lists non-persistent buffers, unregistered tensor attributes, `_extra_state`, a wrapper's own
    tensors, and what `include` and `exclude` left out.

    Args:
        module: walked again at every `metas()`, read live at every `tensors()`; kept alive, never changed.
        prefix: put before every name, with its dot, as in `state_dict(prefix=...)`.
        include: glob patterns of serving names; empty means all.
        exclude: glob patterns, stronger than `include`.
        serving_dtype: in which dtype masters travel; None sends every parameter as it is.
        serving_names: names in the checkpoint that is served, to pick among tied ones.

    Raises:
        TableError, InputError, DTypeError: as `metas`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        prefix: str = "",
        include: Collection[str] = (),
        exclude: Collection[str] = (),
        serving_dtype: ServingDType | None = None,
        serving_names: Collection[str] = (),
    ) -> None:
        self._module = module
        super().__init__(
            prefix=prefix, include=include, exclude=exclude, serving_dtype=serving_dtype, serving_names=serving_names
        )

    def _walk(self) -> Iterator[_Registered]:
        for prefix, module, wrapped in _modules(self._module, self._prefix):
            if wrapped == "_fsdp_wrapped_module" and _is_sharded_fsdp(module):
                raise InputError("FSDP1 keeps only shards", parameter=prefix or "the model", hint=_GATHER_HINT)
            if wrapped is not None:
                continue  # the wrapper's own tensors are no part of the model
            state: dict[str, Any] = module.__dict__
            parameters, buffers, hidden = state["_parameters"], state["_buffers"], state["_non_persistent_buffers_set"]
            for key, tensor in parameters.items():
                if tensor is not None:
                    yield prefix + key, parameters, key, tensor
            for key, tensor in buffers.items():
                if tensor is not None and key not in hidden:
                    yield prefix + key, buffers, key, tensor

    def _unsendable(self) -> Iterator[str]:
        for prefix, module, wrapped in _modules(self._module, self._prefix):
            state: dict[str, Any] = module.__dict__
            parameters, buffers, hidden = state["_parameters"], state["_buffers"], state["_non_persistent_buffers_set"]
            unsent = hidden if wrapped is None else {*parameters, *buffers}
            own = (*parameters.items(), *buffers.items())
            yield from (prefix + key for key, tensor in own if tensor is not None and key in unsent)
            yield from (prefix + key for key, value in state.items() if isinstance(value, torch.Tensor))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{prefix}_extra_state"

    def _tied(self) -> Iterator[tuple[str, str]]:
        for prefix, module, wrapped in _modules(self._module, self._prefix):
            if wrapped is None:
                keys = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None)
                yield from ((prefix, key) for key in keys or ())


class StateDictSource(_TorchSource):
    """The weights of a state dict, in its order.

    Parts of names that only torch's wrappers use (`_orig_mod`, `_fsdp_wrapped_module`,
    `_checkpoint_wrapped_module`) are stripped. `module.` may be honest: it is stripped only where `strip_prefix`
    asks for it. Ties are found as in `ModuleSource` (`state_dict()` keeps storages shared). `not_covered` lists
    entries that are no tensors (`_extra_state`) and what `include` and `exclude` left out.

    Args:
        state_dict: read again at every `metas()` and `tensors()`.
        strip_prefix: taken off the front of every name that has it (`module.` for a state dict of DDP).
        prefix, include, exclude, serving_dtype, serving_names: as `ModuleSource`.

    Raises:
        TableError, InputError, DTypeError: as `metas`.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        *,
        strip_prefix: str = "",
        prefix: str = "",
        include: Collection[str] = (),
        exclude: Collection[str] = (),
        serving_dtype: ServingDType | None = None,
        serving_names: Collection[str] = (),
    ) -> None:
        self._state_dict = state_dict
        self._strip_prefix = strip_prefix
        super().__init__(
            prefix=prefix, include=include, exclude=exclude, serving_dtype=serving_dtype, serving_names=serving_names
        )

    def _walk(self) -> Iterator[_Registered]:
        for key, value in self._state_dict.items():
            if isinstance(value, torch.Tensor):
                yield self._name(key), self._state_dict, key, value

    def _unsendable(self) -> Iterator[str]:
        yield from (self._name(key) for key, value in self._state_dict.items() if not isinstance(value, torch.Tensor))

    def _name(self, key: str) -> str:
        name = ".".join(part for part in key.split(".") if part not in _WRAPPER_PARTS)
        return self._prefix + name.removeprefix(self._strip_prefix)


def _modules(
    module: nn.Module, prefix: str, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield a module and all below it: prefix of its names, module, and the wrapped attribute if it is a wrapper."""
    if id(module) in above:
        return  # a child that refers back to its parent would only add endless aliases
    module_class: type = type(module)
    wrapped = _wrapped_attribute(module_class)
    yield prefix, module, wrapped
    children = module.__dict__["_modules"]
    if children:
        above = (*above, id(module))
    for key, child in children.items():
        if child is not None:
            yield from _modules(child, prefix if key == wrapped else f"{prefix}{key}.", above)


@lru_cache(maxsize=256)
def _wrapped_attribute(module_class: type) -> str | None:
    for cls in module_class.__mro__:
        attribute = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if attribute is not None:
            return attribute
    return None


def _is_sharded_fsdp(module: nn.Module) -> bool:
    return getattr(getattr(module, "sharding_strategy", None), "name", "") != "NO_SHARD"


def _is_alias(name: str, tied: list[tuple[str, str]]) -> bool:
    # a key is a name in older transformers and a pattern in newer ones, always relative to the model's prefix
    return any(
        name.startswith(prefix) and (name[len(prefix) :] == key or _searches(key, name[len(prefix) :]))
        for prefix, key in tied
    )


def _searches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _place(raw: torch.Tensor, tensor: torch.Tensor) -> Hashable:
    """Return what two names must share to be tied: the very same elements in the very same order."""
    address = 0 if tensor.is_meta else tensor.data_ptr()
    if address == 0:  # meta and zero-size tensors have none: only the same object is the same
        return id(raw)
    layout = (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return address, layout


def _whole(name: str, raw: torch.Tensor) -> torch.Tensor:
    """Return a parameter as a plain tensor that holds all of it, or refuse it by name."""
    is_plain = type(raw) in _PLAIN and raw.layout == torch.strided and _MARKS.isdisjoint(raw.__dict__)
    return raw if is_plain else _local(name, raw)


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        raise InputError("a lazy parameter is not initialised", parameter=name, hint="Run a forward pass first.")
    if getattr(tensor, "_is_flat_param", False):
        raise InputError("an FSDP flat parameter has no name of its own", parameter=name, hint=_GATHER_HINT)
    if getattr(tensor, "ds_shape", tensor.shape) != tensor.shape:
        raise InputError("DeepSpeed ZeRO-3 has partitioned a parameter", parameter=name, hint=_GATHER_HINT)
    if hasattr(tensor, "to_local") and hasattr(tensor, "placements"):
        return _whole_dtensor(name, tensor)
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise InputError("a tensor subclass that wraps others has no bits of its own", parameter=name,
                         found=type(tensor).__name__, hint="Send its parts through a source of your own.")  # fmt: skip
    if tensor.layout != torch.strided:
        raise InputError("a sparse tensor has no plain memory", parameter=name, expected="a strided layout",
                         found=tensor.layout)  # fmt: skip
    return tensor.detach()


def _whole_dtensor(name: str, tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local().detach()
    placements = list(tensor.placements)
    if local.shape != tensor.shape or any(placement.is_partial() for placement in placements):
        raise InputError("this rank holds only a shard of a parameter", parameter=name,
                         expected=f"all of {list(tensor.shape)}", found=f"{list(local.shape)} as {placements}",
                         hint=_GATHER_HINT)  # fmt: skip
    return local
