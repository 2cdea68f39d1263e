"""Workers that update themselves from a store, when they are told to: no collective, and no trainer to wait for.

They are told through the call that starts any update, `receive_weights`, with::

    {"pull": {"where": URL or folder, "run_id": ..., "base": version or null, "target": version}}

The whole way from what a worker holds to the target is one step: it happens, proven by digest, or nothing does.

Whoever can reach that call can send anything. So a worker's own configuration says which stores it reads, and with
which key; nothing in the call does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from deltacast.delta.errors import BaseError, CorruptionError, InputError, StateError, VerificationError
from deltacast.engines.base import AuditPolicy, ServingStatus, check_audit
from deltacast.engines.payload import Incoming, Limits
from deltacast.engines.report import WorkerReport
from deltacast.engines.store_wire import fetch
from deltacast.engines.worker import RoundWorker
from deltacast.store.objects import is_object_name
from deltacast.store.records import NUM_RECENT, VersionRecord
from deltacast.store.sealed import check_key
from deltacast.store.version_store import VersionStore

__all__ = ["PullRequest", "PullSettings", "PullingWorker"]

_LOG: Final = logging.getLogger(__name__)
_SERVES: Final = (ServingStatus.SERVING, ServingStatus.STALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """What a worker's own configuration says about pulls.

    Attributes:
        allowed: folders and URLs of stores, or of what stores are below, as deep as names of objects go. By default
            none: nothing is pulled.
        signing_key: with one, only stores that are signed with it are read.
        audit: how much to rescan after an update; everything is after a whole version.
        folder: where whole versions are put together, on a disk with room for two; None for the system's folder of
            temporary files.

    Raises:
        InputError: `allowed` is no tuple of texts, the key is empty, or a bad audit policy.
    """

    allowed: tuple[str, ...] = ()
    signing_key: bytes | None = field(default=None, repr=False)
    audit: AuditPolicy = 16
    folder: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.allowed, tuple) or not all(isinstance(root, str) and root for root in self.allowed):
            raise InputError("allowed stores must be a tuple of folders and URLs", found=ascii(self.allowed)[:200])
        check_key(self.signing_key)
        check_audit(self.audit)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what a configuration file or a command line says; for the key it names the file, as `key_file`.

        Raises:
            InputError: an unknown name, or a value that cannot be. OSError: the key cannot be read.
        """
        unknown = values.keys() - {"allowed", "key_file", "audit", "folder"}
        if unknown or not isinstance(values.get("allowed", []), list):
            raise InputError(
                "bad settings of pulls", expected="allowed (a list), key_file, audit, folder", found=sorted(values)
            )
        key_file = values.get("key_file")
        return cls(
            allowed=tuple(values.get("allowed", ())),
            signing_key=None if key_file is None else Path(key_file).read_bytes(),
            audit=values.get("audit", 16),
            folder=values.get("folder"),
        )

    def require_allowed(self, where: str) -> None:
        """Raise unless a store may be read. Names are compared as they are written.

        Raises:
            InputError: it may not.
        """
        for root in self.allowed:
            below = where.removeprefix(root.rstrip("/") + "/")
            if where == root or (below != where and is_object_name(below)):
                return
        raise InputError(
            "this worker's configuration does not allow that store",
            expected=f"one of {', '.join(self.allowed) or 'none'}, or below",
            found=ascii(where)[:200],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """What a worker is told to do.

    Attributes:
        where: the store: a folder or a URL.
        run_id: the lineage of versions that it must keep.
        base: the version that the worker must hold; None for whatever it holds.
        target: the version to get.

    Raises:
        InputError: a field of another type, or a negative version.
    """

    where: str
    run_id: str
    base: int | None
    target: int

    def __post_init__(self) -> None:
        texts = isinstance(self.where, str) and isinstance(self.run_id, str)
        versions = [self.target] if self.base is None else [self.target, self.base]
        if not texts or any(type(version) is not int or version < 0 for version in versions):
            raise InputError("not a pull", expected="where, run_id, base (or null) and target", found=ascii(self)[:400])

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Read what a client sent; unknown keys are ignored.

        Raises:
            InputError: a key is missing, or a value cannot be.
        """
        if not isinstance(values, Mapping) or not {"where", "run_id", "target"} <= values.keys():
            raise InputError("not a pull", expected="where, run_id and target", found=ascii(values)[:400])
        return cls(where=values["where"], run_id=values["run_id"], base=values.get("base"), target=values["target"])

    def as_dict(self) -> dict[str, Any]:
        """Return the `update_info` that says this."""
        pull = {"where": self.where, "run_id": self.run_id, "base": self.base, "target": self.target}
        return {"pull": pull}


class PullingWorker(RoundWorker):
    """A worker that takes part in rounds, as any, and between connections to a trainer also pulls.

    Made as a `RoundWorker`, whose limits hold for updates that are pulled.

    Attributes:
        pulls: which stores it reads, and how; set by whoever makes the worker. By default none.
    """

    pulls = PullSettings()

    def receive_weights(
        self, update_info: Mapping[str, Any] | None = None, *, before_write: Callable[[], object] | None = None
    ) -> WorkerReport:
        """Pull, if that is what the call says; else as `RoundWorker`. Blocks.

        A pull that has been done already is answered in the same way again. On every error but the last two below the
        worker serves what it served before, if that was a version, and `status.last_error` says what went wrong; a
        first version that came whole has no undo.

        Args:
            update_info: says what to pull, as above.
            before_write: as for `RoundWorker`: called once all is fetched and proven, on this thread.

        Raises:
            InputError: a bad call, a store that is not allowed, other parameters, or the worker's limits exceeded.
            StateError: a trainer is connected, memory may still change, or only pieces of parameters are held.
            BaseError: another run, an older writer, or the worker is not at the base, or beyond the target.
            StoreError, FormatError: no such version, or no way leads there; the object that is to blame is named.
            VerificationError: the store's objects do not make the version that they say.
            CorruptionError: the worker's weights are damaged: it serves nothing until a whole version has come.
            Exception: what `before_write` raises; nothing was written. Or what `_weights_written` raises: if that, or
                undoing, fails again, the status is `lost`, and nothing is served until a whole version has come.
        """
        if update_info is None or "pull" not in update_info:
            return super().receive_weights(update_info, before_write=before_write)
        with self._one_at_a_time("receive_weights"):
            try:
                report = self._pull(PullRequest.from_dict(update_info["pull"]), before_write)
            except BaseException as err:
                self._last_error = f"{type(err).__name__}: {err}"
                _LOG.warning("deltacast worker could not pull: %s", err)
                raise
            self._last_error = ""
            return report

    def _pull(self, request: PullRequest, before_write: Callable[[], object] | None) -> WorkerReport:
        if self._channel is not None and not self._channel.gone():
            raise StateError("a trainer is connected to this worker, and sends it what it needs")
        self._disconnect()
        if self._stuck is not None and not self._stuck.done:
            raise StateError("a collective has still not ended", hint="Restart this process.")
        if len(self._state.memories) < len(self._state.table):
            raise StateError("a worker that holds pieces of parameters cannot pull", hint="Send it updates by rounds.")
        self.pulls.require_allowed(request.where)
        with VersionStore.open(request.where, signing_key=self.pulls.signing_key) as store:
            record = self._target(store, request)
            held = self._held(store, request, before_write)
            if held is None or self._is_behind(held, record):
                limits = Limits(self._undo_budget_bytes, self._max_payload_bytes, self._state.threads)
                payload = fetch(
                    store, record.version, held, self._state,
                    limits=limits, folder=self.pulls.folder, on_write=self._stop_serving,
                )  # fmt: skip
                self._take(payload, record, before_write)
        return WorkerReport(record.version, committed=True, optimizer_step=self._optimizer_step)

    def _target(self, store: VersionStore, request: PullRequest) -> VersionRecord:
        """Return the target's record, if this worker may go there at all."""
        wanted = ascii(request.run_id)
        if store.run_id != request.run_id:
            raise BaseError("the store keeps another run", expected=wanted, found=ascii(store.run_id))
        if self._serving in _SERVES and self._run_id != request.run_id:
            raise BaseError("this worker serves another run", expected=wanted, found=ascii(self._run_id))
        record = store.record(request.target)
        self._state.require_table(record.table_digest)
        if record.run_id == self._run_id and record.epoch < self._epoch:
            raise BaseError(
                "an older writer", version=record.version, expected=f"epoch >= {self._epoch}", found=record.epoch
            )
        return record

    def _held(self, store: VersionStore, request: PullRequest, before_write: Callable[[], object] | None) -> int | None:
        """Return the version that is held, so that updates may follow it; None if everything must come."""
        if self._serving not in _SERVES and self._state.version is None:
            self._recognise(store, request, before_write)
        held = self._state.version if self._serving in _SERVES else None
        if request.base not in {None, held}:
            raise BaseError("wrong base", version=request.target, expected=f"version {held}", found=request.base)
        return held

    def _recognise(self, store: VersionStore, request: PullRequest, before_write: Callable[[], object] | None) -> None:
        """Take the label of a version whose bits are here already: of a checkpoint that was loaded, say."""
        self._state.rescan()
        records: Iterable[VersionRecord]
        if request.base is None:  # one read of the store goes back so far
            records = islice(store.version_log.up_to(request.target).records(), NUM_RECENT + 1)
        else:
            records = [store.record(request.base)]
        ours = (self._state.table.digest, self._state.digest)
        for record in records:
            if (record.table_digest, record.state_digest) == ours:
                self._state.version = record.version
                self._state.mark_audited()
                if before_write is not None and self._model_is_behind():
                    before_write()
                self._weights_written(None)  # they may have come by a pull whose last step failed
                self._serving = ServingStatus.SERVING
                self._note(record)
                return

    def _model_is_behind(self) -> bool:
        """Whether what is made from the weights is not of these weights."""
        return False

    def _is_behind(self, held: int, record: VersionRecord) -> bool:
        if held > record.version:
            raise BaseError(
                "this worker is beyond that version", version=record.version, found=f"version {held}",
                hint="Restart it to go back.",
            )  # fmt: skip
        if held == record.version and self._state.digest != record.state_digest:
            raise BaseError(
                "other weights have that number in the store", version=held, expected=self._state.digest,
                found=record.state_digest,
            )  # fmt: skip
        return held < record.version

    def _take(self, payload: Incoming, record: VersionRecord, before_write: Callable[[], object] | None) -> None:
        """Write, prove, and take the version's label; or undo."""
        before = self._serving
        try:
            payload.stage()
            if before_write is not None:
                before_write()
            self._write(payload, record)
        except BaseException:
            self._take_back(payload, before)
            raise
        self._keep(payload, record.optimizer_step)
        self._note(record)

    def _write(self, payload: Incoming, record: VersionRecord) -> None:
        payload.apply()
        if self._state.digest != record.state_digest:
            raise VerificationError("what was written is not the version", version=record.version,
                                    expected=record.state_digest, found=self._state.digest)  # fmt: skip
        self._weights_written(payload)
        damaged = [] if payload.is_seed else self._audit_some(record.version, self.pulls.audit)
        if damaged:
            raise CorruptionError(f"weights are damaged: {damaged[0]}", parameter=damaged[0].parameter)

    def _take_back(self, payload: Incoming, before: ServingStatus) -> None:
        try:
            self._undo(payload, before)
        except BaseException:
            self._serving = ServingStatus.LOST
            raise

    def _note(self, record: VersionRecord) -> None:
        """Go by a version's label from now on."""
        newest = self._newest if record.run_id == self._run_id else -1
        self._run_id, self._epoch, self._newest = record.run_id, record.epoch, max(newest, record.version)
        self._optimizer_step = record.optimizer_step
