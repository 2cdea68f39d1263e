"""deltacast: keep RL inference workers bit-identical to the trainer by sending only the weights that changed.

`deltacast.delta` is what changed, `deltacast.store` what is kept, `deltacast.engines` how it travels. The names
below are the usual ones; they are imported on first use, so that importing `deltacast` does not import torch.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltacast.delta.apply import apply_update
    from deltacast.delta.checkpoint import CheckpointSource
    from deltacast.delta.codec import decode_update, encode_update
    from deltacast.delta.diff import diff_state
    from deltacast.delta.module_source import ModuleSource, StateDictSource
    from deltacast.delta.sources import ServingDType
    from deltacast.delta.state import WeightState
    from deltacast.engines.base import TrainerInitInfo, WorkerInitInfo
    from deltacast.engines.clients import HttpClient, InProcessClient, PausingClient, RayClient
    from deltacast.engines.registry import trainer_engine, worker_engine
    from deltacast.store.version_store import VersionStore

__version__ = "0.1.0"

_HOMES = {
    "CheckpointSource": "deltacast.delta.checkpoint",
    "HttpClient": "deltacast.engines.clients",
    "InProcessClient": "deltacast.engines.clients",
    "ModuleSource": "deltacast.delta.module_source",
    "PausingClient": "deltacast.engines.clients",
    "RayClient": "deltacast.engines.clients",
    "ServingDType": "deltacast.delta.sources",
    "StateDictSource": "deltacast.delta.module_source",
    "TrainerInitInfo": "deltacast.engines.base",
    "VersionStore": "deltacast.store.version_store",
    "WeightState": "deltacast.delta.state",
    "WorkerInitInfo": "deltacast.engines.base",
    "apply_update": "deltacast.delta.apply",
    "decode_update": "deltacast.delta.codec",
    "diff_state": "deltacast.delta.diff",
    "encode_update": "deltacast.delta.codec",
    "trainer_engine": "deltacast.engines.registry",
    "worker_engine": "deltacast.engines.registry",
}

__all__ = [
    "CheckpointSource",
    "HttpClient",
    "InProcessClient",
    "ModuleSource",
    "PausingClient",
    "RayClient",
    "ServingDType",
    "StateDictSource",
    "TrainerInitInfo",
    "VersionStore",
    "WeightState",
    "WorkerInitInfo",
    "__version__",
    "apply_update",
    "decode_update",
    "diff_state",
    "encode_update",
    "trainer_engine",
    "worker_engine",
]

if not (Path(__file__).parent / "delta").is_dir():
    raise ImportError(
        "src/deltacast/delta is not a link to ../../delta: this checkout was made without symbolic links. "
        "Clone with `git -c core.symlinks=true clone`, or install the wheel."
    )


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'deltacast' has no attribute {name!r}")
    return getattr(import_module(home), name)
