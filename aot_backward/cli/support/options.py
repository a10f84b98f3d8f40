"""Options that several commands share: ``--import``, ``--key`` and ``--tune``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def import_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Imports the modules that are named, before the command runs; the current folder comes last on the path."""

    def imported(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> None:
        if not names or context.resilient_parsing:
            return
        from aot_backward_runtime.operators import import_modules

        # The console script's own path begins with the folder of the script
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)
        import_modules(names)

    text = "Import this module first, such as one that registers operators which the package calls. May be given several times."
    return click.option(
        "--import", "imports", multiple=True, metavar="MODULE", expose_value=False, callback=imported, help=text
    )(command)


def key_option(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "The public key that the package must be signed by."
    return click.option("--key", type=click.Path(path_type=Path), metavar="PUBLIC.pem", help=text)(command)


def tune_option(words: str) -> Callable[..., Any]:
    """``none`` or ``quick``, by default what the environment says; ``words``: what it does for this command."""
    return click.option(
        "--tune",
        type=click.Choice(["none", "quick"]),
        envvar="AOT_BACKWARD_TUNE",
        default="quick",
        show_default=True,
        show_envvar=True,
        help=words,
    )
