"""Small weights, updates and stores for tests of the durable store.

Weights are flat numpy words by name; digests come from the slow twin in `fingerprint_twin.py`, so that what a store is
held against was not computed by the code under test.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file

import fingerprint_twin as twin
import made_updates as made
from deltacast.delta.apply import apply_update
from deltacast.delta.bits import Words, from_words
from deltacast.delta.errors import BaseError, FencedError
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.patch import WeightUpdate
from deltacast.delta.state import WeightState
from deltacast.delta.table import ParamMeta
from deltacast.store.backends import open_backend
from deltacast.store.objects import ObjectBackend
from deltacast.store.records import SnapshotRef
from deltacast.store.version_store import VersionStore

Weights: TypeAlias = dict[str, Words]

RUN = "run"
KEY = b"a key of a test"
METAS = {meta.name: meta for meta in (
    ParamMeta("w", "bfloat16", (6, 7)), ParamMeta("router", "float32", (8,)), ParamMeta("steps", "int64", ()),
    ParamMeta("none", "bfloat16", (0, 4)),
)}  # fmt: skip


def first_weights(seed: int = 0) -> Weights:
    """Any bits at all."""
    rng = np.random.default_rng(seed)
    return {name: made.random_words(rng, meta) for name, meta in METAS.items()}


def next_weights(old: Weights, seed: int, num_changed: int = 3) -> Weights:
    """Weights that differ from `old` in up to so many words of each parameter."""
    rng = np.random.default_rng(seed)
    return {
        name: made.step(rng, words, np.flatnonzero(rng.permutation(words.size) < num_changed))
        for name, words in old.items()
    }


def digests(weights: Weights) -> tuple[str, str]:
    """The table digest and the state digest, by the twin."""
    return twin.digests(
        (name, meta.dtype, meta.shape, twin.bytes_fingerprint(weights[name].tobytes(), meta.row.word_bytes))
        for name, meta in METAS.items()
    )


def state_digest(weights: Weights) -> str:
    """The state digest, by the twin."""
    return digests(weights)[1]


def update_between(old: Weights, new: Weights, base_version: int, **changes: Any) -> WeightUpdate:
    """The update from one version to the next."""
    patches = [made.patch_of(METAS[name], old[name], new[name]) for name in METAS if (old[name] != new[name]).any()]
    table, target = digests(new)
    fields: dict[str, Any] = {
        "run_id": RUN, "epoch": 0, "base_version": base_version, "target_version": base_version + 1,
        "base_digest": state_digest(old), "target_digest": target, "table_digest": table,
        "optimizer_step": 10 * (base_version + 1),
    }  # fmt: skip
    return WeightUpdate(patches=tuple(patches), **(fields | changes))


def tensors_of(weights: Weights) -> dict[str, torch.Tensor]:
    """Tensors of their own memory."""
    return {name: from_words(words.copy(), METAS[name].row, METAS[name].shape) for name, words in weights.items()}


def source_of(weights: Weights) -> StateDictSource:
    """A weight source of these bits."""
    return StateDictSource(tensors_of(weights))


def replayed(base: Weights, version: int, updates: Iterable[WeightUpdate]) -> Weights:
    """The weights after applying updates to a version's."""
    tensors = tensors_of(base)
    state = WeightState(tensors, version=version)
    for update in updates:
        apply_update(state, update)
    return {name: np.frombuffer(_bytes(tensors[name]), words.dtype) for name, words in base.items()}


def folder_weights(folder: Path) -> Weights:
    """What the stock library reads from a checkpoint folder."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: np.frombuffer(_bytes(tensor), METAS[name].row.numpy_word) for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())


def same(left: Weights, right: Weights) -> bool:
    """Whether two sets of weights have the same names and bits."""
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def new_backend(kind: str, folder: Path) -> ObjectBackend:
    """An empty backend of its own: `local` or `memory`."""
    return open_backend(folder / "store" if kind == "local" else f"memory://{secrets.token_hex(8)}", create=True)


def new_store(backend: ObjectBackend, *, key: bytes | None = None, first_version: int = 0) -> VersionStore:
    """An empty store."""
    return VersionStore.create(backend, run_id=RUN, first_version=first_version, signing_key=key)


def filled_store(
    backend: ObjectBackend, num_updates: int, *, key: bytes | None = None, seed: int = 0, folds: bool = True
) -> tuple[VersionStore, list[Weights]]:
    """A store of a snapshot and so many updates, and the weights of each version."""
    store = new_store(backend, key=key)
    weights = [first_weights(seed)]
    store.publish_snapshot(source_of(weights[0]))
    for version in range(num_updates):
        weights.append(next_weights(weights[-1], 1000 * seed + version))
        store.publish_update(update_between(weights[-2], weights[-1], version), folds=folds)
    return store, weights


def race_to_publish(url: str, writer: int, num_tries: int, start: Barrier) -> None:
    """Publish on whatever is the newest version, each time as a new writer; for a process of its own.

    The store begins with `first_weights()`. The optimizer step of a version says which process and which try it is.
    Exits with the number of versions that were published.
    """
    start.wait(60)
    published = 0
    for number in range(num_tries):
        store = VersionStore.open(url)
        head = store.head()
        assert head is not None
        weights = replayed(first_weights(), 0, store.updates(store.plan(0)))
        step = 1000 * writer + number
        try:
            store.publish_update(
                update_between(weights, next_weights(weights, step), head.version, optimizer_step=step)
            )
        except (FencedError, BaseError):
            continue
        published += 1
    raise SystemExit(published)


def a_snapshot_ref(version: int) -> SnapshotRef:
    """The reference to a snapshot that is nowhere."""
    digest = "xxh3_128:" + "ab" * 16
    return SnapshotRef(f"snapshots/{version:020}-{'ab' * 8}/manifest.json", 1000, digest, 100_000)
