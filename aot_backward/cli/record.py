"""``aot-backward record -o bw.pt2 -- train.py ARGS…``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .support.failures import EXIT_CODES, debug_option
from .support.imports import import_option
from .support.progress import shown
from .support.ranks import rank_of_several
from .support.script import Script, run_script, script_options
from .support.tables import count
from .support.tune import tune_option


@click.command(epilog=EXIT_CODES)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="BW.pt2", help="The package; what is new is added to it.")
@click.option("--entry", default="backward", show_default=True, metavar="NAME", help="The name of its replay entry.")
@click.option("--target", default="cpu", show_default=True, help="cpu, or cuda for this machine's GPU.")
@tune_option("How long passes are timed in eager and compiled; with none they are not, and replay runs whatever is compiled.")
@click.option("--no-optimizer", is_flag=True, help="Compile backward passes alone, and no steps of optimizers.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON, on standard error: standard output is the script's.")
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
    no_optimizer: bool,
    as_json: bool,
    script: Script,
    max_structures: int | None,
) -> None:
    """Run TRAIN.py as it is, and compile its backward passes and optimizer steps into BW.pt2 when it ends.

    Let it see at least two batch sizes: sizes that change between passes become dynamic. Nothing is written where the script fails.
    """
    from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

    from ..recording.record import record as recording

    with shown() as progress:
        session = recording(
            output,
            entry=entry,
            target=target,
            progress=progress,
            max_structures=max_structures or MAX_STRUCTURES,
            tune=tune,
            optimizer=not no_optimizer,
        )
        try:
            code = run_script(script, session)
        except click.exceptions.Exit as end:
            if not session.of_ranks:
                raise
            code = end.exit_code  # it failed since another process was killed; what the rest saw is compiled
    if as_json:
        more = {"recorded": session.recorded, "timed_in_eager": session.in_eager, "skipped": dict(session.skipped), "slower_compiled": session.slower}
        more["optimizer_steps_compiled"] = session.compiled_steps
        if (rank := rank_of_several()) is not None:
            more.update(rank=rank, writes=session.writes, of_ranks=session.of_ranks)
        click.echo(json.dumps({**session.report.to_json(), **more}), err=True)
    elif session.writes:
        timed = f" and {session.in_eager} timed in eager" if session.in_eager else ""
        click.echo(f"{session.recorded} passes of {len(session.structures)} structures recorded{timed}; {session.report}", err=True)
        for words in session.of_ranks:
            click.echo(words, err=True)
        if session.compiled_steps:
            click.echo(f"{count(len(session.compiled_steps), 'kind')} of optimizer steps compiled: {', '.join(session.compiled_steps)}", err=True)
        for reason in session.skipped:
            click.echo(f"  left out: {reason}", err=True)
        for words in session.slower:
            click.echo(f"  replay leaves to eager, unless told --always: {words}", err=True)
        if output.exists():
            click.echo(f"wrote {output} ({output.stat().st_size / 1e6:.2f} MB)", err=True)
    context.exit(code)
