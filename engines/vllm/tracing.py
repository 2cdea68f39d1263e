"""Where a loader puts what it is given, found by running it once on tensors that have no bits.

The loader gets meta tensors. Each storage is known by whose it is, so a view of it, however it was made, says which
elements it means. A copy between two such views is written down and not carried out: nothing is read, nothing is
written, and a run costs what the loader's Python costs. What is not a copy of bits is named with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltacast.delta.errors import StateError
from deltacast.delta.pieces import Lattice, disjoint, through
from deltacast.delta.table import ParamMeta

__all__ = ["Landing", "Trace", "trace_loader"]

_ATEN: Final = torch.ops.aten
_REARRANGED: Final = "its loader rearranges it through a temporary copy"


@dataclass(frozen=True, slots=True)
class Landing:
    """One copy that the loader made from a checkpoint parameter into a target, bit for bit.

    Attributes:
        target: the target's name.
        here: what was copied, in the parameter's flat memory.
        there: where it went, relative to the target's first element.
    """

    target: str
    here: Lattice
    there: Lattice


@dataclass(slots=True)
class Trace:
    """What one run of a loader did.

    Attributes:
        landings: the copies of each parameter, in the loader's order.
        targets: the targets that it went into in any way; none for one that the loader left alone. Dicts for order.
        transformed: parameters whose values the loader looked at or changed, with how.
    """

    landings: dict[str, list[Landing]]
    targets: dict[str, dict[str, None]]
    transformed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A storage that stands for a checkpoint parameter."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Target:
    """A storage that the loader is to fill."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Copy:
    """A temporary that holds the bits of a view of a parameter."""

    parameter: _Parameter
    here: Lattice
    layout: Lattice


@dataclass(frozen=True, slots=True)
class _Computed:
    """A temporary that depends on parameters in some other way."""

    names: frozenset[str]
    how: str


_Owner: TypeAlias = _Parameter | _Target | _Copy | _Computed


