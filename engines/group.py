"""The payload's process group: NCCL between GPUs, Gloo between CPUs, built by us and never the user's default one.

Rank 0 is the trainer. A group belongs to one *generation*: after any failure it is closed and a new one is formed
under the next number, without restarting a process. TCPStore serves rendezvous only, on the chosen interface: it
knows no secret, so whoever reaches that interface can disturb a rendezvous, though not what is decided.

Another `Transport` brings a group of its own: `shared_group.py`, for workers on the trainer's host.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch

# The classes themselves: `torch.distributed` re-exports them without saying so to type checkers.
from torch._C._distributed_c10d import (
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from deltacast.delta.errors import ProtocolError, TransportError
from deltacast.engines.control import Deadline
from deltacast.engines.opening import ANY_PORT, listening_socket
from deltacast.engines.pace import LinkMeter, Pace

__all__ = ["COLLECTIVES", "MeetingPlace", "PayloadGroup", "Rendezvous", "Transport", "flat_bytes"]

_PIECE_BYTES: Final = 64 << 20
_LEAST_TIMEOUT_S: Final = 0.01  # Gloo reads 0 ms as: wait for ever
_WATCHDOG_ONLY_LOGS: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else it ends the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it asks the rendezvous, whose host may be frozen, and so does our `abort`
}
_WATCHDOG_FACTOR: Final = 10  # our abort must come before torch's watchdog, which would end the process


class Rendezvous:
    """The trainer's TCPStore, where the members of a generation find each other.

    Args:
        host: the interface to serve on.
        world_size: the trainer and its workers.
        timeout_s: for every member's calls.
        ports: where to listen, the first that is free.

    Raises:
        TransportError: it cannot be opened.
    """

    def __init__(self, host: str, world_size: int, timeout_s: float, ports: Sequence[int] = ANY_PORT) -> None:
        try:
            sock = listening_socket(host, ports)  # TCPStore's own would listen on every interface
            self.host, self.port = host, int(sock.getsockname()[1])
            self.store = TCPStore(
                host,
                self.port,
                world_size,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=sock.detach(),  # the store closes it
            )
        except (RuntimeError, ValueError, OSError) as err:
            raise TransportError(f"cannot open a rendezvous on {host}: {err}") from err


class PayloadGroup:
    """One generation's group: make it, `meet` or `join`, then `post` and `wait`. Collective methods run on every rank.

    Args:
        rank: 0 for the trainer.
        world_size: the trainer and its workers.
        generation: keeps the keys of generations apart.
        device: `cpu` for Gloo, `cuda:N` for NCCL.
        timeout_s: ours; a collective that takes longer has failed.
        interface: this host's address that Gloo binds to; NCCL has its own variables for that.
        pace: what rank 0 holds its payload to; None for as fast as it goes.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        generation: int,
        device: torch.device,
        timeout_s: float,
        interface: str,
        pace: Pace | None = None,
    ) -> None:
        self.rank, self.world_size, self.generation, self.device = rank, world_size, generation, device
        self._timeout_s, self._interface = timeout_s, interface
        self._pace = pace if rank == 0 else None
        self._backend: Any = None  # a Backend or None; torch's stubs leave out its collectives
        self._aborted = False
        self._meter = LinkMeter(device)

    @property
    def link_bytes_per_s(self) -> float | None:
        """The best rate of any post of at least a MiB that has ended, not above the pace; None if there was none."""
        measured = self._meter.best_bytes_per_s
        return measured if measured is None or self._pace is None else min(measured, self._pace.bytes_per_s)

    @property
    def posts_at_once(self) -> bool:
        """Whether rank 0's `post` only enqueues: no Gloo, and no pace that it has to keep."""
        return self.device.type == "cuda" and self._pace is None

    def meet(self, store: Any) -> None:
        """Meet the others. Collective; blocks inside torch, past every timeout if the store's host is frozen.

        Args:
            store: a torch Store; another transport's groups take that of their own `MeetingPlace`.

        Raises:
            TransportError: the members did not meet in time, or `abort` was called meanwhile.
        """
        try:
            prefixed, cuda = PrefixStore(f"deltacast/{self.generation}", store), self.device.type == "cuda"
            self._backend = self._nccl(prefixed) if cuda else self._gloo(prefixed)
            if self._aborted:
                self.abort()
            self._broadcast_piece(torch.zeros(1, dtype=torch.uint8, device=self.device), self._timeout_s)  # connects
        except RuntimeError as err:
            self.abort()
            who = f"rank {self.rank} of {self.world_size}"
            raise TransportError(f"{who} could not form generation {self.generation}: {err}") from err

    def join(self, host: str, port: int) -> None:
        """Meet the others at the trainer's rendezvous (a worker's side); as `meet`."""
        if not port:  # torch would try the name for as long as it may, and log it
            raise ProtocolError("no rendezvous of torch's", hint="Use one engine on both sides.")
        timeout = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(host, port, self.world_size, is_master=False, timeout=timeout)
        except (RuntimeError, ValueError) as err:
            raise TransportError(f"cannot reach the rendezvous at {host}:{port}: {err}") from err
        self.meet(store)

    def post(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        """Broadcast rank 0's tensors into everybody's, as one operation. Collective.

        NCCL: returns at once; ordered with the current stream, which waits for it. A peer that is gone shows in
        `wait`. Gloo: blocks until it is done.

        Args:
            tensors: on the group's device, contiguous, of the same dtypes and sizes everywhere; rank 0's are only
                read. Their memory must stay until the work is done.
            deadline: for Gloo; with NCCL whoever waits holds the clock, and calls `abort`.

        Raises:
            DeadlineError: the deadline passed.
            TransportError: a peer is gone. The group is unusable: close it.
        """
        tensors = [tensor for tensor in tensors if tensor.numel()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self._pace is not None:
            self._pace.pass_on(num_bytes, deadline)
        try:
            with self._meter.measured(num_bytes):
                self._carry(tensors, deadline)
        except RuntimeError as err:
            self._fail(err, deadline)

    def wait(self, deadline: Deadline) -> None:
        """Block until what was posted on the current stream is done; with NCCL, until `abort` if a peer is gone.

        Raises:
            DeadlineError, TransportError: as `post`.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            if self._backend is None:
                raise TransportError("the payload group was closed meanwhile")
            self._meter.read()
        except RuntimeError as err:
            self._fail(err, deadline)

    def broadcast(self, buffer: torch.Tensor, deadline: Deadline) -> None:
        """Send rank 0's bytes into everybody's host buffer, in a few large pieces. Collective; blocks.

        Args:
            buffer: flat uint8 on the host, the same size everywhere; rank 0's is only read.
            deadline: for all of it.

        Raises:
            DeadlineError, TransportError: as `post`.
        """
        for start in range(0, buffer.numel(), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            staged = piece.to(self.device)
            self.post([staged], deadline)
            self.wait(deadline)
            if self.rank and staged is not piece:
                piece.copy_(staged)

    def _carry(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        """Do what `post` says, with tensors that are not empty; RuntimeError if a peer is gone."""
        if self.device.type == "cuda":
            self._post_coalesced(tensors)
            return
        for tensor in tensors:
            self._broadcast_piece(flat_bytes(tensor), deadline.left_s("the payload group"))

    def _post_coalesced(self, tensors: Sequence[torch.Tensor]) -> None:
        backend = self._open_backend()
        backend._start_coalescing()  # noqa: SLF001 - one launch for all of them has no other spelling
        for tensor in tensors:
            backend.broadcast([flat_bytes(tensor)], BroadcastOptions())
        backend._end_coalescing().wait()  # noqa: SLF001 - the current stream waits, not this thread

    def _fail(self, err: RuntimeError, deadline: Deadline) -> None:
        # Without its traceback, which would keep the backend, and with it our connections, alive: closing
        # them is what wakes peers that still wait for this rank.
        cause = err.with_traceback(None)
        self.abort()
        deadline.left_s("the payload group")
        raise TransportError(f"the payload group broke: {cause}") from cause

    @contextmanager
    def aborted_by(self, deadline: Deadline) -> Iterator[None]:
        """Abort if what is done inside takes longer; with NCCL, also while this thread is blocked inside CUDA.

        An allocation of page-locked memory, say, waits for every kernel, and one of NCCL's for its peer: if that is
        gone, only an abort from another thread ends both.
        """
        if self.device.type != "cuda":
            yield
            return
        timer = threading.Timer(max(deadline.remaining_s, 0.0), self.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Make running collectives fail, here and on peers that wait for this rank; unusable afterwards.

        NCCL's communicator is aborted. Gloo has no abort that unblocks: closing our connections is what wakes
        the others, and our own wait ends with its deadline at the latest.
        """
        self._aborted = True
        backend, self._backend = self._backend, None
        if backend is not None and self.device.type == "cuda":
            backend.abort()

    close = abort

    def _broadcast_piece(self, piece: torch.Tensor, timeout_s: float) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(timeout_s, _LEAST_TIMEOUT_S))
        self._open_backend().broadcast([piece], options).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _open_backend(self) -> Any:
        if self._backend is None:
            raise TransportError("the payload group is closed")
        return self._backend

    def _gloo(self, store: Store) -> Backend:
        gloo: Any = ProcessGroupGloo  # torch's stubs leave out its options
        options = gloo._Options()  # noqa: SLF001 - the only way to choose the interface
        options._timeout = timedelta(seconds=self._timeout_s)  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=self._interface)]  # noqa: SLF001
        return ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _nccl(self, store: Store) -> Backend:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in CPU builds

        torch.cuda.set_device(self.device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout_s * _WATCHDOG_FACTOR)  # noqa: SLF001 - its only spelling
        with _watchdog_that_only_logs():
            return ProcessGroupNCCL(store, self.rank, self.world_size, options)


