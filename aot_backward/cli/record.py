"""``aot-backward record -o bw.pt2 -- train.py ARGS…``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .support import record_report
from .support.failures import EXIT_CODES, FAILED, ScriptInterrupted, debug_option
from .support.options import import_option, tune_option
from .support.progress import shown
from .support.script import Script, run_script, script_options
from .support.tables import say


@click.command(epilog=EXIT_CODES)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="BW.pt2",
    help="The package. New passes and steps are added to it.",
)
@click.option("--entry", default="backward", show_default=True, metavar="NAME", help="The name of its replay entry.")
@click.option("--target", default="cpu", show_default=True, help="cpu, or cuda for this machine's GPU.")
@tune_option(
    "How long passes are timed in eager and compiled. With none they are not timed, and replay runs all compiled code."
)
@click.option(
    "--min-seen",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Compile structures seen N times or more.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop starting new compilations after SECONDS. The most expensive structures come first, and one is always compiled.",
)
@click.option("--no-optimizer", is_flag=True, help="Compile only backward passes, not optimizer steps.")
@click.option(
    "--json", "as_json", is_flag=True, help="The report as JSON, on standard error: standard output is the script's."
)
@import_option
@debug_option
@script_options
@click.pass_context
def record(
    context: click.Context,
    output: Path,
    entry: str,
    target: str,
    tune: str,
    min_seen: int,
    time_limit: float | None,
    no_optimizer: bool,
    as_json: bool,
    script: Script,
    max_structures: int | None,
) -> None:
    """Run TRAIN.py as it is, and compile its backward passes and optimizer steps into BW.pt2 when it ends.

    Let it see at least two batch sizes: sizes that change between passes become dynamic. Nothing is written where the
    script fails. Ctrl-C ends the script, and what was recorded is compiled; while it is compiled, Ctrl-C ends that, and
    what is finished is written.
    """
    from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

    from ..recording.record import record as recording

    def say_compiling() -> None:
        click.echo("compiling the recorded passes and steps; Ctrl-C stops this", err=True)

    with shown() as progress:
        session = recording(
            output,
            entry=entry,
            target=target,
            progress=progress,
            max_structures=max_structures or MAX_STRUCTURES,
            tune=tune,
            optimizer=not no_optimizer,
            min_seen=min_seen,
            time_limit=time_limit,
        )
        code, interrupt = 0, None
        try:
            code = run_script(script, session, say_compiling if session.writes else lambda: None)
        except (ScriptInterrupted, KeyboardInterrupt) as error:
            interrupt = error
    if as_json and session.writes:
        click.echo(json.dumps(record_report.to_json(session)), err=True)
    elif session.writes:
        for line in record_report.lines(session, output):
            say(line, err=True)
    if isinstance(interrupt, KeyboardInterrupt):
        raise click.Abort from None
    if interrupt is not None:
        raise interrupt
    context.exit(code or (0 if not session.writes or record_report.serves_anything(session) else FAILED))
