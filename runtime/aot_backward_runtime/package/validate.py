"""Whether a manifest agrees with itself and with the members of its archive, and a library's ELF headers with the manifest.

Native code checks nothing, so that what a plan says of a library is compared with what the manifest says of that library, of the variant's own
tensors and of the weights. Everything is stated at least twice (an operand ``saved:2`` is passed as the library's input called ``saved[2]``), so a
single field that is not as it was written contradicts another one. What a library says of itself is compared when it is opened
(``native/plan.py``). ``docs/format.md``, section 8, "What must agree", is the list.

Each error is a :class:`PackageError` that names the field; :mod:`.archive` puts the package's path before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import PackageError
from ..format.elf import numeric, read_elf
from ..format.manifest import GRAPH_FOLDER, MANIFEST_MEMBER, WEIGHTS_MEMBER, BuildSpec, EntrySpec, LibrarySpec, Manifest, Target
from .clipping_checks import check_clippings
from .entry_checks import check_entry, state_names
from .recorded_pass_checks import check_structures
from .targets import targets_of
from .tensor_checks import DEVICES, check_weights
from .update_checks import check_updates
from .variant_checks import check_orders

LIBRARY_FOLDER = "data/aotinductor"
GRAPH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_LEVEL = re.compile(r"[a-z0-9_]{1,40}")
_VERSION = re.compile(r"([0-9]{1,9}(\.[0-9]{1,9})*)?")


def check_manifest(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """``sizes``: in bytes, of the archive's members by their path below the top folder."""
    _check_members(manifest, sizes)
    _check_libraries(manifest)
    _check_entries(manifest)


def check_library_file(spec: LibrarySpec, path: Path) -> None:
    """That the ELF file ``path`` can be loaded, and asks for nothing that ``spec`` does not list."""
    try:
        elf = read_elf(path)
    except PackageError as error:
        raise PackageError(f"member {spec.member}: {str(error).removeprefix(f'{path}: ')}") from error
    if elf.executable_stack:
        raise PackageError(f"member {spec.member} asks for an executable stack, which glibc 2.41 and later refuse")
    for needed in elf.needed:
        if needed not in spec.needed:
            raise PackageError(f"member {spec.member} is linked with {needed}, which the manifest does not list")
    for family, listed in (("GLIBC", spec.glibc), ("GLIBCXX", spec.glibcxx)):
        asked = elf.versions.get(family)
        if asked is not None and (not listed or numeric(asked) > numeric(listed)):
            raise PackageError(f"member {spec.member} asks for {family} {asked}; the manifest says {listed or 'none'}")


