"""Compiles graphs for a GPU on a machine without one: a table answers the device queries of torch, Inductor and Triton,
and nothing is launched.

A graph is captured on fake CPU tensors and rewritten for fake CUDA tensors (:mod:`.retarget`). It needs a CUDA build of
torch, triton, and a CUDA toolkit's headers; no driver. Other pairs of torch and triton than :data:`TESTED` raise an
error that names them.

:func:`crossing` restores every private name of torch that it replaces. This module is the one exception to the rule
that private names live in ``torch_api.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..process_state import patched, patched_items
from .devices import DEVICES, Device
from .toolkit import cuda_home, toolkit

TESTED = {"2.11": "3.6", "2.15": "3.9"}
"""torch minor -> triton minor: the pairs that `make cross` has checked and run."""


def check(target: str) -> Device:
    """Return the device of ``target`` ("cuda:sm_90"). Raise :class:`ExportError` with installation advice if this
    process cannot compile for it."""
    arch = target.partition(":")[2]
    if arch not in DEVICES:
        raise ExportError(
            f"unknown target {target!r}; GPUs supported for cross-compilation: {', '.join(f'cuda:{a}' for a in DEVICES)}"
        )
    install = (
        " or ".join(f"pip install torch=={t}.0 triton=={v}.0" for t, v in TESTED.items())
        + ", the build for CUDA from PyPI"
    )
    if torch.version.cuda is None:
        raise ExportError(
            f"target {target} needs a build of torch for CUDA, and this is {torch.__version__}: {install}"
        )
    try:
        import triton
    except ImportError as error:
        raise ExportError(f"target {target} needs triton, which is not installed: {install}") from error
    if TESTED.get(torch_api.minor()) != ".".join(triton.__version__.split(".")[:2]):
        tested_pairs = ", ".join(f"torch {t} with triton {v}" for t, v in TESTED.items())
        raise ExportError(
            f"target {target} is tested with {tested_pairs}; this is torch {torch.__version__} with triton {triton.__version__}: {install}"
        )
    cuda_home()
    return DEVICES[arch]


@contextlib.contextmanager
def crossing(device: Device) -> Iterator[None]:
    """Simulate one GPU, ``device``: code for it can be generated, but not launched."""
    with toolkit(), contextlib.ExitStack() as stack:
        # without the second, kernels contain the path and time of a temporary file
        stack.enter_context(patched_items(os.environ, TENSORIFY_PYTHON_SCALARS="0", TRITON_DISABLE_LINE_INFO="1"))
        _forget()
        stack.callback(_forget)
        # Otherwise a kernel of another architecture is reused, by its name
        stack.enter_context(torch_api.fresh_cache())
        for patch in (_torch_cuda, _fake_tensors, _triton, _autotuning, _constants, _folding):
            patch(device, stack)
        stack.enter_context(torch_api.inductor_config.patch(_SETTINGS))
        yield


_SETTINGS = {
    "triton.autotune_at_compile_time": True,
    "aot_inductor.embed_kernel_binary": True,
    "aot_inductor.emit_multi_arch_kernel": False,
    "compile_threads": 1,
    "max_autotune": False,
    "max_autotune_gemm": False,
}


def _forget() -> None:
    """Empty torch's caches of device properties."""
    from torch._inductor import utils
    from torch._inductor.runtime import hints
    from torch.utils import _triton as triton_utils

    hints.DeviceProperties.create.cache_clear()
    for module in (utils, hints, triton_utils):
        for value in vars(module).values():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()


def _torch_cuda(device: Device, stack: contextlib.ExitStack) -> None:
    from torch._dynamo import device_interface

    properties = types.SimpleNamespace(
        name=device.name, major=device.major, minor=device.minor, multi_processor_count=device.multiprocessors, total_memory=device.memory,
        warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=device.threads, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=device.shared, shared_memory_per_multiprocessor=device.shared_of_all,
        L2_cache_size=device.cache, is_integrated=False, is_multi_gpu_board=False, gcnArchName="", uuid="0", pci_bus_id=0,
    )  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device="cuda": state.clone(),
        "set_rng_state": lambda new_state, device="cuda": None,
        "_lazy_init": lambda: None,
        "init": lambda: None,
    }
    stack.enter_context(patched(torch.cuda, **answers))
    interface = device_interface.CudaInterface
    names = (
        "current_device",
        "device_count",
        "set_device",
        "get_device_properties",
        "is_bf16_supported",
        "is_available",
    )
    methods = {name: answers[name] for name in names}
    methods |= {
        "exchange_device": answers["_exchange_device"],
        "maybe_exchange_device": answers["_maybe_exchange_device"],
    }
    methods["get_compute_capability"] = lambda device=None: device_number(properties)
    stack.enter_context(patched(interface, **{name: staticmethod(method) for name, method in methods.items()}))
    stack.enter_context(patched_items(device_interface.caching_worker_device_properties, cuda=[properties]))


