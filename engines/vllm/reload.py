"""Bring vLLM's running model after weights in host memory that have the checkpoint's names, shapes and dtypes.

A running model's tensors are fused, sharded, quantised, and on CPUs repacked: where a plan (planner.py) says that a
parameter cannot be written as it is, only the model's own loader knows how to fill it. So the modules that changed, and
only they, go through vLLM's layerwise reload, each with every checkpoint tensor that it is made of: a module that gets
some of its members keeps garbage for the others.

Checked against vLLM 0.32. What is worked around here, each with a test in tests/integration/vllm:

- A reload that was begun for the whole model and then failed leaves every layer without data, and the next request ends
  the server. Here it is begun module by module, and ended whatever happens.
- On CPUs a weight that two modules share is repacked only for the one that was loaded (a tied `lm_head` stays old).
- On CPUs expert weights are repacked only where there is no kernel for them yet.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deltacast.delta.errors import StateError
from deltacast.delta.state import WeightState
from deltacast.engines.vllm.planner import Plan
from deltacast.engines.vllm.readback import differing_modules

__all__ = ["Reloader", "RuntimeModel"]

_LOG: Final = logging.getLogger(__name__)


class Reloader:
    """Loads modules of a running model anew. No forward pass may run meanwhile.

    Args:
        model: vLLM's, loaded.
        vllm_config: of its worker.
        plan: of the model.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self._vllm_config = vllm_config

    def load(self, modules: Sequence[str], weights: Mapping[str, torch.Tensor]) -> None:
        """Load modules from whole checkpoint tensors, any device; what `Plan.reload_group` says belongs together.

        Raises:
            StateError: a module did not take all of its tensors.
            Exception: vLLM's own. Either way the modules may be old, new, or some of each; all of them can run.
        """
        from vllm.config import set_current_vllm_config

        expected = self._expected(weights)
        load: Any = self.model.load_weights
        # vLLM sets its config around updates only, and a handshake is none.
        with torch.no_grad(), set_current_vllm_config(self._vllm_config):
            with self._opened([path for path in modules if path in expected]) as opened:
                load(weights.items())
                for path, module in opened.items():
                    if _left_out(module, expected[path]):
                        first = next(name for name in weights if path in self.plan.placement(name).modules)
                        raise StateError(f"the model's loader leaves out {path} when it reloads", parameter=first)
            for path in modules:
                if path not in expected:
                    self._make_anew(self.model.get_submodule(path))

    def _expected(self, names: Iterable[str]) -> Counter[str]:
        """Return the modules that a loader fills from some parameters, and how many elements it copies at least."""
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        expected: Counter[str] = Counter()
        for name in names:
            for target, count in self.plan.placement(name).targets.items():
                path, _, leaf = target.rpartition(".")
                expected[path] += 0 if leaf in SKIP_LOAD_TENSORS else count  # those are loaded without being counted
        return expected

    @contextmanager
    def _opened(self, paths: Iterable[str]) -> Iterator[dict[str, nn.Module]]:
        """Open modules for loading, and close them in any case: one that stays open has no data to run with."""
        from vllm.model_executor.model_loader.reload import layerwise

        modules = {path: self.model.get_submodule(path) for path in paths}
        with self._without_kernels(modules.values()):
            try:
                for module in modules.values():
                    layerwise.initialize_layerwise_reload(module)
                yield modules
            except BaseException:
                for layer in (layer for module in modules.values() for layer in module.modules()):
                    info = layerwise.get_layerwise_info(layer)
                    info.loaded_weights.clear()  # so that what was there before is put back
                    info.load_numel = 0
                raise
            finally:
                for module in modules.values():
                    layerwise.finalize_layerwise_reload(module, self._vllm_config.model_config)

    @contextmanager
    def _without_kernels(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let experts on CPUs be repacked: vLLM does so only when it makes their kernel."""
        methods: list[Any] = [getattr(module, "quant_method", None) for module in modules]
        on_cpu = self._vllm_config.device_config.device_type == "cpu"
        kernels = [(method, method.moe_kernel) for method in methods if on_cpu and getattr(method, "moe_kernel", None)]
        for method, _ in kernels:
            method.moe_kernel = None
        try:
            yield
        finally:
            for method, kernel in kernels:
                method.moe_kernel = method.moe_kernel or kernel

    def _make_anew(self, module: Any) -> None:
        """Have a module process again what it keeps of weights that another module was loaded with."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        if is_deferred_attention_layer(module):
            module.process_weights_after_loading(self._vllm_config.model_config.dtype)
        elif hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def _left_out(module: nn.Module, expected: int) -> bool:
    """Whether a module did not take everything; one that is complete was closed by vLLM already."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(module)
    # A vocabulary's padding keeps a module open though it has all.
    return bool(info.can_load() and info.load_numel < max(expected, 1))


class RuntimeModel:
    """A running model that follows a `WeightState`: what it was last loaded from here is kept as fingerprints.

    One thread, the one that runs the model.

    Args:
        reloader: of the model.
        plan: of the model, proven.
        names: the state's parameters, in its order.
    """

    def __init__(self, reloader: Reloader, plan: Plan, names: Sequence[str]) -> None:
        self._reloader, self._plan = reloader, plan
        self._names = tuple(names)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._loaded = np.zeros(len(self._names), np.uint64)
        self._known = np.zeros(len(self._names), np.bool_)  # else what the model was loaded from is not known

    def distrust(self, names: Iterable[str] | None = None) -> None:
        """Take it that the model may hold other bits of some parameters (all by default) than was noted."""
        places = slice(None) if names is None else [self._places[name] for name in names]
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
            StateError: a module did not take what it was given.
            Exception: vLLM's own. In either case the model is behind until a `follow` succeeds.
        """
        behind = np.flatnonzero(self._behind(state))
        if not behind.size:
            return 0
        modules, names = self._plan.reload_group(self._names[place] for place in behind)
        places = [*behind, *(self._places[name] for name in names)]  # an empty parameter is in no group
        self._known[places] = False
        self._reloader.load(modules, {name: self._weight(state, name) for name in names})
        differing = self._differing(state, modules)
        if differing:
            raise StateError("modules hold other bits than were just loaded into them", found=", ".join(differing))
        self._loaded[places] = state.fingerprints[places]
        self._known[places] = True
        _LOG.debug("deltacast reloaded %d modules", len(modules))
        return len(modules)

    def audit(self, state: WeightState) -> list[str]:
        """Return the modules that hold other weights than the state's, as far as that can be read back.

        The model is behind in them until a `follow` succeeds.

        Args:
            state: read only; what the model was last loaded from.
        """
        modules, _ = self._plan.reload_group(self._names)
        differing = self._differing(state, modules)
        self.distrust(self._plan.loaded_into(differing))
        return differing

    def _differing(self, state: WeightState, modules: Iterable[str]) -> list[str]:
        return differing_modules(self._reloader.model, self._plan, modules, lambda name: self._weight(state, name))

    def _weight(self, state: WeightState, name: str) -> torch.Tensor:
        return state.memories[self._places[name]].tensor

    def _behind(self, state: WeightState) -> NDArray[np.bool_]:
        behind: NDArray[np.bool_] = ~self._known | (self._loaded != state.fingerprints)
        return behind
