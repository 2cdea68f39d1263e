"""A payload group on one host: the trainer copies into shared memory, every worker copies out of it.

It is cut into slabs, which are used in turn. Over each worker's connection (`local_sockets.py`), little-endian::

    worker  -> trainer  kind of device (`cpu` or `cuda`)                         in its opening message
    trainer -> worker   kind of device, number of slabs (u32), bytes of a slab (u64), the memory's handle
    trainer -> worker   u64 n, u64 bytes: slab n mod slabs is full, and holds so many
    worker  -> trainer  u64 n: slab n mod slabs is copied out

Both sides compute from the sizes alone what lies where in a slab, as `dense_nccl.py` does. A slab is filled again once
every worker has copied it out. Nothing has a name that outlives its holder: whoever dies, whenever, leaves nothing.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from deltacast.delta.errors import InputError, ProtocolError, TransportError
from deltacast.engines.control import Deadline
from deltacast.engines.cuda_memory import CudaMemory
from deltacast.engines.dense_nccl import Piece, filled_bytes, slab_cuts
from deltacast.engines.group import PayloadGroup, Transport, flat_bytes
from deltacast.engines.local_sockets import Door, Peer, Visitor, readable
from deltacast.engines.shared_memory import HostMemory, SharedMemory

__all__ = ["SHARED_MEMORY", "SharedGroup", "SharedRendezvous"]

_SEAT: Final = struct.Struct("<4sIQ")
_FULL: Final = struct.Struct("<QQ")
_EMPTIED: Final = struct.Struct("<Q")
_ALIGN: Final = 16
# CPUs copied slabs of 1 to 32 MiB at the same cost; with GPUs every slab costs waits of the host.
_SLAB_BYTES: Final = {"cpu": 4 << 20, "cuda": 64 << 20}


class SharedRendezvous:
    """Where a generation's workers find the trainer, and the slabs that they will share.

    Args:
        host: not used: unix sockets are this host's.
        world_size: the trainer and its workers.
        timeout_s: not used: groups have their own.
        ports: not used.
        slab_bytes: bytes of a slab, a positive multiple of 16; None for 4 MiB on CPUs, 64 MiB on GPUs. Larger payloads
            go through in several.
        num_slabs: how many; with 2, one is filled while another is emptied.

    Attributes:
        host: the door's place: for Form, and for no log.
        port: 0.
        store: what `SharedGroup.meet` takes: this.
        door: for the workers.

    Raises:
        InputError: a slab size or number that cannot be.
        TransportError: this system has no such sockets.
    """

    def __init__(
        self,
        host: str,  # noqa: ARG002 - of every rendezvous
        world_size: int,  # noqa: ARG002 - likewise
        timeout_s: float,  # noqa: ARG002 - likewise
        ports: Sequence[int] = (),  # noqa: ARG002 - likewise
        *,
        slab_bytes: int | None = None,
        num_slabs: int = 4,
    ) -> None:
        if num_slabs < 1 or (slab_bytes is not None and (slab_bytes <= 0 or slab_bytes % _ALIGN)):
            expected = f"1 or more, of a positive multiple of {_ALIGN} bytes"
            raise InputError("bad slabs", expected=expected, found=f"{num_slabs} of {slab_bytes}")
        self.slab_bytes, self.num_slabs = slab_bytes, num_slabs
        self.door = Door()
        self.host, self.port = self.door.place, 0

    @property
    def store(self) -> SharedRendezvous:
        """See `MeetingPlace`."""
        return self


class SharedGroup(PayloadGroup):
    """One generation's group on one host; as `PayloadGroup`, whose arguments it takes.

    On rank 0 `post` returns once its tensors are copied into slabs and the workers know, and `wait` once every worker
    has copied them out; on a worker `post` returns once they are copied out. With CUDA that costs each side one wait of
    the host for its own copy per slab; no stream ever waits for a peer. A peer that is gone or late makes either raise,
    and ends the group. So does `abort`, from any thread; memory and sockets are closed once no call uses them.
    """

    def __init__(self, **seat: Any) -> None:
        super().__init__(**seat)
        self._kind = self.device.type.encode().ljust(4, b"\0")
        self._lock = threading.Lock()  # of what `abort` touches: users, door, peers and memory
        self._num_users = 0
        self._door: Door | None = None
        self._peers: list[Peer] = []  # ranks 1 and up; a worker's only one is rank 0
        self._memory: SharedMemory | None = None
        self._slab_bytes = self._num_slabs = 0
        self._num_full = 0  # slabs that were ever posted
        self._num_emptied: list[int] = []  # by each peer of rank 0

    @property
    def posts_at_once(self) -> bool:
        """See `PayloadGroup`: no, `post` copies and waits for slabs."""
        return False

    def meet(self, store: Any) -> None:
        """See `PayloadGroup`. Rank 0 only.

        Args:
            store: a `SharedRendezvous`.
        """
        deadline, door, num_workers = Deadline(self._timeout_s), store.door, self.world_size - 1
        num_slabs, slab_bytes = store.num_slabs, store.slab_bytes or _SLAB_BYTES[self.device.type]
        with self._in_use():
            self._hold(door=door)
            memory = self._create(num_slabs * slab_bytes)
            self._hold(memory=memory)
            workers = door.admit(num_workers, deadline)
            self._hold(peers=[peer for peer, _ in workers])
            door.close()  # everybody is here
            seat = _SEAT.pack(self._kind, num_slabs, slab_bytes) + memory.handle
            for peer, message in workers:
                door.answer(peer, message, seat, memory.descriptor, deadline)
            self._slab_bytes, self._num_slabs = slab_bytes, num_slabs
            self._num_emptied = [0] * num_workers

    def join(self, host: str, port: int) -> None:  # noqa: ARG002 - there are no ports here
        """See `PayloadGroup`. A worker's side."""
        deadline = Deadline(self._timeout_s)
        with self._in_use():
            trainer = Visitor(host, self.rank, self._kind, deadline)
            self._hold(peers=[trainer])
            seat, descriptor = trainer.answered(deadline)
            self._open(seat, descriptor)

    def wait(self, deadline: Deadline) -> None:
        """See `PayloadGroup`."""
        with self._in_use():
            self._await_emptied(self._num_full, deadline)
        self._meter.read()

    @contextmanager
    def aborted_by(self, deadline: Deadline) -> Iterator[None]:  # noqa: ARG002 - of every group
        """See `PayloadGroup`: nothing of ours waits for a peer inside CUDA, so nothing needs an abort."""
        yield

    def abort(self) -> None:
        """See `PayloadGroup`."""
        with self._lock:
            self._aborted = True
            for end in (*self._peers, *((self._door,) if self._door else ())):
                end.shut()
            self._close_unused()

    close = abort

    def _carry(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        rows = [flat_bytes(tensor.detach()) for tensor in tensors]
        with self._in_use():
            for pieces in slab_cuts([row.numel() for row in rows], self._slab_bytes):
                if self.rank == 0:
                    self._fill(rows, pieces, deadline)
                else:
                    self._empty(rows, pieces, deadline)
                self._num_full += 1

    def _fill(self, rows: Sequence[torch.Tensor], pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Copy pieces into the next slab, once every worker has emptied it, and say so."""
        assert self._memory is not None
        self._await_emptied(self._num_full + 1 - self._num_slabs, deadline)
        for piece in pieces:
            self._memory.put(self._place(piece), rows[piece.tensor][piece.start : piece.end])
        self._memory.settle()
        for peer in self._peers:
            peer.send(_FULL.pack(self._num_full, filled_bytes(pieces)), deadline)

    def _empty(self, rows: Sequence[torch.Tensor], pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Copy pieces out of the next slab, once it is full, and say so."""
        assert self._memory is not None
        expected, found = _FULL.pack(self._num_full, filled_bytes(pieces)), self._peers[0].receive(deadline)
        if found != expected:
            raise ProtocolError("another slab than was to come", expected=expected.hex(), found=found.hex())
        for piece in pieces:
            self._memory.take(self._place(piece), rows[piece.tensor][piece.start : piece.end])
        self._memory.settle()
        self._peers[0].send(_EMPTIED.pack(self._num_full), deadline)

    def _place(self, piece: Piece) -> int:
        return self._num_full % self._num_slabs * self._slab_bytes + piece.offset

    def _await_emptied(self, count: int, deadline: Deadline) -> None:
        """Wait until every worker has emptied that many slabs, of all that there ever were; at once on a worker."""
        while late := [peer for peer, num in zip(self._peers, self._num_emptied, strict=False) if num < count]:
            for peer in readable(late, deadline):
                number = self._peers.index(peer)
                expected, found = _EMPTIED.pack(self._num_emptied[number]), peer.receive(deadline)
                if found != expected:
                    raise ProtocolError(f"{peer.name} out of turn", expected=expected.hex(), found=found.hex())
                self._num_emptied[number] += 1

    def _create(self, num_bytes: int) -> SharedMemory:
        if self.device.type == "cuda":
            return CudaMemory.create(num_bytes, self.device)
        return HostMemory.create(num_bytes)

    def _open(self, seat: bytes, descriptor: int) -> None:
        """Map the trainer's memory; takes the descriptor."""
        (kind, num_slabs, slab_bytes), handle = _SEAT.unpack_from(seat), seat[_SEAT.size :]
        if kind != self._kind:
            os.close(descriptor)
            raise ProtocolError("another kind of device", expected=self.device.type, found=kind.rstrip(b"\0").decode())
        self._slab_bytes, self._num_slabs = slab_bytes, num_slabs
        num_bytes = slab_bytes * num_slabs
        if self.device.type == "cuda":
            self._hold(memory=CudaMemory.open(handle, num_bytes, descriptor, self.device))
        else:
            self._hold(memory=HostMemory.open(descriptor, num_bytes))

    # What is open, and until when.

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep what is open until the block has ended; if it fails, the group ends."""
        with self._lock:
            self._require_open()
            self._num_users += 1
        try:
            yield
        except BaseException:
            self.abort()
            raise
        finally:
            with self._lock:
                self._num_users -= 1
                self._close_unused()

    def _hold(
        self, *, door: Door | None = None, peers: Sequence[Peer] = (), memory: SharedMemory | None = None
    ) -> None:
        """Take over what was opened; it is closed with the group, which may have been aborted meanwhile."""
        with self._lock:
            self._door, self._memory = door or self._door, memory or self._memory
            self._peers += peers
            self._require_open()

    def _require_open(self) -> None:
        if self._aborted:
            raise TransportError("the payload group is closed")

    def _close_unused(self) -> None:
        """Close everything if the group has ended and nobody uses it. Memory first: peers learn of it by its end."""
        if not self._aborted or self._num_users:
            return
        memory, self._memory = self._memory, None
        ends = (*self._peers, *((self._door,) if self._door else ()))
        self._peers, self._door = [], None
        try:
            if memory is not None:
                memory.close()
        finally:
            for end in ends:
                end.close()


SHARED_MEMORY: Final = Transport(SharedGroup, SharedRendezvous)
"""Memory of the trainer's host, or of its GPU."""
