"""How the command line fails: one line on standard error that names the next step, and an exit code that scripts can
tell apart."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import click

from .tables import say

FAILED, USAGE, INCOMPATIBLE, INTERRUPTED = 1, 2, 3, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 it failed, or a check found something wrong; 2 bad usage; "
    "3 the package was built for another machine or torch; 130 interrupted."
)
_DEBUG = "aot_backward.debug"


class ScriptInterrupted(click.Abort):
    """A script that the command ran was interrupted, and its traceback has been printed."""


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--debug``, before or after the name of the command."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            context.find_root().meta[_DEBUG] = True

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=note,
        is_eager=True,
        help="On an error, show the traceback.",
    )(command)


class Commands(click.Group):
    """A group that reports errors as this module says, also when a test calls it."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = USAGE
        except click.ClickException as error:
            context = getattr(error, "ctx", None)  # only usage errors know their command
            hint = f" ({context.command_path} --help shows how)" if context is not None else ""
            code = _report(f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
        except ScriptInterrupted:
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt from None  # Python ends by the signal then, as it does after the script alone
        except click.Abort:
            code = _report("interrupted", INTERRUPTED)
        except BrokenPipeError:  # the reader of the output has closed it: `aot-backward inspect … | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = FAILED
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:
            if _DEBUG in ctx.meta:
                traceback.print_exc()
            ctx.exit(_failure(error, _DEBUG in ctx.meta))


def _failure(error: Exception, debug: bool) -> int:
    # Imports torch, which the failed command had imported already
    from aot_backward_runtime.errors import AotBackwardError, IncompatibleError

    lines = str(error).strip().splitlines() or [type(error).__name__]
    more = "" if debug or len(lines) == 1 else " (--debug shows the rest)"
    if isinstance(error, IncompatibleError):
        return _report(lines[0] + more, INCOMPATIBLE)
    if isinstance(error, (AotBackwardError, OSError)):
        return _report(lines[0] + more, FAILED)
    return _report(f"unexpected {type(error).__name__}: {lines[0]}; --debug shows where", FAILED)


def _report(message: str, code: int) -> int:
    say(f"error: {' '.join(message.split())}", err=True)
    return code
