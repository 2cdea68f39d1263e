"""The trainer's side of a streamed round: chunk after chunk is diffed, and later applied to the baseline.

The host runs two chunks ahead of the one whose number of changes it waits for, and further where that takes no
memory, so that the device never idles. Everything that was found stays in the arenas until the round is decided: the
baseline moves by exactly what was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from deltacast.delta.bits import Words, copy_bits
from deltacast.delta.chunks.device import Lane, SumBuffer, pinned
from deltacast.delta.chunks.headers import Begin, Sums
from deltacast.delta.chunks.kept import KeptChunk, KeptRound, on_host
from deltacast.delta.chunks.plan import ChunkPlan, Span
from deltacast.delta.chunks.proof import require_sums
from deltacast.delta.chunks.walk import ParamChanges, changes_of
from deltacast.delta.errors import CapacityError, CorruptionError, InputError, TableError
from deltacast.delta.kernels import Arena, ParamGroup, RawChunk, advance_group, diff_group, gather_group, masks
from deltacast.delta.memory import WordMemory
from deltacast.delta.state import WeightState
from deltacast.delta.threads import in_order

__all__ = ["ChunkSender", "SentChunk"]

_AHEAD: Final = 2
_Launch: TypeAlias = tuple[Span, RawChunk, "torch.cuda.Event | None"]


@dataclass(frozen=True, slots=True)
class SentChunk:
    """One chunk, ready to be sent.

    Attributes:
        number: from 0, in sending order.
        span: which blocks it covers.
        changes: counts, offsets and values.
        ready: when they are there, for other streams; None on the CPU.
        old: [num_changes] words before, if the sender keeps them.
    """

    number: int
    span: Span
    changes: RawChunk
    ready: torch.cuda.Event | None
    old: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What travels."""
        return self.changes.counts, self.changes.offsets, self.changes.values


