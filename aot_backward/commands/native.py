"""Write the C libraries of aot-backward-native for a target: what ``aot-backward native`` does."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

from aot_backward_exporters.inductor.targets import parsed, processor
from aot_backward_exporters.toolchain import native_libraries
from aot_backward_runtime.errors import ExportError

from ..checks import standalone

FILES = ("libaot_backward.so", "libaotb_core.so")


def write_libraries(target: str, folder: Path) -> list[Path]:
    """Write the two libraries and their header to ``folder``, and return their paths. They run on every processor of
    the target's machine.

    Raises:
        ExportError: The target is not a CPU's, aot-backward-native is not installed, or there is no compiler for the
            target.
    """
    (name, *others) = parsed(target)
    if others or not name.startswith("cpu"):
        raise ExportError(f"target {target!r}: expected one target for CPUs, such as cpu:neon")
    if not standalone.is_installed():
        raise ExportError(
            "the C libraries are part of aot-backward-native, which is not installed: pip install aot-backward-native"
        )
    native = importlib.import_module("aot_backward_native")
    built = native_libraries.built(Path(native.source_dir()), processor(name).machine)
    sources = [*(built / file for file in FILES), Path(native.include_dir()) / "aot_backward.h"]
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(source, folder)) for source in sources]