class MeetingPlace(Protocol):
    """Where a generation's members find each other, opened by the trainer; closed with its last reference.

    Attributes:
        host, port: what Form tells the workers, for `PayloadGroup.join`.
    """

    host: str
    port: int

    @property
    def store(self) -> Any:
        """For the trainer's `PayloadGroup.meet`."""


@dataclass(frozen=True, slots=True)
class Transport:
    """How an engine's payloads travel.

    Attributes:
        group: makes a member of a generation's group; takes what `PayloadGroup` takes.
        rendezvous: opens the place where its members meet; takes what `Rendezvous` takes.
    """

    group: Callable[..., PayloadGroup]
    rendezvous: Callable[[str, int, float, Sequence[int]], MeetingPlace]


COLLECTIVES: Final = Transport(PayloadGroup, Rendezvous)
"""NCCL between GPUs, Gloo between CPUs."""


@contextmanager
def _watchdog_that_only_logs() -> Iterator[None]:
    """Make groups whose watchdog leaves it to our own deadlines to deal with a peer that is gone or frozen.

    torch reads these variables when it makes a group, and has no options for them.
    """
    before = {name: os.environ.get(name) for name in _WATCHDOG_ONLY_LOGS}
    os.environ |= _WATCHDOG_ONLY_LOGS
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of any dtype as flat uint8: Gloo knows few dtypes, and shared memory none."""
    return tensor.view(-1).view(torch.uint8)
