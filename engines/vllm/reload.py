"""Bring vLLM's running model after weights in host memory that have the checkpoint's names, shapes and dtypes.

A running model's tensors are fused, sharded, and on CPUs repacked: only its own loader knows how to fill them. So the
modules that changed, and only they, go through vLLM's layerwise reload, each with every checkpoint tensor that it is
made of: a module that gets some of its members keeps garbage for the others.

Checked against vLLM 0.32. What is worked around here, each with a test in tests/integration/vllm:

- A reload that was begun for the whole model and then failed leaves every layer without data, and the next request ends
  the server. Here it is begun module by module, and ended whatever happens.
- On CPUs a weight that two modules share is repacked only for the one that was loaded (a tied `lm_head` stays old).
- On CPUs expert weights are not repacked on a second load. They are refused.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deltacast.delta.errors import InputError, StateError
from deltacast.delta.state import WeightState

__all__ = ["RuntimeModel"]

_LOG: Final = logging.getLogger(__name__)
_MOST_NAMED: Final = 5  # parameters that one message lists


class RuntimeModel:
    """A running model that follows a `WeightState`: what it was last loaded from is kept as fingerprints.

    One thread, the one that runs the model: no forward pass may run during `follow`.

    Args:
        model: vLLM's, loaded.
        model_config: vLLM's `ModelConfig` of it.
        names: the state's parameters, in its order.
        loaded: the fingerprints of what the model was loaded from; None if it holds something else.

    Raises:
        InputError: parameters that cannot be brought into the model this way, by name.
    """

    def __init__(
        self, model: nn.Module, model_config: Any, names: Sequence[str], loaded: NDArray[np.uint64] | None
    ) -> None:
        self._model, self._model_config = model, model_config
        self._names = tuple(names)
        self._modules = _modules_of(model, self._names)
        self._sharing = _sharing_packed_weights(model)
        self._loaded = np.zeros(len(self._names), np.uint64) if loaded is None else loaded.copy()
        self._known = np.full(len(self._names), loaded is not None)

    def distrust(self, names: Iterable[str] | None = None) -> None:
        """Take it that the model may hold other bits of some parameters (all by default) than was noted."""
        places = slice(None) if names is None else [self._names.index(name) for name in names]
        self._known[places] = False

    def is_behind(self, state: WeightState) -> bool:
        """Tell whether the model holds anything but the state's weights."""
        return bool(self._behind(state).any())

    def follow(self, state: WeightState) -> int:
        """Reload every module that holds anything but the state's weights. Blocks.

        Args:
            state: read only.

        Returns:
            How many modules were reloaded.

        Raises:
            StateError: a module did not take all of its tensors.
            Exception: vLLM's own. Either way what was touched may be a mix, and `is_behind` until a `follow` succeeds.
        """
        behind = self._behind(state)
        paths = [path for path, places in self._modules.items() if behind[places].any()]
        if not paths:
            return 0
        places = sorted(place for path in paths for place in self._modules[path])
        self._known[places] = False
        tensors = ((self._names[place], state.memories[place].tensor) for place in places)
        with torch.no_grad(), self._reloading(paths) as modules:
            self._model.load_weights(tensors)  # type: ignore[operator] # vLLM's models have it
            for path, module in modules.items():
                self._require_loaded(path, module, state)
        self._repack_sharing(modules.values())
        self._loaded[places] = state.fingerprints[places]
        self._known[places] = True
        _LOG.debug("deltacast reloaded %d modules", len(paths))
        return len(paths)

    def _behind(self, state: WeightState) -> NDArray[np.bool_]:
        behind: NDArray[np.bool_] = ~self._known | (self._loaded != state.fingerprints)
        return behind

    @contextmanager
    def _reloading(self, paths: Iterable[str]) -> Iterator[dict[str, nn.Module]]:
        """Open modules for loading, and close them in any case: one that stays open has no data to run with."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            get_layerwise_info,
            initialize_layerwise_reload,
        )

        modules: dict[str, nn.Module] = {}
        try:
            for path in paths:
                modules[path] = self._model.get_submodule(path)
                initialize_layerwise_reload(modules[path])
            yield modules
        except BaseException:
            for module in modules.values():
                info = get_layerwise_info(module)
                info.loaded_weights.clear()  # so that what was there before is put back
                info.load_numel = 0
            raise
        finally:
            for module in modules.values():
                finalize_layerwise_reload(module, self._model_config)

    def _require_loaded(self, path: str, module: nn.Module, state: WeightState) -> None:
        """Check that a module took everything; one that is complete was closed by vLLM already."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        info = get_layerwise_info(module)
        places = self._modules[path]
        expected = sum(state.memories[place].tensor.numel() for place in places)
        # A vocabulary's padding keeps a module open though it has all; a shard takes only its part.
        enough = expected if getattr(module, "tp_size", 1) == 1 else 1
        if info.can_load() and info.load_numel < enough:
            raise StateError(
                f"vLLM's loader left out weights of {path}",
                parameter=self._names[places[0]],
                expected=f"{expected} elements of {len(places)} tensors",
                found=info.load_numel,
            )

    def _repack_sharing(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for other in self._sharing.get(module, ()):
                other.quant_method.process_weights_after_loading(other)  # type: ignore[union-attr, operator]


def _modules_of(model: nn.Module, names: Sequence[str]) -> dict[str, list[int]]:
    """Map the path of each module that is reloaded to the places of all checkpoint tensors that it is made of."""
    modules: dict[str, list[int]] = {}
    refused: dict[str, list[str]] = {}
    for place, name in enumerate(names):
        runtime = _runtime_name(model, name)
        path, _, leaf = runtime.rpartition(".")
        module = _submodule(model, path)
        if module is None or not hasattr(module, leaf):
            refused.setdefault("the running model has no place for", []).append(name)
        elif hasattr(getattr(module, "quant_method", None), "moe_kernel"):
            refused.setdefault("expert weights cannot be reloaded yet:", []).append(name)
        else:
            modules.setdefault(path, []).append(place)
    for why, parameters in refused.items():
        listed = ", ".join(parameters[:_MOST_NAMED]) + (", ..." if len(parameters) > _MOST_NAMED else "")
        raise InputError(
            f"deltacast cannot update this model: {why} {listed}", parameter=parameters[0], found=f"{len(parameters)}"
        )
    return modules


def _runtime_name(model: nn.Module, name: str) -> str:
    """Return the running model's name for what a checkpoint tensor is loaded into, as the model itself declares it."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    name = (mapper.map_name(name) if mapper is not None else name) or name
    path, _, leaf = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    for fused, members in getattr(model, "packed_modules_mapping", {}).items():
        if module in members and _submodule(model, path) is None:
            return ".".join(part for part in (parent, fused, leaf) if part)
    return name


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _sharing_packed_weights(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Map each module to the others that have a packed copy of the same weight (vLLM on CPUs: `cpu_linear`)."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "quant_method") and isinstance(weight, torch.Tensor) and weight.numel():
            owners.setdefault(weight.untyped_storage().data_ptr(), []).append(module)
    return {
        module: [other for other in group if other is not module and hasattr(other, "cpu_linear")]
        for group in owners.values()
        for module in group
    }
