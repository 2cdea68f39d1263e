"""The worker engine for vLLM: finds where a checkpoint's weights lie in the running model, and has a worker hold them.

Every check, digest, verdict and rollback is `RoundWorker`'s, in checkpoint coordinates; how what is written gets into
the running model is the worker's strategy (strategies.py). A vote for COMMIT means: it runs. What writes happens within
one call of vLLM's, during which nothing is generated; `stage` has what comes before it happen while the server serves.

Nothing here raises into such a call: with several ranks, vLLM would pair later answers with the wrong questions
(vllm-project/vllm#57846). An error is kept, logged, and told by `status`; what cannot be right is refused by the
constructor, which ends the server's start.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltacast.delta.checkpoint import CheckpointSource
from deltacast.delta.dtypes import dtype_named
from deltacast.delta.errors import InputError
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.sources import WeightSource
from deltacast.engines.pulling import PullSettings
from deltacast.engines.staging import Staging
from deltacast.engines.vllm.planner import trace
from deltacast.engines.vllm.ranks import tensor_parallel_exchange
from deltacast.engines.vllm.reload import Reloader
from deltacast.engines.vllm.strategies import (
    DirectWorker,
    Part,
    ReloadWorker,
    ServingWorker,
    ShardedWorker,
    agreed,
    choose,
    proven_by_pattern,
    require_covered,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

__all__ = ["DeltacastEngine", "EngineStatus", "InitInfo", "UpdateInfo"]

_LOG: Final = logging.getLogger("vllm.deltacast")  # of others than its own, vLLM shows warnings only


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc] # vLLM is not there for the type checker
    """What a client gives to `init_weight_transfer_engine`: the trainer's `worker_init_info`, checked by the worker."""

    values: Mapping[str, Any] = field(repr=False)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a client gives to `update_weights`: which of the trainer's calls this is."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What one rank holds, JSON-ready by `as_dict`.

    Attributes:
        rank: of all of the server's workers.
        strategy: how updates get into the running model (strategies.py).
        serves: whether the running model holds one whole version, so that it may generate: the one below, or if that
            is None the checkpoint that vLLM loaded.
        state: the worker's own `ServingStatus`, by value.
        run_id, version, digest, audited_through, optimizer_step: as in `WorkerStatus`; of the worker's weights, which
            are what the running model holds where it `serves`.
        staging: how far an update is that it stages (`StagingState`).
        error: why the last call did not do what it should; empty if it did.
    """

    rank: int
    strategy: str
    serves: bool
    state: str
    run_id: str
    version: int | None
    digest: str
    audited_through: int | None
    optimizer_step: int | None
    staging: str
    error: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as a plain dict."""
        return asdict(self)


class DeltacastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM's half of a weight transfer; one per rank, made once the model is loaded. vLLM's one thread calls it.

    With strategies `direct` and `shards` weights are kept once, as vLLM runs them, and payload comes to the model's
    device. With `reload` they are kept twice, and payload comes to host memory: there they are the checkpoint's files,
    mapped, which take memory of their own only where updates have written. With `--load-format dummy` only the files'
    headers are read, and the trainer sends everything at the first handshake.

    Args:
        config: unused; everything comes with the init info.
        vllm_config: of the worker.
        device: where the model runs.
        model: the loaded model.

    Raises:
        InputError, StateError: something here that deltacast cannot update, by name. The server does not start.
        FileNotFoundError: the model's folder has no safetensors files.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        _require_supported(vllm_config, model)
        with set_current_vllm_config(vllm_config):  # loaders look there
            self._worker = _worker(vllm_config, model)
        self._error = ""
        self._staging = Staging(self._receive)

    @property
    def status(self) -> EngineStatus:
        """What this rank holds."""
        status = self._worker.status
        return EngineStatus(
            rank=self.parallel_config.rank,
            strategy=self._worker.strategy,
            serves=self._worker.serves,
            state=status.status.value,
            run_id=status.run_id,
            version=status.version,
            digest=status.digest,
            audited_through=status.audited_through,
            optimizer_step=status.optimizer_step,
            staging=self._staging.state,
            error=self._error or status.last_error,
        )

    def parts(self) -> list[Part]:
        """Say which boxes of the checkpoint's parameters this rank holds, with their fingerprints, of the bits now.

        Raises:
            StateError: the running model holds other bits than this rank would say.
        """
        return self._worker.parts()

    def audit_runtime(self) -> list[str]:
        """Return the modules that hold other bits than this rank says; it serves nothing until that is mended."""
        return self._worker.audit_runtime()

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Pass it on; what is wrong with it is found where errors are kept."""
        return InitInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Likewise."""
        return UpdateInfo(update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's run and catch up to its version. Blocks; an error is kept."""
        self._leave_staging("a new handshake")
        self._keep_error(lambda: self._worker.init_transfer_engine(init_info.values))

    def start_weight_update(self) -> None:
        """Nothing: a module is opened for loading when it is known to have changed."""

    def stage(self, values: Mapping[str, Any], patience_s: float) -> None:
        """Begin what `receive_weights` is then to end, while this rank serves; see `Staging`. Does not block.

        Args:
            values: as of the update info.
            patience_s: until it is given up.
        """
        self._staging.stage(values, patience_s)

    def call_off(self, reason: str) -> None:
        """Have an update that is staged not be written when `receive_weights` comes for it. Blocks until it is sure."""
        self._staging.call_off(reason)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Answer the trainer until its `send_weights` is over. Blocks; an error is kept."""
        self._staging.receive(update_info.values)

    def finish_weight_update(self) -> None:
        """Nothing: what was decided was done."""

    def shutdown(self) -> None:
        """Leave the trainer; may be called twice. The model keeps its weights."""
        self._leave_staging("the server shuts down")
        self._worker.shutdown()

    def _receive(self, values: Mapping[str, Any], before_write: Callable[[], object] | None) -> None:
        """Do a call; one that is staged, on its thread."""
        on_gpu = self.device.type == "cuda"

        def ask() -> None:
            assert before_write is not None
            before_write()
            if on_gpu:  # vLLM may still run with the old weights, on a stream that this thread's do not wait for
                torch.cuda.synchronize(self.device)

        def call() -> None:
            if on_gpu:
                torch.cuda.set_device(self.device)  # is of a thread
            self._worker.receive_weights(values, before_write=None if before_write is None else ask)
            if on_gpu:
                torch.cuda.synchronize(self.device)

        self._keep_error(call)

    def _leave_staging(self, reason: str) -> None:
        """Have nothing staged, without waiting for a trainer that may be gone."""
        if self._staging.state in ("receiving", "staged"):
            self._worker.interrupt()
        self._staging.forget(reason)

    def _keep_error(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as err:  # noqa: BLE001 - the boundary to vLLM's RPC
            self._error = f"{type(err).__name__}: {err}"
            _LOG.exception("deltacast: rank %d", self.parallel_config.rank)
        else:
            self._error = ""


def _worker(vllm_config: VllmConfig, model: torch.nn.Module) -> ServingWorker:
    """Make the worker that the running model allows for, and say which and why."""
    checkpoint, pulls = CheckpointSource(_checkpoint_folder(vllm_config)), _pull_settings(vllm_config)
    is_dummy = vllm_config.load_config.load_format == "dummy"
    plan = require_covered(trace(model, checkpoint.metas()))
    reloader = Reloader(model, vllm_config, plan)
    plan = proven_by_pattern(plan, reloader) if is_dummy else plan.proven(checkpoint.tensors())
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    exchange = tensor_parallel_exchange() if tensor_parallel > 1 else None
    choice = choose(plan, tensor_parallel=tensor_parallel, pulls=bool(pulls.allowed))
    if exchange is not None:
        choice = agreed(choice, exchange)
    _LOG.info("deltacast updates by strategy %s: %s", choice.strategy, choice.reason)
    worker: ServingWorker
    if choice.strategy == "direct":
        worker = DirectWorker(plan)
    elif choice.strategy == "shards" and exchange is not None:
        worker = ShardedWorker(plan, exchange, loaded=not is_dummy)
    elif is_dummy:
        worker = ReloadWorker(_zeros_like(checkpoint), reloader, plan)
    else:
        worker = ReloadWorker(checkpoint, reloader, plan)
        worker.follow()  # so that a model that cannot be reloaded is refused now
    worker.pulls, worker.untouched = pulls, not is_dummy
    return worker


def _pull_settings(vllm_config: VllmConfig) -> PullSettings:
    """Read what `--additional-config '{"deltacast": {"pull": {...}}}'` allows: of the server's own, not of a call's."""
    config = vllm_config.additional_config
    ours = config.get("deltacast", {}) if isinstance(config, dict) else {}
    return PullSettings.from_dict(ours.get("pull", {}))


def _require_supported(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    parallel, quantization = vllm_config.parallel_config, vllm_config.model_config.quantization
    is_online = isinstance(vllm_config.quant_config, OnlineQuantizationConfig)  # of a checkpoint that is not quantised
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    unsupported = {
        f"quantization {quantization} of the checkpoint": quantization and not is_online,
        # Scales are maxima over all ranks, and a rank that reloads alone, to undo an update, would wait for the others.
        f"--quantization {quantization} and tensor parallelism": is_online and parallel.tensor_parallel_size > 1,
        f"--quantization {quantization} of experts": any(isinstance(method, OnlineMoEMethodBase) for method in methods),
        # vLLM says what its first replica holds, and labels them all.
        "--data-parallel-size": parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-lora": vllm_config.lora_config,
    }
    for what, found in unsupported.items():
        if found:
            raise InputError(f"deltacast cannot update a server with {what} yet")


def _checkpoint_folder(vllm_config: VllmConfig) -> Path:
    """Return where the model's files are; vLLM has fetched them if they were not here."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
    )


def _zeros_like(source: WeightSource) -> StateDictSource:
    dtypes = {meta.name: dtype_named(meta.dtype).torch_dtype for meta in source.metas()}
    return StateDictSource({meta.name: torch.zeros(meta.shape, dtype=dtypes[meta.name]) for meta in source.metas()})
