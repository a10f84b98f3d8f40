"""``python -m tests.tools.cross.played DRIVER JOBS RESULTS``: run compiled libraries; Triton's interpreter runs each
launch of a kernel.

It needs a separate process: the simulated driver must be loaded before torch, and Triton decides at its first import
whether it interprets.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

_HEADER = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import math as tl_math

libdevice = None

@triton.jit
"""
_PATHS = {".debug_line": b""}  # the exporter removes paths of this machine from the library; this section has them
_CTYPES = {
    "i1": ctypes.c_bool, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


class Player:
    """Launches kernels by name. ``failure``: the first exception of a launch."""

    def __init__(self, kernels: dict[str, Any], folder: Path) -> None:
        self.kernels, self.folder = kernels, folder
        self.functions: dict[str, Any] = {}
        self.launches = 0
        self.failure: BaseException | None = None

    def launch(self, image: int, name: bytes, grid: Any, threads: Any, shared: int, arguments: Any) -> int:
        """Run a launch and return the status for ``cuLaunchKernel``: an exception cannot pass through the library."""
        try:
            self.run(image, name.decode(), tuple(grid[:3]), tuple(threads[:3]), shared, arguments)
        except BaseException as error:
            self.failure = self.failure or error
            return 1
        return 0

    def run(
        self, image: int, name: str, grid: tuple[int, ...], threads: tuple[int, ...], shared: int, arguments: Any
    ) -> None:
        from .machine_code import kernels_of, sections

        source = self.kernels[name]
        loaded, made = dict(sections(ctypes.string_at(image, len(source.cubin)))), dict(sections(source.cubin))
        if {**loaded, **_PATHS} != {**made, **_PATHS}:
            raise ValueError(f"{name}: the machine code in the library differs from the compiled source")
        code = next(kernel for kernel in kernels_of(source.cubin) if kernel.name == name)
        if (threads, shared) != (code.threads, source.shared):
            raise ValueError(f"{name}: launched with {threads} threads and {shared} bytes of shared memory")
        raw = [ctypes.string_at(arguments[ordinal], size) for ordinal, (_, size) in enumerate(code.parameters)]
        own, scratch = dict(zip(source.signature, raw, strict=False)), raw[len(source.signature) :]
        if any(map(any, scratch)):
            raise NotImplementedError(f"{name}: it gets scratch memory")
        if odd := [argument for argument in source.multiples if int.from_bytes(own[argument], "little") % 16]:
            raise ValueError(f"{name}: its machine code expects multiples of 16 in {', '.join(odd)}")
        values = {argument: _value(source.signature[argument], data) for argument, data in own.items()}
        self.function(name).run(**values, **source.constants, grid=grid, warmup=False)
        self.launches += 1

    def function(self, name: str) -> Any:
        """Return the kernel, from a Python module with its source: the interpreter reads the source from the file."""
        from .gaps import Libdevice

        if name not in self.functions:
            path = self.folder / f"{name}.py"
            path.write_text(_HEADER + self.kernels[name].text)
            spec = importlib.util.spec_from_file_location(f"kernel_{name}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.libdevice = Libdevice()
            self.functions[name] = getattr(module, name)
        return self.functions[name]


def _value(kind: str, data: bytes) -> Any:
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    typed = tl.str_to_ty(kind, None)
    if kind.startswith("*"):
        return tl.tensor(TensorHandle(numpy.frombuffer(data, numpy.uint64).copy(), typed), typed)
    value = _CTYPES[kind].from_buffer_copy(data).value
    return tl.tensor(TensorHandle(numpy.array([value], _get_np_dtype(typed)), typed), typed)


def main() -> None:
    driver = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    import torch

    from . import gaps, jobs

    gaps.install()
    on_cpu = ctypes.CDLL("libtorch_cpu.so")
    job = torch.load(sys.argv[2], weights_only=False)
    missing = {name for name in job["operators"] if not hasattr(on_cpu, f"aoti_torch_cpu_{name}")}
    forwarded = {f"to_{name}": f"aoti_torch_cpu_{name}" for name in set(job["operators"]) - missing}
    for name, function in (forwarded | {"empty_strided": "aoti_torch_empty_strided"}).items():
        ctypes.c_void_p.in_dll(driver, name).value = ctypes.cast(getattr(on_cpu, function), ctypes.c_void_p).value
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, library in enumerate(job["libraries"]):
            if lacking := missing & set(library.operators):
                results.append(jobs.Played(refused=f"{', '.join(sorted(lacking))} not available on the CPU"))
                continue
            (Path(folder) / str(number)).mkdir()
            player = Player(library.kernels, Path(folder) / str(number))
            called = _LAUNCH(player.launch)
            ctypes.c_void_p.in_dll(driver, "play").value = ctypes.cast(called, ctypes.c_void_p).value
            try:
                played = _run(library, player)
            except Exception as error:
                cause = player.failure or error
                traceback.print_exception(cause)
                where = (
                    "refused"
                    if isinstance(cause, NotImplementedError) or "NotImplementedError" in str(cause)
                    else "failed"
                )
                played = jobs.Played(**{where: f"{type(cause).__name__}: {str(cause).splitlines()[0]}"})
            results.append(played)
    torch.save(results, sys.argv[3])


def _run(library: Any, player: Player) -> Any:
    import torch
    from torch._C._aoti import AOTIModelContainerRunnerCpu

    from . import jobs

    runner = AOTIModelContainerRunnerCpu(library.path, 1)
    runner.update_constant_buffer(
        {name: library.weights[key] for name, key in library.constants.items()}, False, True, True
    )
    calls = []
    for seed, inputs in library.calls:
        torch.manual_seed(seed)
        outputs = runner.run(list(inputs))
        calls.append(jobs.Call(outputs, inputs, {key: tensor.clone() for key, tensor in library.weights.items()}))
    return jobs.Played(calls=calls, launches=player.launches, kernels=len(player.functions))


if __name__ == "__main__":
    main()
