"""Generated C++ as code for WebAssembly: one object per graph, with names of its own, because all graphs of a package
are linked into one module.

emscripten compiles it. The vectors are the compiler's own (``-msimd128``), since PyTorch has none for WebAssembly.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from aot_backward_runtime.errors import ExportError

from . import cpp_source

MACHINE = "wasm32"
MAGIC = b"\0asm"
INCLUDE = Path(__file__).with_name("wasm_include")
EXCEPTIONS = ("-fwasm-exceptions", "-sSUPPORT_LONGJMP=wasm")
LINK = (
    *EXCEPTIONS,
    "-Os",
    "-sALLOW_MEMORY_GROWTH=1",
    "-sMAXIMUM_MEMORY=2GB",
    "-sTOTAL_STACK=1MB",
    "-sERROR_ON_UNDEFINED_SYMBOLS=1",
)
_KEPT = ("-D", "-O", "-std=", "-fsigned-zeros", "-fno-trapping-math", "-fmath-errno", "-ffp-contract=")
_KERNEL = re.compile(r'^extern "C"\s+void\s+(\w+)\(', re.MULTILINE)
_INTERFACE = re.compile(r"\b(AOTInductor\w+)(?=\()")
_TEXT = cpp_source.TORCH_INCLUDE.parent / "_inductor/codegen/aoti_runtime/interface.cpp"
_PRINTED = re.compile(r"std::cerr <<.*?;", re.DOTALL)
_CONSTANTS = ("_binary_constants_bin_start", "_binary_constants_bin_end")
_RUN = re.compile(rb"(g[0-9a-f]{16}_)AOTInductorModelContainerRun\b")


def flags(of: Sequence[str]) -> tuple[str, ...]:
    """Return those of Inductor's flags for g++ that mean the same here, and emscripten's."""
    kept: list[str] = []
    for number, flag in enumerate(of):
        if flag == "-D":
            kept.append(f"-D{of[number + 1]}")
        elif flag == "-O2":  # wrappers: smaller code; kernels keep -O3
            kept.append("-Os")
        elif flag.startswith(_KEPT) or (flag.startswith("-I") and "/torch/include" in flag):
            kept.append(flag)
    return (*kept, "-msimd128", *EXCEPTIONS, f"-I{INCLUDE}")


def sources(wrapper: str, kernels: str) -> dict[str, str]:
    """Return the wrapper, with the C interface of the library behind it, and the kernels of one graph. Every name that
    another graph may have too begins with a digest of the graph."""
    interface = _TEXT.read_text()
    # The error is returned to the caller, so that the C++ library's streams are not needed
    if "g_aoti_last_error = e.what();" in interface:
        interface = _PRINTED.sub("", interface)
    names = {
        *_KERNEL.findall(kernels),
        *_INTERFACE.findall(interface),
        *_CONSTANTS,
        cpp_source.CONSTANT_LAYOUTS,
        "aot_inductor",
    }
    prefix = f"g{hashlib.sha256((wrapper + kernels).encode()).hexdigest()[:16]}_"
    # There is one thread, and clang 14 writes "unreachable" for a thread_local in a handler of exceptions
    renamed = "#define thread_local\n"
    renamed += "".join(f"#define {name} {prefix}{name}\n" for name in sorted(names))
    # The weights are bound; PyTorch writes them in assembler
    constants = "".join(f"uint8_t {name}[1];\n" for name in _CONSTANTS)
    return {
        "wrapper.cpp": f"{renamed}{wrapper}\n{interface}\n{constants}",
        "kernel.cpp": f"{renamed}{cpp_source.KERNEL_HEADER}{kernels}",
    }


def graph_table(objects: Iterable[Path]) -> str:
    """Return the C source of the table of compiled graphs (``runtime/native/wasm/linked.h``)."""
    prefixes = sorted({prefix_of(path) for path in objects})
    declared = "".join(f"DECLARE_GRAPH({prefix})\n" for prefix in prefixes)
    rows = "".join(f"  GRAPH({prefix}),\n" for prefix in prefixes)
    return f'#include "linked.h"\n{declared}const linked_graph linked_graphs[] = {{\n{rows}  {{0}},\n}};\n'


def prefix_of(path: Path) -> str:
    """Return what the names in a compiled graph begin with. It is a digest of the graph."""
    found = _RUN.search(path.read_bytes())
    if found is None:
        raise ExportError(f"{path}: expected a compiled graph for WebAssembly, got another file")
    return found[1].decode()
