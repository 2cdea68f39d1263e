"""The `dense` wire: whole parameters of the baseline, by bits, through two slabs (`dense_nccl.py`).

For seeds and repairs. The trainer makes no copy of the model, a worker writes slabs into its live weights as they
arrive, and either holds two slabs beside its weights. So a word is written before anything is proven: the proof is
the audit before the vote. There is no undo, and a receiver serves nothing until the decision is COMMIT.

The header beside PROPOSE, little-endian, read whole before READY (docs/protocol.md, "Seeds and repairs")::

    magic (8 bytes), u32 number of parameters, 4 zero bytes, u64 slab bytes, table digest (16 bytes),
    u64 fingerprint of each parameter, u32 place of each, ascending, xxh3_128 of all before it (16 bytes)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from deltacast.delta.errors import (
    BaseError,
    ChecksumError,
    CorruptionError,
    FormatError,
    ProtocolError,
    TableError,
    VerificationError,
)
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParameterTable
from deltacast.engines.control import Deadline
from deltacast.engines.dense_nccl import DenseReceiver, DenseSender
from deltacast.engines.group import PayloadGroup
from deltacast.engines.payload import Inbox, Incoming, Outgoing, Route
from deltacast.engines.protocol import Propose
from deltacast.store.baseline import Baseline

__all__ = ["DenseDrain", "DenseHeader", "DenseIncoming", "DenseOutgoing"]

_MAGIC: Final = b"\x89DCD\r\n\x1a\n"
_HEAD: Final = struct.Struct("<8sI4xQ16s")
_DIGEST_BYTES: Final = 16
_DIGEST_PREFIX: Final = "xxh3_128:"
_NUM_SLABS: Final = 2  # one is under way while the other is filled, or emptied
_ALIGN: Final = 16  # of a tensor on the tape, and of a slab


@dataclass(frozen=True, slots=True, eq=False)
class DenseHeader:
    """Which parameters come whole, through slabs of which size, and what they are.

    Attributes:
        slab_bytes: of each of the two slabs; a positive multiple of 16.
        places: uint32 [sent], in the table, ascending.
        fingerprints: uint64 [sent], of the bits that are sent.
    """

    slab_bytes: int
    places: NDArray[np.uint32]
    fingerprints: NDArray[np.uint64]

    def to_bytes(self, table: ParameterTable) -> bytes:
        """Write it, for whoever holds the same table."""
        digest = bytes.fromhex(table.digest.removeprefix(_DIGEST_PREFIX))
        head = _HEAD.pack(_MAGIC, len(self.places), self.slab_bytes, digest)
        body = head + self.fingerprints.astype("<u8").tobytes() + self.places.astype("<u4").tobytes()
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def from_bytes(cls, raw: bytes, table: ParameterTable) -> DenseHeader:
        """Read one that is not trusted.

        Raises:
            ChecksumError, FormatError: it is damaged, or breaks a rule.
            TableError: it is about another parameter table.
        """
        body = raw[:-_DIGEST_BYTES]
        if len(body) < _HEAD.size or not body.startswith(_MAGIC):
            raise FormatError("not a dense header", expected=_MAGIC.hex(), found=raw[: len(_MAGIC)].hex())
        if xxhash.xxh3_128_digest(body) != raw[-_DIGEST_BYTES:]:
            raise ChecksumError("a dense header does not have its checksum")
        _, count, slab_bytes, digest = _HEAD.unpack_from(body)
        if len(body) != _HEAD.size + 12 * count:
            raise FormatError("a dense header has another size than it states", found=f"{len(raw)} bytes")
        if (found := _DIGEST_PREFIX + digest.hex()) != table.digest:
            raise TableError("made for another parameter table", expected=table.digest, found=found)
        if slab_bytes <= 0 or slab_bytes % _ALIGN:
            raise FormatError("bad slab size", expected=f"a positive multiple of {_ALIGN}", found=slab_bytes)
        fingerprints = np.frombuffer(body, "<u8", count, _HEAD.size)
        places = np.frombuffer(body, "<u4", count, _HEAD.size + 8 * count)
        if (np.diff(places.astype(np.int64)) <= 0).any() or (count and int(places[-1]) >= len(table)):
            raise FormatError("a dense header is not about parameters of the table, each once and in order")
        return cls(slab_bytes, places, fingerprints)

    def sizes(self, table: ParameterTable) -> list[int]:
        """Return the bytes of each parameter that is sent."""
        return [table.metas[place].nbytes for place in self.places.tolist()]


class DenseOutgoing(Outgoing):
    """The baseline, or some parameters of it, straight from where it lies. It stays as it is.

    Args:
        baseline: what is sent; not to be written to before the round has ended.
        group: met already.
        names: only these parameters (a repair); all of them by default (a seed).
        slab_bytes: of each of two slabs, which are taken now, on the group's device; a positive multiple of 16. They
            are no larger than what is sent.

    Raises:
        TableError: no such parameter.
        InputError: a slab size that cannot be.
    """

    wire = "dense"
    overlaps = True

    def __init__(
        self, baseline: Baseline, group: PayloadGroup, names: Iterable[str] | None = None, *, slab_bytes: int
    ) -> None:
        state, table = baseline.state, baseline.state.table
        places = range(len(table)) if names is None else sorted({table.index(name) for name in names})
        metas = [table.metas[place] for place in places]
        self._tensors = [state.memories[place].tensor for place in places]
        self._sizes = [meta.nbytes for meta in metas]
        self._sender = DenseSender(group, min(slab_bytes, _tape_bytes(self._sizes)), _NUM_SLABS)
        self.base_version = None if names is None else baseline.version
        self.target_version, self.target_digest = baseline.version, baseline.digest
        fingerprints = state.fingerprints[list(places)]
        header = DenseHeader(self._sender.slab_bytes, np.array(places, np.uint32), fingerprints)
        self.header = header.to_bytes(table)
        self.payload_bytes = self.buffer_bytes = self._sender.nbytes
        self.num_changed, self.num_parameters = sum(meta.num_words for meta in metas), len(metas)
        self.sent_bytes = len(self.header) + sum(self._sizes)

    def begin(self) -> None:
        """See `Outgoing`. The baseline's last step may still be under way, on a stream that `send` does not follow."""
        _wait_for_writes(self._tensors)

    def send(self, route: Route) -> None:
        """See `Outgoing`."""
        self._sender.send(self._tensors, self._sizes, route.deadline)

    def advance(self) -> None:
        """See `Outgoing`. What was sent is what the baseline is."""


