"""Memory that each step of a store takes, for weights that are larger than it.

    python benchmarks/store_memory.py --dir /scratch [--gib 6] [--threads 2] [--limit-gib 1]

Makes a checkpoint of random bf16 weights in a folder of its own below --dir (three times their size is needed there),
pushes it to a store as a snapshot, downloads that, makes an update of 1 % of the words, and applies it in place. Each
step runs in a process of its own, of which two figures are reported:

- own: the most anonymous memory (RssAnon, looked at every 5 ms) above what it had after imports. A host needs that.
- resident: ru_maxrss. It counts pages of mapped files too, which the kernel takes back whenever somebody needs them.

--limit-gib sets RLIMIT_DATA for the steps that map nothing privately (download and apply): they end with a MemoryError
where they ask for more, whatever the host has.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from deltacast.delta.bits import numpy_words
from deltacast.delta.checkpoint import CheckpointSource, CheckpointWriter
from deltacast.delta.checkpoint_digest import CheckpointDigest, digest_checkpoint
from deltacast.delta.checkpoint_update import apply_to_checkpoint
from deltacast.delta.codec import read_update, write_update
from deltacast.delta.diff import diff_words
from deltacast.delta.patch import SparseWeightPatch, WeightUpdate
from deltacast.delta.sources import table_of
from deltacast.delta.table import ParamMeta
from deltacast.store.backends.local import LocalBackend
from deltacast.store.snapshots import download_snapshot, list_snapshots, read_manifest, write_snapshot

HIDDEN: Final = 8192
CHANGED: Final = 0.01
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Where and how much."""

    folder: Path
    num_tensors: int
    threads: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Row:
    """One step: seconds, and MiB of memory."""

    step: str
    seconds: float
    own_mib: int
    resident_mib: int
    limit_mib: int | None


def own_bytes() -> int:
    """Return the process's anonymous memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched() -> Iterator[list[int]]:
    """Yield a list whose last item, after the block, is the most anonymous memory that there was, in bytes."""
    seen, stop = [own_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            seen.append(max(seen[-1], own_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def make(setting: Setting) -> None:
    """Write a checkpoint of 128 MiB tensors, made one at a time."""
    rng = np.random.default_rng(0)
    metas = [
        ParamMeta(f"layers.{number}.weight", "bfloat16", (HIDDEN, HIDDEN)) for number in range(setting.num_tensors)
    ]
    with CheckpointWriter(setting.folder / "model.safetensors", metas, metadata={"format": "pt"}) as writer:
        for meta in metas:
            words = rng.integers(0, 1 << 16, HIDDEN * HIDDEN, np.uint16)
            writer.write(meta.name, torch.from_numpy(words).view(torch.bfloat16).view(HIDDEN, HIDDEN))


def push(setting: Setting) -> None:
    """Store it as a snapshot."""
    store = LocalBackend(setting.folder / "store", create=True)
    with CheckpointSource(setting.folder / "model.safetensors") as source:
        write_snapshot(store, source, run_id="memory", version=0, threads=setting.threads)


class Unmapped(LocalBackend):
    """A folder that is read as a bucket is: without its paths."""

    def path(self, name: str) -> Path | None:  # type: ignore[override]  # noqa: ARG002
        """Return None."""
        return None


def download(setting: Setting) -> None:
    """Fetch it through buffers."""
    store = Unmapped(setting.folder / "store")
    manifest = read_manifest(store, list_snapshots(store)[-1][1])
    download_snapshot(store, manifest, setting.folder / "out", threads=setting.threads)


def copy(setting: Setting) -> None:
    """Fetch it by the file system."""
    shutil.rmtree(setting.folder / "out")
    store = LocalBackend(setting.folder / "store")
    manifest = read_manifest(store, list_snapshots(store)[-1][1])
    download_snapshot(store, manifest, setting.folder / "out", threads=setting.threads)


def diff(setting: Setting) -> None:
    """Make an update of the weights."""
    rng = np.random.default_rng(1)
    with CheckpointSource(setting.folder / "out") as source:
        before, patches = digest_checkpoint(source, threads=setting.threads), list[SparseWeightPatch]()
        for meta in before.table:
            old = numpy_words(source.tensor(meta.name))
            new = old.copy()
            new[rng.integers(0, new.size, round(CHANGED * new.size))] += 1
            patch = diff_words(meta, old, new, before.fingerprint(meta.name))
            assert patch is not None
            patches.append(patch)
        table = table_of(source)
    after = CheckpointDigest.of((patch.meta, patch.fingerprint_after) for patch in patches).state_digest
    update = WeightUpdate(run_id="memory", epoch=0, base_version=0, target_version=1, base_digest=before.state_digest,
                          target_digest=after, table_digest=table.digest, patches=tuple(patches))  # fmt: skip
    write_update(update, setting.folder / "update.dcu", threads=setting.threads)


def apply(setting: Setting) -> None:
    """Apply it in place, proven before and after."""
    update = read_update(setting.folder / "update.dcu", threads=setting.threads)
    apply_to_checkpoint(update, setting.folder / "out", None, threads=setting.threads)


def measured(step: Callable[[Setting], None], setting: Setting) -> Row:
    """Run a step in this process, which runs no other."""
    limit = setting.limit_bytes if step in (download, copy, apply) else None
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    began = time.perf_counter()
    with watched() as seen:
        step(setting)
    seconds = time.perf_counter() - began
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return Row(step.__name__, seconds, (seen[-1] - seen[0]) // MIB, resident, limit and limit // MIB)


def main() -> None:
    """Run all steps and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an existing folder with room")
    parser.add_argument("--gib", type=float, default=6.0, help="size of the weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, help="RLIMIT_DATA for download, copy and apply")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    folder = options.dir / "deltacast-store-memory"
    folder.mkdir()
    limit = None if options.limit_gib is None else round(options.limit_gib * (1 << 30))
    setting = Setting(folder, math.ceil(options.gib * 8), options.threads, limit)
    rows = []
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as children:
            for step in (make, push, download, copy, diff, apply):
                row = children.submit(measured, step, setting).result()
                rows.append(asdict(row))
                print(f"{row.step:<9}{row.seconds:7.1f} s  own {row.own_mib:5} MiB  resident {row.resident_mib:5} MiB"
                      + (f"  within {row.limit_mib} MiB" if row.limit_mib else ""), flush=True)  # fmt: skip
    finally:
        shutil.rmtree(folder)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
