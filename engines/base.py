"""What an engine is: the two halves, what they are told at init, and the client between them.

The verbs are vLLM's. A trainer engine drives rounds (`send_weights`); a worker engine answers them
(`receive_weights`); a client is how the lifecycle calls reach the workers. A user may replace four things: the
source, the client, the trainer engine and the worker engine.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Literal, Protocol, Self, TypeAlias, get_args, runtime_checkable

from deltacast.delta.errors import InputError
from deltacast.delta.sources import WeightSource
from deltacast.engines.opening import ANY_PORT
from deltacast.engines.pending import PendingUpdate
from deltacast.engines.report import RoundReport, WorkerReport
from deltacast.store.anchors import Anchors
from deltacast.store.placement import Placement, check_placement
from deltacast.store.version_store import VersionStore

__all__ = [
    "AuditPolicy",
    "Client",
    "Durability",
    "Pausing",
    "SeedWire",
    "ServingStatus",
    "TrainerEngine",
    "TrainerInitInfo",
    "Wire",
    "WorkerEngine",
    "WorkerInitInfo",
    "WorkerStatus",
    "check_audit",
]

Wire: TypeAlias = Literal["auto", "raw", "coded", "container"]
"""How changes travel; see `TrainerInitInfo`."""
SeedWire: TypeAlias = Literal["auto", "dense", "container"]
"""How whole parameters travel; see `TrainerInitInfo`."""
Durability: TypeAlias = Literal["after_commit", "before_commit"]
"""When a version is in the store; see `TrainerInitInfo`."""
AuditPolicy: TypeAlias = int | Literal["full", "off"]
"""How much a worker rescans in each round: 1/N of the bytes, everything, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerInitInfo:
    """What a trainer engine needs to know.

    Attributes:
        num_workers: workers to wait for at init; later ones are admitted between rounds.
        host: the interface that control, rendezvous and payload bind to.
        port: of the control connection; 0 for any free one.
        port_range: first and last of the ports that the trainer may listen on, at least three: for control if `port` is
            0, and for rendezvous. None for any free ones. What Gloo and NCCL listen on is the system's choice.
        secret: hex, at least 16 bytes; a fresh one by default. Workers get it in their init info.
        device: `cpu` (Gloo) or `cuda:N` (NCCL) for the payload.
        placement: where the baseline lives, and at what cost (`deltacast.store.baseline.Baseline`).
        baseline_folder: for placement `mmap`: the folder of its file.
        wire: how changes travel. `raw`: as the kernels find them, 4 bytes per changed bf16. `coded`: the same chunks
            entropy-coded, about 10 bits. `container`: encoded whole on the host, for any tensors and any density.
            `auto` takes, per round, what should be fastest by link and density (engines/wires.py), and logs why.
        seed_wire: how seeds and repairs travel. `dense`: as they lie, in a few large broadcasts, and written as they
            arrive. `container`: encoded whole on the host, which takes its cores and more memory than the model does.
            `auto` takes `dense` between GPUs, if every worker knows it.
        slab_bytes: of each of the two buffers on the payload's device that a dense payload goes through, on the trainer
            and on each worker; a positive multiple of 16.
        max_density: share of the words that may change in a streamed round: what its buffers are sized for, on the
            trainer and on each worker. A round that turns out denser is sent as a container instead.
        chunk_bytes: bytes of weights that one chunk of a streamed round covers. Smaller ones cost the host more time;
            a baseline on the host takes three of them on the device.
        overlap_apply: workers write chunks as they arrive, serving nothing from the first one on; else they stage the
            whole payload while serving, and write between its end and the decision.
        max_send_bytes_per_s: hold the payload to this rate; None for as fast as it goes.
        store: where every committed version is kept, for whoever joins or restarts; None for nowhere. The caller opens
            and closes it, and leaves it to the trainer in between. If it has versions, the trainer goes on from the
            newest, whatever its own weights are, under the store's run id and the next epoch.
        durability: `after_commit`: workers go on at once, and the version is published beside the next rounds. Those
            that a trainer did not publish before it died are lost, and its workers go back to the store's newest.
            `before_commit`: a version is in the store before any worker serves it; every round waits for that.
        max_unpublished: versions that may wait to be published, each with its changes in host memory (of bf16 weights 6
            bytes per change of a streamed round, 12 of a container's); `send_weights` waits for room, for `timeout_s`,
            before it sends anything.
        history_bytes: of the updates committed last that stay in host memory, so that a worker that comes again at one
            of their versions is sent what changed since, and not everything; 0 for none. An update that is larger is
            not kept, and costs nothing.
        anchors: when the store gets a snapshot of its newest version. It is put together in `baseline_folder` or the
            system's temporary folder, which must have room for the weights.
        run_id: the lineage; by default the store's, else a fresh one.
        epoch: this writer's number in the lineage; workers refuse lower ones than they have seen. A store says its own.
        version: the version that the source's weights are at init. A store says its own.
        timeout_s: for each phase of a round.
        decision_timeout_s: how long a worker that has voted waits before it rolls back and calls itself stale; never
            less than `timeout_s`, in which the others may still vote.
        join_timeout_s: how long to wait at init for workers that may still be loading a model.
        audit: how much a worker rescans in each round.
        values: the form of the values on the wire (docs/format.md).
        threads: for diff, encode and scans.

    Raises:
        InputError: a number out of range, an unknown wire or placement, or a secret that is not hex or too short.
    """

    num_workers: int
    host: str = "127.0.0.1"
    port: int = 0
    port_range: tuple[int, int] | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    device: str = "cpu"
    placement: Placement = "cpu"
    baseline_folder: str | None = None
    wire: Wire = "auto"
    seed_wire: SeedWire = "auto"
    slab_bytes: int = 256 << 20
    max_density: float = 1 / 16
    chunk_bytes: int = 1 << 31
    overlap_apply: bool = True
    max_send_bytes_per_s: float | None = None
    store: VersionStore | None = field(default=None, repr=False)
    durability: Durability = "after_commit"
    max_unpublished: int = 4
    history_bytes: int = 64 << 20
    anchors: Anchors = Anchors()  # noqa: RUF009 - frozen
    run_id: str = ""
    epoch: int = 0
    version: int = 0
    timeout_s: float = 60.0
    decision_timeout_s: float = 120.0
    join_timeout_s: float = 600.0
    audit: AuditPolicy = 16
    values: Literal["auto", "delta", "absolute"] = "auto"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.threads < 1 or not 0 <= self.port < 65536:
            raise InputError("num_workers, threads or port out of range", found=self)
        if self.port_range is not None and not 0 < self.port_range[0] <= self.port_range[1] - 2 < 65534:
            raise InputError("bad port_range", expected="two ports, and one between them", found=self.port_range)
        if self.durability == "before_commit" and self.store is None:
            raise InputError("durability 'before_commit' needs a store", hint="Give one.")
        if self.max_unpublished < 1:
            raise InputError("max_unpublished out of range", expected="1 or more", found=self.max_unpublished)
        if self.history_bytes < 0:
            raise InputError("history_bytes out of range", expected="0 or more", found=self.history_bytes)
        if min(self.timeout_s, self.decision_timeout_s, self.join_timeout_s) <= 0:
            raise InputError("timeouts must be positive", found=self)
        _check_choice("wire", self.wire, Wire)
        _check_choice("seed_wire", self.seed_wire, SeedWire)
        _check_choice("durability", self.durability, Durability)
        if self.slab_bytes <= 0 or self.slab_bytes % 16:
            raise InputError("bad slab_bytes", expected="a positive multiple of 16", found=self.slab_bytes)
        if not 0 < self.max_density <= 1:
            raise InputError("max_density out of range", expected="above 0, at most 1", found=self.max_density)
        if self.max_send_bytes_per_s is not None and not self.max_send_bytes_per_s > 0:
            raise InputError("max_send_bytes_per_s must be positive", found=self.max_send_bytes_per_s)
        check_placement(self.placement, self.baseline_folder)
        check_audit(self.audit)
        _check_secret(self.secret)

    @property
    def ports(self) -> Sequence[int]:
        """Where the trainer may listen."""
        return ANY_PORT if self.port_range is None else range(self.port_range[0], self.port_range[1] + 1)

    def for_workers(self, host: str, port: int) -> WorkerInitInfo:
        """Return what the workers of this trainer are told."""
        return WorkerInitInfo(
            host=host,
            port=port,
            secret=self.secret,
            run_id=self.run_id,
            timeout_s=self.timeout_s,
            decision_timeout_s=max(self.decision_timeout_s, self.timeout_s),  # the others may vote until then
            audit=self.audit,
            payload_device=self.device.partition(":")[0],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInitInfo:
    """What a worker engine needs to know; a plain dict on the way (`as_dict`, `from_dict`).

    Attributes:
        host: where the trainer listens.
        port: likewise.
        secret: the run's, hex. Keep it off logs and public networks.
        run_id: the lineage.
        timeout_s: for each phase of a round.
        decision_timeout_s: how long to wait for a decision before rolling back.
        audit: how much to rescan in each round.
        idle_timeout_s: how long to wait for the next round, or to be admitted: a trainer lets workers in at the start
            of a `send_weights` only.
        payload_device: `cpu` or `cuda`, what the trainer sends from: a worker receives where it sends. Empty: unknown.

    Raises:
        InputError: a bad secret, timeout or audit policy.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    run_id: str
    timeout_s: float = 60.0
    decision_timeout_s: float = 120.0
    audit: AuditPolicy = 16
    idle_timeout_s: float = 600.0
    payload_device: str = ""

    def __post_init__(self) -> None:
        check_audit(self.audit)
        _check_secret(self.secret)
        if min(self.timeout_s, self.decision_timeout_s, self.idle_timeout_s) <= 0:
            raise InputError("timeouts must be positive", found=self)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready values, for a client."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote; unknown keys are ignored.

        Raises:
            InputError: a key is missing or a value is bad.
        """
        known = {item.name for item in fields(cls)}
        try:
            return cls(**{key: value for key, value in values.items() if key in known})
        except TypeError as err:
            raise InputError(f"bad worker init info: {err}") from err


@runtime_checkable
class Client(Protocol):
    """How the lifecycle calls reach the workers: HTTP, Ray, pipes, or this process.

    Four methods, vLLM's, and no results: verdicts travel on the control connections, so that any way to make a call
    will do. Each call goes to all workers. `init_transfer_engine` and `update_weights` may return before the workers
    are done with it, or block until they are; the trainer runs them on a thread of their own. What it is given is
    passed on unchanged: `update_info` tells a worker which call it answers. After every `start_weight_update`, failed
    ones included, comes a `finish_weight_update`.
    """

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker call `WorkerEngine.init_transfer_engine(init_info)`."""

    def start_weight_update(self) -> None:
        """Have every worker call `WorkerEngine.start_weight_update()`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have every worker call `WorkerEngine.receive_weights(update_info)`."""

    def finish_weight_update(self) -> None:
        """Have every worker call `WorkerEngine.finish_weight_update()`."""


@runtime_checkable
class Pausing(Protocol):
    """What a client may have besides, if it keeps workers from generating around an update."""

    @property
    def paused_s(self) -> float | None:
        """How long the last pause was, in seconds on the trainer's clock; None before the first."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Keep the workers paused within; the trainer does so around `init_transfer_engine`.

        It leaves this only once it has let all workers go: one that waits for the others answers nothing before that.
        """
        ...


class TrainerEngine(ABC):
    """The trainer's half. One thread calls it."""

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: TrainerInitInfo, source: WeightSource, client: Client) -> Self:
        """Take the source's weights as the baseline, or the store's newest, and bring every worker to it. Blocks.

        Args:
            init_info: addresses, timeouts, policies.
            source: the trainer's weights; read now and at every `send_weights`.
            client: how workers are reached.

        Raises:
            TransportError: a worker did not come, or went, in time.
            TableError: a worker, or the store, has other parameters. Nothing was written anywhere.
            InputError: the store keeps another run. Nothing was written anywhere.
            StoreError, FencedError: the store failed, or other trainers take it over as well.
        """

    @abstractmethod
    def send_weights(self, *, optimizer_step: int | None = None) -> RoundReport:
        """Publish the source's present weights as the next version, to every worker or to none. Blocks.

        Args:
            optimizer_step: metadata, from 0 on; workers are told it with the version, and the report says it.

        Raises:
            RoundAbortedError: the round ended in ABORT; everybody alive is at the base version. `report` tells.
            TransportError: no worker is left, or the client, the control or payload layer failed before a round
                began. If only the client's `finish_weight_update` failed, the message says that the version stands.
            StateError: after `shutdown`, or while another call runs. Nothing was sent.
            InputError: the source broke its contract or changed its parameters, or a step out of range. Nothing was
                sent.
            StoreError: an earlier version could not be published, or too many wait. Nothing was sent; call again. With
                `before_commit` also: nobody knows whether this version was published. Then the trainer has ended.
            FencedError: another trainer has taken over the store's run. Nothing was sent, and nothing will be.
        """

    @abstractmethod
    def send_weights_async(self, *, optimizer_step: int | None = None) -> PendingUpdate:
        """Start a `send_weights` on a thread of its own, so that training goes on while the update travels.

        The source's weights must not change before `wait_until_read` of what is returned. They are not read again after
        that, so that where a blocking call would repair a damaged worker and send once more, this one ends in ABORT;
        the next call repairs it. Until the update has ended, every other call is refused.

        Args:
            optimizer_step: as for `send_weights`.

        Raises:
            StateError, InputError: as `send_weights`; whatever else that raises comes with the result.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Close every connection, group and thread; may be called twice. Workers keep their weights.

        An update that is pending is waited for; its own timeouts end it. Versions that wait to be published are, for up
        to `timeout_s`.

        Raises:
            StoreError: not all were; it says which. Everything is closed.
        """


