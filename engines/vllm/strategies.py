"""The workers of an engine inside vLLM: one class per way to get weights into the running model, and the choice.

`direct`: the worker's weights are the running model's own memory, seen in the checkpoint's names and shapes, so that
an update costs what changed. `shards`: likewise, but of pieces of the parameters, where ranks share the model; together
they prove what each received. `reload`: they are a copy in host memory, and the modules that changed are loaded anew
from it before the vote; the cost grows with those modules. Undo, audits and digests are of the worker's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

import torch

from deltacast.delta.errors import InputError, StateError
from deltacast.delta.fingerprint import Box
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.sources import WeightSource
from deltacast.delta.state import Damage
from deltacast.engines.base import ServingStatus, WorkerInitInfo
from deltacast.engines.payload import Incoming
from deltacast.engines.protocol import Hello
from deltacast.engines.pulling import PullingWorker
from deltacast.engines.shard_exchange import Exchange
from deltacast.engines.shards import ShardWorker
from deltacast.engines.vllm.planner import Plan
from deltacast.engines.vllm.reload import Reloader, RuntimeModel

__all__ = [
    "Choice",
    "DirectWorker",
    "Part",
    "ReloadWorker",
    "ServingWorker",
    "ShardedWorker",
    "agreed",
    "choose",
    "proven_by_pattern",
    "require_covered",
]

Part: TypeAlias = tuple[str, tuple[int, ...], Box, int]
"""A box of a checkpoint parameter that a rank holds: name, shape, `[lo, hi)` per dim of it, partial fingerprint."""

_MOST_NAMED: Final = 5  # parameters that one message lists


class Choice(NamedTuple):
    """A strategy, and why."""

    strategy: Literal["direct", "shards", "reload"]
    reason: str


def require_covered(plan: Plan) -> Plan:
    """Return the plan, if the running model has a place for every parameter.

    Raises:
        InputError: those that it has none for, by name. Neither pipeline nor expert parallelism is served, so that
            what one rank leaves alone is no other's.
    """
    absent = plan.names("absent")
    if absent:
        listed = ", ".join(absent[:_MOST_NAMED]) + (", ..." if len(absent) > _MOST_NAMED else "")
        reason = plan.placement(absent[0]).reason
        raise InputError(f"the running model has no place for {listed}", parameter=absent[0], found=reason)
    return plan


def choose(plan: Plan, *, tensor_parallel: int, pulls: bool = False) -> Choice:
    """Choose how updates get into a running model.

    Args:
        plan: proven.
        tensor_parallel: ranks that share the model.
        pulls: whether the worker may be told to pull, which one that holds pieces cannot.
    """
    shared = tensor_parallel > 1
    if shared and pulls:
        return Choice("reload", "ranks that pull from a store keep whole parameters")
    for name, placement in plan.placements.items():
        if placement.strategy != "direct":
            return Choice("reload", f"{name}: {placement.reason}")
        if not shared and plan.whole(name) is None:
            return Choice("reload", f"{name} lies in several pieces")
    count = len(plan.placements)
    if shared:
        return Choice(
            "shards", f"all {count} parameters lie in pieces in the running model, on {tensor_parallel} ranks"
        )
    return Choice("direct", f"all {count} parameters lie as they are in the running model")


def agreed(choice: Choice, exchange: Exchange) -> Choice:
    """Return what all ranks of a server can do: one that has to reload makes all of them reload. Collective.

    Raises:
        TransportError, StateError: as `Exchange.gather`.
    """
    said = exchange.gather("strategy", choice.strategy.encode(), exchange.patience_s)
    other = next((rank for rank, strategy in enumerate(said) if strategy == b"reload"), None)
    if choice.strategy == "reload" or other is None:
        return choice
    return Choice("reload", f"rank {other} of this server has to")


def proven_by_pattern(plan: Plan, reloader: Reloader) -> Plan:
    """Prove a plan with weights made for it, where those that the model holds are not known (dummy weights).

    Module by module, random bits are loaded the way that vLLM reloads, with all that it does after loading, and then
    compared through the plan. The model keeps them.

    Raises:
        Exception: as `Reloader.load`.
    """
    return plan.proven(_loaded_patterns(plan, reloader))


def _loaded_patterns(plan: Plan, reloader: Reloader) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    done: set[str] = set()
    for first in plan.placements:
        if first in done:
            continue
        modules, names = plan.reload_group([first])
        patterns: dict[str, torch.Tensor] = {}
        for meta in (plan.placement(name).meta for name in names):
            # One random bit per byte: bits of every dtype, bool too, and no NaN, which arithmetic may change.
            ones = torch.randint(0, 2, (meta.nbytes,), dtype=torch.uint8, generator=random)
            patterns[meta.name] = ones.view(meta.row.torch_dtype).view(meta.shape)
        reloader.load(modules, patterns)
        done.update(names)
        yield from patterns.items()


class ServingWorker(PullingWorker):
    """A worker whose weights a running model serves.

    Attributes:
        strategy: its name.
        untouched: whether the model still holds the checkpoint that vLLM loaded.
    """

    strategy: ClassVar[str]
    untouched = False
    _home: torch.device | None = None  # where payload arrives, unless the trainer sends from the host

    @property
    def serves(self) -> bool:
        """Whether the running model holds one whole version, or the checkpoint that vLLM loaded."""
        return self.untouched or self._serving in (ServingStatus.SERVING, ServingStatus.STALE)

    def audit_runtime(self) -> list[str]:
        """Return the modules that do not hold what the worker's weights say; nothing is served until that is mended."""
        return []

    def parts(self) -> list[Part]:
        """Say what is held, from the bits in memory now: a row for each parameter and alias. Reads all weights."""
        table, memories = self._state.table, self._state.memories
        sums = {meta.name: memory.fingerprint() for meta, memory in zip(table, memories, strict=True)}
        shapes = {meta.name: meta.shape for meta in table}
        names = {name: name for name in sums} | table.aliases
        return [
            (name, shapes[held], tuple((0, extent) for extent in shapes[held]), sums[held])
            for name, held in names.items()
        ]

    def _stop_serving(self) -> None:
        super()._stop_serving()
        self.untouched = False

    def _hello(self) -> Hello:
        hello = super()._hello()
        self.untouched = self.untouched and not hello.damaged
        return hello

    def _undo(self, payload: Incoming | None, served_before: ServingStatus) -> list[Damage]:
        damaged = super()._undo(payload, served_before)
        self.untouched = self.untouched and not damaged
        return damaged

    def _agree_on_device(self, sent_from: str) -> None:
        """Receive on the host what a trainer sends from there, wherever the model runs: nobody chose this device."""
        self._home = self._home or self._device
        self._receive_on(torch.device("cpu") if sent_from == "cpu" else self._home)
        super()._agree_on_device(sent_from)


