"""``--import``, for the commands that load a package."""

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

        if (here := str(Path.cwd())) not in sys.path:  # the console script's own path begins with the folder of the script
            sys.path.append(here)
        import_modules(names)

    text = "Import this module first, such as one that registers operators which the package calls. May be given several times."
    return click.option("--import", "imports", multiple=True, metavar="MODULE", expose_value=False, callback=imported, help=text)(command)