class WorkerEngine(ABC):
    """A worker's half. One thread calls it; between calls the weights do not change."""

    @abstractmethod
    def init_transfer_engine(self, init_info: WorkerInitInfo | Mapping[str, Any]) -> None:
        """Join the trainer's run and catch up to its version. Blocks until admitted.

        Raises:
            TransportError: no trainer there, wrong secret, or no admission in time.
            StateError: the trainer refused this worker; `message` says why. Nothing was written.
        """

    def start_weight_update(self) -> None:  # noqa: B027 - optional hook of the lifecycle
        """Prepare for an update (pause generation, say). Optional."""

    @abstractmethod
    def receive_weights(self, update_info: Mapping[str, Any] | None = None) -> WorkerReport:
        """Answer the trainer until its present `send_weights` is over. Blocks.

        Args:
            update_info: what the client was given; without it, a call that follows one which did not reach this
                worker ends at once.

        Returns:
            What this worker serves now, and whether the update was committed.

        Raises:
            TransportError: the trainer is gone. The weights are those of the last committed version; the status
                is `stale`.
        """

    def finish_weight_update(self) -> None:  # noqa: B027 - optional hook of the lifecycle
        """Resume after an update. Optional."""

    @property
    @abstractmethod
    def status(self) -> WorkerStatus:
        """What this worker serves and how sure it is."""

    @abstractmethod
    def shutdown(self) -> None:
        """Close every connection, group and thread; may be called twice. The weights stay."""