def device_number(properties: Any) -> int:
    return int(properties.major * 10 + properties.minor)


def _fake_tensors(device: Device, stack: contextlib.ExitStack) -> None:
    from torch._subclasses import fake_tensor

    stack.enter_context(patched(fake_tensor, init_gpu_context=lambda device: None))
    stack.enter_context(patched(fake_tensor.FakeTensorMode, avoid_device_init=property(lambda self: True)))


def _triton(device: Device, stack: contextlib.ExitStack) -> None:
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver as drivers

    objdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"

    class Utils:
        def get_device_properties(self, number: int) -> dict[str, int]:
            return {
                "max_shared_mem": device.shared, "max_num_regs": 65536, "multiprocessor_count": device.multiprocessors, "warpSize": 32,
                "sm_clock_rate": 1980000, "mem_clock_rate": 3201000, "mem_bus_width": 6144,
            }  # fmt: skip

        def load_binary(self, name: str, kernel: bytes, shared: int, number: int) -> tuple[None, int, int, int, int]:
            """Return registers and spills from the machine code, but no module: triton 3.8 and newer would have the
            driver unload it."""
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel)
                file.flush()
                output = subprocess.run([objdump, "-res-usage", file.name], capture_output=True, text=True).stdout
            usage = re.search(r"REG:(\d+) STACK:(\d+)", output)
            registers, spills = (int(usage[1]), int(usage[2]) // 4) if usage else (32, 0)
            return None, 0, registers, spills, 1024

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"{name} needs a GPU, and cross-compilation has only a table of its properties")

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = lambda source, metadata: None
            self.get_device_capability = lambda number=0: (device.major, device.minor)
            self.get_current_device = lambda: 0
            self.set_current_device = lambda number: None
            self.get_current_stream = lambda number=0: 0

    stack.enter_context(patched(nvidia.CudaDriver, is_active=staticmethod(lambda: True)))
    stack.enter_context(patched(drivers, _active=Driver()))


def _autotuning(device: Device, stack: contextlib.ExitStack) -> None:
    """Keep each kernel's launcher with the fewest spills, Inductor's favourite first; nothing is timed."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def generate(self: Any) -> None:
        self.kernel_autotune_defs.splice("\nasync_compile.wait(globals())\ndel async_compile\n")
        scope: dict[str, Any] = {}
        exec(self.kernel_autotune_defs.getvalue(), scope)  # noqa: S102  Inductor's own text
        for kernel in list(scope.values()):
            if isinstance(kernel, CachingAutotuner):
                if not kernel.launchers:
                    kernel.precompile()
                best = min(range(len(kernel.launchers)), key=lambda i: (kernel.launchers[i].n_spills or 0, i))
                kernel.launchers = [kernel.launchers[best]]
                kernel.save_gpu_kernel("stream", kernel.launchers[0])

    stack.enter_context(patched(PythonWrapperCodegen, generate_and_run_autotune_block=generate))


def _constants(device: Device, stack: contextlib.ExitStack) -> None:
    """Compare constants by identity: fake tensors have no addresses."""
    from torch._inductor import graph

    stack.enter_context(patched(graph, is_same_tensor=lambda data, value: data is value))


def _folding(device: Device, stack: contextlib.ExitStack) -> None:
    """Fold constants on the CPU: Inductor computes single elements on the node's device."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    class OnCpu(torch_api.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def moved(value: Any) -> Any:
                return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

            return function(*map(moved, args), **{k: moved(v) for k, v in (kwargs or {}).items()})

    def wrapped(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with OnCpu():
                return original(self, *args, **kwargs)

        return method

    stack.enter_context(patched(Folder, run=wrapped(Folder.run), __init__=wrapped(Folder.__init__)))
