"""``aot-backward``: the command line. One command per file; torch is imported when a command runs, not for
``--help``."""

from __future__ import annotations

import click

from aot_backward_exporters.graph import VERSION

from .convert import convert
from .doctor import doctor
from .export import export
from .inspect import inspect
from .native import native
from .rebuild import rebuild
from .record import record
from .replay import replay
from .run import run
from .sign import sign
from .support.failures import EXIT_CODES, Commands, debug_option
from .train import train
from .verify import verify

__all__ = ["main"]


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="aot-backward")
@debug_option
def main() -> None:
    """PyTorch gradients, compiled ahead of time into one file that runs without tracing or a compiler."""


for command in (export, convert, record, replay, inspect, verify, sign, rebuild, run, train, native, doctor):
    main.add_command(command)
