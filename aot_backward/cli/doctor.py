"""``aot-backward doctor``."""

from __future__ import annotations

import dataclasses

import click

from .support.failures import FAILED, debug_option
from .support.tables import say, say_json


@click.command(epilog="Exit codes: 0 exports for cpu can work here; 1 they cannot.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@debug_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Show what this machine has of what an export needs, what would fail and why, and what to do about it."""
    from ..commands.doctor import examine

    findings = examine()
    works = not any(f.status == "failed" for f in findings)
    if as_json:
        say_json({"ok": works, "findings": [dataclasses.asdict(f) for f in findings]})
    else:
        for f in findings:
            say(f"{f.status:8} {f.what}: {f.found}")
            if f.next:
                say(f"         -> {f.next}")
        say("exports for cpu can work here" if works else "an export would fail here, see above")
    context.exit(0 if works else FAILED)
