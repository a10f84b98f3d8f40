"""The names of entries that were recorded from a script's modules: they say what the entry was recorded from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from .manifest import EntrySpec, ModuleSource, WeightSpec

PREFIX = "module_"
StateRow = tuple[str, str, tuple[int, ...], tuple[int, ...], bool]
"""Of a parameter or buffer: name, dtype, shape, strides in elements, whether it is a parameter."""


def entry_name(source: ModuleSource, state: Iterable[StateRow], autocast: str = "") -> str:
    """The beginning of a SHA-256 of all of it, and what the calls are autocast to."""
    rows = [[name, dtype, list(shape), list(stride), parameter] for name, dtype, shape, stride, parameter in state]
    digest = hashlib.sha256(json.dumps([source.module, source.facts, rows], sort_keys=True).encode()).hexdigest()
    return f"{PREFIX}{digest[:16]}" + (f"_{autocast}" if autocast else "")


def name_of(entry: EntrySpec, weights: Mapping[str, WeightSpec]) -> str:
    """What an entry with that source must be called."""
    assert entry.source is not None
    rows = [(s.name, w.dtype, w.shape, w.stride, s.parameter) for s in entry.state for w in (weights[s.weight],)]
    autocast = {v.ambient.autocast for v in entry.variants}
    return entry_name(entry.source, rows, autocast.pop() if len(autocast) == 1 else "")
