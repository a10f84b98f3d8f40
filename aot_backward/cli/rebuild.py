"""``aot-backward rebuild IN.pt2 -o OUT.pt2``."""

from __future__ import annotations

from pathlib import Path

import click

from .support.failures import EXIT_CODES, debug_option
from .support.options import import_option, key_option
from .support.progress import shown


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="IN.pt2")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT.pt2",
    help="The package to write; IN.pt2 is allowed.",
)
@click.option(
    "--target",
    default="",
    metavar="TARGETS",
    help="cpu:avx2 (the same as cpu), cpu:sse4, cpu:avx512, cpu:neon, cpu:wasm, cuda:sm_90 (80, 89, 100), or several "
    "with commas between them; by default those of IN.pt2.",
)
@import_option
@key_option
@debug_option
def rebuild(package: Path, output: Path, target: str, key: Path | None) -> None:
    """Compile the graphs in IN.pt2 again, for this torch or other processors. The model's source is not needed.

    Each is compared with PyTorch's own operators and with the numbers that were stored when IN.pt2 was exported, before
    anything is written.
    """
    from aot_backward_runtime.package.archive import open_package

    from ..packaging.rebuild import NARROWED
    from ..packaging.rebuild import rebuild as rebuild_package

    with shown() as progress:
        rebuild_package(package, output, target=target, progress=progress, key=key)
    if narrowed := open_package(output).manifest.notes.get(NARROWED):
        click.echo(f"{NARROWED}: {narrowed}", err=True)
    click.echo(f"wrote {output} ({output.stat().st_size / 1e6:.2f} MB)")
