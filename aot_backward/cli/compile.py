"""``aot-backward compile FILE -o bw.pt2``."""

from __future__ import annotations

from pathlib import Path

import click

from .support.failures import EXIT_CODES, debug_option
from .support.imports import import_option
from .support.progress import shown


@click.command(name="compile", epilog=EXIT_CODES)
@click.argument("misses", type=click.Path(path_type=Path), metavar="FILE")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="BW.pt2", help="The package that they are added to.")
@click.option("--entry", default="backward", show_default=True, metavar="NAME", help="The name of its replay entry.")
@click.option("--target", default="cpu", show_default=True, help="cpu, or cuda for this machine's GPU.")
@import_option
@debug_option
def compile_command(misses: Path, output: Path, entry: str, target: str) -> None:
    """Compile the passes that a replay saved with --save-misses, and add them to BW.pt2."""
    from ..recording.miss_file import compile_misses

    with shown() as progress:
        skipped = compile_misses(misses, output, entry=entry, target=target, progress=progress)
    for reason in skipped:
        click.echo(f"left out: {reason}", err=True)
    click.echo(f"wrote {output} ({output.stat().st_size / 1e6:.2f} MB)" if output.exists() else "nothing was written")
    if skipped:
        raise click.exceptions.Exit(1)
