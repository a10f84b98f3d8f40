"""PyTorch for aarch64 in the emulator: it runs a package, and exports another.

The wheel of PyPI is a CUDA build. Empty libraries replace CUDA's, and files in the emulator's root describe an Arm
processor, because PyTorch reads them and ends where they describe the workstation's. A compiler that the emulated
Python starts is the workstation's own program: the cross compiler, under the name g++.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CROSS = "aarch64-linux-gnu"
PURE = (
    "typing_extensions",
    "sympy",
    "mpmath",
    "filelock",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "setuptools",
    "_distutils_hack",
    "packaging",
)
"""Packages that PyTorch and Inductor import, in the workstation's own versions: they have no compiled code, or go
without."""
PROCESSOR = """processor\t: {number}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""A Neoverse N1 (``-cpu neoverse-n1``) in Linux's words."""


def python(folder: Path, emulated: list[str]) -> list[str]:
    """Return the command of a Python with PyTorch for aarch64; [] if its wheel cannot be fetched. ``emulated``: that of
    a plain one."""
    if not emulated:
        return []
    packages = folder / "packages"
    if not (packages / "torch").exists():
        version = torch.__version__.partition("+")[0]
        asked = (
            f"torch=={version} --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 --python-version 3.11"
        )
        pip = [sys.executable, "-m", "pip", "download", "-q", *asked.split(), "-d", folder]
        fetched = subprocess.run(pip, check=False)
        if fetched.returncode:
            return []
        (wheel,) = folder.glob("torch-*aarch64.whl")
        unpacked = folder / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        unpacked.rename(packages)
        wheel.unlink()
    for name in PURE:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        path = Path(spec.origin)
        link = packages / (path.name if path.stem == name else name)
        if not link.exists():
            link.symlink_to(path if path.stem == name else path.parent)
    write_stubs(packages / "torch" / "lib", folder / "stubs")
    write_compilers(folder / "bin")
    root = folder / "root-with-processors"
    if not root.exists():
        shutil.copytree(folder / "root", root, symlinks=True)
    describe_processors(root)
    settings = {
        "LD_LIBRARY_PATH": folder / "stubs",
        "PYTHONPATH": f"{packages}:{folder / 'wheel'}:{ROOT}:{ROOT / 'runtime'}:{ROOT / 'exporters'}",
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "AOT_BACKWARD_CACHE": folder / "cache",
    }
    command = [*emulated[:1], "-cpu", "neoverse-n1", "-L", str(root)]
    return [*command, *(w for name, value in settings.items() for w in ("-E", f"{name}={value}")), emulated[-1]]


def write_stubs(libraries: Path, folder: Path) -> None:
    """Write a library for each one of CUDA's that is missing, with the functions that PyTorch takes from all of them.
    Each returns a text: an error's number where PyTorch asks for one, and its message where it asks for that."""
    folder.mkdir(exist_ok=True)
    present = {path.name for path in libraries.iterdir()}
    missing, defined, symbols = set[str](), set[str](), dict[str, set[str]]()
    for path in libraries.glob("lib*.so*"):
        header = subprocess.run([f"{CROSS}-readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)\w*\.so\.\d+)\]", header)
        missing.update(name for name in needed if name not in present)
        listed = subprocess.run([f"{CROSS}-nm", "-D", path], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            if kind in "Uw":
                symbols.setdefault(version, set()).add(name)
            else:
                defined.add(name)
    ours = {v: names for v, names in symbols.items() if v in missing or v == "NVSHMEM"}
    plain = {n for n in symbols[""] - defined if re.match(r"(cu|nccl|nv|__nv)", n)}
    every = sorted(plain.union(*ours.values()))
    (folder / "stubs.c").write_text("".join(f'const char *{name}(void) {{ return "no CUDA"; }}\n' for name in every))
    nodes = [f"{version} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};" for version, names in ours.items()]
    (folder / "stubs.map").write_text("\n".join(nodes))
    for name in missing:
        flags = ["-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{name}"]
        script = f"-Wl,--version-script={folder / 'stubs.map'}"
        subprocess.run([f"{CROSS}-gcc", *flags, script, folder / "stubs.c", "-o", folder / name], check=True)


def write_compilers(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("g++", "gcc"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {CROSS}-{name} "$@"\n')
        program.chmod(0o755)


def describe_processors(root: Path) -> None:
    processors = root / "sys/devices/system/cpu"
    numbers = sorted(os.sched_getaffinity(0))
    for number in numbers:
        for name, text in (
            ("regs/identification/midr_el1", "0x00000000413fd0c1"),
            ("topology/core_id", str(number)),
            ("topology/physical_package_id", "0"),
        ):
            path = processors / f"cpu{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    for name in ("possible", "present"):
        (processors / name).write_text(f"{numbers[0]}-{numbers[-1]}\n")
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "cpuinfo").write_text("".join(PROCESSOR.format(number=number) for number in numbers))


def results(folder: Path, emulated: list[str], package: Path) -> dict[str, Any]:
    """What ``there.py`` finds: each entry of ``package`` against the stored results, and an export there against
    eager."""
    command = python(folder, emulated)
    if not command:
        return {}
    python_there = folder / "bin" / "python"
    python_there.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    python_there.chmod(0o755)
    argv = [python_there, "-W", "ignore", HERE / "there.py", python_there, package, folder / "there.pt2"]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"with PyTorch for aarch64: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
