"""What this machine has of what an export needs: what ``aot-backward doctor`` shows."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from aot_backward_exporters import torch_api
from aot_backward_exporters.inductor import targets
from aot_backward_exporters.toolchain import products, wasm
from aot_backward_exporters.toolchain.compile_cache import cache_root
from aot_backward_exporters.toolchain.gcc import compiler, compiler_version
from aot_backward_runtime import compatibility
from aot_backward_runtime.errors import AotBackwardError
from aot_backward_runtime.format.elf import MACHINES

from ..checks import emulated

_LEAST_ROOM = 1 << 30  # bytes; two precompiled headers of up to 150 MB, and room to compile in
_PROBE = "#include <omp.h>\n#include <vector>\nextern int f() { return omp_get_max_threads(); }\n"


@dataclass(frozen=True)
class Finding:
    """``status``: "ok"; "warning" (most will work); "failed" (an export for ``cpu`` cannot work). ``next``: what to do
    about it."""

    what: str
    status: str
    found: str
    next: str = ""


def examine() -> list[Finding]:
    """Everything, in the order in which it would fail."""
    checks = (_system, _python, _torch, _processor, _products, _c_library, _compiler, _cache, _temporary, _gpu)
    return [
        *(check() for check in checks),
        *(_other_machine(machine) for machine in (*MACHINES.values(), wasm.MACHINE) if machine != platform.machine()),
    ]


def _system() -> Finding:
    system = f"{sys.platform} {platform.machine()}"
    if system not in (supported := [f"linux {machine}" for machine in MACHINES.values()]):
        return Finding(
            "system", "failed", system, f"native code is made for {' and '.join(supported)} only: use such a machine"
        )
    return Finding("system", "ok", system)


def _python() -> Finding:
    # An older Python cannot have installed us
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _torch() -> Finding:
    if torch_api.minor() not in torch_api.SUPPORTED:
        versions = ", ".join(torch_api.SUPPORTED)
        return Finding(
            "torch",
            "failed",
            torch.__version__,
            f"aot-backward supports torch {versions}: pip install 'torch=={torch_api.SUPPORTED[-1]}.*'",
        )
    return Finding("torch", "ok", torch.__version__)


def _processor() -> Finding:
    spec = targets.target_spec("cpu")
    flags, march = spec.cpu_flags, spec.march
    missing = [f for f in flags if f not in compatibility.cpu_flags()]
    if missing:
        return Finding(
            "processor",
            "failed",
            f"lacks {' '.join(missing)} of {march}",
            "packages cannot be checked or run here: use a newer processor",
        )
    return Finding("processor", "ok", f"has all of {march}; {len(os.sched_getaffinity(0))} usable cores")


def _products() -> Finding:
    """Return which library computes large matrix products of compiled code, which follows the same rule
    (``toolchain/products.h``)."""
    name = "matrix products"
    if library := os.environ.get(products.VARIABLE):
        if library not in ("mkl", "onednn"):
            return Finding(
                name, "failed", f"{products.VARIABLE}: expected mkl or onednn, got {library}", "unset it, or correct it"
            )
        return Finding(name, "ok", f"{'oneDNN' if library == 'onednn' else 'MKL'} for large ones ({products.VARIABLE})")
    if compatibility.processor_vendor() != "AuthenticAMD" or "avx512f" not in compatibility.cpu_flags():
        return Finding(name, "ok", "PyTorch's own" + " (MKL)" * torch.backends.mkl.is_available())
    if compatibility.processor_family() == "25":
        return Finding(name, "ok", "oneDNN for large ones, MKL for gradients of weights (AMD Zen 4)")
    return Finding(name, "ok", "oneDNN for large ones (AMD with AVX-512)")


def _c_library() -> Finding:
    return _check(
        "C library",
        lambda: f"glibc {compatibility.glibc()}, GLIBCXX {compatibility.glibcxx()}",
        "use a system with glibc and libstdc++, such as Debian",
    )


def _compiler() -> Finding:
    """Not only that there is one: headers and OpenMP come in packages of their own on some systems."""
    try:
        command = compiler()
        version = compiler_version(command)
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
            argv = [*command, "-x", "c++", "-", "-fopenmp", "-shared", "-fPIC", "-o", f"{folder}/probe.so"]
            process = subprocess.run(argv, input=_PROBE, capture_output=True, text=True)
    except AotBackwardError as error:
        return Finding("compiler", "failed", "none", str(error))
    except (OSError, subprocess.CalledProcessError) as error:
        return Finding("compiler", "failed", str(error), "apt-get install g++ (or set CXX)")
    if process.returncode:
        message = next(
            (line for line in process.stderr.splitlines() if "error" in line), f"exit status {process.returncode}"
        )
        return Finding(
            "compiler",
            "failed",
            f"{version} does not compile a C++ file with OpenMP: {message}",
            "apt-get install g++ (or set CXX)",
        )
    return Finding("compiler", "ok", version)


def _cache() -> Finding:
    folder = cache_root()
    advice = "set AOT_BACKWARD_CACHE to a folder that only you can write to, on a file system that allows execution"
    ancestor = folder
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        return Finding("cache folder", "failed", f"{folder}: {ancestor} cannot be written to", advice)
    if os.statvfs(ancestor).f_flag & os.ST_NOEXEC:
        return Finding("cache folder", "failed", f"{folder} is on a file system mounted noexec", advice)
    status = ancestor.stat()
    if ancestor == folder and (status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        return Finding(
            "cache folder",
            "warning",
            f"{folder} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})",
            f"loading refuses it: chmod go-w {folder}",
        )
    room = shutil.disk_usage(ancestor).free
    summary = (
        f"{folder}, {_held(folder) / 1e6:.0f} MB in it, {room / 1e9:.1f} GB free"
        if ancestor == folder
        else f"{folder}, not made yet, {room / 1e9:.1f} GB free"
    )
    if room < _LEAST_ROOM:
        return Finding(
            "cache folder",
            "warning",
            summary,
            "an export may run out of room: free some, or set AOT_BACKWARD_CACHE to another disk",
        )
    return Finding("cache folder", "ok", summary)


def _temporary() -> Finding:
    def found() -> str:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
            if os.statvfs(folder).f_flag & os.ST_NOEXEC:  # the self-check opens what was just compiled there
                raise AotBackwardError(f"{tempfile.gettempdir()} is on a file system mounted noexec")
        return f"{tempfile.gettempdir()}, {shutil.disk_usage(tempfile.gettempdir()).free / 1e9:.1f} GB free"

    return _check("temporary folder", found, "set TMPDIR to a folder that can be written to and allows execution")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        reason = (
            f"torch {torch.__version__} is built without CUDA"
            if torch.version.cuda is None
            else f"CUDA {torch.version.cuda}, and no usable GPU"
        )
        return Finding("GPU", "ok", f"none ({reason}): --target cuda would fail, cpu does not need one")
    major, minor = torch.cuda.get_device_capability()
    return Finding("GPU", "ok", f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}")


def _other_machine(machine: str) -> Finding:
    label = f"targets for {machine}"
    try:
        command = compiler(machine)
    except AotBackwardError as error:
        return Finding(label, "ok", f"none ({error})")
    emulator = emulated.emulator(machine)
    check = f"checked in {emulator[0]}" if emulator else f"not checked: no {emulated.described(machine)}"
    names = [f"cpu:{level}" for level, processor in targets.PROCESSORS.items() if processor.machine == machine]
    return Finding(label, "ok", f"{', '.join(names)}, compiled by {command[0]}, {check}")


def _check(name: str, question: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding(name, "ok", question())
    except (AotBackwardError, OSError) as error:
        return Finding(name, "failed", str(error), advice)


def _held(folder: Path) -> int:
    """Return the bytes of the files below ``folder``, of which other processes may rename or delete some meanwhile."""
    size = 0
    for below, _, files in os.walk(folder):  # ignores folders that are gone; Path.rglob raises
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                size += (Path(below) / name).lstat().st_size
    return size
