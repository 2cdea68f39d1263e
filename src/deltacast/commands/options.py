"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from deltacast.delta.errors import InputError

__all__ = [
    "DEFAULT_THREADS",
    "Checkpoint",
    "Force",
    "Json",
    "SigningKey",
    "Threads",
    "read_key",
    "refuse_existing",
]

DEFAULT_THREADS: Final = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)

Checkpoint = Annotated[Path, typer.Argument(help="A safetensors file or a Hugging Face folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Parameters that are read at once.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
SigningKey = Annotated[
    Path | None,
    typer.Option(
        "--signing-key",
        metavar="FILE",
        help="The bytes of this file are the HMAC key: updates that are read must be signed with it, and updates "
        "that are written are.",
    ),
]


def read_key(path: Path | None) -> bytes | None:
    """Return the bytes of a key file, exactly as they are; None without one.

    Raises:
        InputError: the file is empty.
        OSError: it cannot be read.
    """
    if path is None:
        return None
    key = path.read_bytes()
    if not key:
        raise InputError("the signing key is empty", found=str(path), hint="Make one: head -c 32 /dev/urandom > key")
    return key


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise early, before any long work, if an output is there already.

    Raises:
        InputError: it is, and may not be replaced.
        FileNotFoundError: its folder does not exist.
    """
    if path.is_dir():
        raise InputError("the output is a folder", found=str(path), hint="Folders are never replaced: name a file.")
    if os.path.lexists(path) and not force:
        raise InputError("the output exists already", found=str(path), hint="Name another file, or pass --force.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"no such folder: {path.absolute().parent}")
