"""Write a package as a WebAssembly module with its weights in a separate file, for browsers and Node.js.

The module is the C library, its standalone backend and the compiled graphs, linked by emscripten. It reads the package,
which has the manifest and the weights but no code, so that guards, errors and state files are those of C.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import tempfile
from pathlib import Path

from aot_backward_exporters.graph import Artifact
from aot_backward_exporters.progress import Progress, silent
from aot_backward_exporters.toolchain import gcc, native_libraries, wasm
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import LibrarySpec
from aot_backward_runtime.native.weights import load_weights
from aot_backward_runtime.package.archive import Archive, open_package
from aot_backward_runtime.package.targets import seen_as, targets_of

from . import api
from .checks import emulated, standalone
from .entries import Entries
from .packaging.package_writer import write_package
from .packaging.rebuild import rebuild

TARGET = "cpu:wasm"
FILES = ("index.mjs", "index.d.mts", "module.mjs", "module.wasm", "package.pt2")
_FUNCTIONS = (
    "error",
    "open",
    "digest",
    "entries",
    "entry",
    "entry_kind",
    "metadata",
    "seed",
    "get",
    "free",
    "train",
    "variants",
    "count",
    "describe",
    "convert",
    "scale",
    "run",
    "served",
    "forward",
    "backward",
    "state",
    "accumulate",
    "update",
    "zero_grad",
    "number",
    "progress_of",
    "save",
    "resume",
)
"""Functions of ``aot_backward.h`` that ``index.mjs`` calls, without their prefix."""
_LINK = (
    "-sMODULARIZE=1",
    "-sEXPORT_ES6=1",
    "-sENVIRONMENT=web,worker",  # also in Node.js, where index.mjs reads the files
    "-sFORCE_FILESYSTEM=1",
    "-sWASM_BIGINT=1",
    f"-sEXPORTED_FUNCTIONS=_malloc,_free,{','.join(f'_aotb_{name}' for name in _FUNCTIONS)}",
    "-sEXPORTED_RUNTIME_METHODS=FS,HEAPU8,UTF8ToString",
)


def export(folder: Path, entries: Entries, *, tune: str | None = None, progress: Progress = silent) -> list[Path]:
    """Compile entries, compare each with eager, natively and as WebAssembly in Node.js, and write the files of
    :data:`FILES` to ``folder``.

    Raises:
        ExportError: An entry cannot be exported correctly or needs PyTorch, or there is no emscripten or no Node.js.
            Nothing is written.
    """
    _check(folder)
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as temporary:
        package = Path(temporary) / "both.pt2"
        api.export(
            package, entries, target=f"cpu,{TARGET}", portable=False, tune=tune, runtime="standalone", progress=progress
        )
        return _write(open_package(package), folder)


def convert(package: Path, folder: Path, *, progress: Progress = silent) -> list[Path]:
    """Write the same files for a package, which is rebuilt for WebAssembly if it has no code for it. Raises the errors
    of :func:`rebuild`, too."""
    _check(folder)
    archive = open_package(package)
    if all(target.machine != wasm.MACHINE for target in targets_of(archive.manifest)):
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as temporary:
            both = rebuild(
                package, Path(temporary) / "both.pt2", target=f"cpu,{TARGET}", with_graphs=False, progress=progress
            )
            return _write(open_package(both), folder)
    return _write(archive, folder)


def _check(folder: Path) -> None:
    """Raise :class:`ExportError` before minutes of compiling."""
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"{folder}: expected a folder for {', '.join(FILES)}, got a file. Name a new folder.")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ExportError(f"{parent}: expected a folder, got nothing of that name. Make it first.")
    for place in (folder, parent) if folder.exists() else (parent,):
        if not os.access(place, os.W_OK):
            raise ExportError(f"{place}: expected a folder that you can write to. Name another one.")
    for name in FILES:
        if (folder / name).is_dir():
            raise ExportError(f"{folder / name}: expected a file or nothing, got a folder. Name another folder.")
    if not standalone.is_installed():
        raise ExportError(
            "the C library is part of aot-backward-native, which is not installed: pip install aot-backward-native"
        )
    gcc.compiler(wasm.MACHINE)
    if not emulated.emulator(wasm.MACHINE):
        raise ExportError("WebAssembly needs Node.js, and it was not found: apt-get install nodejs")


def _write(archive: Archive, folder: Path) -> list[Path]:
    archive.verify_digests()
    number = next(n for n, target in enumerate(targets_of(archive.manifest)) if target.machine == wasm.MACHINE)
    manifest = seen_as(archive.manifest, number)
    if not manifest.has_weights:
        raise ExportError(f"{archive.path}: expected a package with weights, got one without. Export it with weights.")
    for name, entry in manifest.entries.items():
        if entry.standalone != standalone.VERIFIED:
            raise ExportError(
                f"entry {name!r} {entry.standalone or 'stores no example'}. It does not run as WebAssembly, and nothing was written."
            )
    source = Path(importlib.import_module("aot_backward_native").source_dir())
    try:
        temporary_folder = tempfile.TemporaryDirectory(prefix=".aot-backward-", dir=folder.absolute().parent)
    except OSError as error:
        raise ExportError(f"cannot write below {folder.absolute().parent}: {error.strerror or error}") from error
    with temporary_folder as temporary:
        work = Path(temporary)
        objects, artifacts = [], {}
        for name, spec in manifest.libraries.items():
            objects.append(work / f"{name}.o")
            objects[-1].write_bytes(archive.read_member(spec.member))
            artifacts[name] = _without_code(archive, name, spec, objects[-1], work)
        native_libraries.linked(source, None, objects, _LINK, work, "module.mjs")
        write_package(
            work / "package.pt2", dataclasses.replace(manifest, members={}), artifacts, load_weights(archive), {}
        )
        for name in ("index.mjs", "index.d.mts"):
            shutil.copy(source / "wasm" / name, work / name)
        try:
            folder.mkdir(exist_ok=True)
            for name in FILES:  # module.wasm and package.pt2 of two exports do not run together
                (work / name).replace(folder / name)
        except OSError as error:
            raise ExportError(f"cannot write {folder}: {error.strerror or error}") from error
    return [folder / name for name in FILES]


def _without_code(archive: Archive, name: str, spec: LibrarySpec, code: Path, work: Path) -> Artifact:
    """Return the compiled graph with a library that only names its code, so that the package does not run with another
    module."""
    library, metadata, extern = work / f"{name}.so", work / f"{name}_metadata.json", work / f"{name}.json"
    library.write_text(wasm.prefix_of(code))
    metadata.write_bytes(archive.read_member(spec.metadata))
    if spec.extern:
        extern.write_bytes(archive.read_member(spec.extern))
    constants = {constant.name: constant.weight for constant in spec.constants}
    return Artifact(library, metadata, extern if spec.extern else None, constants, (), "", "", spec.operators)