class ChunkSender:
    """Diffs a baseline against new tensors by the kernels, round after round, in buffers that are made once.

    One thread uses it. A round is `begin`, `chunks` to its end, `sums`, maybe `keep`, and `advance` at COMMIT; after
    anything else the next `begin` forgets it. Only `advance` moves the baseline.

    Args:
        baseline: the weights that every worker holds. On `device`, or on the host: then chunks of it are copied
            through two slabs on the device while others are diffed.
        order: places in the table in the order in which the source yields them.
        device: where the kernels run.
        chunk_bytes: bytes of weights per chunk.
        max_density: the share of words that may change in one round.
        keeps_old: bring the words before as well, for a wire that codes against them.
        threads: for a baseline on the host.

    Attributes:
        plan: groups and chunks.
        groups: the plan's groups over the baseline.
        keeps_old: as given.
        in_place: whether all new tensors of the last round, and of this one so far, lay where they had lain before, and
            the baseline is on the device: then launching allocates nothing, so that it never waits for other kernels.
        nbytes: device memory of everything that is kept, about.

    Raises:
        InputError: sizes out of range.
    """

    def __init__(
        self,
        baseline: WeightState,
        order: Sequence[int],
        device: torch.device,
        *,
        chunk_bytes: int,
        max_density: float,
        keeps_old: bool = False,
        threads: int = 1,
    ) -> None:
        if not 0 < max_density <= 1:
            raise InputError("bad max_density", expected="above 0, at most 1", found=max_density)
        self.plan = ChunkPlan(baseline.table, order, chunk_bytes)
        self.device = device
        self._state, self._threads = baseline, threads
        self._capacities = self.plan.capacities(max_density)
        self._diffing, self._copying, self._keeping = Lane(device), Lane(device), Lane(device)
        self._staged = any(memory.tensor.device != device for memory in baseline.memories)
        self.keeps_old = keeps_old
        self._ahead = 0 if self._staged and keeps_old else _AHEAD  # old words are read while they are on the device
        # The host may run further ahead, unless old words or slabs wait for it; on the CPU nothing runs beside it.
        self._runs_on = device.type == "cuda" and not self._staged and not keeps_old
        self.groups = [self._group(members) for members in self.plan.members]
        numbers = range(len(self.groups))
        self._arenas = [Arena(self.groups[i], self._capacities[i], self.plan.num_chunks(i)) for i in numbers]
        self._scratch = [masks(self.groups[i], self.plan.max_blocks(i)) for i in numbers]
        sizes = [group.num_params for group in self.groups]
        self._found = SumBuffer(3, sizes, device)
        self._slabs = self._make_slabs()
        self._totals = pinned(len(self.plan.spans), device)
        self._places = [np.array(members) for members in self.plan.members]
        self._numbers = {place: (i, j) for i, places in enumerate(self.plan.members) for j, place in enumerate(places)}
        self.in_place = self._stayed = False
        self._unlaunched = self._launches(iter(()))
        self._waiting: deque[_Launch] = deque()
        self._sent: list[SentChunk] = []
        self._after: NDArray[np.uint64] | None = None
        self._old_sums: NDArray[np.uint64] | None = None
        self._old_read: torch.cuda.Event | None = None  # when `keep` needs the baseline no more,
        self._kept: torch.cuda.Event | None = None  # and the arenas
        self._compile()

    @property
    def nbytes(self) -> int:
        """Device memory of what is kept between rounds: arenas, scratch, tables, keys and slabs."""
        kept = [*(arena.nbytes for arena in self._arenas), *(scratch.nbytes for scratch in self._scratch)]
        kept += [group.nbytes + group.keys.nbytes for group in self.groups]
        return sum(kept) + sum(slab.nbytes for slab in self._slabs)

    @property
    def num_changed(self) -> int:
        """Changes found in this round so far."""
        return sum(sent.changes.num_changes or 0 for sent in self._sent)

    @property
    def kept_bytes(self) -> int:
        """Host memory that `keep` would take now."""
        chunks = [sent.changes for sent in self._sent if sent.changes.num_changes]
        return sum(chunk.counts.nbytes + chunk.offsets.nbytes + 2 * chunk.values.nbytes for chunk in chunks)

    def header(self) -> Begin:
        """Return what the workers are told before the first chunk."""
        state = self._state
        assert state.version is not None
        order = np.array(self.plan.order, np.uint32)
        return Begin(state.version, state.digest, state.table.digest, self.plan.chunk_bytes, self._capacities, order)

    def begin(self) -> None:
        """Forget the last round."""
        for arena in self._arenas:
            arena.reset()
        self._sent.clear()
        self._after = None
        self._diffing.follow_caller()
        self._diffing.follow(self._kept)
        with self._diffing.active():
            self._found.reset()

    def chunks(self, tensors: Iterable[torch.Tensor]) -> Iterator[SentChunk]:
        """Diff everything, yielding each chunk once its number of changes is known.

        The first diffs are under way when this returns.

        Args:
            tensors: the new weights, in the plan's order, on any device: what is elsewhere, or not contiguous, is
                copied. Read on the calling thread's current stream, and each held until the chunk after its last one is
                asked for: so converted temporaries cost a few times `chunk_bytes`.

        Raises:
            TableError: a tensor of another dtype or shape, or another number of them. Chunks before it may have been
                yielded.
            CapacityError: more changes than `max_density` allows. Chunks before it were yielded.
        """
        self._unlaunched = self._launches(iter(tensors))
        self._waiting = deque(islice(self._unlaunched, self._ahead))
        self.run_ahead(1)  # enough to do until every worker is asked: more would only delay that
        return self._settled()

    def run_ahead(self, num_chunks: int) -> None:
        """Launch the diffs of more chunks, if that takes no memory and nothing has to wait for it; waits for nothing.

        Raises:
            TableError: as `chunks`.
        """
        if self._runs_on and self.in_place:
            self._waiting.extend(islice(self._unlaunched, num_chunks))

    def stop(self) -> None:
        """Read no more of the new weights in this round, which has failed; nothing if all were read."""
        self._unlaunched.close()

    def sums(self) -> tuple[Sums, str]:
        """Return what the workers must arrive at, and the state digest of it. Blocks until all chunks were diffed.

        Raises:
            CorruptionError: the baseline's bits, all of which were read, are not what its fingerprints say.
        """
        base = self._state.fingerprints
        after, old_sums, read = np.zeros((3, len(base)), np.uint64)
        for places, (new, new_sums, old) in zip(self._places, self._found.read(self._diffing)[0], strict=True):
            after[places], read[places] = new, old
            old_sums[places] = new_sums - new + old
        hint = "Restart this trainer from its weights; workers keep theirs."
        require_sums(self._state.table, read, base, CorruptionError, "the trainer's baseline is damaged", hint=hint)
        self._after, self._old_sums = after, old_sums
        changed = np.flatnonzero((after != base) | (old_sums != 0))
        digest = self._state.table.state_digest(after)
        return Sums(changed.astype(np.uint32), after[changed], old_sums[changed]), digest

    def keep(self) -> KeptRound:
        """Copy the round and the words that it overwrites to host memory that the caller owns.

        Call it after `sums` and before `advance`. With a baseline on the device nothing is waited for: the copies run
        beside what comes next, and what would overwrite their source waits for them there. Memory: on the host 4 bytes
        and the word twice for each change, on the device a word for each until the copies are done.
        """
        assert self._after is not None
        assert self._old_sums is not None
        assert self._state.version is not None
        sent = [chunk for chunk in self._sent if chunk.changes.num_changes]
        self._keeping.follow(self._diffing.mark())
        with self._keeping.active():
            old = [self._words_before(chunk) for chunk in sent]
            self._old_read = self._keeping.mark()
            sources = [tensor for chunk in sent for tensor in chunk.tensors] + old
            kept = [
                KeptChunk(chunk.span, *(on_host(tensor) for tensor in (*chunk.tensors, words)))
                for chunk, words in zip(sent, old, strict=True)
            ]
            self._kept = self._keeping.mark()
        return KeptRound(
            self._state.table, self.groups, self.plan.members, kept, self._kept, sources, self._state.version,
            self._state.fingerprints.copy(), self._after, self._old_sums,
        )  # fmt: skip

    def advance(self, version: int) -> None:
        """Apply what was found to the baseline, and move it to a version. Call it at COMMIT only.

        With a baseline on the device nothing is waited for: the calling thread's current stream follows.
        """
        assert self._after is not None
        if self._staged:
            self._write_to_host()
        else:
            self._write_on_device()
        self._state.advance(version, self._after)

    def _group(self, members: Sequence[int]) -> ParamGroup:
        memories = [self._state.memories[place] for place in members]
        names = [memory.name for memory in memories]
        return ParamGroup(
            [memory.tensor for memory in memories], device=self.device if self._staged else None, names=names
        )

    def _compile(self) -> None:
        """Have the kernels compiled that work between votes and decision, by chunks without changes."""
        if self.device.type != "cuda" or self._staged:
            return
        for group, arena in zip(self.groups, self._arenas, strict=True):
            if not group.num_blocks:
                continue
            chunk = arena.chunk(0, group.num_blocks, min(arena.capacity, 1))
            arena.counts.zero_()
            gather_group(group, chunk)
            advance_group(group, [chunk])
            arena.reset()

    def _make_slabs(self) -> list[torch.Tensor]:
        if not self._staged:
            return []
        runs = (self.groups[span.group].baseline_run(span.first_block, span.num_blocks) for span in self.plan.spans)
        size = max((run.nbytes for run in runs), default=0)
        return [torch.empty(-(-size // 16) * 16, dtype=torch.uint8, device=self.device) for _ in range(self._ahead + 1)]

    def _point(self, number: int, tensor: torch.Tensor | None) -> bool:
        """Say where the new bits of the order's `number`th parameter are; return whether that is where they were."""
        place = self.plan.order[number]
        meta = self._state.table.metas[place]
        if tensor is None:
            raise TableError("the new weights end before a parameter of the baseline", parameter=meta.name)
        group, param = self._numbers[place]
        if self.groups[group].point_again(param, tensor):
            return True
        if tensor.device.type == "meta":
            raise InputError("a tensor without data", parameter=meta.name, found="a meta tensor")
        self.groups[group].point_new(param, self._on_device(tensor, meta.name))
        return False

    def _on_device(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        plain = tensor.detach()
        if plain.device == self.device and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            return plain
        copy = torch.empty(plain.shape, dtype=plain.dtype, device=self.device)
        copy_bits(copy, plain, name=name)
        return copy

    def _launches(self, source: Iterator[torch.Tensor]) -> Generator[_Launch, None, None]:
        pointed, stayed = 0, not self._staged
        self.in_place, self._stayed = self._stayed, False  # the latter also if this round does not come to its end
        for number, span in enumerate(self.plan.spans):
            while pointed < span.num_params:
                stayed &= self._point(pointed, next(source, None))
                pointed += 1
            self.in_place &= stayed
            yield self._launch(number, span)
        for left in range(pointed, len(self.plan.order)):  # empty ones, which no chunk needs
            self._point(left, next(source, None))
        if next(source, None) is not None:
            raise TableError("more new weights than the baseline has parameters", expected=len(self.plan.order))
        self._stayed = stayed

    def _launch(self, number: int, span: Span) -> _Launch:
        group, arena = self.groups[span.group], self._arenas[span.group]
        chunk = arena.chunk(span.first_block, span.num_blocks)
        self._diffing.follow_caller()  # the new tensors may have just been made
        if self._staged:
            self._stage(number, span)
        with self._diffing.active():
            sums, scratch = self._found.parts[span.group], self._scratch[span.group]
            diff_group(group, chunk, sums=sums, scratch=scratch, audit_baseline=True)
            self._totals[number : number + 1].copy_(chunk.total.view(1), non_blocking=True)
        ready = self._diffing.mark()
        if number + 1 == len(self.plan.spans):
            self._found.fetch(self._diffing)
        return span, chunk, ready

    def _stage(self, number: int, span: Span) -> None:
        """Copy a chunk's baseline to the device, beside the diffs before it."""
        group, slab = self.groups[span.group], self._slabs[number % len(self._slabs)]
        run = group.baseline_run(span.first_block, span.num_blocks)
        target = slab.view(group.torch_word)[: run.numel()]
        if number >= len(self._slabs):  # that chunk is settled: the host runs only so far ahead
            self._copying.follow(self._sent[number - len(self._slabs)].ready)
        with self._copying.active():
            target.copy_(run, non_blocking=True)
        self._diffing.follow(self._copying.mark())
        group.point_baseline(span.first_block, span.num_blocks, target)

    def _settled(self) -> Iterator[SentChunk]:
        """Keep the device ahead of the chunk that is waited for: for each that is settled launch one, or two."""
        while True:
            self._waiting.extend(islice(self._unlaunched, 1))
            self.run_ahead(1)
            if not self._waiting:
                break
            settled = self._settle(*self._waiting.popleft())
            yield settled
            self._release(settled.span)  # only now: what was settled is on its way
        for group in self.groups:
            group.release_new()

    def _settle(self, span: Span, chunk: RawChunk, ready: torch.cuda.Event | None) -> SentChunk:
        if ready is not None:
            ready.synchronize()
        try:
            chunk.arena.settle(chunk, int(self._totals[len(self._sent)]))
        except InputError as err:
            raise CapacityError(
                "more changes than the buffers hold", expected=err.expected, found=err.found, hint="Raise max_density."
            ) from err
        old = None
        if self.keeps_old:
            with self._diffing.active():
                old = gather_group(self.groups[span.group], chunk)
            ready = self._diffing.mark()
        number = len(self._sent)
        self._sent.append(SentChunk(number, span, chunk, ready))
        return SentChunk(number, span, chunk, ready, old)  # who takes it holds the old words; `advance` needs none

    def _release(self, span: Span) -> None:
        """Let go of the new tensors that were diffed whole: temporaries need not be kept any longer."""
        group, end_block = self.groups[span.group], span.first_block + span.num_blocks
        params = group.params_of(span.first_block, span.num_blocks)
        group.release_new(param for param in params if group.first_blocks[param + 1] <= end_block)

    def _words_before(self, sent: SentChunk) -> torch.Tensor:
        """Return the words that a chunk overwrites; of a baseline on the host they are read there, and waited for."""
        if not self._staged:
            return gather_group(self.groups[sent.span.group], sent.changes)
        old = torch.empty_like(sent.changes.values, device="cpu")
        words = old.numpy()

        def read(memory: WordMemory, change: ParamChanges) -> None:
            words[change.part] = memory.read(change.positions).view(words.dtype)

        self._on_memories(sent, read)
        return old

    def _write_on_device(self) -> None:
        self._diffing.follow(self._old_read)
        with self._diffing.active():
            for number, group in enumerate(self.groups):
                advance_group(group, [sent.changes for sent in self._sent if sent.span.group == number])
        self._diffing.lead_caller()

    def _write_to_host(self) -> None:
        for sent in self._sent:
            values: Words = sent.changes.values.cpu().numpy()

            def write(memory: WordMemory, change: ParamChanges, values: Words = values) -> None:
                memory.write(change.positions, values[change.part].view(memory.numpy_word))

            self._on_memories(sent, write)

    def _on_memories(self, sent: SentChunk, act: Callable[[WordMemory, ParamChanges], None]) -> None:
        """Call `act` with each parameter's changes and memory on the host, many parameters at a time."""
        group, members = self.groups[sent.span.group], self.plan.members[sent.span.group]
        counts, offsets = (tensor.cpu().numpy() for tensor in (sent.changes.counts, sent.changes.offsets))
        changes = changes_of(group, sent.span.first_block, counts, offsets.view(np.uint16))

        def one(change: ParamChanges) -> None:
            act(self._state.memories[members[change.param]], change)

        for _ in in_order(one, changes, self._threads):
            pass
