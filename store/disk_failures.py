"""What a disk refuses, as a `StoreError` that says where, why, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from deltacast.delta.errors import StoreError

__all__ = ["DISK_HINTS", "disk_failure", "explained"]

DISK_HINTS: Final[Mapping[int, str]] = {
    errno.ENOSPC: "Free space there (in a store, of old versions: `deltacast store gc`), then try again.",
    errno.EDQUOT: "This user's quota is used up: free space there, then try again.",
    errno.EROFS: "The file system is read-only: mount it for writing, or use the store from where it is.",
    errno.EACCES: "Give this user the right to write there.",
    errno.EPERM: "Give this user the right to write there.",
    errno.EIO: "The disk or the network file system failed: check it before anything else is written there.",
    errno.ENOTDIR: "There is a file where a folder should be: move it away.",
    errno.EISDIR: "There is a folder where a file should be: move it away.",
    errno.ELOOP: "Symbolic links inside a store are not followed: put the file itself there.",
    errno.ENOENT: "Was the folder removed while it was in use?",
    errno.EFBIG: "The file system or this process's limit (ulimit -f) allows no file of that size.",
    errno.EMFILE: "This process has too many files open: raise its limit (ulimit -n).",
    errno.ENFILE: "This machine has too many files open.",
}
"""Error number -> what to do about it."""


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a `StoreError`; the store's own errors pass as they are.

    Args:
        action: what is done: "write", "list".
        path: to what.
    """
    try:
        yield
    except StoreError:
        raise
    except OSError as err:
        raise disk_failure(err, action, path) from err


def disk_failure(err: OSError, action: str, path: Path) -> StoreError:
    """Return the error that says what the operating system refused."""
    why = os.strerror(err.errno) if err.errno else str(err)
    return StoreError(f"cannot {action} {path}: {why}", hint=DISK_HINTS.get(err.errno or 0))
