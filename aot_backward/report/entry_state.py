"""An entry's state without what a training step adds to the program's own. Imports no torch: ``inspect`` needs it without the page."""

from __future__ import annotations

from aot_backward_runtime.format.manifest import EntrySpec, StateSpec


def program_state(entry: EntrySpec) -> list[StateSpec]:
    """The program's parameters and buffers: no optimizer state, numbers, or accumulated gradients."""
    step = entry.step
    added = {"numbers", *(s.state for s in step.state), *(g.state for g in step.gradients)} if step else set()
    return [s for s in entry.state if s.name not in added]
