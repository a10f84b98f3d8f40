"""Builds the C libraries of aot-backward-native for another machine, and the program that runs an entry on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from aot_backward_runtime.errors import ExportError

from . import gcc
from .compile_cache import cache_root, digest, store_folder


def built(source: Path, machine: str) -> Path:
    """Return the folder with ``libaot_backward.so``, ``libaotb_core.so`` and ``run_entry`` for ``machine``; build it if the cache has none.

    ``source``: the folder with the C sources and their Makefile. Raise :class:`ExportError` without a compiler for ``machine``."""
    for program in (gcc.c_compiler(machine)[0], "make"):
        if shutil.which(program) is None:
            raise ExportError(f"the C libraries for {machine} need {program}, and it was not found: apt-get install gcc-{machine}-linux-gnu make")
    compiler = " ".join(gcc.c_compiler(machine))
    files = sorted(p for p in source.rglob("*") if p.suffix in (".c", ".h", ".inc") or p.name == "Makefile")
    key = digest([machine, compiler, gcc.compiler_version(gcc.c_compiler(machine)), *(p.read_text() for p in files)])

    def build(folder: Path) -> None:
        jobs = f"-j{len(os.sched_getaffinity(0))}"
        argv = ["make", "-C", str(source), f"CC={compiler}", "CFLAGS=-O2", f"BUILD={folder}", jobs, "all", f"{folder}/run_entry"]
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
        process = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, env=env)
        if process.returncode:
            lines = process.stdout.splitlines()
            reason = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise ExportError(f"the C libraries could not be built for {machine}: {reason}")

    return store_folder(cache_root() / "shared" / key, build)
