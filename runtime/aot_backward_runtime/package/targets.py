"""Views of a package for several targets as a package for one of them."""

from __future__ import annotations

import dataclasses

from ..format.manifest import EntrySpec, Manifest, Target, VariantSpec


def targets_of(manifest: Manifest) -> tuple[Target, ...]:
    """Return all targets of a package. A reader of format 1.3 sees the first."""
    return (manifest.target, *manifest.targets)


def seen_as(manifest: Manifest, number: int) -> Manifest:
    """Return ``manifest`` with the code and the verdicts of only target ``number``."""
    if not manifest.targets:
        return manifest
    libraries = manifest.libraries
    entries = manifest.entries
    if number:
        libraries = {}
        for name, library in manifest.libraries.items():
            build = library.builds[number - 1]
            libraries[name] = dataclasses.replace(library, **{f.name: getattr(build, f.name) for f in dataclasses.fields(build)})
        entries = {name: _judged(entry, number - 1) for name, entry in manifest.entries.items()}
    libraries = {name: dataclasses.replace(library, builds=()) for name, library in libraries.items()}
    return dataclasses.replace(manifest, target=targets_of(manifest)[number], targets=(), libraries=libraries, entries=entries)


def _judged(entry: EntrySpec, number: int) -> EntrySpec:
    structures = tuple(
        dataclasses.replace(s, variants=tuple(dataclasses.replace(v, verdict=v.verdicts[number], verdicts=()) for v in s.variants))
        for s in entry.structures
    )
    updates = tuple(dataclasses.replace(u, verdict=u.verdicts[number], verdicts=()) for u in entry.updates)
    clippings = tuple(dataclasses.replace(c, verdict=c.verdicts[number], verdicts=()) for c in entry.clippings)
    variants = tuple(_variant(v, number) for v in entry.variants)
    return dataclasses.replace(entry, variants=variants, structures=structures, updates=updates, clippings=clippings)


def _variant(variant: VariantSpec, number: int) -> VariantSpec:
    return dataclasses.replace(variant, verdict=variant.verdicts[number], verdicts=())
