"""``aot-backward run OUT.pt2 --inputs in.safetensors --outputs out.safetensors``."""

from __future__ import annotations

from pathlib import Path

import click

from .support.failures import EXIT_CODES, debug_option
from .support.options import import_option, key_option
from .support.tables import say


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option(
    "--inputs",
    required=True,
    type=click.Path(path_type=Path),
    metavar="IN.safetensors",
    help="The arguments, by the names that inspect lists.",
)
@click.option(
    "--outputs",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT.safetensors",
    help="The file for the results, written whole or not at all.",
)
@click.option("--entry", metavar="NAME", help="The entry to call. Not needed if there is only one.")
@click.option(
    "--mode", type=click.Choice(["train", "eval"]), help="By default, the mode in which the entry was exported."
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="The GPU, such as cuda:1, if the package is for GPUs. By default, the current one.",
)
@import_option
@key_option
@debug_option
def run(
    package: Path,
    inputs: Path,
    outputs: Path,
    entry: str | None,
    mode: str | None,
    device: str | None,
    key: Path | None,
) -> None:
    """Call one entry of OUT.pt2 once.

    A module gives output[0], output[1] …; where IN.safetensors also holds "gradient of output[0]", it gives "gradient
    of NAME" for every parameter and input that gets one. A gradient function gives "value" and "gradient of NAME".
    """
    from aot_backward_runtime import load

    from ..commands.run_entry import call_entry
    from ..tensor_file import read_tensors, write_tensors

    results = call_entry(load(package, device=device, key=key), entry, mode, read_tensors(inputs))
    write_tensors(outputs, results)
    say(f"wrote {outputs}: {', '.join(results)}")
