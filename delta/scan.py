"""Rescanning live tensors: fingerprints of the bits that are there, on GPUs in one launch for many tensors.

Scans recur (everything, or the slices of a rolling audit) and the tensors never move, so the descriptor tables that
the kernels read are kept from one scan to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltacast.delta.kernels import BLOCK_WORDS, Backend, KeyTables, ParamGroup, audit_group, available
from deltacast.delta.memory import WordMemory
from deltacast.delta.threads import in_order

__all__ = ["Scanner"]


class Scanner:
    """Fingerprints of a fixed set of memories, by place.

    Contiguous CUDA tensors go through the Triton kernels where those run; anything else (CPU, strided, empty) is
    scanned one by one. Not thread-safe; one owner.

    What is kept for recurring sets of places lists each memory twice at most (once in a whole scan, once in a slice);
    the sets used longest ago go first. On a GPU that is 32 bytes per 65,536 words each time, and the key tables.

    Args:
        memories: what to scan. Not copied; each must stay where it is.
        threads: for those that are scanned on the host.
        backend: `auto` as above; any other sends every contiguous tensor, those on the CPU too, through that
            implementation of the kernels, for tests.
    """

    def __init__(self, memories: Sequence[WordMemory], threads: int = 1, *, backend: Backend = "auto") -> None:
        self._memories = tuple(memories)
        self._threads = threads
        self._backend: Backend = backend
        self._plans: dict[tuple[int, ...], _Plan] = {}  # the one used last comes last
        self._keys: dict[torch.device, KeyTables] = {}

    def fingerprints(self, places: Sequence[int]) -> list[int]:
        """Rescan the memories at these places and return their fingerprints, in the same order. Blocks.

        Kernels run on each device's current stream, which must come after whatever wrote the weights; the host reads
        once per device.
        """
        plan = self._plan(tuple(places))
        launched = [batch.launch(self._backend) for batch in plan.batches]
        alone = in_order(lambda place: self._memories[place].fingerprint(), plan.alone, self._threads)
        found = dict(zip(plan.alone, alone, strict=True))  # while the devices work
        for batch, sums in zip(plan.batches, launched, strict=True):
            found.update(zip(batch.places, sums.cpu().numpy().view(np.uint64).tolist(), strict=True))
        return [found[place] for place in places]

    def prepare(self, places: Sequence[int]) -> None:
        """Make ready for a scan of these places, so that it takes no longer than reading them."""
        self._plan(tuple(places))

    def _plan(self, places: tuple[int, ...]) -> _Plan:
        plan = self._plans.pop(places, None) or self._make(places)
        self._plans[places] = plan
        num_listed = sum(map(len, self._plans))
        while num_listed > 2 * len(self._memories):
            oldest = next(iter(self._plans))
            num_listed -= len(oldest)
            del self._plans[oldest]
        return plan

    def _make(self, places: tuple[int, ...]) -> _Plan:
        alone = []
        by_device: dict[torch.device, dict[int, list[int]]] = {}
        for place in places:
            memory = self._memories[place]
            if self._goes_in_groups(memory):
                by_width = by_device.setdefault(memory.tensor.device, {})
                by_width.setdefault(memory.numpy_word.itemsize, []).append(place)
            else:
                alone.append(place)
        return _Plan(tuple(self._batch(list(by_width.values())) for by_width in by_device.values()), tuple(alone))

    def _keys_on(self, device: torch.device) -> KeyTables:
        """Return key tables that are long enough for every memory: all groups of a device share them."""
        if device not in self._keys:
            blocks = max(-(-memory.num_words // BLOCK_WORDS) for memory in self._memories)
            units_per_word = max((memory.numpy_word.itemsize + 1) // 2 for memory in self._memories)
            self._keys[device] = KeyTables.on(device, blocks * units_per_word * BLOCK_WORDS // 1024)
        return self._keys[device]

    def _goes_in_groups(self, memory: WordMemory) -> bool:
        device = memory.tensor.device
        forced = self._backend != "auto"
        return (
            memory.num_words > 0
            and memory.tensor.is_contiguous()
            and (forced or (device.type == "cuda" and available(device)))
        )

    def _batch(self, by_width: Sequence[Sequence[int]]) -> _Batch:
        groups = []
        for members in by_width:
            tensors = [self._memories[place].tensor for place in members]
            groups.append(ParamGroup(tensors, keys=self._keys_on(tensors[0].device)))
        return _Batch(tuple(itertools.chain.from_iterable(by_width)), tuple(groups))


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is scanned on one device: its groups, one per word width, and the places of their tensors in turn."""

    places: tuple[int, ...]
    groups: tuple[ParamGroup, ...]

    def launch(self, backend: Backend) -> torch.Tensor:
        """Start the scan and return the int64 sums that it will fill, on the device."""
        sums = torch.zeros(len(self.places), dtype=torch.int64, device=self.groups[0].device)
        for group, part in zip(
            self.groups, sums.split_with_sizes([group.num_params for group in self.groups]), strict=True
        ):
            audit_group(group, part, backend=backend)
        return sums


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one set of places is scanned: in batches, one per device, and one by one."""

    batches: tuple[_Batch, ...]
    alone: tuple[int, ...]
