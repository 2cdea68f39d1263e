"""Processes that write to a folder store: racing for names, and on a disk that is full, read-only or split in two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from deltacast.delta.errors import ObjectExistsError, StoreError
from deltacast.store.backends.local import LocalBackend


def race(root: str, names: list[str], writer: int, start: Barrier, won: Queue[tuple[int, list[str]]]) -> None:
    """Create every name together with the others at the barrier; report those that this writer created."""
    backend = LocalBackend(root)
    start.wait(60)
    mine = []
    for name in names:
        try:
            backend.create(name, f"{writer}".encode() * 1000)
            mine.append(name)
        except ObjectExistsError:
            pass
    won.put((writer, mine))


def use_small_disk(root: Path) -> list[str]:
    """Fill a file system of 256 KiB, then make it read-only; return what the store said and what it held."""
    _mount("-t", "tmpfs", "-o", "size=256k", "none", str(root))
    backend = LocalBackend(root)
    backend.create("small", b"1234")
    said = [_refusal(lambda: backend.write("large", (bytes(4096) for _ in range(100)))), _held(root)]
    backend.write("fits", [bytes(4096)] * 20)
    _mount("-o", "remount,ro", str(root))
    changes = (lambda: backend.create("late", b""), lambda: backend.delete("small"), backend.now_s)
    said += [_refusal(change) for change in changes]
    return [*said, _held(root), str(LocalBackend(root).read("small"))]


def use_split_disk(root: Path) -> list[str]:
    """Keep drafts on another file system than objects; return what the store said and what it held."""
    backend = LocalBackend(root)
    (root / ".tmp").mkdir()
    _mount("-t", "tmpfs", "-o", "size=256k", "none", str(root / ".tmp"))
    return [_refusal(lambda: backend.create("split", b"1234")), _held(root)]


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=10)


def _refusal(change: Callable[[], object]) -> str:
    try:
        return f"done: {change()}"
    except StoreError as err:
        return str(err)


def _held(root: Path) -> str:
    return " ".join(sorted(str(path.relative_to(root)) for path in root.rglob("*")))


if __name__ == "__main__":
    use = {"small": use_small_disk, "split": use_split_disk}[sys.argv[1]]
    sys.stdout.write("\n".join(use(Path(sys.argv[2]))))
