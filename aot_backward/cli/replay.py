"""``aot-backward replay bw.pt2 -- train.py ARGS…``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .support.failures import EXIT_CODES, ScriptInterrupted, debug_option
from .support.options import import_option, key_option
from .support.script import Script, run_script, script_options
from .support.tables import say


@click.command(epilog=EXIT_CODES)
@click.option("--entry", metavar="NAME", help="The replay entry. Not needed if there is only one.")
@click.option("--strict", is_flag=True, help="Raise an error if the package has no variant for a backward pass.")
@click.option("--no-optimizer", is_flag=True, help="Run optimizer steps in eager.")
@click.option(
    "--json", "as_json", is_flag=True, help="The report as JSON, on standard error: standard output is the script's."
)
@import_option
@key_option
@debug_option
@click.argument("package", type=click.Path(path_type=Path), metavar="BW.pt2")
@script_options
@click.pass_context
def replay(
    context: click.Context,
    entry: str | None,
    strict: bool,
    no_optimizer: bool,
    as_json: bool,
    package: Path,
    script: Script,
    key: Path | None,
    max_structures: int | None,
) -> None:
    """Run TRAIN.py as it is, its backward passes and optimizer steps from BW.pt2: no tracing, no compiler.

    A pass that the package has no variant for is interpreted: the gradients are eager's, and the report says why. After
    three such passes from one place, others from there run in eager.
    """
    from aot_backward_runtime.passes.session import replay as replaying
    from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

    from ..recording.launcher import rank_of_all

    session = replaying(
        package,
        entry=entry,
        strict=strict,
        optimizer=not no_optimizer,
        key=key,
        max_structures=max_structures or MAX_STRUCTURES,
    )
    code, interrupt = 0, None
    try:
        code = run_script(script, session)
    except (ScriptInterrupted, KeyboardInterrupt) as error:
        interrupt = error
    rank, report = rank_of_all(), session.report
    if as_json:
        click.echo(json.dumps(report.to_json() | ({} if rank is None else {"rank": rank})), err=True)
    elif not rank or report.misses:
        for line in str(report).splitlines():  # reasons hold names from the package
            say(f"rank {rank}: {line}" if rank else line, err=True)
    if interrupt is not None:
        raise interrupt
    context.exit(code)
