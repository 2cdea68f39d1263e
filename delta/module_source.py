"""Weight sources over torch objects: a live `nn.Module`, or a state dict.

Both cover parameters and persistent buffers, send tied tensors once, and name what they leave out. They gather
nothing: a parameter of which this rank holds only a shard is refused by name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
_GATHER_HINT: Final = (
    "Gather it first (DTensor.full_tensor, FSDP full state dict, GatheredParameters) and pass a StateDictSource."
)


@dataclass(frozen=True, slots=True)
class _Found:
    """One registered tensor: its name, and the live dict that holds it under `key`."""

    name: str
    holder: Mapping[str, Any]
    key: str

    def now(self) -> tuple[torch.Tensor, Hashable]:
        """Return the tensor as it is now (detached, plain, whole), and its place.

        The place is what two names must share to be tied: the very same elements in the very same order.
        """
        try:
            raw = self.holder[self.key]
        except KeyError:
            raw = None
        if not isinstance(raw, torch.Tensor):
            raise TableError("a parameter is gone since the source was listed", parameter=self.name)
        tensor = raw.detach() if _is_plain(raw) else _local(self.name, raw)
        storage = tensor.untyped_storage().data_ptr() if not tensor.is_meta else 0
        if storage == 0:  # meta and zero-size tensors have no address: only the same object is the same
            return tensor, id(raw)
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        return tensor, (tensor.device, storage, *layout, tensor.is_conj(), tensor.is_neg())


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One tensor that travels: every name it has, and the dtypes it has here and on the wire."""

    meta: ParamMeta
    names: tuple[_Found, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype


@dataclass(slots=True)
class _Plan:
    """One walk over the model."""

    parameters: list[_Parameter] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    not_covered: list[str] = field(default_factory=list)


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
        self._tied: list[tuple[str, str]] = []
        """(prefix, key) of what the model itself says that checkpoints leave out."""
        self._plan = _Plan()
        self.metas()

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied tensors that do not travel -> the name that does, as of the last `metas()`."""
        return dict(self._plan.aliases)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What is held but not sent, by name, as of the last `metas()`."""
        return tuple(self._plan.not_covered)

    def metas(self) -> list[ParamMeta]:
        """Walk the model again and list what travels; `tensors`, `aliases`, `not_covered` answer for this walk.

        Works on meta tensors too. No collective, no device synchronisation.

        Raises:
            TableError: two parameters have one name once wrappers are stripped.
            InputError: a parameter is sharded, not initialised, or a wrapper tensor subclass.
            DTypeError: a dtype without addressable bits.
        """
        plan = _Plan()
        groups: dict[Hashable, list[_Found]] = {}
        names: set[str] = set()
        kinds: dict[str, tuple[torch.Size, torch.dtype, torch.dtype]] = {}
        for found in self._walk(plan.not_covered):
            name = found.name
            if name in names:
                raise TableError("two parameters have one name once wrappers are stripped", parameter=name)
            names.add(name)
            if (self._include and not matches_any(name, self._include)) or matches_any(name, self._exclude):
                plan.not_covered.append(name)
                continue
            tensor, place = found.now()
            wire = self._serving_dtype.of(name, tensor.dtype)
            kinds[name] = tensor.shape, tensor.dtype, wire
            groups.setdefault((place, wire), []).append(found)
        for group in groups.values():
            first = self._preferred(group)
            shape, dtype, wire = kinds[first.name]
            meta = ParamMeta(first.name, dtype_of(wire).name, tuple(shape))
            others = [found for found in group if found is not first]
            plan.parameters.append(_Parameter(meta, (first, *others), dtype, wire))
            plan.aliases.update({found.name: first.name for found in others})
        self._plan = plan
        return [parameter.meta for parameter in plan.parameters]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter as it is now: detached, any layout, cast one at a time.

        What is not cast is a live view of the trainer's memory.

        Raises:
            TableError: since `metas()` a parameter was removed or changed its dtype, or tied ones were untied.
        """
        hint = "Call metas() again and agree on the new table."
        for parameter in self._plan.parameters:
            meta, (first, *others) = parameter.meta, parameter.names
            tensor, place = first.now()
            if tensor.dtype != parameter.dtype:
                raise TableError("a parameter changed its dtype", parameter=meta.name, expected=parameter.dtype,
                                 found=tensor.dtype, hint=hint)  # fmt: skip
            for other in others:
                if other.now()[1] != place:
                    raise TableError(f"{other.name!r} is no longer tied to it", parameter=meta.name, hint=hint)
            yield meta.name, tensor.to(parameter.wire_dtype)

    def _preferred(self, group: list[_Found]) -> _Found:
        if len(group) == 1:
            return group[0]
        served = [found for found in group if found.name in self._serving_names]
        return (served or [found for found in group if not self._is_alias(found.name)] or group)[0]

    @abstractmethod
    def _walk(self, not_covered: list[str]) -> Iterator[_Found]:
        """Yield every registered tensor under its stripped name; append what cannot travel to `not_covered`."""

    def _is_alias(self, name: str) -> bool:
        # a key is a name in older transformers and a pattern in newer ones, always relative to the model's prefix
        return any(
            name.startswith(prefix) and (name[len(prefix) :] == key or _searches(key, name[len(prefix) :]))
            for prefix, key in self._tied
        )


class ModuleSource(_TorchSource):
    """The weights of a live module: parameters and persistent buffers, in registration order.

    Names are those of `named_parameters()` without the parts that wrapper *classes* add (DDP, `torch.compile`,
    FSDP, activation checkpointing, EMA); a submodule of yours that is called `module` keeps its name. A model
    whose `state_dict()` renames parameters needs a `StateDictSource`.

    Tensors are tied when device, storage, offset, shape, strides and dtype are all equal. They travel once: under
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

    def _walk(self, not_covered: list[str]) -> Iterator[_Found]:
        self._tied = []
        yield from self._walk_module(self._module, self._prefix, not_covered, ())

    def _walk_module(
        self, module: nn.Module, prefix: str, not_covered: list[str], above: tuple[int, ...]
    ) -> Iterator[_Found]:
        if id(module) in above:
            return  # a child that refers back to its parent would only add endless aliases
        state: dict[str, Any] = module.__dict__
        inner = _wrapped_attribute(module)
        if inner == "_fsdp_wrapped_module" and _is_sharded_fsdp(module):
            raise InputError("FSDP1 keeps only shards", parameter=prefix or "the model", hint=_GATHER_HINT)
        buffers = [key for key, value in state["_buffers"].items() if value is not None]
        own = [(state["_parameters"], key) for key, value in state["_parameters"].items() if value is not None]
        own += [(state["_buffers"], key) for key in buffers if key not in state["_non_persistent_buffers_set"]]
        not_covered += [prefix + key for key in buffers if key in state["_non_persistent_buffers_set"]]
        not_covered += [prefix + key for key, value in state.items() if isinstance(value, torch.Tensor)]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            not_covered.append(f"{prefix}_extra_state")
        keys = getattr(module, "all_tied_weights_keys", None) or getattr(module, "_tied_weights_keys", None)
        self._tied += [(prefix, key) for key in keys or () if inner is None]
        for holder, key in own:
            if inner is None:
                yield _Found(prefix + key, holder, key)
            else:
                not_covered.append(prefix + key)  # the wrapper's own, no part of the model
        for key, child in state["_modules"].items():
            if child is not None:
                below = prefix if key == inner else f"{prefix}{key}."
                yield from self._walk_module(child, below, not_covered, (*above, id(module)))


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

    def _walk(self, not_covered: list[str]) -> Iterator[_Found]:
        for key, value in self._state_dict.items():
            name = ".".join(part for part in key.split(".") if part not in _WRAPPER_PARTS)
            name = self._prefix + name.removeprefix(self._strip_prefix)
            if isinstance(value, torch.Tensor):
                yield _Found(name, self._state_dict, key)
            else:
                not_covered.append(name)


def _wrapped_attribute(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        attribute = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if attribute is not None:
            return attribute
    return None


def _is_sharded_fsdp(module: nn.Module) -> bool:
    return getattr(getattr(module, "sharding_strategy", None), "name", "") != "NO_SHARD"


def _searches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in {torch.Tensor, nn.Parameter}
        and tensor.layout == torch.strided
        and not getattr(tensor, "_is_flat_param", False)
        and getattr(tensor, "ds_shape", tensor.shape) == tensor.shape
    )


def _local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter as a plain tensor that holds all of it, or refuse it by name."""
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
