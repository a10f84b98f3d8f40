"""Splits Inductor's generated C++ into a part compiled for each graph and a part compiled once for all.

Inductor pastes the same C interface (``interface.cpp``, 600 lines that instantiate the model container) into every
wrapper. Compiled separately and linked in it takes 4.4 s once and saves 4 of 5.2 s per graph (g++ 12, -O2). The model's
base class is compiled with it, too, and wrappers do not include the container: the smallest takes 0.72 s in place of
1.05.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.torch_api import CONSTANT_LAYOUTS

from .float_sums import in_registers
from .parallel_regions import where_it_pays

WRAPPER_HEADER = "#include <torch/csrc/inductor/aoti_include/cpu.h>\n"
KERNEL_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
_MODEL = "namespace torch::aot_inductor {{ {} class AOTInductorModelBase<AOTInductorModel>; }}\n"
TORCH_INCLUDE = Path(torch.__file__).parent / "include"

_INTERFACE = Path(torch.__file__).parent / "_inductor/codegen/aoti_runtime/interface.cpp"
_MODEL_BASE = Path("torch/csrc/inductor/aoti_runtime/model_base.h")
_PARSE_DEVICE = re.compile(r"inline void parse_device_str\((?P<parameters>.*?)\) \{\n.*?\n\}\n", re.DOTALL)
_PARSED_BY_HAND = r"""inline void parse_device_str(\g<parameters>) {
  const auto colon = device_str.find(':');
  const auto kind = device_str.substr(0, colon), index = colon == std::string::npos ? "" : device_str.substr(colon + 1);
  const bool is_valid = (colon == std::string::npos || !index.empty()) && index.find_first_not_of("0123456789") == std::string::npos;
  AOTI_RUNTIME_CHECK(is_valid && (kind == "cpu" || kind == "cuda"), "Invalid device: " + device_str);
  device_type = kind == "cpu" ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  device_idx = index.empty() ? -1 : std::stoi(index);
}
"""
"""In place of torch's function, which needs std::regex: 3 s of g++ and 230 kB in every library."""
_CONSTANT_INFO = re.compile(
    r"constants_info_\[(\d+)\]\.(name|dtype|shape|stride) = (?:static_cast<int32_t>\()?(.*?)\)?;$", re.MULTILINE
)
_KERNEL_START = 'extern "C" '
_OMP = re.compile(r"^[ \t]*#pragma omp (parallel|for).*$", re.MULTILINE)
_PRINTED = re.compile(r'^ *std::cerr << "Error: " << e\.what\(\)[^;]*;[ \\]*\n', re.MULTILINE)
_CHECKS_WANTED = "static bool _check_aoti_runtime_check_inputs_env() {"
_MAY_HAVE_THREADS = 'extern "C" char __libc_single_threaded = 0;\n'
"""libstdc++ reads this variable of glibc 2.32 to skip atomic reference counting in single-threaded processes. The
library defines its own as 0, so it always counts atomically."""
PARALLEL = "GOMP_parallel"
_WITHOUT_A_TEAM = f"""
extern "C" int omp_get_max_threads(void);
extern "C" int omp_get_num_threads(void);
extern "C" void __real_{PARALLEL}(void (*)(void*), void*, unsigned, unsigned);
extern "C" void __wrap_{PARALLEL}(void (*body)(void*), void* data, unsigned threads, unsigned flags) {{
    if ((threads ? threads : omp_get_max_threads()) == 1 && omp_get_num_threads() == 1) body(data);
    else __real_{PARALLEL}(body, data, threads, flags);
}}
"""
"""The function that compiled parallel loops call instead of libgomp's of that name (``ld --wrap``). For one thread,
libgomp makes a team of one and wakes the others by a system call at the end of each loop: 0.3 µs, 191 times in a
training step of a transformer of 110 thousand parameters. Inside another team libgomp would divide the loop among its
threads, so libgomp still runs it."""
_OLD_SYMBOLS = [
    "pthread_rwlock_rdlock",
    "pthread_rwlock_wrlock",
    "pthread_rwlock_unlock",
    "pow",
    "exp",
    "exp2",
    "hypot",
    "fmod",
]
"""Functions that a newer glibc also exports under a newer version (2.29 to 2.38). The older version gives the same
bits. The list excludes ``log`` and ``log2``: their older versions give NaN another sign."""
_CHECKS_UNWANTED = "static constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }\n"


