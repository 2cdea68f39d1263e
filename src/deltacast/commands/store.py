"""`deltacast store`: a run's versions in a folder or a bucket, each a few percent of a checkpoint."""

from __future__ import annotations

from typing import Final

import typer

from deltacast.commands.store_care import anchor, fsck, gc
from deltacast.commands.store_exchange import export, import_
from deltacast.commands.store_log import log, show
from deltacast.commands.store_pull import fold, plan, pull
from deltacast.commands.store_push import init, push

__all__ = ["app"]

app: Final = typer.Typer(
    help="Keep the versions of a run in a folder or a bucket, and get any of them back, proven.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
for _command in (init, push, pull, log, show, plan, fold, anchor, gc, fsck, export):
    app.command()(_command)
app.command("import")(import_)