class DenseIncoming(Incoming):
    """Whole parameters on their way into live weights.

    It has no undo. A seed that fails leaves the state without a version. A repair that fails leaves version and
    fingerprints as they were: it brings the very bits that they promise, so that what is still not as promised is
    damaged as before, and the audit names it.

    Args:
        propose: what the trainer said.
        header: what came beside it.
        state: the weights.
        group: the payload's; two slabs are taken on its device.
        on_write: called before the first write.

    Raises:
        FormatError, TableError, ProtocolError: the header does not belong to such a round.
        BaseError: a repair of another version or digest than the state's.
        VerificationError: the parameters announced do not give the digest announced.
    """

    publishes = False

    def __init__(
        self,
        propose: Propose,
        header: bytes,
        state: WeightState,
        group: PayloadGroup,
        on_write: Callable[[], None],
    ) -> None:
        self._state, self._on_write, self._version = state, on_write, propose.target_version
        self._header = _header_of(propose, header, state.table)
        self.is_seed = propose.base_version == -1
        places = self._header.places.tolist()
        self._tensors = [state.memories[place].tensor for place in places]
        if not self.is_seed:
            self.repairs = tuple(state.table.metas[place].name for place in places)
        self._after = self._resulting_fingerprints(propose)
        self._written = False
        self._receiver = DenseReceiver(group, self._header.slab_bytes, _NUM_SLABS)
        gathered = (tensor.nbytes for tensor in self._tensors if not tensor.is_contiguous())
        self.buffer_bytes = self._receiver.nbytes + max(gathered, default=0)
        _wait_for_writes(self._tensors)

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:  # noqa: ARG002
        """See `Incoming`. Writes from the first slab on."""
        self._on_write()
        self._written = True
        self._receiver.receive(self._tensors, self._header.sizes(self._state.table), deadline)

    def apply(self) -> None:
        """See `Incoming`. What a seed brought is audited by the worker, with everything; a repair is audited here."""
        self._state.advance(self._version, self._after)
        if damaged := self._state.audit(self.repairs):  # none of a seed
            raise CorruptionError(f"a parameter did not arrive as it was sent: {damaged[0]}")

    def commit(self) -> None:
        """See `Incoming`. There is no log."""

    def rollback(self) -> None:
        """See `Incoming`. Of a seed, what is there is nobody's version; a repair has moved nothing but damaged bits."""
        if self._written and self.is_seed:
            self._state.forget()
        self._written = False

    def _resulting_fingerprints(self, propose: Propose) -> NDArray[np.uint64]:
        """Return what all fingerprints will be, once it is sure that they give the digest announced."""
        state, after = self._state, self._state.fingerprints.copy()
        after[self._header.places] = self._header.fingerprints
        if self.is_seed and len(self._header.places) != len(after):
            raise FormatError("a seed that is not whole", expected=len(after), found=len(self._header.places))
        if not self.is_seed:
            label, version = (propose.base_version, propose.target_digest), state.version
            if label != (version, state.digest) or propose.target_version != version:
                raise BaseError(
                    "a repair of other bits",
                    version=propose.target_version,
                    expected=f"version {version} with {state.digest}",
                    found=f"version {propose.base_version} to {propose.target_version} with {propose.target_digest}",
                )
        if (digest := state.table.state_digest(after)) != propose.target_digest:
            raise VerificationError(
                "the parameters announced do not give the digest announced",
                version=propose.target_version,
                expected=propose.target_digest,
                found=digest,
            )
        return after


