"""How much memory of its own a process takes to store and to fetch weights: a few pieces, however large they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

_MIB: Final = 1 << 20
_PIECE_MIB: Final = 16
_SIZE_MIB: Final = 160
_SLACK_MIB: Final = 24
"""Thread stacks, keys of fingerprints, allocator."""

_CHILD: Final = """
import sys
from pathlib import Path
import numpy as np, torch
from deltacast.delta.module_source import StateDictSource
from deltacast.store.backends.local import LocalBackend
from deltacast.store.snapshots import download_snapshot, list_snapshots, open_snapshot, read_manifest, write_snapshot

step, store, threads, size_mib = sys.argv[1], LocalBackend(sys.argv[2], create=True), int(sys.argv[3]), int(sys.argv[4])

class Unmapped(LocalBackend):
    def path(self, name):
        return None

def own_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon:"))

def weights():
    one = torch.from_numpy(np.memmap(store.url + ".bin", np.int16, "w+", shape=(size_mib << 9, 1024)))
    if step == "transposed":
        return {f"layer.{number}": part.t() for number, part in enumerate(one.chunk(16))}
    return {"one": one}

def stored():
    return read_manifest(store, list_snapshots(store)[-1][1])

seen = [own_mib()]
note = lambda _: seen.append(own_mib())
if step == "download":
    download_snapshot(Unmapped(store.url), stored(), sys.argv[5], threads=threads, progress=note)
elif step == "copy":
    download_snapshot(store, stored(), sys.argv[5], threads=threads, progress=note)
else:
    source = open_snapshot(store, stored()) if step == "checkpoint" else StateDictSource(weights())
    seen[0] = own_mib()
    write_snapshot(store, source, run_id="run", version=0, threads=threads, progress=note)
print(max(seen) - seen[0], len(seen))
"""


def _peak_mib(step: str, store: Path, threads: int, *more: object) -> int:
    """Run one step in a process of its own; the most anonymous memory it had at any piece, above what it began with."""
    command = [sys.executable, "-P", "-c", _CHILD, step, store, threads, _SIZE_MIB, *more]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    peak, looks = map(int, done.stdout.split())
    assert looks > _SIZE_MIB // _PIECE_MIB
    return peak


def test_memory_is_bounded_by_threads_and_not_by_weights(tmp_path: Path) -> None:
    """One tensor of 160 MiB is stored, mapped and stored again, fetched, and copied in a few pieces of 16 MiB."""
    store, threads = tmp_path / "store", 2
    bound = (threads + 2) * _PIECE_MIB + _SLACK_MIB
    assert _peak_mib("live", store, threads) < bound
    assert _peak_mib("checkpoint", store, threads) < bound
    assert _peak_mib("download", store, threads, tmp_path / "downloaded") < bound
    assert _peak_mib("copy", store, threads, tmp_path / "copied") < bound


_REPLAY: Final = """
import sys, threading
from pathlib import Path
import numpy as np, torch
from deltacast.delta.diff import diff_state
from deltacast.delta.module_source import StateDictSource
from deltacast.delta.sources import checked
from deltacast.delta.state import WeightState
from deltacast.store.version_store import VersionStore

def own_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon:"))

store = sys.argv[1]
if len(sys.argv) == 2:
    made = VersionStore.create(store, run_id="run")
    old = {f"p{number}": torch.zeros(8 << 20, dtype=torch.int16) for number in range(8)}
    made.publish_snapshot(StateDictSource(old))
    new = {name: words.clone() for name, words in old.items()}
    for words in new.values():
        words[::4] = 1
    state = WeightState(old, version=0)
    update = diff_state(state, checked(StateDictSource(new)), run_id="run", epoch=0, target_version=1)
    made.publish_update(update)
else:
    start, most, done = own_mib(), 0, threading.Event()
    def watch():
        global most
        while not done.wait(0.002):
            most = max(most, own_mib())
    watcher = threading.Thread(target=watch)
    watcher.start()
    VersionStore.open(store).materialize(1, sys.argv[2], threads=1)
    done.set()
    watcher.join()
    print(most - start)
"""


def test_a_large_update_is_not_held_whole(tmp_path: Path) -> None:
    """Of 64 Mi words every fourth changes: 160 MiB of positions and words, of which 4 Mi changes are held at a time.

    Such a portion takes 40 MiB decoded, and half as much again while it is written; the snapshot came in less.
    """
    for more in ([], [tmp_path / "out"]):
        command = [sys.executable, "-P", "-c", _REPLAY, tmp_path / "store", *more]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 + _SLACK_MIB


def test_copies_of_tensors_that_are_not_contiguous_do_not_add_up(tmp_path: Path) -> None:
    """Of sixteen transposed tensors of 10 MiB, as many are copies at a time as pieces are under way."""
    threads = 2
    bound = (threads + 3) * (_SIZE_MIB // 16) + _SLACK_MIB
    assert _peak_mib("transposed", tmp_path / "store", threads) < bound