def trace_loader(
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object],
    metas: Iterable[ParamMeta],
    targets: Mapping[str, torch.Tensor],
) -> Trace:
    """Run a loader once, writing down where it copies what.

    Args:
        load: the loader; takes `(name, tensor)` pairs and copies them into the targets. What it does to its own
            Python state it really does.
        metas: the checkpoint's parameters, in the order in which they are loaded.
        targets: what it fills, by name; meta tensors or live ones, whose bits stay as they are. Names that share a
            tensor are found under the first.

    Returns:
        The trace, with every parameter of `metas` in `landings`.

    Raises:
        StateError: the loader raised, or put another memory under a target; the parameter or the target is named.
    """
    listed = list(metas)
    recorder = _Recorder(listed, targets)
    storages = {name: _storage_of(tensor) for name, tensor in targets.items()}
    with torch.no_grad():
        weights = [torch.empty(m.shape, dtype=m.row.torch_dtype, device="meta") for m in listed]
        given = recorder.given(listed, weights)
        try:
            with recorder:
                load(given)
        except Exception as err:  # a loader may raise anything
            raise StateError("the model's loader refuses a parameter", parameter=recorder.latest,
                             found=f"{type(err).__name__}: {err}") from err  # fmt: skip
    for name, tensor in targets.items():
        if _storage_of(tensor) != storages[name]:
            raise StateError("the model's loader puts another memory under a parameter", parameter=name)
    return recorder.trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Sees every operation of torch while the loader runs."""

    def __init__(self, metas: Sequence[ParamMeta], targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace({meta.name: [] for meta in metas}, {meta.name: {} for meta in metas})
        self.latest: str | None = None
        self._owners: dict[int, _Owner] = {}
        self._loaded: dict[str, list[tuple[str, Lattice | None]]] = {}  # what went into a target, from which, where
        self._kept: list[torch.Tensor] = []  # a storage that is freed could lend its identity to the next
        for name, tensor in targets.items():
            self._own(tensor, _Target(name, tensor), first=True)

    def given(self, metas: Sequence[ParamMeta], weights: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, weight in zip(metas, weights, strict=True):
            self.latest = meta.name
            self._own(weight, _Parameter(meta.name, weight.dtype))
            yield meta.name, weight

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(tensor.is_meta or self._owner(tensor) for tensor in tensors):
            return func(*args, **kwargs)  # the loader's own arithmetic, on values of its own
        if func is _ATEN.copy_.default:
            self._copied(args[0], args[1])
            return args[0]
        if func is _ATEN._local_scalar_dense.default:  # noqa: SLF001
            self._mark(self._names(tensors), "its loader reads its values")
            return 0
        if func._schema.is_mutable:  # noqa: SLF001
            changed = kwargs.get("out", args[0])
            self._changed(changed, [tensor for tensor in tensors if tensor is not changed], f"its loader runs {func}")
            return changed
        if func in (_ATEN.clone.default, _ATEN._to_copy.default):  # noqa: SLF001
            return self._cloned(func, args, kwargs)
        made = func(*args, **kwargs)
        self._own_new(made, tensors, f"its loader runs {func}")
        return made

    def _owner(self, tensor: torch.Tensor) -> _Owner | None:
        return self._owners.get(_storage_of(tensor))

    def _own(self, tensor: torch.Tensor, owner: _Owner, *, first: bool = False) -> None:
        key = _storage_of(tensor)
        if not first or key not in self._owners:
            self._owners[key] = owner
            self._kept.append(tensor)

    def _own_new(self, made: object, tensors: Iterable[torch.Tensor], how: str) -> None:
        """Note what an operation's results depend on; a view has its owner already."""
        new = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and self._owner(leaf) is None]
        names = self._names(tensors) if new else frozenset()
        for leaf in new if names else ():
            self._own(leaf, _Computed(names, how))

    def _names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        names: set[str] = set()
        for tensor in tensors:
            match self._owner(tensor):
                case _Parameter(name) | _Copy(_Parameter(name)):
                    names.add(name)
                case _Computed(found):
                    names |= found
                case _Target(target):
                    names |= {name for name, _ in self._loaded.get(target, ())}
                case None:
                    pass
        return frozenset(names)

    def _mark(self, names: Iterable[str], how: str) -> None:
        for name in names:
            self.trace.transformed.setdefault(name, how)

    def _source(self, tensor: torch.Tensor) -> tuple[_Parameter, Lattice] | str | None:
        """Return which elements of which parameter a view has the bits of, or why that cannot be said."""
        owner = self._owner(tensor)
        if isinstance(owner, _Computed):
            return owner.how
        if not isinstance(owner, _Parameter | _Copy):
            return None
        parameter = owner if isinstance(owner, _Parameter) else owner.parameter
        if tensor.itemsize != parameter.dtype.itemsize or tensor.is_neg() or tensor.is_conj():
            return "its loader changes its values"
        view = Lattice.of(tensor)
        lattice = view if isinstance(owner, _Parameter) else through(view, owner.layout, owner.here)
        return (parameter, lattice) if lattice is not None else _REARRANGED

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        owner = self._owner(target)
        found = self._source(source.expand(target.shape))
        if not isinstance(owner, _Target) or not isinstance(found, tuple):
            self._changed(target, [source], found if isinstance(found, str) else "its loader builds it up in pieces")
        elif source.dtype != target.dtype or target.itemsize != owner.tensor.itemsize:
            self._changed(target, [source], f"its loader casts it from {source.dtype} to {target.dtype}")
        elif target.numel():
            parameter, here = found
            landing = Landing(owner.name, here, _place(target, owner))
            self.trace.landings[parameter.name].append(landing)
            self._reached(owner, [parameter.name], landing.there)

    def _changed(self, target: torch.Tensor, sources: Iterable[torch.Tensor], how: str) -> None:
        """Take in that something is written that has not the bits of one parameter, or not by a copy."""
        names, owner = self._names(sources), self._owner(target)
        if not isinstance(owner, _Target):
            names |= self._names([target])
            if names:
                self._own(target, _Computed(names, how))
            return
        self._mark(names | self._overwritten(target, owner), how)
        self._reached(owner, names, None)

    def _reached(self, owner: _Target, names: Iterable[str], there: Lattice | None) -> None:
        for name in names:
            self.trace.targets[name][owner.name] = None
            self._loaded.setdefault(owner.name, []).append((name, there))

    def _overwritten(self, target: torch.Tensor, owner: _Target) -> frozenset[str]:
        """Return the parameters that were copied to where something else is written now; padding is nobody's."""
        place, loaded = _place(target, owner), self._loaded.get(owner.name, ())
        return frozenset(name for name, there in loaded if there is not None and not disjoint([place, there]))

    def _cloned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        original = args[0]
        made: torch.Tensor = func(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
        found = self._source(original)
        names = self._names([original])
        if not isinstance(found, tuple):
            self._own_new(made, [original], found or "its loader reads it back")
        elif made.dtype != original.dtype:
            self._own(made, _Computed(names, f"its loader casts it from {original.dtype} to {made.dtype}"))
        else:
            self._own(made, _Copy(found[0], found[1], Lattice.of(made)))
        return made


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what a tensor and its views have in common, also where they have no address (meta)."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _place(view: torch.Tensor, owner: _Target) -> Lattice:
    lattice = Lattice.of(view)
    return Lattice(lattice.offset - int(owner.tensor.storage_offset()), lattice.extents, lattice.strides)
