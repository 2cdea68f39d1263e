"""The trainer engine in vLLM's own trainer factory: code that is written for vLLM's engines, with another init info.

    engine = WeightTransferTrainerFactory.trainer_init(
        DeltacastTrainerInitInfo(master_address="10.0.0.1", master_port=0, world_size=2, rank=0),
        client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model),
    )
    engine.send_weights()

vLLM's clients call four methods and hear nothing of what the servers hold. A `VllmClient` may take their place: it asks
the servers, labels and resumes them by that, and its errors have their words.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import TrainerInitInfo as VllmTrainerInitInfo
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

from deltacast.delta.errors import InputError, StateError
from deltacast.delta.sources import VLLMSource
from deltacast.engines.base import Client, TrainerInitInfo
from deltacast.engines.report import RoundReport
from deltacast.engines.sparse_nccl import SparseNcclTrainer
from deltacast.engines.vllm.plugin import BACKEND, register

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource

__all__ = ["DeltacastTrainerEngine", "DeltacastTrainerInitInfo"]


@dataclass
class DeltacastTrainerInitInfo(VllmTrainerInitInfo):  # type: ignore[misc] # vLLM is not there for the type checker
    """What vLLM's `NCCLTrainerInitInfo` says, for deltacast; makes the backend known to vLLM's factories.

    Attributes:
        master_address: the interface that the trainer listens on; workers connect there.
        master_port: the port of the control connection; 0 for any free one.
        world_size: workers of all servers together, and the sender.
        packed: accepted for the sake of code that says it; changes always travel packed.
        options: of `deltacast.TrainerInitInfo`, by name; the three above are not among them.
        rank: of this trainer process; 0 sends, the others take part in reading the source.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        register()  # vLLM loads plugins where it serves, and this is where it trains

    def for_trainer(self) -> TrainerInitInfo:
        """Return it as deltacast's own.

        Raises:
            InputError: a value out of range, or an unknown option.
        """
        try:
            return TrainerInitInfo(
                host=self.master_address, port=self.master_port, num_workers=self.world_size - 1, **self.options
            )
        except TypeError as err:
            raise InputError(f"bad options: {err}") from err


class DeltacastTrainerEngine(TrainerWeightTransferEngine[DeltacastTrainerInitInfo]):  # type: ignore[misc]
    """A deltacast trainer with vLLM's calls. Made by `trainer_init`, on every trainer rank.

    A rank other than 0 only reads its source, once in each call, so that what is collective in that comes about. If
    several take part (`torch.distributed`), the sender reads once too, and a round that would have to be read again is
    an error; the next call mends what it left.
    """

    init_info_cls = DeltacastTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient | Client, source: WeightSource, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._weights = _SharedSource(source)
        self._trainer: SparseNcclTrainer | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: DeltacastTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient | Client,
        source: WeightSource | None = None,
    ) -> Self:
        """Bring every worker to the source's weights; the servers' label is then version 0, or the store's newest.

        Raises:
            InputError: no source, or bad options.
            DeltacastError: as `deltacast.engines.base.TrainerEngine.trainer_init`.
        """
        if source is None:
            raise InputError("no source", hint="Give trainer_init a WeightSource, vLLM's ModuleSource say.")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._meet(init_info)
        return engine

    def send_weights(self) -> RoundReport | None:
        """Publish the source's present weights as the next version; blocks.

        Returns:
            What happened; None on a rank that does not send.

        Raises:
            DeltacastError: as `deltacast.engines.base.TrainerEngine.send_weights`.
        """
        try:
            return None if self._trainer is None else self._trainer.send_weights()
        finally:
            self._weights.end_call()

    def shutdown(self) -> None:
        """Let the workers go; may be called twice."""
        if self._trainer is not None:
            self._trainer.shutdown()

    def _meet(self, init_info: DeltacastTrainerInitInfo) -> None:
        lifecycle = self.client if isinstance(self.client, Client) else _Lifecycle(self.client)
        try:
            if self.is_sender:
                self._trainer = SparseNcclTrainer.trainer_init(init_info.for_trainer(), self._weights, lifecycle)
        finally:
            self._weights.end_call()
        if self._trainer is not None and isinstance(lifecycle, _Lifecycle):
            lifecycle.trainer = self._trainer
            lifecycle.start_weight_update()
            lifecycle.finish_weight_update()


class _Lifecycle:
    """A client of vLLM's as one of ours, which labels what was committed.

    Attributes:
        trainer: whose versions the labels are; none before it has met its workers.
    """

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self._client, self._label = client, ""
        self.trainer: SparseNcclTrainer | None = None

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._client.update_weights(update_info)

    def finish_weight_update(self) -> None:
        label = self._label if self.trainer is None else str(self.trainer.baseline.version)
        self._client.finish_weight_update(None if label == self._label else label)  # an abort leaves it alone
        self._label = label


class _SharedSource(VLLMSource):
    """A source of vLLM's that is read once in each call of the engine, to its end, where other ranks read along."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._read = False

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = super().tensors()
        if not _others_read():
            yield from pairs
            return
        if self._read:
            raise StateError("the other trainer ranks have read their weights already", hint="Call send_weights again.")
        self._read = True
        try:
            for pair in pairs:  # noqa: UP028 - `yield from` would close it
                yield pair
        finally:
            for _ in pairs:  # a round that ends early: the other ranks go on, and wait for this one
                pass

    def end_call(self) -> None:
        if _others_read() and not self._read:
            for _ in self.tensors():
                pass
        self._read = False


def _others_read() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
