"""Whole tensors through slabs: the same cuts on both sides, the same bits in place, and no hang."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltacast.delta.errors import DeltacastError, DTypeError, InputError, TableError, TransportError
from deltacast.engines.control import Deadline, Task, wait_any
from deltacast.engines.dense_nccl import DenseReceiver, DenseSender, Piece, slab_cuts
from deltacast.engines.group import PayloadGroup, Rendezvous
from dense_processes import Layout, check_landed, group_of, send_and_die, serve_receiver
from engine_processes import EngineProcess, WorkerError
from tensor_bytes import WORDS, random_raw

HOST = "127.0.0.1"
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TIMEOUT_S = 20.0

pytestmark = pytest.mark.timeout(60)


class Fleet:
    """A sender in this process and receivers in others; `exchange` runs one payload."""

    def __init__(self, sender: DenseSender, group: PayloadGroup, receivers: list[EngineProcess]) -> None:
        self.sender, self.group, self.receivers = sender, group, receivers

    def tell_receivers(self, layouts: list[Layout], timeout_s: float = TIMEOUT_S) -> None:
        for receiver in self.receivers:
            receiver.tell("receive", layouts, [layout.nbytes for layout in layouts], timeout_s)

    def send(self, tensors: Any, layouts: list[Layout], timeout_s: float = TIMEOUT_S) -> None:
        sizes = [layout.nbytes for layout in layouts]
        held(self.group, lambda clock: self.sender.send(tensors, sizes, clock), timeout_s)

    def check(self, layouts: list[Layout], raws: list[bytes]) -> None:
        for receiver in self.receivers:
            check_landed(layouts, raws, receiver.reply())


def held(group: PayloadGroup, function: Callable[[Deadline], None], timeout_s: float = TIMEOUT_S) -> None:
    """Run a payload on a thread of its own and abort its group at the deadline, as engines do."""
    deadline = Deadline(timeout_s)
    task = Task("payload", lambda: function(deadline))
    try:
        wait_any([], deadline, task)
    finally:
        if not task.done:
            group.abort()
        assert task.join(10)
    if task.error is not None:
        raise task.error


@contextmanager
def fleet(device: str = "cpu", num_receivers: int = 1, slab_bytes: int = 4096, num_slabs: int = 2) -> Iterator[Fleet]:
    """Start receivers and meet them; none is left afterwards."""
    world_size = num_receivers + 1
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    rendezvous = Rendezvous(HOST, world_size, TIMEOUT_S)
    with ExitStack() as stack:
        receivers = []
        for rank in range(1, world_size):
            receiver = EngineProcess(serve_receiver, rank, world_size, device)
            stack.callback(receiver.stop)
            receiver.tell("join", HOST, rendezvous.port, slab_bytes, num_slabs)
            receivers.append(receiver)
        group = group_of(0, world_size, device)
        stack.callback(group.close)
        group.meet(rendezvous.store)
        for receiver in receivers:
            receiver.reply()
        yield Fleet(DenseSender(group, slab_bytes, num_slabs), group, receivers)


def made(layouts: Sequence[Layout], device: str = "cpu", seed: int = 0) -> tuple[list[torch.Tensor], list[bytes]]:
    """Tensors of random bits in these layouts, and their canonical bytes."""
    rng, tensors, raws = np.random.default_rng(seed), [], []
    for layout in layouts:
        raws.append(random_raw(rng, layout.dtype, int(np.prod(layout.shape, dtype=object))))
        storage = layout.storage()
        layout.cells(storage)[...] = np.frombuffer(raws[-1], np.uint8).reshape(layout.cells(storage).shape)
        tensors.append(layout.tensor(storage, device)[0])
    return tensors, raws


def in_order(layouts: list[Layout], order: str) -> list[Layout]:
    return [Layout(layout.dtype, layout.shape, order) for layout in layouts]


def test_tensors_are_cut_where_slabs_end_and_begin_at_multiples_of_16() -> None:
    """Written by hand: an empty tensor has no piece, one spans three slabs, three share the last."""
    assert slab_cuts([0, 5, 70, 16, 0, 1], 32) == [
        [Piece(1, 0, 0, 5), Piece(2, 0, 16, 16)],
        [Piece(2, 16, 0, 32)],
        [Piece(2, 48, 0, 22)],
        [Piece(3, 0, 0, 16), Piece(5, 0, 16, 1)],
    ]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_to_send_has_no_slabs(sizes: list[int]) -> None:
    """So that nothing is broadcast."""
    assert slab_cuts(sizes, 64) == []


def test_a_tensor_that_fills_a_slab_leaves_no_empty_one_behind() -> None:
    """Also where only padding would lie in the next."""
    assert slab_cuts([64], 64) == [[Piece(0, 0, 0, 64)]]
    assert slab_cuts([50], 64) == [[Piece(0, 0, 0, 50)]]
    assert slab_cuts([50, 0], 64) == [[Piece(0, 0, 0, 50)]]


def test_sizes_beyond_4_gib_are_cut_exactly() -> None:
    """No 32-bit number anywhere."""
    slabs = slab_cuts([(5 << 30) + 3, 7], 1 << 30)
    assert slabs[-1] == [Piece(0, 5 << 30, 0, 3), Piece(1, 0, 16, 7)]
    assert [len(pieces) for pieces in slabs] == [1] * 5 + [2]


@given(st.lists(st.integers(0, 200), max_size=20), st.integers(1, 8))
def test_every_byte_has_the_place_that_counting_byte_by_byte_gives_it(sizes: list[int], sixteenths: int) -> None:
    """A naive twin: walk a tape, skip to the next multiple of 16 before each tensor, divide by the slab's size."""
    slab_bytes, at, expected = 16 * sixteenths, 0, []
    for tensor, size in enumerate(sizes):
        while at % 16:
            at += 1
        for byte in range(size):
            expected.append((at // slab_bytes, at % slab_bytes, tensor, byte))
            at += 1
    slabs = slab_cuts(sizes, slab_bytes)
    assert expected == [
        (number, piece.offset + byte, piece.tensor, piece.start + byte)
        for number, pieces in enumerate(slabs)
        for piece in pieces
        for byte in range(piece.num_bytes)
    ]
    assert all(pieces for pieces in slabs)


@DEVICES
@pytest.mark.parametrize("order", ["rows", "columns", "gaps"])
def test_every_dtype_arrives_bit_by_bit_in_every_layout(device: str, order: str) -> None:
    """0-d, empty, odd-sized and spanning tensors of all dtypes, from rows into `order` and from `order` into rows.

    What lies between and beside the elements stays, and so does every `data_ptr()`.
    """
    shapes = [(), (0, 3), (1,), (7,), (5, 3, 2), (33, 41)]
    rows = [Layout(dtype, shape) for dtype in WORDS for shape in shapes]
    other = in_order(rows, order)
    with fleet(device, slab_bytes=2048) as party:
        for number, (theirs, ours) in enumerate([(rows, other), (other, rows)]):
            tensors, raws = made(theirs, party.group.device.type, seed=number)
            party.tell_receivers(ours)
            party.send(tensors, theirs)
            party.check(ours, raws)


@DEVICES
@pytest.mark.parametrize("num_slabs", [1, 3])
@pytest.mark.parametrize("slab_bytes", [16, 4096, 1 << 22])
def test_two_receivers_get_the_same_with_any_number_and_size_of_slabs(
    device: str, slab_bytes: int, num_slabs: int
) -> None:
    """Slabs smaller and larger than a tensor, and than everything; tensors on both sides of the batching limit."""
    columns = 700_000 if slab_bytes > 4096 else 70
    layouts = [Layout("bfloat16", (2, columns)), Layout("uint8", (3, 5), "columns"), Layout("float32", (1, 9), "gaps")]
    with fleet(device, 2, slab_bytes, num_slabs) as party:
        assert party.sender.nbytes == slab_bytes * num_slabs
        for seed in range(2):
            tensors, raws = made(layouts, party.group.device.type, seed)
            party.tell_receivers(layouts)
            party.send(tensors, layouts)
            party.check(layouts, raws)


@DEVICES
def test_tensors_in_host_memory_are_sent_as_they_are(device: str) -> None:
    """With NCCL they go through the slabs like all others."""
    layouts = [Layout("float16", (50, 60)), Layout("int8", (3000,), "gaps")]
    tensors, raws = made(layouts)
    with fleet(device) as party:
        party.tell_receivers(layouts)
        party.send(tensors, layouts)
        party.check(layouts, raws)


@DEVICES
def test_converted_temporaries_are_sent_one_by_one(device: str) -> None:
    """Each is made when it is its turn, and nobody but the sender holds it."""
    layouts = [Layout("bfloat16", (40, 100))] * 20
    tensors, raws = made(layouts, "cpu")
    with fleet(device, slab_bytes=3 * 8000) as party:
        party.tell_receivers(layouts)
        place = party.group.device
        party.send((tensor.to(place, copy=True) for tensor in tensors), layouts)
        party.check(layouts, raws)


def test_a_temporary_is_freed_once_its_slab_is_packed() -> None:
    """At most a slab's worth of them, the one that is cut, and the next one are in memory at any time."""
    alive: set[int] = set()
    most = 0

    def tensors() -> Iterator[torch.Tensor]:
        nonlocal most
        for number in range(100):
            array = np.full(1024, number, np.uint8)
            alive.add(number)
            weakref.finalize(array, alive.discard, number)
            most = max(most, len(alive))
            yield torch.from_numpy(array)
            del array

    layouts = [Layout("uint8", (1024,))] * 100
    with fleet(slab_bytes=8 * 1024) as party:
        party.tell_receivers(layouts)
        party.send(tensors(), layouts)
        party.check(layouts, [bytes([number]) * 1024 for number in range(100)])
    assert not alive
    assert most <= 8 + 2


def test_a_conjugated_view_is_sent_resolved() -> None:
    """Its bits are those that a copy of it has: the sign of each imaginary part flipped."""
    raw = np.array([1 + 2j, 3 - 4j], np.complex64)
    with fleet() as party:
        party.tell_receivers([Layout("complex64", (2,))])
        party.send([torch.from_numpy(raw).conj()], [Layout("complex64", (2,))])
        party.check([Layout("complex64", (2,))], [raw.conj().tobytes()])


BAD_TENSORS: list[tuple[torch.Tensor, type[DeltacastError]]] = [
    (torch.empty(4, device="meta"), InputError),
    (torch.zeros(2, 2).to_sparse(), InputError),
    (torch.zeros(4, dtype=torch.bits16), DTypeError),
    (torch.zeros(3), TableError),
]
"""What neither side can take where four float32 elements are announced."""


@pytest.mark.parametrize(("bad", "error"), BAD_TENSORS)
def test_a_sequence_is_refused_before_anything_is_sent(bad: torch.Tensor, error: type[DeltacastError]) -> None:
    """By number; the group is as good as before."""
    layouts = [Layout("int64", (1000,)), Layout("float32", (4,))]
    tensors, raws = made(layouts)
    with fleet(slab_bytes=1024) as party:
        with pytest.raises(error, match="tensor 1"):
            party.send([tensors[0], bad], layouts)
        party.tell_receivers(layouts)
        party.send(tensors, layouts)
        party.check(layouts, raws)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_another_number_of_tensors_than_announced_is_refused(number: int) -> None:
    """Too few and too many, on both sides."""
    group = group_of(0, 2, "cpu")  # never met: using it would raise a TransportError
    tensors = [torch.zeros(4)] * number
    with pytest.raises(TableError, match="number of tensors"):
        DenseSender(group, 64).send(tensors, [16, 16], Deadline(1))
    with pytest.raises(TableError, match="number of tensors"):
        DenseReceiver(group, 64).receive(tensors, [16, 16], Deadline(1))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_iterator_of_another_length_is_found_out_when_it_ends(number: int) -> None:
    """Whatever has been sent by then: the error names the numbers, and the group is closed."""
    layouts = [Layout("uint8", (1024,))] * 2
    with fleet(slab_bytes=1024) as party:
        party.tell_receivers(layouts)
        with pytest.raises(TableError, match="number of tensors"):
            party.send(iter(made(layouts[:1] * number)[0]), layouts)
        with pytest.raises(TransportError, match="closed"):
            party.send(made(layouts)[0], layouts)


LAZY = torch.zeros(2, dtype=torch.complex64).conj()


@pytest.mark.parametrize(
    ("bad", "error"),
    [*BAD_TENSORS, (torch.zeros(1).expand(4), InputError), (LAZY, InputError), (LAZY.imag, InputError)],
)
def test_a_receiver_refuses_what_it_cannot_write_in_place_before_anything_is_received(
    bad: torch.Tensor, error: type[DeltacastError]
) -> None:
    """By number, without touching the group or any tensor."""
    group = group_of(1, 2, "cpu")  # never met: using it would raise a TransportError
    good, sizes = torch.full((4,), 7.0), [16, bad.numel() * bad.element_size() if error is InputError else 16]
    with pytest.raises(error, match="tensor 1"):
        DenseReceiver(group, 64).receive([good, bad], sizes, Deadline(1))
    assert good.tolist() == [7.0] * 4


@pytest.mark.parametrize(("slab_bytes", "num_slabs"), [(0, 2), (-16, 2), (100, 2), (64, 0)])
def test_slabs_that_cannot_be_are_refused(slab_bytes: int, num_slabs: int) -> None:
    """On both sides."""
    for end in (DenseSender, DenseReceiver):
        with pytest.raises(InputError, match="bad"):
            end(group_of(0, 2, "cpu"), slab_bytes, num_slabs)


def test_empty_tensors_alone_need_no_group() -> None:
    """Nothing is broadcast; they are looked at all the same."""
    group = group_of(0, 2, "cpu")
    DenseReceiver(group, 64).receive([torch.zeros(0, 4)], [0], Deadline(1))
    DenseReceiver(group, 64).drain([0], Deadline(1))
    with pytest.raises(TableError, match="tensor 0"):
        DenseSender(group, 64).send([torch.zeros(1)], [0], Deadline(1))


@DEVICES
def test_a_source_that_fails_half_way_raises_its_own_error_and_wakes_the_receivers(device: str) -> None:
    """The sender's group is aborted, so that nobody waits for the rest (with NCCL until the deadline)."""

    def tensors() -> Iterator[torch.Tensor]:
        yield torch.zeros(4000, dtype=torch.uint8)
        raise ZeroDivisionError

    layouts = [Layout("uint8", (4000,))] * 5
    with fleet(device, slab_bytes=1024) as party:
        party.tell_receivers(layouts, 5.0)
        with pytest.raises(ZeroDivisionError):
            party.send(tensors(), layouts)
        if device == "cpu":  # a receiver has nobody to hold its clock here
            with pytest.raises(WorkerError, match="TransportError"):
                party.receivers[0].reply()
        with pytest.raises(TransportError, match="closed"):
            party.send([torch.zeros(4000, dtype=torch.uint8)] * 5, layouts)


def test_a_drain_takes_every_slab_or_says_that_it_did_not() -> None:
    """Of a group that is not there, none."""
    with pytest.raises(TransportError, match="closed"):
        DenseReceiver(group_of(1, 2, "cpu"), 64).drain([65], Deadline(1))


@DEVICES
def test_a_receiver_that_dies_half_way_ends_the_sending(device: str) -> None:
    """With an error, within the deadline."""
    layouts = [Layout("uint8", (4000,))] * 50
    with fleet(device, slab_bytes=1024) as party:

        def tensors() -> Iterator[torch.Tensor]:
            for number in range(50):
                if number == 20:
                    party.receivers[0].signal(signal.SIGKILL)
                    assert party.receivers[0].exit_code() == -signal.SIGKILL
                yield torch.zeros(4000, dtype=torch.uint8)

        party.tell_receivers(layouts)
        with pytest.raises(TransportError):
            party.send(tensors(), layouts, 5.0)


@DEVICES
def test_a_sender_that_dies_half_way_ends_the_receiving(device: str) -> None:
    """With an error, within the deadline; of the tape, some whole slabs were written and nothing else."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    sizes = [4000] * 50
    rendezvous, group = Rendezvous(HOST, 2, TIMEOUT_S), group_of(1, 2, device)
    sender = EngineProcess(send_and_die, (HOST, rendezvous.port), device, sizes, 1024)
    try:
        group.meet(rendezvous.store)
        tensors = [torch.full((size,), 7, dtype=torch.uint8, device=group.device) for size in sizes]
        receiver = DenseReceiver(group, 1024, 2)
        with pytest.raises(TransportError):
            held(group, lambda clock: receiver.receive(tensors, sizes, clock), 5.0)
        assert sender.exit_code() == -signal.SIGKILL
        tape = torch.cat(tensors).tolist()  # no gaps: the sizes are multiples of 16
        num_written = tape.index(7)
        assert num_written % 1024 == 0
        assert num_written < 25 * 4000
        assert tape == [0] * num_written + [7] * (len(tape) - num_written)
    finally:
        group.close()
        sender.stop()


def test_a_sender_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    """Gloo holds it itself."""
    layouts = [Layout("uint8", (4000,))]
    with fleet() as party:
        party.tell_receivers(layouts, 0.5)
        with pytest.raises(WorkerError, match="DeadlineError"):
            party.receivers[0].reply()