def model_source(wrapper: str) -> str:
    """Return the part of a generated wrapper that belongs to its graph.

    The checks that ``AOTI_RUNTIME_CHECK_INPUTS`` would switch on are removed too: our runtime checks every input
    itself, and they take 5 kB of code an input and a branch on the hot path.
    """
    interface = _INTERFACE.read_text().strip()
    before, separator, after = wrapper.partition(interface)
    if not separator or after.count(_CHECKS_WANTED) != 1:
        raise ExportError(
            f"the C++ that torch {torch.__version__} generates is unknown to this aot-backward: install one that supports it"
        )
    return (
        _for_older_glibc()
        + before
        + _layout_symbol(wrapper)
        + after.replace(_CHECKS_WANTED, _CHECKS_UNWANTED + _CHECKS_WANTED.replace("_check", "_unused", 1))
    )


def _layout_symbol(wrapper: str) -> str:
    """Return a symbol with the dtype, shape and strides that the code was compiled for, for each constant: the C
    interface gives only name, dtype and size in bytes. A reader compares it with the manifest: another layout than the
    code's would give wrong numbers."""
    constants: dict[str, dict[str, str]] = {}
    for number, field, value in _CONSTANT_INFO.findall(wrapper):
        constants.setdefault(number, {})[field] = (
            value.strip('"{}').replace(" ", "").removeprefix("cached_torch_dtype_")
        )
    lines = "".join(f"{c['name']} {c['dtype']} [{c['shape']}] [{c['stride']}]\\n" for c in constants.values())
    return f'extern "C" __attribute__((used, visibility("default"))) const char {CONSTANT_LAYOUTS}[] = "{lines}";\n'


def kernel_source(kernels: str) -> str:
    """Return kernel source. Kernels that check an index (embeddings, gathers, class labels) are single-threaded; others
    are parallel if that pays.

    The check throws, and an exception that leaves an OpenMP region ends the process; outside of one it becomes the
    error of that call.
    """
    functions = in_registers(kernels).split(_KERNEL_START)
    return _for_older_glibc() + _KERNEL_START.join(
        _OMP.sub("", f) if "TORCH_CHECK" in f else where_it_pays(f) for f in functions
    )


def wrapper_header() -> str:
    """Return the header that every model source includes first. The model's base class is compiled with the C
    interface."""
    return WRAPPER_HEADER + _MODEL.format("extern template")


def interface_source() -> str:
    """Return the C interface of every library."""
    text = _INTERFACE.read_text()
    # The error returned to the caller has the text (torch 2.13): stderr need not repeat it
    if "g_aoti_last_error = e.what();" in text:
        text = _PRINTED.sub("", text)
    return _for_older_glibc() + WRAPPER_HEADER + text + _MODEL.format("template") + _MAY_HAVE_THREADS + _WITHOUT_A_TEAM


def _for_older_glibc() -> str:
    """Bind to the oldest version of glibc's functions (x86-64's ABI begins at 2.2.5), so that the library loads on
    older systems."""
    lines = "".join(f'__asm__(".symver {name},{name}@GLIBC_2.2.5");\n' for name in _OLD_SYMBOLS)
    return f"#ifdef __x86_64__\n{lines}#endif\n"


def write_patched_headers(folder: Path) -> None:
    """Write ``model_base.h`` without std::regex."""
    header, found = _PARSE_DEVICE.subn(_PARSED_BY_HAND, (TORCH_INCLUDE / _MODEL_BASE).read_text())
    if found:
        header = header.replace("#include <regex>\n", "#include <functional>\n#include <string>\n")
    (folder / _MODEL_BASE).parent.mkdir(parents=True)
    (folder / _MODEL_BASE).write_text(header)
