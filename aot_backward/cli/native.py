"""``aot-backward native --target cpu:neon -o FOLDER``."""

from __future__ import annotations

from pathlib import Path

import click

from .support.failures import EXIT_CODES, debug_option


@click.command(epilog=EXIT_CODES)
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="The processor: cpu:neon for 64-bit ones of Arm. Needs a compiler for it.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where the libraries and the header go.",
)
@debug_option
def native(target: str, output: Path) -> None:
    """Write libaot_backward.so and libaotb_core.so, which run packages without PyTorch, and aot_backward.h, for a
    target."""
    from ..commands.native import write_libraries

    for path in write_libraries(target, output):
        click.echo(f"wrote {path}")
