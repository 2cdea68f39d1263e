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

__all__ = ["Scan", "Scanner"]


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

        As `begin`; the host reads once per device.
        """
        return self.finish(self.begin(places))

    def begin(self, places: Sequence[int]) -> Scan:
        """Start rescanning what kernels scan, and return what `finish` takes; waits for nothing.

        Kernels run on each device's current stream, which must come after whatever wrote the weights. Of scans of the
        same places only the last that was begun can be finished.
        """
        plan = self._plan(tuple(places))
        for batch in plan.batches:
            batch.launch(self._backend)
        return Scan(tuple(places), plan)

    def finish(self, scan: Scan) -> list[int]:
        """Return the fingerprints of a scan's memories, in the order of its places. Blocks.

        The weights must have kept their bits since `begin`: what the host scans is read only now.
        """
        alone = scan.plan.alone
        threads = min(self._threads, len(alone))
        scanned = in_order(lambda place: self._memories[place].fingerprint(), alone, threads)
        found = dict(zip(alone, scanned, strict=True))  # while the devices work
        for batch in scan.plan.batches:
            found |= batch.read()
        return [found[place] for place in scan.places]

    def prepare(self, places: Sequence[int]) -> None:
        """Make ready for a scan of these places, so that it takes no longer than reading them.

        Tables go to each device in the order of its current stream.
        """
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
            group = ParamGroup(tensors, keys=self._keys_on(tensors[0].device))
            group.upload(0, group.num_blocks)  # now: it takes page-locked memory, which may wait for every kernel
            groups.append(group)
        return _Batch(tuple(itertools.chain.from_iterable(by_width)), groups)


class _Batch:
    """What is scanned on one device, with its buffers: a scan's sums stay until the next scan of the same places.

    Args:
        places: of the tensors of all groups in turn.
        groups: one per word width.
    """

    __slots__ = ("_arrived", "_host", "_parts", "_sums", "groups", "places")

    def __init__(self, places: tuple[int, ...], groups: Sequence[ParamGroup]) -> None:
        device = groups[0].device
        self.places, self.groups = places, groups
        self._sums = torch.zeros(len(places), dtype=torch.int64, device=device)
        self._parts = self._sums.split_with_sizes([group.num_params for group in groups])
        self._host = torch.zeros(len(places), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def launch(self, backend: Backend) -> None:
        """Start a scan, on the device's current stream; waits for nothing."""
        self._sums.zero_()
        for group, part in zip(self.groups, self._parts, strict=True):
            audit_group(group, part, backend=backend)
        self._host.copy_(self._sums, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(self._sums.device))

    def read(self) -> dict[int, int]:
        """Wait for the scan that was started last, and return the fingerprint of each place."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return dict(zip(self.places, self._host.numpy().view(np.uint64).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one set of places is scanned: in batches, one per device, and one by one."""

    batches: tuple[_Batch, ...]
    alone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan under way.

    Attributes:
        places: what is scanned.
        plan: how.
    """

    places: tuple[int, ...]
    plan: _Plan