class DenseDrain(Incoming):
    """Whole parameters that are for other workers.

    Args:
        propose: what the trainer said.
        header: what came beside it.
        table: the parameters.
        group: the payload's; two slabs are taken on its device.

    Raises:
        FormatError, TableError, ProtocolError: as `DenseIncoming`.
    """

    publishes = False
    drains = True

    def __init__(self, propose: Propose, header: bytes, table: ParameterTable, group: PayloadGroup) -> None:
        mine = _header_of(propose, header, table)
        self._sizes = mine.sizes(table)
        self._receiver = DenseReceiver(group, mine.slab_bytes, _NUM_SLABS)
        self.buffer_bytes = self._receiver.nbytes

    def receive(self, group: PayloadGroup, inbox: Inbox, deadline: Deadline) -> None:  # noqa: ARG002
        """See `Incoming`."""
        self._receiver.drain(self._sizes, deadline)

    def apply(self) -> None:
        """Nothing of it is ours."""

    def commit(self) -> None:
        """Nothing of it is ours."""

    def rollback(self) -> None:
        """Nothing of it is ours."""


def _header_of(propose: Propose, raw: bytes, table: ParameterTable) -> DenseHeader:
    header = DenseHeader.from_bytes(raw, table)
    if propose.payload_bytes != header.slab_bytes * _NUM_SLABS:
        raise ProtocolError(
            "a header of another payload", expected=propose.payload_bytes, found=header.slab_bytes * _NUM_SLABS
        )
    return header


def _tape_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a slab that takes all of it."""
    return max(_ALIGN, sum(-(-size // _ALIGN) * _ALIGN for size in sizes))


def _wait_for_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Block until this thread's current streams are done: the payload's thread has others."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
