"""``aot-backward inspect OUT.pt2``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .support.describe import describe
from .support.failures import EXIT_CODES, debug_option
from .support.tables import count, say, say_json, size, table

if TYPE_CHECKING:
    from aot_backward_runtime.package.archive import Archive


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="REPORT.html",
    help="Write a page with memory and graphs, in one file.",
)
@debug_option
def inspect(package: Path, as_json: bool, html: Path | None) -> None:
    """Show the entries of OUT.pt2, their variants, guards and sizes, recorded passes, and what it was built for. Runs
    nothing of it.

    Sizes and structure are checked, digests are not (but for those of graphs that are drawn): that is what verify does.
    """
    if html is not None and as_json:
        raise click.UsageError("--json and --html exclude each other: call inspect twice.")
    if html is not None and html.resolve() == package.resolve():
        raise click.UsageError(f"--html would write the report over the package {package}.")
    from aot_backward_runtime.package.archive import open_package

    archive = open_package(package)
    if html is not None:
        write_report(archive, html)
    elif as_json:
        say_json(describe(archive))
    else:
        print_text(archive)


def print_text(archive: Archive) -> None:
    from aot_backward.report.plain_text import Table, text

    say(f"{archive.path}:")
    for block in text(archive):
        if isinstance(block, Table):
            table(block.header, block.rows)
        else:
            say(block)


def write_report(archive: Archive, path: Path) -> None:
    from aot_backward.report import report
    from aot_backward_runtime.errors import AotBackwardError
    from aot_backward_runtime.format.atomic_file import replacing

    text = report(archive).encode()
    try:
        with replacing(path.resolve()) as file:
            file.write(text)
    except OSError as error:
        raise AotBackwardError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
    graphs = sum(bool(spec.graph) for spec in archive.manifest.libraries.values())
    say(
        f"wrote {path} ({size(len(text))}): {count(len(archive.manifest.entries), 'entry', 'entries')}, {count(graphs, 'graph')}"
    )
