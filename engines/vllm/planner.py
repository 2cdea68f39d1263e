"""The apply plan: for each checkpoint parameter, where its elements live in the running model, and how to change them.

`trace` runs the model's own loader once, over meta tensors (tracing.py), so that fused, sharded, padded and stacked
layouts are whatever that loader does with them; no name is interpreted. Nothing of the running model is read or
written for it. `Plan.proven` then compares the running weights with the checkpoint that they were loaded from, through
the plan: a plan is to be trusted only after that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deltacast.delta.bits import strided_words
from deltacast.delta.errors import InputError, PatchError, StateError, TableError
from deltacast.delta.fingerprint import Box
from deltacast.delta.pieces import Lattice, Located, Piece, View, disjoint
from deltacast.delta.table import ParamMeta
from deltacast.engines.vllm.skeleton import as_loaded, derived_state, runtime_tensors
from deltacast.engines.vllm.tracing import Trace, trace_loader

__all__ = ["Placement", "Plan", "Strategy", "trace"]

Strategy: TypeAlias = Literal["direct", "reload", "absent"]
"""`direct`: indexed writes into the runtime tensors. `reload`: its modules are loaded anew from whole tensors.
`absent`: this rank's loader leaves the parameter alone (it is another rank's, or nobody's)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one checkpoint parameter lives on this rank.

    Attributes:
        meta: the parameter.
        strategy: how it is changed.
        reason: why not `direct`; empty if it is.
        pieces: where its elements are; only this rank's part of a sharded one. If it is not `direct`, where its loader
            puts them before the engine makes something else of them; empty where that is no copy of boxes.
        targets: runtime tensors that the loader fills from it -> elements that it copies there as they are; 0 for what
            it transforms.
        modules: paths of the runtime modules that are loaded from it, share a tensor with one of those, or keep state
            that was made from it: what a reload has to process anew.
    """

    meta: ParamMeta
    strategy: Strategy
    reason: str
    pieces: tuple[Piece, ...]
    targets: Mapping[str, int]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of a checkpoint's parameters in one rank's running model.

    Holds references to the model's live tensors, which must stay the tensors that it runs with (in-place reloads do).

    Attributes:
        placements: by the checkpoint's names, in load order.
        tensors: the live runtime tensors by name.
        shapes: of the runtime tensors as their loader knows them.
        aliases: parameters that are loaded into the very memory of another -> that one, the first (tied weights under
            two checkpoint names). Both are located; a digest of what is held counts the memory once.
        ties: runtime tensors that are another's memory -> that one.
        uncovered: runtime parameters and persistent buffers with elements that no parameter is loaded into (vocabulary
            padding, a scale that the checkpoint leaves out) -> how many.
    """

    placements: Mapping[str, Placement]
    tensors: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    ties: Mapping[str, str]
    uncovered: Mapping[str, int]

    def placement(self, name: str) -> Placement:
        """Return a parameter's placement.

        Raises:
            TableError: the plan has no parameter of that name.
        """
        found = self.placements.get(name)
        if found is None:
            raise TableError("not a parameter of the checkpoint that the model was loaded from", parameter=name)
        return found

    def names(self, strategy: Strategy) -> tuple[str, ...]:
        """Return the names of the parameters of one strategy, in load order."""
        return tuple(name for name, placement in self.placements.items() if placement.strategy == strategy)

    def locate(self, name: str, positions: NDArray[np.int64]) -> list[Located]:
        """Find where elements of a `direct` parameter are.

        Args:
            name: the parameter.
            positions: int64 flat positions in the checkpoint parameter, strictly ascending (a patch's `indices`).

        Returns:
            For each runtime tensor region that holds any, which of the positions it holds and where, in
            O(positions * log) for any number of pieces that follow one another. Elements of other ranks are in none.

        Raises:
            TableError: unknown name.
            StateError: the parameter is not `direct`.
            PatchError: positions that are not ascending, or out of range.
        """
        pieces, numel = self._direct(name).pieces, self.placements[name].meta.numel
        if positions.dtype != np.int64 or positions.ndim != 1 or bool((positions[1:] <= positions[:-1]).any()):
            raise PatchError("positions are not flat, ascending int64", parameter=name)
        if positions.size and not 0 <= int(positions[0]) <= int(positions[-1]) < numel:
            raise PatchError("a position lies outside the parameter", parameter=name, expected=f"[0, {numel})",
                             found=f"{int(positions[0])} to {int(positions[-1])}")  # fmt: skip
        located = []
        for piece in pieces:
            first, last = np.searchsorted(positions, [piece.here.offset, piece.here.last + 1])
            found = piece.locate(positions[first:last])
            if found.which.size:
                located.append(found._replace(which=found.which + first))
        return located

    def views(self, name: str) -> list[View]:
        """View what the running model holds of a `direct` parameter, in the checkpoint's coordinates.

        Returns:
            One view per piece, together this rank's part, each element once; live memory, not copied.

        Raises:
            TableError: unknown name.
            StateError: the parameter is not `direct`.
        """
        pieces = self._direct(name).pieces
        return [View(piece.shape, piece.box, piece.view(self.tensors[piece.runtime])) for piece in pieces]

    def fill(self, name: str, tensor: torch.Tensor, image: torch.Tensor, target: str) -> bool:
        """Copy what a loader would copy from a parameter into a runtime tensor, into a contiguous image of that tensor.

        Args:
            name: the parameter.
            tensor: the parameter's, whole and contiguous.
            image: of `shapes[target]`, in the parameter's dtype, on any device.
            target: the runtime tensor's name.

        Returns:
            Whether that is all that the loader would do.

        Raises:
            TableError: unknown name.
        """
        placement = self.placement(name)
        for piece in placement.pieces:
            if piece.runtime == target:
                piece.view(image).copy_(_box(tensor, piece.shape, piece.box))
        return bool(placement.pieces)

    def whole(self, name: str) -> torch.Tensor | None:
        """Return the live memory of a parameter in its own shape, strided or not; None where no one view is all of it.

        Raises:
            TableError: unknown name.
        """
        placement = self.placement(name)
        views = self.views(name) if placement.strategy == "direct" else []
        if len(views) != 1 or views[0].tensor.numel() != placement.meta.numel:
            return None
        try:
            return views[0].tensor.view(placement.meta.shape)
        except RuntimeError:  # torch has no other way to ask
            return None

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether the running model's bits of a `direct` parameter are those of a whole tensor, on this rank.

        Args:
            name: the parameter.
            tensor: contiguous, of its dtype and full shape, on any device; compared there.

        Raises:
            TableError: unknown name.
            StateError: the parameter is not `direct`.
            InputError: another dtype or shape.
        """
        meta = self._direct(name).meta
        if tensor.dtype != meta.row.torch_dtype or tuple(tensor.shape) != meta.shape:
            raise InputError("not the parameter's tensor", parameter=name, expected=f"{meta.dtype}{list(meta.shape)}",
                             found=f"{tensor.dtype}{list(tensor.shape)}")  # fmt: skip
        flat = strided_words(tensor, name=name).reshape(-1)
        return all(
            torch.equal(_box(flat, view.shape, view.box), strided_words(view.tensor, name=name).to(flat.device))
            for view in self.views(name)
        )

    def proven(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Plan:
        """Return the plan with what the running model does not hold, seen through it, made `reload`.

        Such a parameter has its shape but not its bits: repacked in place, or an expert layout of the engine's own.

        Args:
            weights: all parameters of the checkpoint that the model was loaded from; read once, none is kept.

        Raises:
            TableError, InputError: as `holds`; or a `direct` parameter is missing.
        """
        missing, changed = set(self.names("direct")), dict[str, str]()
        for name, tensor in weights:
            if self.placement(name).strategy == "direct":
                missing.discard(name)
                if not self.holds(name, tensor):
                    changed[name] = "the running model holds other bits than were loaded"
        if missing:
            raise TableError("a parameter to compare the running model with is missing", parameter=min(missing))
        return replace(self, placements=_reloaded(self.placements, changed))

    def reload_group(self, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what has to be loaded together when some parameters change.

        Returns:
            The modules to reload, and every parameter that they are loaded from, in load order.

        Raises:
            TableError: unknown name.
        """
        modules = dict.fromkeys(module for name in names for module in self.placement(name).modules)
        while True:
            together = self.loaded_into(modules)
            wider = dict.fromkeys(module for name in together for module in self.placements[name].modules)
            if wider.keys() == modules.keys():
                return tuple(modules), together
            modules = wider

    def loaded_into(self, modules: Collection[str]) -> tuple[str, ...]:
        """Return the parameters that some modules are made of, in load order."""
        return tuple(name for name, one in self.placements.items() if not set(one.modules).isdisjoint(modules))

    def _direct(self, name: str) -> Placement:
        placement = self.placement(name)
        if placement.strategy != "direct":
            raise StateError("a parameter without places of its own in the running model", parameter=name,
                             expected="strategy direct", found=f"{placement.strategy}: {placement.reason}")  # fmt: skip
        return placement


