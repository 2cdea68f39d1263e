"""Whether modules that were reloaded hold what they were loaded from, as far as that can be read back.

Tensors that a plan proves to be plain are compared bit by bit. A matrix that vLLM's CPU build packed away is multiplied
with unit vectors, which gives columns of it; some of them, others each time, so that it costs little beside a reload.
Experts that were packed are compared with what packing gives, and matrices that vLLM quantised with what quantising
gives. Matrices and experts of checkpoints of other dtypes than bf16, and packed experts that were padded as well, are
not read back.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn

from deltacast.delta.bits import strided_words
from deltacast.engines.vllm.planner import Plan

__all__ = ["differing_modules"]

_COLUMNS: Final = 64
_BF16: Final = torch.finfo(torch.bfloat16)
_HOST: Final = torch.device("cpu")


def differing_modules(
    model: nn.Module, plan: Plan, paths: Iterable[str], weight: Callable[[str], torch.Tensor]
) -> list[str]:
    """Return those of some modules that hold other bits than they were loaded from.

    Args:
        model: vLLM's.
        plan: of it, proven.
        paths: the modules.
        weight: the checkpoint's tensor of a name; contiguous, in host memory.
    """
    readback = _Readback(model, plan, weight)
    return [path for path in paths if readback.differs(path)]


class _Readback:
    """One look at a model; arguments as for `differing_modules`."""

    def __init__(self, model: nn.Module, plan: Plan, weight: Callable[[str], torch.Tensor]) -> None:
        self._model, self._plan, self._weight = model, plan, weight
        self._loaded: dict[str, list[str]] = {}  # runtime tensor -> what it is loaded from
        self._targets: dict[str, list[str]] = {}  # module -> its runtime tensors that something is loaded into
        for name, placement in plan.placements.items():
            for target in placement.targets:
                self._loaded.setdefault(target, []).append(name)
        for target in self._loaded:
            self._targets.setdefault(target.rpartition(".")[0], []).append(target)

    def differs(self, path: str) -> bool:
        module: Any = self._model.get_submodule(path)
        return (
            not all(self._holds(target) for target in self._targets.get(path, ()))
            or (hasattr(module, "cpu_linear") and self._packs_another(path, module))
            or (hasattr(module, "w13_weight") and self._packs_other_experts(path, module))
            or self._quantises_another(path, module)
        )

    def _is_direct(self, name: str) -> bool:
        return self._plan.placement(name).strategy == "direct"

    def _holds(self, target: str) -> bool:
        direct = filter(self._is_direct, self._loaded[target])
        return all(self._plan.holds(name, self._weight(name)) for name in direct)

    def _packs_another(self, path: str, module: Any) -> bool:
        image = self._image(self._plan.ties.get(f"{path}.weight", f"{path}.weight"))
        if image is None:
            return False
        rows = image.isfinite().all(1)  # what is not finite reaches its whole row; padding is NaN
        columns = torch.randperm(image.shape[1])[:_COLUMNS]
        units = torch.zeros(len(columns), image.shape[1], dtype=torch.bfloat16).scatter_(1, columns[:, None], 1)
        packed = module.cpu_linear(units, module.weight, None).t()
        return not torch.equal(_comparable(packed[rows]), _comparable(image[:, columns][rows]))

    def _packs_other_experts(self, path: str, module: Any) -> bool:
        from vllm._custom_ops import cpu_prepack_moe_weight

        experts: Any = getattr(module.quant_method.moe_kernel, "fused_experts", None)
        if not hasattr(experts, "isa"):  # not those of the CPU build
            return False
        for target in (f"{path}.w13_weight", f"{path}.w2_weight"):
            held, image = self._plan.tensors[target].detach(), self._image(target)
            if image is None or image.shape != held.shape or any(map(self._is_direct, self._loaded[target])):
                continue
            if not torch.equal(cpu_prepack_moe_weight(image, experts.isa).view(torch.int16), held.view(torch.int16)):
                return True
        return False

    def _quantises_another(self, path: str, module: Any) -> bool:
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

        if not isinstance(getattr(module, "quant_method", None), OnlineLinearBase):
            return False
        image = self._image(f"{path}.weight", module.weight.device)
        if image is None:
            return False
        fresh = copy.copy(module)  # a shell: vLLM's method reads and replaces attributes of it, and no tensor is shared
        fresh._parameters = dict.fromkeys(module._parameters)  # noqa: SLF001
        fresh.weight = nn.Parameter(image, requires_grad=False)
        vars(fresh).pop("_already_called_process_weights_after_loading", None)  # else it would do nothing
        fresh.quant_method.process_weights_after_loading(fresh)
        made = {name: tensor for name, tensor in fresh._parameters.items() if tensor is not None}  # noqa: SLF001
        return not all(_same_bits(tensor, getattr(module, name), f"{path}.{name}") for name, tensor in made.items())

    def _image(self, target: str, device: torch.device = _HOST) -> torch.Tensor | None:
        """Return a bf16 tensor as its loader would fill it, NaN where it does not; None if that is not known."""
        names = self._loaded.get(target, ())
        if not names or any(self._plan.placement(name).meta.dtype != "bfloat16" for name in names):
            return None
        image = torch.full(self._plan.shapes[target], torch.nan, dtype=torch.bfloat16, device=device)
        filled = [self._plan.fill(name, self._weight(name), image, target) for name in names]
        return image if all(filled) else None


def _same_bits(one: torch.Tensor, other: torch.Tensor, name: str) -> bool:
    return torch.equal(strided_words(one, name=name), strided_words(other, name=name))


def _comparable(numbers: torch.Tensor) -> torch.Tensor:
    """Take subnormals and minus zero, which do not survive a multiplication, for zero."""
    return torch.where(numbers.abs() < _BF16.smallest_normal, 0, numbers)
