"""The command line: `deltacast COMMAND`, one module per command in `deltacast.commands`.

Building the app and showing its help imports neither torch nor numpy: commands import what they need when they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from deltacast import __version__
from deltacast.commands import bench, store
from deltacast.commands.apply import apply
from deltacast.commands.demo import demo
from deltacast.commands.diff import diff
from deltacast.commands.digest import digest
from deltacast.commands.failures import BROKEN_PIPE, report_failure
from deltacast.commands.fold import fold
from deltacast.commands.inspect import inspect
from deltacast.commands.verify import verify

__all__ = ["app", "main"]

_EPILOG: Final = """\b
Exit codes:
  0    done; what was compared is the same
  1    a mismatch: checkpoints differ, a digest is another, an update is for another base
  2    usage: an option, a path that is missing or taken, an input that cannot be used
  3    bad data: a damaged or foreign file, a wrong signature
  4    I/O: a peer, the network, a disk or the store failed
  70   a bug in deltacast (DELTACAST_TRACEBACK=1 shows where)
  130  interrupted
  141  the reader of stdout went away

Errors are one line on stderr or, with --json, {"error": {...}} on stdout.
"""


class _CommandLine(TyperGroup):
    """Turn whatever a command raises into an exit code and one clear line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit the process; with `standalone_mode=False` return or raise instead."""
        given = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except Exception as error:
            if not standalone_mode:
                raise
            code = report_failure(error, as_json="--json" in given[: given.index("--") if "--" in given else None])
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a closed stdout ends it quietly."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            with suppress(OSError):  # the interpreter flushes once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        return result


app = typer.Typer(
    name="deltacast",
    cls=_CommandLine,
    help="Weight updates as files: prove, compare, diff, apply, fold and inspect them; keep versions in a store.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing rich doubles the time of --help
    pretty_exceptions_enable=False,
)


def _show_version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


for _command in (digest, verify, diff, apply, fold, inspect, demo):
    app.command()(_command)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line of this process; never returns."""
    app()
