"""Find the undefined symbols of a compiled library."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import torch


def unresolved(library: Path, driver: frozenset[str]) -> list[str]:
    """Return the symbols that neither torch's libraries, nor the system's, nor the driver define."""
    wanted = symbols(library, "--undefined-only")
    weak = {name for kind, name in wanted if kind in "wv"}
    return sorted({name for _, name in wanted} - weak - _provided() - driver)


def driver_symbols(header: Path) -> frozenset[str]:
    """Return the driver's functions that ``cuda.h`` declares."""
    text = header.read_text(errors="replace")
    return frozenset(re.findall(r"\b(cu[A-Z]\w+)\s*\(", text)) | frozenset(
        re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+)", text)
    )


@functools.cache
def _provided() -> frozenset[str]:
    folder = Path(torch.__file__).parent / "lib"
    libraries = [*folder.glob("libtorch*.so"), *folder.glob("libc10*.so"), *folder.glob("libgomp*")]
    linked = subprocess.run(["ldd", folder / "libtorch_cpu.so"], capture_output=True, text=True, check=True).stdout
    libraries += [
        Path(p)
        for p in re.findall(
            r"(/\S+/(?:libc|libm|libstdc\+\+|libgcc_s|ld-linux-x86-64|libgomp)[-.\w]*\.so[.\d]*)", linked
        )
    ]
    return frozenset(name for library in libraries for _, name in symbols(library, "--defined-only"))


def symbols(library: Path, which: str) -> list[tuple[str, str]]:
    """Return kind and name of each symbol, without its version."""
    said = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in said.splitlines()]
    return [(row[-2], row[-1].partition("@")[0]) for row in rows if len(row) >= 2]
