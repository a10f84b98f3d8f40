"""Check that the members of an archive, and the ELF headers of its libraries, match its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import PackageError
from ..format.elf import numeric, read_elf
from ..format.manifest import MANIFEST_MEMBER, WEIGHTS_MEMBER, LibrarySpec, Manifest


def check_members(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Check members and sizes. ``sizes``: bytes of the archive's members by their path below the top folder."""
    members = manifest.members
    for name in sizes.keys() - members.keys() - {MANIFEST_MEMBER}:
        raise PackageError(f"member {name} is not in the manifest")
    for name, member in members.items():
        if name not in sizes:
            raise PackageError(f"member {name} is missing")
        if sizes[name] != member.size:
            raise PackageError(f"member {name} has {sizes[name]} bytes, expected {member.size}")
    if (WEIGHTS_MEMBER in members) != manifest.has_weights:
        raise PackageError(f"has_weights is {manifest.has_weights}, but {WEIGHTS_MEMBER} says otherwise")


def check_library_file(spec: LibrarySpec, path: Path, machine: str) -> None:
    """Check that the ELF file ``path`` can be loaded on ``machine``, and that it needs nothing that ``spec`` does not
    list."""
    try:
        elf = read_elf(path)
    except PackageError as error:
        raise PackageError(f"member {spec.member}: {str(error).removeprefix(f'{path}: ')}") from error
    if elf.machine != machine:
        raise PackageError(f"member {spec.member} is code for {elf.machine}; the manifest says {machine}")
    if elf.executable_stack:
        raise PackageError(f"member {spec.member} asks for an executable stack, which glibc 2.41 and later refuse")
    for needed in elf.needed:
        if needed not in spec.needed:
            raise PackageError(f"member {spec.member} is linked with {needed}, which the manifest does not list")
    for family, manifest_version in (("GLIBC", spec.glibc), ("GLIBCXX", spec.glibcxx)):
        version = elf.versions.get(family)
        if version is not None and (not manifest_version or numeric(version) > numeric(manifest_version)):
            raise PackageError(
                f"member {spec.member} asks for {family} {version}; the manifest says {manifest_version or 'none'}"
            )
