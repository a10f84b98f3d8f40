"""Runs an entry on its stored example as code for another machine, in an emulator
(``runtime/native/check/run_entry.c``).

The emulator for WebAssembly is Node.js.
"""

from __future__ import annotations

import importlib
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aot_backward_exporters.toolchain import gcc, native_libraries, wasm
from aot_backward_runtime.compatibility import cpu_flags
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Target
from aot_backward_runtime.package.archive import open_package

Placed = tuple[str, tuple[int, ...], int]
_CODES = {
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "bool": (6, 8),
}
"""DLPack's code and bits of each dtype."""
_NAMES = {code: name for name, code in _CODES.items()}


_PROCESSORS = {"aarch64": "cortex-a53"}
"""A processor with the instructions of the targets for that machine (armv8-a) and few more: qemu's default one has all
that it knows."""


def emulator(machine: str) -> list[str]:
    """Return the command that runs programs for ``machine`` here, without the program; [] if there is none."""
    if machine == wasm.MACHINE:
        return [node] if (node := shutil.which("node")) else []
    found = next((path for name in (f"qemu-{machine}", f"qemu-{machine}-static") if (path := shutil.which(name))), None)
    if found is None or machine not in _PROCESSORS:
        return []
    libraries = Path(f"/usr/{machine}-linux-gnu")  # of Debian's cross compiler
    return [found, "-cpu", _PROCESSORS[machine], *(["-L", str(libraries)] if libraries.exists() else [])]


def why_not(target: Target) -> str:
    """Return why code for ``target`` is not run on this machine, or ""."""
    if target.machine == gcc.HERE:
        lacking = [flag for flag in target.cpu_flags if flag not in cpu_flags()]
        return f"was not run: this processor lacks the CPU flags {' '.join(lacking)}" if lacking else ""
    if emulator(target.machine):
        return ""
    return f"was not run: this machine is {gcc.HERE}, and has no {described(target.machine)}"


def described(machine: str) -> str:
    """Return what an emulator of ``machine`` is, and how to install it."""
    return "Node.js (apt-get install nodejs)" if machine == wasm.MACHINE else "emulator (apt-get install qemu-user)"


def run(request: Mapping[str, Any], machine: str) -> dict[str, Any]:
    """Return the answer of ``standalone_process.py``. The tensors are in the file ``request["file"]``."""
    dtypes = {dtype for tensors in (request["inputs"], request["incoming"]) for dtype, _, _ in tensors}
    if unknown := dtypes - _CODES.keys():
        return {"error": f"the C library takes no {', '.join(sorted(unknown))}"}
    source = Path(importlib.import_module("aot_backward_native").source_dir())
    try:
        program = (
            _runner(source, Path(request["path"]))
            if machine == wasm.MACHINE
            else native_libraries.built(source, machine) / "run_entry"
        )
    except ExportError as error:
        return {"error": str(error)}
    asked = Path(f"{request['file']}.request")
    with asked.open("wb") as file:
        for tensors in (request["inputs"], request["incoming"]):
            file.write(struct.pack("<q", len(tensors)))
            for dtype, shape, data in tensors:
                file.write(struct.pack(f"<{3 + len(shape)}q", *_CODES[dtype], len(shape), *shape) + data)
        file.write(struct.pack("<q", len(request["states"])))
        for name in request["states"].values():
            file.write(struct.pack("<q", len(name.encode())) + name.encode())
    calls = request["steps"] if request["kind"] == "step" else int(request["backward"])
    arguments = [
        request["path"],
        request["entry"],
        request["variant"],
        request["mode"] or "-",
        request["seed"],
        calls,
        asked,
        request["file"],
    ]
    try:
        process = subprocess.run(
            [*emulator(machine), program, *map(str, arguments)], capture_output=True, text=True, errors="replace"
        )
    finally:
        asked.unlink()
    if process.returncode:
        said = process.stderr.strip().rpartition("\n")[2]
        return {"error": said or f"the process ended with status {process.returncode}"}
    first, second, states = _read(Path(request["file"]).read_bytes())
    labeled = dict(zip(request["states"], states, strict=True))
    if request["kind"] == "step":
        return {
            "results": {"before": dict(zip(request["states"], first, strict=True)), "losses": second, "after": labeled}
        }
    return {"results": {"before": {}, "outputs": first, "gradients": second, "after": labeled}}


def _runner(source: Path, package: Path) -> Path:
    """Return the program that runs entries of ``package``, which has code for WebAssembly alone."""
    archive = open_package(package)
    objects = []
    for library in archive.manifest.libraries.values():
        objects.append(package.with_name(Path(library.member).name))
        objects[-1].write_bytes(archive.read_member(library.member))
    return native_libraries.runner(source, objects, package.parent)


def _read(data: bytes) -> list[list[Placed | None]]:
    """Return the lists of tensors in the results: their dtype, shape and offset."""
    lists: list[list[Placed | None]] = []
    at = 0

    def numbers(count: int) -> Sequence[int]:
        nonlocal at
        at += 8 * count
        return struct.unpack_from(f"<{count}q", data, at - 8 * count)

    while at < len(data):
        lists.append([])
        for _ in range(*numbers(1)):
            code, bits, rank = numbers(3)
            if rank < 0:
                lists[-1].append(None)
                continue
            shape, size = tuple(numbers(rank)), bits // 8
            lists[-1].append((_NAMES[code, bits], shape, at))
            for n in shape:
                size *= n
            at += size
    return lists