def _check_members(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    listed = manifest.members
    for name in sizes.keys() - listed.keys() - {MANIFEST_MEMBER}:
        raise PackageError(f"member {name} is not in the manifest")
    for name, member in listed.items():
        if name not in sizes:
            raise PackageError(f"member {name} is missing")
        if sizes[name] != member.size:
            raise PackageError(f"member {name} has {sizes[name]} bytes, expected {member.size}")
    if (WEIGHTS_MEMBER in listed) != manifest.has_weights:
        raise PackageError(f"has_weights is {manifest.has_weights}, but {WEIGHTS_MEMBER} says otherwise")


def _check_libraries(manifest: Manifest) -> None:
    for name, spec in manifest.libraries.items():
        if not GRAPH_NAME.fullmatch(name):
            raise PackageError(f"{name!r} is not a name for a library")
        if len(spec.builds) != len(manifest.targets):
            raise PackageError(f"library {name} has {len(spec.builds)} further builds, for {len(manifest.targets)} further targets")
        stems = (name, *(f"{name}.{t.level}" for t in manifest.targets))
        for stem, build in zip(stems, spec.every_build, strict=True):
            _check_build(name, stem, build, manifest)
        if spec.graph not in ("", f"{GRAPH_FOLDER}/{name}.json"):
            raise PackageError(f"library {name}: its graph must be {GRAPH_FOLDER}/{name}.json, not {spec.graph}")
        if spec.graph and spec.graph not in manifest.members:
            raise PackageError(f"library {name}: member {spec.graph} is missing")
    places = [b.member for s in manifest.libraries.values() for b in s.every_build]
    if len(set(places)) != len(places):
        raise PackageError("two libraries are the same member")
    levels = [t.level for t in manifest.targets]
    for level in levels:
        if not _LEVEL.fullmatch(level) or levels.count(level) > 1:
            raise PackageError(f"its targets are not told apart by their names: {level!r}")


def _check_build(name: str, stem: str, spec: LibrarySpec | BuildSpec, manifest: Manifest) -> None:
    # AOTInductor's loaders find the JSON files by the library's own name, so no other place would do.
    stem = f"{LIBRARY_FOLDER}/{stem}/{stem}"
    if (spec.member, spec.metadata) != (f"{stem}.so", f"{stem}_metadata.json") or spec.extern not in ("", f"{stem}.json"):
        raise PackageError(f"library {name}: its members must be {stem}.so, _metadata.json and .json, not {spec.member}, …")
    for member in (spec.member, spec.metadata, spec.extern):
        if member and member not in manifest.members:
            raise PackageError(f"library {name}: member {member} is missing")
    if not (_VERSION.fullmatch(spec.glibc) and _VERSION.fullmatch(spec.glibcxx)):
        raise PackageError(f"library {name}: {spec.glibc!r} and {spec.glibcxx!r} are not both versions")
    for constant in spec.constants:
        _check_reference(f"library {name}: constant {constant.name}", constant.weight, manifest.weights)


def _check_entries(manifest: Manifest) -> None:
    _check_targets(targets_of(manifest))
    check_weights(manifest.weights)
    named = state_names(manifest)
    for name, entry in manifest.entries.items():
        for state in entry.state:
            _check_reference(f"entry {name}: {state.name}", state.weight, manifest.weights)
        for library in _called(entry):
            _check_reference(f"entry {name}", library, manifest.libraries)
        _check_step_references(name, entry, manifest)
        verdicts = [v.verdicts for v in entry.variants] + [v.verdicts for s in entry.structures for v in s.variants]
        verdicts += [u.verdicts for u in entry.in_place]
        if any(len(v) != len(manifest.targets) for v in verdicts):
            raise PackageError(f"entry {name} has not as many verdicts as there are further targets, {len(manifest.targets)}")
        try:
            for number, variant in enumerate(entry.variants):
                check_orders(f"variant {number}", variant)
            check_entry(entry, manifest, named)
            check_structures(entry, manifest.libraries)
            check_updates(entry, manifest.libraries)
            check_clippings(entry, manifest.libraries)
        except PackageError as error:
            raise PackageError(f"entry {name}: {error}") from error


def _check_targets(targets: Sequence[Target]) -> None:
    for target in targets:
        if target.device not in DEVICES:
            raise PackageError(f"its code is for the device {target.device[:40]!r}; expected {' or '.join(DEVICES)}")


def _check_step_references(name: str, entry: EntrySpec, manifest: Manifest) -> None:
    """That what a training step names is in the entry's state."""
    if (entry.kind == "step") != (entry.step is not None):
        raise PackageError(f"entry {name} is of kind {entry.kind!r}, but {'has a' if entry.step else 'has no'} step")
    if entry.step is None:
        return
    known = {s.name: s for s in entry.state}
    groups = [f"module.{p}" for g in entry.step.groups for p in g.parameters]
    slots = [s.state for s in entry.step.state] + [g.state for g in entry.step.gradients]
    for state in ("numbers", *groups, *slots):
        _check_reference(f"entry {name}: its step", state, known)
    length, shape = len(entry.step.numbers) + 2, manifest.weights[known["numbers"].weight].shape
    if shape != (length,):
        raise PackageError(f"entry {name}: its vector of numbers has the shape {list(shape)}; expected {length} numbers")
    for number in entry.step.numbers:
        if not -1 <= number.group < len(entry.step.groups):
            raise PackageError(f"entry {name}: the number {number.key!r} is of group {number.group}, of {len(entry.step.groups)}")
    for slot in entry.step.state:
        if not -1 <= slot.starts_as < len(entry.step.numbers):
            raise PackageError(f"entry {name}: the state {slot.state!r} starts as number {slot.starts_as}, of {len(entry.step.numbers)}")


def _check_reference(what: str, key: str, known: Mapping[str, object]) -> None:
    if key not in known:
        raise PackageError(f"{what} refers to {key!r}, which the manifest does not have")


def _called(entry: EntrySpec) -> Iterator[str]:
    """The libraries that the entry calls."""
    for variant in (v for spec in entry.variants for v in spec.orders):
        for plan in (variant.forward, variant.backward, variant.inference, variant.gradient, variant.step, variant.accumulate):
            if plan is not None and plan.call is not None:
                yield plan.call.library
    if entry.step is not None and entry.step.update is not None and entry.step.update.call is not None:
        yield entry.step.update.call.library
    for structure in entry.structures:
        for compiled in structure.variants:
            yield from (s.library for s in compiled.segments if s.library)
    yield from (u.library for u in entry.in_place)
