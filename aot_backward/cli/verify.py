"""``aot-backward verify OUT.pt2``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .support.failures import EXIT_CODES, FAILED, debug_option
from .support.options import import_option, key_option
from .support.progress import shown
from .support.tables import count, say, say_json, size

if TYPE_CHECKING:
    from ..checks.verify import Report


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option("--run/--no-run", default=True, help="Compare digests only, and open no native code.")
@import_option
@key_option
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output, also when something is wrong."
)
@debug_option
@click.pass_context
def verify(context: click.Context, package: Path, run: bool, key: Path | None, as_json: bool) -> None:
    """Compare OUT.pt2 with its digests, then its outputs and gradients with eager's, which were stored when it was
    built.

    Recorded passes store none: they were compared with the recorded numbers when they were built, and are not run here.

    Digests find damage, not intent; with --key, the signature in OUT.pt2.sig is checked before anything else. Comparing
    numbers runs the package's native code: use --no-run on one that you do not trust.
    """
    from aot_backward_runtime.errors import AotBackwardError

    from ..checks.verify import verify_package

    try:
        with shown() as progress:
            report = verify_package(package, run=run, progress=progress, key=key)
    except AotBackwardError as error:
        if as_json:
            say_json({"path": str(package), "ok": False, "error": str(error)}, indent=None)
        raise
    if as_json:
        say_json({"path": str(package), "ok": report.ok, **dataclasses.asdict(report)})
    else:
        _show(package, report, key)
    if not report.ok:
        first = next(v for v in report.variants if v.wrong)
        say(f"error: {package}: entry {first.entry!r}: {first.wrong[0]}; export it again", err=True)
        context.exit(FAILED)


def _show(package: Path, report: Report, key: Path | None) -> None:
    if report.signature:
        say(f"{package}: the signature {report.signature} is valid, by the owner of {key}")
    say(f"{package}: {report.members} members, {size(report.bytes)}: digests match")
    for r in report.recorded:
        passes = f"recorded passes of {count(r.structures, 'structure')}, {count(r.variants, 'variant')}"
        passes += f", and {count(r.updates, 'optimizer step')}" if r.updates else ""
        passes += f", and {count(r.clippings, 'clipping')} of gradients" if r.clippings else ""
        note = f" ({r.unproved} of them never were)" if r.unproved else ""
        say(f"entry {r.entry!r}: {passes}: {r.compared}{note}; not run here")
    for v in report.variants:
        label = f"entry {v.entry!r} variant {v.variant}{v.target and f', {v.target}'}"
        if v.wrong:
            say(f"{label}: WRONG: {'; '.join(v.wrong)}")
        else:
            sketched = f" ({v.sketched} large ones by a sketch)" if v.sketched else ""
            say(
                f"{label}: {v.tensors} tensors{sketched} match eager's; {v.worst} is worst, at {v.ratio:.2g} of its tolerance"
            )
    if report.not_run:
        say(f"numbers were not compared: {report.not_run}")
