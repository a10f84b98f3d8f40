"""The CUDA toolkit's headers, and a stub library for linking instead of the driver."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aot_backward_runtime.errors import ExportError

from ..process_state import patched, patched_items
from ..toolchain.gcc import compiler


@functools.cache
def cuda_home() -> Path:
    """Return the CUDA toolkit's folder. The host code includes its headers."""
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    candidates = [Path(root)] if root else []
    if nvcc:
        output = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
        match = re.search(r"TOP=(\S+)", output)
        candidates += [Path(match[1])] if match else []
    candidates.append(Path("/usr/local/cuda"))
    for candidate in candidates:
        if (candidate / "include" / "cuda.h").is_file():
            return candidate.resolve()
    raise ExportError(
        "target cuda needs the headers of the CUDA toolkit (cuda.h), and none was found: install it, or set CUDA_HOME"
    )


@contextlib.contextmanager
def toolkit() -> Iterator[None]:
    """Let the host compiler find the CUDA toolkit, and a stub library for linking instead of the driver: linkers may
    not search the driver's folder on a machine with a GPU."""
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder, contextlib.ExitStack() as stack:
        _driver_stub(Path(folder))
        paths = [folder, *filter(None, [os.environ.get("LIBRARY_PATH")])]
        stack.enter_context(patched_items(os.environ, CUDA_HOME=str(cuda_home()), LIBRARY_PATH=os.pathsep.join(paths)))
        from torch.utils import cpp_extension

        # CUDA_HOME is set at import, and not searched for again
        stack.enter_context(patched(cpp_extension, CUDA_HOME=str(cuda_home())))
        yield


def _driver_stub(folder: Path) -> None:
    """Build a stub for the driver's library: it exports the names in ``cuda.h``, so that the linker keeps the
    dependency on the driver."""
    header = (cuda_home() / "include" / "cuda.h").read_text(errors="replace")
    names = sorted(
        set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", header))
        | set(re.findall(r"#define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+)", header))
    )
    source = folder / "stub.c"
    source.write_text("".join(f"void {name}(void){{}}\n" for name in names))
    argv = [
        *compiler(),
        "-x",
        "c",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        str(source),
        "-o",
        str(folder / "libcuda.so"),
    ]
    subprocess.run(argv, check=True, capture_output=True)
