"""Views of a package for several targets as a package for one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..format.manifest import EntrySpec, Manifest, Target


def targets_of(manifest: Manifest) -> tuple[Target, ...]:
    """Return all targets of a package. A reader of format 1.3 sees the first."""
    return (manifest.target, *manifest.targets)


def standalone_by_target(manifest: Manifest, entry: str) -> dict[str, str]:
    """Return ``EntrySpec.standalone`` of that entry by the name of each target."""
    spec = manifest.entries[entry]
    return {target.label: _standalone(spec, number) for number, target in enumerate(targets_of(manifest))}


def seen_as(manifest: Manifest, number: int) -> Manifest:
    """Return ``manifest`` with the code and the verdicts of only target ``number``."""
    if not manifest.targets:
        return manifest
    libraries = manifest.libraries
    if number:
        libraries = {}
        for name, library in manifest.libraries.items():
            build = library.builds[number - 1]
            libraries[name] = dataclasses.replace(
                library, **{f.name: getattr(build, f.name) for f in dataclasses.fields(build)}
            )
    libraries = {name: dataclasses.replace(library, builds=()) for name, library in libraries.items()}
    entries = {name: _judged(entry, number) for name, entry in manifest.entries.items()}
    return dataclasses.replace(
        manifest, target=targets_of(manifest)[number], targets=(), libraries=libraries, entries=entries
    )


def _judged(entry: EntrySpec, number: int) -> EntrySpec:
    def of(spec: Any) -> Any:
        return dataclasses.replace(spec, verdict=spec.verdicts[number - 1] if number else spec.verdict, verdicts=())

    return dataclasses.replace(
        entry,
        variants=tuple(map(of, entry.variants)),
        structures=tuple(dataclasses.replace(s, variants=tuple(map(of, s.variants))) for s in entry.structures),
        updates=tuple(map(of, entry.updates)),
        clippings=tuple(map(of, entry.clippings)),
        standalone=_standalone(entry, number),
        standalones=(),
    )


def _standalone(entry: EntrySpec, number: int) -> str:
    """Return the word for target ``number``. Before format 1.17 there is one for all."""
    return entry.standalones[number - 1] if number and entry.standalones else entry.standalone