class ServingStatus(Enum):
    """What a worker may serve.

    EMPTY: nothing; its weights are unknown, damaged, half seeded, or written and not decided yet. SERVING: one whole
    published version. STALE: likewise, but the trainer is out of reach. LOST: nothing; a collective did not end, so
    its memory may still change, or what was pulled could not be undone.
    """

    EMPTY = "empty"
    SERVING = "serving"
    STALE = "stale"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's present label.

    Attributes:
        status: whether it may serve.
        run_id: of the version below; empty before the first commit.
        version: the version it serves; None if none.
        digest: its state digest.
        audited_through: the newest version through which every parameter was rescanned; None if never.
        last_error: the last failure, or empty.
        optimizer_step: that the version was published with; None if none was told.
        committed_at: when this worker last acted on a COMMIT, in seconds of Unix time; None if never.
    """

    status: ServingStatus
    run_id: str
    version: int | None
    digest: str
    audited_through: int | None
    last_error: str = ""
    optimizer_step: int | None = None
    committed_at: float | None = None


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise InputError(f"unknown {name}", expected=f"one of {', '.join(get_args(choices))}", found=repr(value))


def check_audit(audit: object) -> None:
    """Raise unless a value is an `AuditPolicy`.

    Raises:
        InputError: it is not.
    """
    if audit not in ("full", "off") and (type(audit) is not int or audit < 1):
        raise InputError("bad audit policy", expected="'full', 'off' or a number of rounds >= 1", found=repr(audit))


def _check_secret(secret: object) -> None:
    try:
        good = isinstance(secret, str) and len(bytes.fromhex(secret)) >= 16
    except ValueError:
        good = False
    if not good:
        raise InputError("bad secret", expected="at least 16 bytes in hex")
