"""Build a manifest from entries: capture and compile each entry, then compare it with eager."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, Manifest, VariantSpec, Verdict
from aot_backward_runtime.loader import Package

from ..checks.example_sizes import SEED
from ..checks.stored_results import Stored
from ..entries import Entry, Module, Step
from .contents import Check, Contents
from .program_entry import add_program
from .step_entry import add_step

log = logging.getLogger("aot_backward")


class Build:
    """The entries of one package. ``contents`` holds their weights, graphs and libraries."""

    def __init__(self, contents: Contents):
        self.contents = contents
        self.entries: dict[str, EntrySpec] = {}
        self._checks: dict[str, Check] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Capture and compile ``entry``."""
        if not name.isidentifier():
            raise ExportError(f"entry name {name!r}: use a Python identifier")
        if isinstance(entry, Module) and not (type(entry.order) is int and 1 <= entry.order <= 4):
            raise ExportError(
                f"entry {name!r}: order is {entry.order!r}; expected 1 (gradients), 2 (gradients of gradients), 3 or 4"
            )
        if not entry.variants:
            raise ExportError(f"entry {name!r} has no variants: give at least one Variant(args)")
        if isinstance(entry, Step):
            spec, self._checks[name] = add_step(self.contents, name, entry)
        else:
            spec, self._checks[name] = add_program(self.contents, name, entry)
        self.entries[name] = dataclasses.replace(
            spec, metadata=metadata_text(entry.metadata, f"metadata of entry {name!r}")
        )

    def manifest(self, with_weights: bool) -> Manifest:
        """Return the manifest without verdicts and members."""
        return dataclasses.replace(
            self.contents.manifest(self.entries),
            required_features=self._features(),
            has_weights=with_weights,
            created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )

    def check(self, manifest: Manifest, packages: Sequence[Callable[[], Package] | str], stored: Stored) -> Manifest:
        """Return ``manifest`` with the verdict of every variant for every target. ``packages``: for each target its
        loader, or why it cannot be loaded (:meth:`Contents.packages`). Inputs, results and tolerances go to
        ``stored``."""
        progress, entries = self.contents.progress, dict[str, Any]()
        for name, spec in manifest.entries.items():
            variants = []
            total = len(spec.variants) * len(packages)
            for i, variant in enumerate(spec.variants):
                verdicts = list[Verdict]()
                for package in packages:
                    progress(f"check {name}", i * len(packages) + len(verdicts), total)
                    if isinstance(package, str):
                        verdicts.append(Verdict(f"not run: {package}"))
                    else:
                        verdicts.append(self._checks[name](package, i, variant, stored, None))
                        variant = self._without_empty_sizes(name, i, variant, package)
                variants.append(
                    dataclasses.replace(variant, verdict=verdicts[0], verdicts=tuple(verdicts[1:]), seed=SEED)
                )
            progress(f"check {name}", total, total)
            entries[name] = dataclasses.replace(spec, variants=tuple(variants))
        return dataclasses.replace(manifest, entries=entries, notes=self.contents.notes)

    def _without_empty_sizes(
        self, name: str, number: int, variant: VariantSpec, load: Callable[[], Package]
    ) -> VariantSpec:
        """Return ``variant``, from 1 for each size that may be 0, if at 0 eager refuses the program or compiled code
        differs from eager."""
        for symbol in variant.symbols:
            if symbol.minimum > 0 or symbol.offset != 0:
                continue
            try:
                self._checks[name](load, number, variant, {}, symbol)
            except (ExportError, RuntimeError) as error:  # a step whose compiled code fails raises a RuntimeError
                reason = str(error).partition("; nothing was written")[0]
                log.info("%s: %s; the package accepts this size from 1", name, reason)
                from_one = dataclasses.replace(symbol, minimum=1)
                variant = dataclasses.replace(
                    variant, symbols=tuple(from_one if s is symbol else s for s in variant.symbols)
                )
        return variant

    def _features(self) -> tuple[str, ...]:
        """Return the features that a runtime needs to read the package correctly."""
        plans = [
            p
            for e in self.entries.values()
            for variant in e.variants
            for v in variant.orders
            for p in (v.backward,)
            if p is not None
        ]
        return (*(["fill"] if self.contents.fills else []), *(["consumes"] if any(p.consumes for p in plans) else []))


def metadata_text(metadata: Any, what: str) -> str:
    """Return ``metadata`` as JSON, or "" for None. :class:`ExportError` starts with ``what``."""
    if metadata is None:
        return ""
    if not isinstance(metadata, Mapping):
        raise ExportError(f"{what}: expected a dict of JSON values, got a {type(metadata).__name__}")
    try:
        text = json.dumps(dict(metadata), allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ExportError(f"{what}: expected a dict of JSON values, got one that JSON cannot hold: {error}") from error
    if json.loads(text) != metadata:
        raise ExportError(
            f"{what}: JSON would change it (keys must be strings, and tuples become lists). Write what JSON gives back."
        )
    return text
