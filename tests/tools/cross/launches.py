"""Check that the host code launches each kernel as its machine code expects: number and sizes of arguments, threads,
shared memory.

``cuLaunchKernel`` gets pointers to the arguments and reads as many bytes as the machine code states. If an argument is
missing, or is an ``int`` instead of a ``long``, it reads unrelated memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .machine_code import Kernel

_SIZES = {
    "CUdeviceptr": 8,
    "int64_t": 8,
    "uint64_t": 8,
    "double": 8,
    "int32_t": 4,
    "uint32_t": 4,
    "float": 4,
    "int16_t": 2,
    "int8_t": 1,
    "bool": 1,
}
# torch 2.15 adds two arguments: a flag for overlapping dependent launches, and a list of modules for the destructor to
# unload.
_LAUNCH = re.compile(
    r"launchKernel\(kernels_\.(\w+), grid_0, grid_1, grid_2, (\d+), (\d+), kernel_args_, stream_(?:, false)?\);"
)
_LOAD = re.compile(r'kernels_\.(\w+) = loadKernel\(\w+, "(\w+)", (\d+)(?:, &kernels_\.loaded_modules_)?\);')
_ARGUMENTS = re.compile(r"void\* kernel_args_\[\] = \{(.*)\};")
_DECLARED = re.compile(r"^ +(\w+) (\w+) = ", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """A launch in the host code. ``name``: the name of the kernel in the machine code. ``arguments``: their types."""

    name: str
    arguments: tuple[str, ...]
    warps: int
    shared: int
    shared_allowed: int  # the limit that the host code sets when it loads the kernel


def launches(wrapper: str) -> list[Launch]:
    """Return the launches in the C++ that Inductor generates. One function launches each kernel."""
    found = []
    start = r"^static (?:inline|__attribute__\(\(noinline\)\)) void (?=call_)"
    for function in re.split(start, wrapper, flags=re.MULTILINE)[1:]:
        code = re.sub(r"/\*.*?\*/", "", function, flags=re.DOTALL)  # a comment has the kernel's source
        launch, load, arguments = _LAUNCH.search(code), _LOAD.search(code), _ARGUMENTS.search(code)
        if not (launch and load and arguments):
            raise ValueError(f"the host code launches {function.split('(', 1)[0]} in a way that is not known here")
        types = {name: kind for kind, name in _DECLARED.findall(code)}
        names = [argument.strip().removeprefix("&") for argument in arguments[1].split(",")]
        found.append(
            Launch(
                load[2],
                tuple(types.get(name, f"undeclared {name}") for name in names),
                int(launch[2]),
                int(launch[3]),
                int(load[3]),
            )
        )
    return found


def faults(wrapper: str, kernels: Sequence[Kernel], shared: Mapping[str, int]) -> list[str]:
    """Return the mismatches.

    ``shared``: bytes of shared memory per kernel, as its compiler stated. The machine code states only whether there is
    any."""
    launched = {launch.name: launch for launch in launches(wrapper)}
    known = {kernel.name: kernel for kernel in kernels}
    wrong = [f"{name} is launched, and has no machine code" for name in launched.keys() - known.keys()]
    wrong += [f"{name} is never launched" for name in known.keys() - launched.keys()]
    for name in sorted(launched.keys() & known.keys()):
        wrong += [f"{name}: {words}" for words in _misfits(launched[name], known[name], shared[name])]
    return wrong


def _misfits(launch: Launch, kernel: Kernel, shared: int) -> list[str]:
    given = [_SIZES.get(kind, 0) for kind in launch.arguments]
    expected = [size for _, size in kernel.parameters]
    offsets, end = [], 0
    for size in expected:
        end += -end % size  # the offset of a parameter is a multiple of its size
        offsets.append(end)
        end += size
    stated = {
        f"is given {len(given)} arguments, and expects {len(expected)}": len(given) != len(expected),
        f"is given arguments of {given} bytes ({', '.join(launch.arguments)}), and expects {expected}": len(given)
        == len(expected)
        and given != expected,
        f"reads its parameters at {[at for at, _ in kernel.parameters]} in {kernel.bytes_of_parameters} bytes; they lie at {offsets} in {end}": (
            offsets != [at for at, _ in kernel.parameters] or end != kernel.bytes_of_parameters
        ),
        f"is given {32 * launch.warps} threads, and expects {kernel.threads}": (32 * launch.warps, 1, 1)
        != kernel.threads,
        f"is given {launch.shared} bytes of shared memory, {launch.shared_allowed} allowed, and expects {shared}": (
            (launch.shared, launch.shared_allowed) != (shared, shared)
        ),
        f"is given {launch.shared} bytes of shared memory, and {'has some' if kernel.uses_shared else 'has none'}": (
            bool(launch.shared) != kernel.uses_shared
        ),
    }
    return [words for words, is_so in stated.items() if is_so]
