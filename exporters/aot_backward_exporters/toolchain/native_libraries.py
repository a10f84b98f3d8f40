"""Builds the C libraries of aot-backward-native for another machine, and the program that runs an entry on them.

For WebAssembly both are linked with the compiled graphs of a package into one module.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aot_backward_runtime.errors import ExportError

from . import gcc, wasm
from .compile_cache import cache_root, digest, store_folder

_SHOWN = 2000  # characters of a failing compiler's output: keeps the message short; a guess


def built(source: Path, machine: str) -> Path:
    """Return the folder with ``libaot_backward.so``, ``libaotb_core.so`` and ``run_entry`` for ``machine``, or for
    WebAssembly with ``libaotb.a``; build it if the cache has none.

    ``source``: the folder with the C sources and their Makefile. Raise :class:`ExportError` without a compiler for
    ``machine``."""
    for program in (gcc.c_compiler(machine)[0], "make"):
        if shutil.which(program) is None:
            package = "emscripten" if machine == wasm.MACHINE else f"gcc-{machine}-linux-gnu"
            raise ExportError(
                f"the C libraries for {machine} need {program}, and it was not found: apt-get install {package} make"
            )
    compiler = " ".join(gcc.c_compiler(machine))
    files = sorted(p for p in source.rglob("*") if p.suffix in (".c", ".h", ".inc", ".cpp") or p.name == "Makefile")
    goals = ["libaotb.a"] if machine == wasm.MACHINE else ["libaot_backward.so", "libaotb_core.so", "run_entry"]
    key = digest(
        [
            machine,
            compiler,
            gcc.compiler_version(gcc.c_compiler(machine)),
            *(p.read_text() for p in (*files, *wasm.INCLUDE.iterdir())),
        ]
    )

    def build(folder: Path) -> None:
        jobs = f"-j{len(os.sched_getaffinity(0))}"
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
        # Not in ``folder``: make cannot write to a path with a space
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as made:
            targets = [f"{made}/{goal}" for goal in goals]
            argv = ["make", "-C", str(source), f"CC={compiler}", "CFLAGS=-O2", f"BUILD={made}", jobs, *targets]
            if machine == wasm.MACHINE:
                argv += [f"AR={gcc.emscripten_tool('emar')}", f"OPENMP={wasm.INCLUDE}"]
            process = subprocess.run(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env
            )
            if process.returncode:
                lines = process.stdout.splitlines()
                reason = next((line for line in lines if "error" in line.lower()), lines[-1])
                raise ExportError(f"the C libraries could not be built for {machine}: {reason}")
            for path in targets:
                shutil.copy2(path, folder)

    return store_folder(cache_root() / "shared" / key, build)


def linked(
    source: Path, program: Path | None, objects: Sequence[Path], flags: Sequence[str], folder: Path, name: str
) -> None:
    """Link the C libraries, a C program if there is one, and compiled graphs into ``folder``/``name`` and its
    ``.wasm``."""
    archive = built(source, wasm.MACHINE) / "libaotb.a"
    (folder / "graphs.c").write_text(wasm.graph_table(objects))
    graphs = sorted({wasm.prefix_of(path): path for path in objects}.values())  # equal graphs have equal names
    include = (f"-I{source / 'include'}", f"-I{source / 'wasm'}")
    compiled = []
    for file in (folder / "graphs.c", *([program] if program else [])):
        compiled.append(f"{file.stem}.o")
        _run(
            [*gcc.c_compiler(wasm.MACHINE), *wasm.EXCEPTIONS, *include, "-O2", "-c", str(file), "-o", compiled[-1]],
            folder,
            name,
        )
    output = _run(
        [*gcc.compiler(wasm.MACHINE), *compiled, *map(str, graphs), str(archive), *wasm.LINK, *flags, "-o", name],
        folder,
        name,
    )
    if "signature mismatch" in output:  # a call of a function of another type would end the module
        raise ExportError(f"{name} could not be linked: {output}")


def _run(argv: Sequence[str], folder: Path, name: str) -> str:
    # Debian's emscripten expects Debian's Node.js, which looks for its modules there.
    env = {"NODE_PATH": "/usr/share/nodejs", **os.environ}
    process = subprocess.run(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=env,
        cwd=folder,
    )
    if process.returncode:
        raise ExportError(f"{name} could not be built: {process.stdout.strip()[-_SHOWN:]}")
    return process.stdout


def runner(source: Path, objects: Sequence[Path], folder: Path) -> Path:
    """Return the ``run_entry`` for Node.js of a package with these compiled graphs. It is linked in ``folder``,
    once."""
    flags = ("-sNODERAWFS=1", "-sEXIT_RUNTIME=1", "-sWASM_ASYNC_COMPILATION=0", "-sENVIRONMENT=node")
    key = digest(sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in objects))

    def build(new: Path) -> None:
        linked(source, source / "check" / "run_entry.c", objects, flags, new, "run_entry.js")

    return store_folder(folder / f"runner-{key}", build) / "run_entry.js"
