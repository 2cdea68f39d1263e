"""Stores of engine tests, and what is in them as the stock library reads it."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from deltacast.store.backends import open_backend
from deltacast.store.version_store import VersionStore
from engine_processes import weights_of
from engine_setups import RUN
from failing_backend import FailingBackend


def failing_store() -> tuple[VersionStore, FailingBackend]:
    """An empty store in memory, and its backend."""
    backend = FailingBackend(open_backend(f"memory://{secrets.token_hex(8)}", create=True))
    return VersionStore.create(backend, run_id=RUN), backend


def reopened(store: VersionStore) -> VersionStore:
    """The same store as another process opens it."""
    return VersionStore.open(store.backend)


def stored(store: VersionStore, version: int) -> dict[str, bytes]:
    """A version's weights, as raw bytes of every name in its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        store.materialize(version, out)
        tensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
        return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def covered(module: nn.Module) -> dict[str, bytes]:
    """The same of a policy's weights: its tied head goes by the first name."""
    return {name: raw for name, raw in weights_of(module).items() if name != "head"}


def everything_in(store: VersionStore) -> dict[str, bytes]:
    """All objects of a store."""
    return {info.name: store.backend.read(info.name) for info in store.backend.list("")}
