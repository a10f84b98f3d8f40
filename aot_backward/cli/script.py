"""Runs a person's script in this process, as ``python train.py ARGS…`` would, inside a context."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click


class Script(click.ParamType):
    """A file of Python code."""

    name = "TRAIN.py"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(value))
        if not path.is_file():
            self.fail(f"{value} does not exist", param, ctx)
        return path


def run_script(script: Path, arguments: Sequence[str], context: AbstractContextManager[Any]) -> int:
    """Runs ``script`` as ``__main__`` inside ``context``; its exit code. Its errors go up with their own traceback."""
    before, first = sys.argv, sys.path[0]
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        with context:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as end:
                if end.code is None or isinstance(end.code, int):
                    return end.code or 0
                click.echo(end.code, err=True)
                return 1
        return 0
    finally:
        sys.argv, sys.path[0] = before, first
