"""Run a client: ``python CLIENT.py eager|record|replay PACKAGE RESULTS``, each mode in a separate process.

``tests/passes/test_replay_clients.py`` compares the JSON in RESULTS.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

STEPS = 50
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}

Train = Callable[[int], tuple[list[float], list[list[int]]]]
"""Maps a number of steps to the loss of each and the shapes of the batches, in order. The first steps are the same for
any number."""


def main(train: Train, recorded: int) -> None:
    """Train and write RESULTS. The recording process makes ``recorded`` steps, the others :data:`STEPS`."""
    mode, package, results = sys.argv[1:]
    children: list[str] = []
    sys.addaudithook(lambda event, arguments: children.append(f"{event} {arguments[:2]}") if event in STARTS else None)
    context: Any = nullcontext()
    if mode != "eager":
        from aot_backward import record, replay

        context = record(package) if mode == "record" else replay(package)
    whole = time.perf_counter()
    with context:
        began = time.perf_counter()
        losses, shapes = train(recorded if mode == "record" else STEPS)
        training = time.perf_counter() - began
    found: dict[str, Any] = {
        "losses": losses,
        "shapes": shapes,
        "training_seconds": training,
        "seconds": time.perf_counter() - whole,
        "compilers": sorted(m for m in sys.modules if m.startswith(COMPILERS)),
        "children": children,
    }
    if "torch._dynamo.utils" in sys.modules:
        counters = sys.modules["torch._dynamo.utils"].counters
        found["counters"] = {name: dict(counts) for name, counts in counters.items() if counts}
    if mode != "eager":
        found |= context.report.to_json()
    if mode == "record":
        found |= {"skipped": dict(context.skipped), "recorded": context.recorded}
    Path(results).write_text(json.dumps(found))


def docstrings() -> list[tuple[int, bytes]]:
    """Return text that every machine has, and which of four modules it is from: beginnings of paragraphs, 12 to 64
    bytes, of the standard library's docstrings."""
    import argparse
    import email.message
    import statistics
    import textwrap

    out = []
    for label, module in enumerate((argparse, email.message, statistics, textwrap)):
        things = [
            module,
            *(t for _, t in sorted(vars(module).items()) if getattr(t, "__module__", "") == module.__name__),
        ]
        things += [
            m for t in things for _, m in sorted(vars(t).items()) if inspect.isclass(t) and inspect.isfunction(m)
        ]
        for thing in things:
            paragraphs = (inspect.getdoc(thing) or "").encode().split(b"\n\n")
            out += [(label, text[: 12 + len(text) % 53]) for text in paragraphs if len(text) > 64]
    return out
