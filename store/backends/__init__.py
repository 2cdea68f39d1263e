"""Where objects are kept: `local.py` (a folder), `memory.py` (tests), `remote.py` (S3, GCS, Azure).

`deltacast.store.objects.ObjectBackend` is the contract of all three; read it first, then `local.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltacast.delta.errors import InputError
from deltacast.store.objects import ObjectBackend

__all__ = ["open_backend"]

_REMOTE = ("s3", "gs", "az")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_backend(url: str | os.PathLike[str], *, create: bool = False) -> ObjectBackend:
    """Open the place that a URL names.

    Args:
        url: a folder as a path or a file:// URL; `s3://bucket/prefix`, `gs://bucket/prefix` or
            `az://container/prefix` (credentials come from the environment: `deltacast.store.backends.remote`); or
            `memory://NAME`, which is shared inside this process and gone with it.
        create: make the folder if there is none. A bucket is never made, but tried: does its service refuse to create
            what is there already?

    Raises:
        InputError: not such a URL, or one that holds credentials (the message does not repeat it); or obstore, the
            extra `objects`, is missing.
        MissingObjectError: there is no such folder.
        StoreError: it cannot be made, or the bucket's service lets two writers create one object.
    """
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        return _local(Path(url), create=create)
    scheme = match[1].lower()
    if scheme == "memory":
        from deltacast.store.backends.memory import MemoryBackend

        return MemoryBackend(match[2])
    if scheme == "file":
        return _local(_file_url(str(url)), create=create)
    if scheme in _REMOTE:
        return _remote(str(url), create=create)
    raise InputError("not a place for a store", expected="a folder, s3://, gs://, az:// or memory://", found=scheme)


def _local(root: Path, *, create: bool) -> ObjectBackend:
    from deltacast.store.backends.local import LocalBackend

    return LocalBackend(root, create=create)


def _remote(url: str, *, create: bool) -> ObjectBackend:
    try:
        from deltacast.store.backends.remote import RemoteBackend
    except ModuleNotFoundError as err:
        if err.name != "obstore":
            raise
        raise InputError("a store in a bucket needs obstore", hint="pip install 'deltacast[objects]'") from err
    backend = RemoteBackend(url)
    if create:
        backend.check_create()
    return backend


def _file_url(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InputError("not a file URL of this machine", expected="file:///folder", found=f"file://{parts.netloc}...")
    return Path(unquote(parts.path))