def trace(model: nn.Module, metas: Iterable[ParamMeta]) -> Plan:
    """Find where each parameter of a checkpoint lives in a running vLLM model.

    The loader runs on the model's modules with meta tensors in the place of their own, which come back afterwards, the
    same objects: the running weights are neither read nor written. Not while a forward pass runs. Every rank for
    itself; no collective.

    Args:
        model: vLLM's, loaded.
        metas: all parameters of the checkpoint that it was loaded from, in load order.

    Raises:
        StateError: the loader refuses a parameter, by name: no strategy covers it. The model is as it was.
    """
    listed = list(metas)
    load: Any = model.load_weights
    with as_loaded(model) as images:
        found = trace_loader(load, listed, images)
        if any(now is not images.get(name) for name, now in runtime_tensors(model).items()):
            raise StateError("the model's loader replaces parameters instead of filling them")
    return _Planner(model, found, images).plan(listed)


class _Planner:
    """What one trace of one model amounts to."""

    def __init__(self, model: nn.Module, found: Trace, images: Mapping[str, torch.Tensor]) -> None:
        self._found, self._images = found, images
        self._tensors = runtime_tensors(model)
        self._persistent = model.state_dict(keep_vars=True).keys()
        self._derived = derived_state(model, images)
        first: dict[int, str] = {}
        self._ties = {
            name: original
            for name, tensor in self._tensors.items()
            if tensor.numel() and (original := first.setdefault(tensor.data_ptr(), name)) != name
        }

    def plan(self, metas: Iterable[ParamMeta]) -> Plan:
        placements = {meta.name: self._placement(meta) for meta in metas}
        aliases, reasons = self._sharing(placements)
        placements = _reloaded(placements, reasons)
        shapes = {name: tuple(image.shape) for name, image in self._images.items()}
        return Plan(placements, self._tensors, shapes, aliases, self._ties, self._uncovered())

    def _placement(self, meta: ParamMeta) -> Placement:
        targets = self._found.targets[meta.name]
        if not targets and meta.numel:
            reason = self._found.transformed.get(meta.name, "this rank's loader leaves it alone")
            return Placement(meta, "absent", reason, (), {}, ())
        found = [
            Piece.between(landing.here, meta.numel, landing.target, landing.there)
            for landing in self._found.landings[meta.name]
        ]
        pieces = tuple(piece for piece in found if piece is not None)
        unclear = self._unclear(meta, whole=len(pieces) == len(found), pieces=pieces)
        reason = unclear or self._obstacle(targets, pieces)
        modules = tuple(dict.fromkeys(module for target in targets for module in self._modules_of(target)))
        copied = {target: self._copied(meta, target) for target in targets}
        return Placement(meta, "reload" if reason else "direct", reason, () if unclear else pieces, copied, modules)

    def _copied(self, meta: ParamMeta, target: str) -> int:
        landings = () if meta.name in self._found.transformed else self._found.landings[meta.name]
        return sum(landing.there.numel for landing in landings if landing.target == target)

    def _unclear(self, meta: ParamMeta, *, whole: bool, pieces: tuple[Piece, ...]) -> str:
        """Say why a parameter's loader does not simply copy it; empty if it does."""
        if meta.name in self._found.transformed:
            return self._found.transformed[meta.name]
        if meta.row.words_per_element != 1:
            return "complex elements are two words each"
        if not whole:
            return "its loader takes elements that form no box of it"
        if not disjoint([piece.here for piece in pieces]):
            return "its loader puts an element in several places"
        return ""

    def _obstacle(self, targets: Iterable[str], pieces: tuple[Piece, ...]) -> str:
        """Say why a parameter that is copied cannot be written where it was copied to; empty if it can."""
        obstacle = next(filter(None, map(self._obstacle_at, targets)), "")
        beyond = any(piece.there.last >= self._images[piece.runtime].numel() for piece in pieces)
        return obstacle or ("its loader writes beyond the tensor that it was given" if beyond else "")

    def _obstacle_at(self, target: str) -> str:
        image, live = self._images[target], self._tensors.get(target)
        kept = _layout(live) if live is not None else "no tensor"
        if kept != _layout(image):
            return f"the engine keeps {target} as {kept} instead of {_layout(image)}"
        if live is not None and not (live.is_contiguous() and image.is_contiguous()):
            return f"the engine keeps {target} with strides {live.stride()}, loaded with {image.stride()}"
        beside = next((self._derived[module] for module in self._modules_of(target) if module in self._derived), "")
        return f"the engine keeps {beside} beside it, which writing it would not reach" if beside else ""

    def _modules_of(self, target: str) -> Iterator[str]:
        """Yield the modules that have a target, by its own name and as a tie, and those that keep state beside it."""
        original = self._ties.get(target, target)
        for name in (target, original, *(tie for tie, to in self._ties.items() if to == original)):
            module = name.rpartition(".")[0]
            yield module
            if module in self._derived:
                yield self._derived[module].rpartition(".")[0]

    def _sharing(self, placements: Mapping[str, Placement]) -> tuple[dict[str, str], dict[str, str]]:
        """Return aliases, and reasons against those whose memory is another parameter's without being its alias."""
        first: dict[object, str] = {}
        aliases: dict[str, str] = {}
        by_tensor: dict[str, list[tuple[str, Lattice]]] = {}
        for name, placement in placements.items():
            pieces = placement.pieces if placement.strategy == "direct" else ()
            places = tuple(replace(piece, runtime=self._ties.get(piece.runtime, piece.runtime)) for piece in pieces)
            original = first.setdefault(places, name) if places else name
            if original != name:
                aliases[name] = original
                continue
            for piece in places:
                by_tensor.setdefault(piece.runtime, []).append((name, piece.there))
        reasons = {
            name: f"another parameter is loaded over it in {runtime}"
            for runtime, loaded in by_tensor.items()
            if not disjoint([lattice for _, lattice in loaded])
            for name, _ in loaded
        }
        return aliases, reasons

    def _uncovered(self) -> dict[str, int]:
        covered: dict[str, set[Lattice]] = {}
        unknown: set[str] = set()
        for name, landings in self._found.landings.items():
            for landing in landings:
                covered.setdefault(self._ties.get(landing.target, landing.target), set()).add(landing.there)
            if name in self._found.transformed:
                unknown |= {self._ties.get(target, target) for target in self._found.targets[name]}
        left = {
            name: image.numel() - sum(lattice.numel for lattice in covered.get(name, ()))
            for name, image in self._images.items()
            if name in self._persistent and name not in self._ties and name not in unknown
        }
        return {name: count for name, count in left.items() if count > 0}


def _box(whole: torch.Tensor, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    return whole.view(shape)[tuple(slice(low, high) for low, high in box)]


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _reloaded(placements: Mapping[str, Placement], reasons: Mapping[str, str]) -> dict[str, Placement]:
    """Make parameters `reload`, and with them every one that is loaded into the same modules: a module loads whole."""
    result = dict(placements)
    pending = [name for name, placement in result.items() if placement.strategy == "reload"]
    for name, reason in reasons.items():
        result[name] = replace(result[name], strategy="reload", reason=reason)
        pending.append(name)
    members: dict[str, list[str]] = {}
    for name, placement in result.items():
        for module in placement.modules:
            members.setdefault(module, []).append(name)
    while pending:
        name = pending.pop()
        for member in {member for module in result[name].modules for member in members.pop(module, ())}:
            if result[member].strategy == "direct":
                reason = f"it is loaded together with {name}"
                result[member] = replace(result[member], strategy="reload", reason=reason)
                pending.append(member)
    return result
