"""What every `deltacast store` command shares: which store, which key, and how it is opened and closed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from deltacast.commands.options import read_key

if TYPE_CHECKING:
    from deltacast.store.version_store import VersionStore

__all__ = ["KEY_FILE_VARIABLE", "KeyFile", "Store", "opened"]

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


def opened(store: str, key_file: Path | None) -> VersionStore:
    """Open a store; the command closes it (`with`).

    Raises:
        InputError: no URL of a store, or an empty key.
        StoreError: there is no store.
        FormatError: what says that there is one is damaged or not signed.
    """
    from deltacast.store.version_store import VersionStore

    return VersionStore.open(store, signing_key=read_key(key_file))
