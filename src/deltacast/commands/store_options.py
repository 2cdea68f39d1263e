"""What every `deltacast store` command shares: which store, which key, and how it is opened and closed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from deltacast.commands.options import read_key
from deltacast.delta.errors import InputError, MissingObjectError, StoreError

if TYPE_CHECKING:
    from deltacast.store.version_store import VersionStore

__all__ = ["KEY_FILE_VARIABLE", "KeyFile", "Store", "opened", "wanted"]

KEY_FILE_VARIABLE: Final = "DELTACAST_SIGNING_KEY_FILE"

Store = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, s3://bucket/prefix, gs:// or az://.", show_default=False)
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        envvar=KEY_FILE_VARIABLE,
        help="The bytes of this file are the HMAC key: what is read must be signed with it, and what is written is.",
    ),
]


@contextmanager
def opened(store: str, key_file: Path | None) -> Generator[VersionStore]:
    """Open a store for one command.

    Raises:
        InputError: no URL of a store, or an empty key.
        MissingObjectError: there is no store.
        FormatError: what says that there is one is damaged or not signed.
        StoreError: it failed; also where it lacks an object that it names, which is not the user's mistake.
    """
    from deltacast.store.version_store import VersionStore

    with VersionStore.open(store, signing_key=read_key(key_file)) as found:
        try:
            yield found
        except MissingObjectError as err:
            raise StoreError(
                f"the store is damaged: {err.message}",
                hint=f"`deltacast store fsck {store}` says which versions are left. If gc ran meanwhile: try again.",
            ) from err


def wanted(store: VersionStore, version: int | None) -> int:
    """Return the version that a command was asked for; None asks for the newest.

    Raises:
        InputError: the store does not have it; the message says which there are.
        StoreError: the store failed.
    """
    versions = store.versions()
    if not versions:
        raise InputError("the store has no version yet", hint="`deltacast store push` publishes one.")
    if version is None:
        return versions[-1]
    if version not in versions:
        there = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else versions[0]
        raise InputError("the store does not have that version", expected=there, found=version,
                         hint="`deltacast store log` lists them.")  # fmt: skip
    return version
