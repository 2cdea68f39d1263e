"""Whether tensors share memory: with themselves (expanded, overlapping windows) or with each other (ties, views).

A write to one of two such tensors changes the other behind its fingerprint, and nothing that reads back what was
written can see it. So it is found before the first write. What address arithmetic cannot decide, a map of the
bytes at stake does; tensors mapped twice from one file at different addresses are not found.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from deltacast.delta.errors import InputError

__all__ = ["overlaps_itself", "require_apart"]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements of a strided tensor share a memory cell; O(1) but for odd strides."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    reach = 0  # from the first element of the dims before to their last
    for stride, size in dims if tensor.numel() else ():
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    if tensor.numel() > _span(tensor):
        return True
    taken = torch.zeros(_span(tensor), dtype=torch.bool)
    taken.as_strided(tensor.shape, tensor.stride()).fill_(value=1)
    return int(taken.sum()) != tensor.numel()


def require_apart(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise if two tensors share memory.

    Contiguous tensors cost O(1) each. Where strided ones interleave (columns of one matrix), a map takes one byte of
    host memory for each that they span.

    Raises:
        InputError: naming two of them.
    """
    by_address = sorted(
        ((str(tensor.device), tensor.data_ptr(), name, tensor) for name, tensor in tensors if tensor.numel()),
        key=operator.itemgetter(0, 1),
    )
    group: list[tuple[str, torch.Tensor]] = []
    last_device, end = "", 0
    for device, address, name, tensor in by_address:
        if device != last_device or address >= end:
            _check_group(group)
            group, last_device, end = [], device, 0
        group.append((name, tensor))
        end = max(end, _end(tensor))
    _check_group(group)


def _check_group(group: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check tensors, by address, each of which begins before an earlier one ends."""
    if len(group) < 2:
        return
    start, end = group[0][1].data_ptr(), max(_end(tensor) for _, tensor in group)
    if all(tensor.is_contiguous() for _, tensor in group):  # no gaps that another could lie in
        raise _shared(group[1][0], group[0][0])
    taken = torch.zeros(end - start, dtype=torch.bool)
    for number, (name, tensor) in enumerate(group):
        cells = _cells(taken, tensor, start)
        if bool(cells.any()):
            raise _shared(name, next(other for other, earlier in group[:number] if _meet(earlier, tensor)))
        cells.fill_(value=1)


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    start = min(a.data_ptr(), b.data_ptr())
    taken = torch.zeros(max(_end(a), _end(b)) - start, dtype=torch.bool)
    _cells(taken, a, start).fill_(value=1)
    return bool(_cells(taken, b, start).any())


def _shared(name: str, other: str) -> InputError:
    return InputError(
        f"two parameters share memory: this one and {other!r}",
        parameter=name,
        hint="Pass the storage once and declare the other name as an alias.",
    )


def _cells(taken: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Return the bytes of a tensor in a map of the bytes from address `start` on."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return taken.as_strided([*tensor.shape, size], [*strides, 1], tensor.data_ptr() - start)


def _end(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + _span(tensor) * tensor.element_size()


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements lie between a non-empty tensor's first and last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