class DirectWorker(ServingWorker):
    """A worker over the running model's own memory.

    Args:
        plan: one that `choose` finds direct.
    """

    strategy = "direct"

    def __init__(self, plan: Plan) -> None:
        views = {name: plan.whole(name) for name in plan.placements}
        device = next((str(view.device) for view in views.values() if view is not None), "cpu")
        super().__init__(StateDictSource(views), device=device)


class ShardedWorker(ServingWorker, ShardWorker):
    """A worker over what one rank holds of the running model. Making one is collective over the server's ranks.

    Args:
        plan: one that `choose` finds in pieces.
        exchange: over the ranks.
        loaded: whether the model holds the checkpoint; False for dummy weights.
    """

    strategy = "shards"

    def __init__(self, plan: Plan, exchange: Exchange, *, loaded: bool) -> None:
        views = {name: plan.views(name) for name in plan.placements if name not in plan.aliases}
        metas = [plan.placement(name).meta for name in views]
        device = next((str(view.tensor.device) for held in views.values() for view in held), "cpu")
        super().__init__(metas, plan.aliases, views, exchange, loaded=loaded, device=device)

    def parts(self) -> list[Part]:
        """See `ServingWorker`."""
        claims, names = self.state.claims(), [meta.name for meta in self.state.table]
        held = [(names[claim.place], claim.shape, claim.box, claim.partial) for claim in claims]
        aliases = self.state.table.aliases.items()
        tied = [(alias, *part[1:]) for alias, name in aliases for part in held if part[0] == name]
        return held + tied


class ReloadWorker(ServingWorker):
    """A worker over the checkpoint's weights in host memory, which the running model follows.

    Args:
        source: the weights; written to.
        reloader: of the running model.
        plan: of the running model, proven.
    """

    strategy = "reload"

    def __init__(self, source: WeightSource, reloader: Reloader, plan: Plan) -> None:
        super().__init__(source)
        names = [meta.name for meta in self._state.table]
        self._runtime = RuntimeModel(reloader, plan, names)

    def follow(self) -> None:
        """Reload whatever the running model does not hold of the weights, at first everything.

        Raises:
            Exception: as `RuntimeModel.follow`.
        """
        self._runtime.follow(self._state)

    @property
    def serves(self) -> bool:
        """See `ServingWorker`; and whether the running model has followed."""
        return super().serves and not self._runtime.is_behind(self._state)

    def _model_is_behind(self) -> bool:
        return self._runtime.is_behind(self._state)

    def init_transfer_engine(self, init_info: WorkerInitInfo | Mapping[str, Any]) -> None:
        """See `WorkerEngine`. What the running model does not hold of these weights is reloaded first."""
        self.audit_runtime()
        if self.untouched or self._state.version is not None:  # else nobody knows whether these weights are any good
            self.follow()
        super().init_transfer_engine(init_info)

    def parts(self) -> list[Part]:
        """See `ServingWorker`.

        Raises:
            StateError: the running model holds other weights.
        """
        differing = self.audit_runtime()
        if self._runtime.is_behind(self._state):
            raise StateError("the running model holds other weights than this rank's copy", found=", ".join(differing))
        return super().parts()

    def audit_runtime(self) -> list[str]:
        """See `ServingWorker`; of what the model was loaded from, as far as readback.py can tell."""
        return [] if self._runtime.is_behind(self._state) else self._runtime.audit(self._state)

    def _weights_written(self, payload: Incoming | None) -> None:
        if payload is not None and payload.is_seed:
            self._runtime.distrust()
        elif payload is not None:
            self._runtime.distrust(payload.repairs)  # mended here, though their fingerprints are what they were
        self.follow()
