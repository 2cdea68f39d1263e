"""vLLM's model as its loader knows it, without a bit of it being touched, and what vLLM derived from it afterwards.

After loading, vLLM repacks, quantises and replaces tensors; the loader knows only those that were there before, which
vLLM records as meta tensors for its own reloads. Checked against vLLM 0.32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

__all__ = ["as_loaded", "derived_state", "runtime_tensors"]

_REGISTRIES: Final = frozenset({"_parameters", "_buffers", "_modules"})


def runtime_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, the live tensors; a shared module counts under its first name.

    Names that share a tensor are all listed.
    """
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in model.named_modules()
        for registry in (module._parameters, module._buffers)  # noqa: SLF001 # the public iterators leave out ties
        for name, tensor in registry.items()
        if tensor is not None
    }


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give a model the tensors that its loader knew, as meta tensors; its own come back on leaving, whatever happens.

    Tensors that are one in the running model (tied embeddings) are one here. What vLLM does not record (biases made
    late, expert maps, which loaders read; modules that it did not build) stays the live tensor. No forward pass may run
    meanwhile.

    Args:
        model: one that vLLM has loaded.

    Yields:
        As `runtime_tensors`.
    """
    images: dict[int, torch.Tensor] = {}
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_module_as_loaded(module, images))
        yield runtime_tensors(model)


@contextmanager
def _module_as_loaded(module: nn.Module, images: dict[int, torch.Tensor]) -> Iterator[None]:
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    info = LAYERWISE_INFO.get(module)
    registries: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)  # noqa: SLF001
    live = [dict(registry) for registry in registries]
    try:
        if info is not None:
            for registry, metas in zip(registries, info.restore_metadata, strict=True):
                now = {name: tensor for name, tensor in registry.items() if tensor is None or name in SKIP_TENSORS}
                now |= {name: _image(meta, module, registry.get(name), images) for name, meta in metas.items()}
                registry.clear()
                registry.update(now)
        yield
    finally:
        for registry, tensors in zip(registries, live, strict=True):
            registry.clear()
            registry.update(tensors)


def _image(
    recorded: torch.Tensor, module: nn.Module, live: torch.Tensor | None, images: dict[int, torch.Tensor]
) -> torch.Tensor:
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    if live is not None and live.shape == recorded.shape and id(live) in images:
        return images[id(live)]
    image: torch.Tensor = restore_layer_refs(to_meta_tensor(recorded), module)  # a copy: vLLM's record stays as it is
    parameter: Any = image
    if hasattr(parameter, "weight_loader"):  # what quantises wraps it, and that loads nothing once a layer is whole
        parameter.weight_loader = _get_original_loader(image)
    if live is not None:
        images[id(live)] = image
    return image


def derived_state(model: nn.Module, images: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Find what vLLM keeps beside the weights that it loaded, so that writing those would not reach it.

    Only modules that vLLM processes after loading can have such state. Tensors that are not in memory that the loader
    knew (MLA's absorbed projections) are taken to come from anything under their module; a function that holds tensors
    (a packed matrix product on CPUs), from its module's own. Too much may be found (a cache), never too little as far
    as vLLM keeps to these places.

    Args:
        model: one that vLLM has loaded, as it runs.
        images: what `as_loaded` yielded for it.

    Returns:
        The path of each module whose weights are not all there is -> the full name of what says so; its last part is
        an attribute of the module that has to be processed anew.
    """
    live = runtime_tensors(model)
    known = {
        tensor.untyped_storage().data_ptr()
        for name, tensor in live.items()
        if name in images and (images[name].shape, images[name].dtype) == (tensor.shape, tensor.dtype)
    }
    derived: dict[str, str] = {}
    for path, module in model.named_modules():
        if not (hasattr(module, "process_weights_after_loading") or hasattr(module, "quant_method")):
            continue
        prefix = f"{path}." if path else ""
        for attribute, value in {**vars(module), **module._parameters, **module._buffers}.items():  # noqa: SLF001
            if attribute in _REGISTRIES:
                continue
            if any(tensor.untyped_storage().data_ptr() not in known for tensor in _tensors_in(value)):
                below = (prefix + inner if inner else path for inner, _ in module.named_modules())
                derived |= dict.fromkeys(below, prefix + attribute)
            elif isinstance(value, FunctionType) and _holds_tensors(value):
                derived[path] = prefix + attribute
    return derived


def _tensors_in(value: object) -> list[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor) and item.numel()]


def _holds_tensors(function: FunctionType) -> bool:
    """Whether a function closes over a tensor, or over an object that has one."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return any(_tensors_in(one) or _tensors_in(getattr(one, "__dict__", None)) for one in held)
