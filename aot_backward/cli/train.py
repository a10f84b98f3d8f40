"""``aot-backward train OUT.pt2 --data data.safetensors --epochs 10 --save state.safetensors``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .support.failures import EXIT_CODES, INTERRUPTED, debug_option
from .support.options import import_option, key_option

if TYPE_CHECKING:
    from ..commands.train_entry import EpochReport

_SHOWN_EVERY = 0.1  # seconds; drawing a bar takes as long as a small step


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DATA.safetensors",
    help="Samples, by the names that inspect lists.",
)
@click.option(
    "--epochs",
    required=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Passes over the samples, including the ones before a --resume.",
)
@click.option(
    "--save",
    required=True,
    type=click.Path(path_type=Path),
    metavar="STATE.safetensors",
    help="The file for the state, written after each epoch and on an interrupt.",
)
@click.option("--resume", is_flag=True, help="Continue from the state in the --save file.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="B",
    help="Samples per step. By default, the exported size, or 32 if that is dynamic.",
)
@click.option("--entry", metavar="NAME", help="The training step. Not needed if there is only one.")
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, 2**63 - 1),
    help="The seed of the samples' order and of dropout.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per epoch on standard output.")
@click.option(
    "--device",
    metavar="DEVICE",
    help="The GPU, such as cuda:1, if the package is for GPUs. By default, the current one, or LOCAL_RANK's under torchrun.",
)
@click.option("--cudagraphs", is_flag=True, help="Replay steps as CUDA graphs, if the package is for GPUs.")
@import_option
@key_option
@debug_option
@click.pass_context
def train(
    context: click.Context,
    package: Path,
    data: Path,
    epochs: int,
    save: Path,
    resume: bool,
    batch_size: int | None,
    entry: str | None,
    seed: int,
    as_json: bool,
    device: str | None,
    cudagraphs: bool,
    key: Path | None,
) -> None:
    """Train with the step of OUT.pt2 on the samples in DATA.safetensors: no tracing, no compiler.

    DATA.safetensors holds a tensor for each argument of the step; each row of the first dimension is a sample. The
    order of an epoch depends on the seed and the epoch alone, so that a training that was interrupted (Ctrl-C, SIGTERM)
    continues with --resume as if it had not been, to the last bit. Under torchrun each process takes B samples of every
    step, and gradients are averaged.
    """
    from ..commands.train_entry import Callbacks, train

    def report_epoch(report: EpochReport) -> None:
        if as_json:
            values = dataclasses.asdict(report)
            click.echo(json.dumps(values if math.isfinite(report.loss) else values | {"loss": None}))  # JSON has no NaN
        else:
            skipped = f", {report.skipped} updates skipped so far" if report.skipped else ""
            speed = (
                f"{report.steps_per_second:.3g} steps/s"
                if report.steps_per_second < 1000
                else f"{report.steps_per_second:.0f} steps/s"
            )
            click.echo(
                f"epoch {report.epoch} of {report.epochs}: loss {report.loss:.6g}, {report.steps} steps, {speed}{skipped}"
            )
        sys.stdout.flush()

    with _bar(epochs) as (step, say):
        callbacks = Callbacks(step, report_epoch, say)
        result = train(
            package,
            data,
            epochs=epochs,
            save=save,
            resume=resume,
            batch_size=batch_size,
            entry=entry,
            seed=seed,
            callbacks=callbacks,
            device=device,
            cudagraphs=cudagraphs,
            key=key,
        )
    if result.signal:
        after = f"{result.epochs} epochs" + (f" and {result.steps} steps" if result.steps else "")
        if result.rank == 0:
            click.echo(
                f"error: interrupted after {after}; {save} holds the state: --resume continues from it", err=True
            )
        context.exit(INTERRUPTED)
    if result.rank == 0 and not as_json:
        click.echo(f"saved {save}")


@contextlib.contextmanager
def _bar(epochs: int) -> Iterator[tuple[Callable[[int, int, int, Any], None], Callable[[str], None]]]:
    """Two callbacks, for each step and for notes: a bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None, lambda text: click.echo(text, err=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"epoch 1/{epochs}", total=None, words="")
        shown = counted = 0
        last = time.perf_counter()

        def step(epoch: int, done: int, total: int, loss: Any) -> None:
            nonlocal shown, counted, last
            counted += 1
            now = time.perf_counter()
            if now - last < _SHOWN_EVERY and done < total:
                return
            speed, shown, last = (counted - shown) / max(now - last, 1e-9), counted, now
            words = f"loss {loss.item():.4g}  {speed:.0f} steps/s"
            bars.update(task, description=f"epoch {epoch}/{epochs}", completed=done, total=total, words=words)

        yield step, lambda text: bars.console.print(text, markup=False, highlight=False)
