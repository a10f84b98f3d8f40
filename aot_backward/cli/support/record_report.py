"""What ``aot-backward record`` says when it has ended: three lines where all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tables import count

if TYPE_CHECKING:
    from ...recording.record import Recording

_REASONS_SHOWN = 5  # reasons of each list: keeps the report short, and --json has all; a guess


def to_json(session: Recording) -> dict[str, Any]:
    """The report of the passes, and everything about what was compiled."""
    added = session.added
    return {
        **session.report.to_json(),
        "recorded": session.recorded,
        "timed_in_eager": session.in_eager,
        "structures": len(session.structures),
        "written": bool(added.contents),
        "structures_compiled": len(added.contents.structures),
        "optimizer_steps_compiled": list(added.contents.steps),
        "seen_too_seldom": added.seldom,
        "unfinished": added.unfinished,
        "stopped_by": added.stopped or None,
        "skipped": dict(session.skipped),
        "slower_compiled": added.slower,
    }


def serves_anything(session: Recording) -> bool:
    """Whether the package holds code for something that the script did, from now on or before."""
    return bool(session.added.contents or session.report.compiled)


def lines(session: Recording, output: Path) -> Iterator[str]:
    added, report = session.added, session.report
    passes = [
        f"{count(session.recorded, 'backward pass', 'backward passes')} of {count(len(session.structures), 'structure')} recorded"
    ]
    passes += [f"{session.in_eager} timed in eager"] if session.in_eager else []
    passes += [f"{report.compiled} run from {output}"] if report.compiled else []
    passes += [f"{sum(report.eager.values())} left to eager"] if report.eager else []
    yield ", ".join(passes)
    yield _written(session, output)
    if added.seldom:
        frequency = "once" if session.min_seen == 2 else f"less than {session.min_seen} times"
        verb, pronoun = ("is", "it") if added.seldom == 1 else ("are", "them")
        yield f"{count(added.seldom, 'structure')} seen {frequency} {verb} left out (--min-seen 1 compiles {pronoun})"
    if added.unfinished:
        why = (
            "interrupted" if added.stopped == "interrupt" else f"the time limit of {session.time_limit:g} s was reached"
        )
        yield f"{count(added.unfinished, 'structure')} left out: {why}"
    yield from (f"  left out, not faster than eager: {words}" for words in added.slower[:_REASONS_SHOWN])
    if len(added.slower) > _REASONS_SHOWN:
        yield f"  left out, not faster than eager: {len(added.slower) - _REASONS_SHOWN} others (--json has all)"
    for reason, times in report.eager.shown(_REASONS_SHOWN).items():
        yield f"  eager x{times}: {reason}"
    for reason, times in list(session.skipped.items())[:_REASONS_SHOWN]:
        yield f"  left out{f' x{times}' if times > 1 else ''}: {reason}"
    if len(session.skipped) > _REASONS_SHOWN:
        yield f"  left out for {len(session.skipped) - _REASONS_SHOWN} other reasons (--json has all)"


def _written(session: Recording, output: Path) -> str:
    contents = session.added.contents
    if contents:
        parts = [f"{count(len(contents.structures), 'structure')} compiled"] if contents.variants else []
        parts += [f"{'' if parts else 'compiled '}{_steps_in_words(contents.steps)}"] if contents.steps else []
        return f"wrote {output} ({output.stat().st_size / 1e6:.2f} MB): {' and '.join(parts)}"
    if session.report.compiled and not session.structures:
        return f"nothing is new: {output} has these passes"
    return f"nothing was written: {_why_not(session)}"


def _steps_in_words(names: Sequence[str]) -> str:
    """``steps of AdamW and clip_grad_norm_``; a name that comes twice is of two kinds of calls."""
    optimizers, functions = ([n for n in names if n.startswith("clip_") is clips] for clips in (False, True))
    return " and ".join(filter(None, (f"steps of {', '.join(optimizers)}" if optimizers else "", ", ".join(functions))))


def _why_not(session: Recording) -> str:
    added, report = session.added, session.report
    if not report.passes:
        return "no backward pass was called"
    if not session.structures:
        return "all backward passes were left to eager"
    if added.stopped == "interrupt":
        return "interrupted before anything was compiled"
    if not added.chosen:
        new = "new " if report.compiled else ""
        return f"no {new}structure was seen " + ("twice" if session.min_seen == 2 else f"{session.min_seen} times")
    return "eager is as fast" if added.slower else "all recorded passes were left out"
