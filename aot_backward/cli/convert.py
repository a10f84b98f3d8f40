"""``aot-backward convert IN.pt2 -o OUT.onnx``, or ``--format wasm -o FOLDER``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .support.failures import EXIT_CODES, debug_option
from .support.options import import_option
from .support.progress import shown

if TYPE_CHECKING:
    from ..onnx.conversion import OnnxFile

external_data_option = click.option(
    "--external-data/--no-external-data",
    default=None,
    help="Store the weights in one file next to the ONNX graphs, OUT.onnx.data. By default, only if they are larger than 64 MiB.",
)


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="IN.pt2")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="The file to write; further files are named after it. With --format wasm, the folder.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["onnx", "wasm"]),
    default="onnx",
    show_default=True,
    help="Graphs for onnxruntime, or a folder for browsers and Node.js.",
)
@click.option("--entry", metavar="NAME", help="Only this entry; by default all.")
@click.option(
    "--variant", type=int, metavar="N", help="Only the variant of this number, counted from 0; by default all."
)
@external_data_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@import_option
@debug_option
@click.pass_context
def convert(
    context: click.Context,
    package: Path,
    output: Path,
    form: str,
    entry: str | None,
    variant: int | None,
    external_data: bool | None,
    as_json: bool,
) -> None:
    """Write the gradients in IN.pt2 as ONNX graphs, which onnxruntime runs, or as a WebAssembly module. The model's
    source is not needed.

    A module becomes OUT.forward.onnx and OUT.backward.onnx, a gradient function or a training step OUT.onnx. Each graph
    is compared with PyTorch's own operators and with the numbers that were stored when IN.pt2 was exported, before
    anything is written.

    With --format wasm, IN.pt2 is compiled for WebAssembly, unless it was exported with --target cpu:wasm, and compared
    with the stored numbers in Node.js. This needs emscripten.
    """
    if form == "wasm":
        refuse_idle(context, form, ("entry", "variant", "external_data", "as_json"))
        from ..web import convert as convert_to_wasm

        with shown() as progress:
            paths = convert_to_wasm(package, output, progress=progress)
        say_paths(paths)
        return
    from ..onnx.convert import convert as convert_package

    with shown() as progress:
        files = convert_package(
            package, output, entry=entry, variant=variant, external_data=external_data, progress=progress
        )
    say(files, as_json)


def refuse_idle(context: click.Context, form: str, idle: Sequence[str]) -> None:
    """:class:`click.UsageError` for an option that does not apply to the format."""
    for parameter in context.command.params:
        if (
            parameter.name in idle
            and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        ):
            raise click.UsageError(f"{parameter.opts[0]} does not apply to --format {form}", context)


def say_paths(paths: Sequence[Path]) -> None:
    for path in paths:
        click.echo(f"wrote {path} ({path.stat().st_size / 1e3:.0f} kB)")


def say(files: Sequence[OnnxFile], as_json: bool) -> None:
    """What was written."""
    if as_json:
        click.echo(json.dumps({"files": [dataclasses.asdict(f) for f in files]}, indent=2, default=str))
        return
    for file in files:
        size = file.path.stat().st_size / 1e6
        click.echo(
            f"wrote {file.path} ({size:.2f} MB): {file.graph} of {file.entry}, {file.nodes} nodes, opset {file.opset}"
        )
    for data in dict.fromkeys(f.data for f in files if f.data is not None):
        click.echo(f"wrote {data} ({data.stat().st_size / 1e6:.2f} MB): weights")
    for text in dict.fromkeys(f.compared for f in files):
        click.echo(f"compared by {text}")
