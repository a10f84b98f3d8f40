"""Check if the C library runs an entry without PyTorch (``docs/native.md``): it has every function that the code calls,
and the results of the stored examples are within their tolerances. The check is skipped if ``aot-backward-native`` is
not installed."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import pickle
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.toolchain import gcc, wasm
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.manifest import EntrySpec, VariantSpec
from aot_backward_runtime.native.tensor_bytes import tensor_chunks

from . import emulated, step_check, stored_results
from .example_sizes import SEED
from .named_results import Named
from .stored_results import as_dtype

VERIFIED = "verified"
_PROCESS = Path(__file__).with_name("standalone_process.py")
_MODULE = "aot_backward_native"
_OPERATOR = "aoti_torch_cpu_"


def is_installed() -> bool:
    return importlib.util.find_spec(_MODULE) is not None


def lacking(libraries: Iterable[Path], operators: Iterable[str]) -> list[str]:
    """Return PyTorch functions that the libraries call and the standalone backend lacks: operators ("aten.abs"), or
    functions of PyTorch's C interface. ``operators``: operators that they call by name ("aten::_linalg_det",
    "aten::set_.source_Tensor")."""
    native = importlib.import_module(_MODULE)
    core = ctypes.CDLL(str(Path(native.library_dir()) / "libaotb_core.so"))
    names = set[str]()
    for library in libraries:
        command = (
            [gcc.emscripten_tool("emnm"), "--undefined-only"]
            if library.read_bytes().startswith(wasm.MAGIC)
            else ["nm", "-D", "--undefined-only"]
        )
        process = subprocess.run([*command, library], capture_output=True, text=True, check=True)
        symbols = [line.split()[-2:] for line in process.stdout.splitlines()]
        # Code goes without weak symbols (products.h)
        names.update(name.partition("@")[0] for kind, name in symbols if kind != "w")
    by_name = {o for o in operators if not core.core_serves(*(part.encode() for part in o.partition(".")[::2]))}
    missing = {n for n in names if n.startswith(("aoti_torch_", "torch_", "Sleef_")) and not hasattr(core, n)}
    missing_operators = {f"aten.{n.removeprefix(_OPERATOR)}" if n.startswith(_OPERATOR) else n for n in missing}
    return sorted(missing_operators | {o.replace("::", ".") for o in by_name})


def verdict(path: Path, name: str, entry: EntrySpec, examples: Mapping[str, torch.Tensor], machine: str) -> str:
    """Return :data:`VERIFIED`, or an error, for an entry of the package at ``path``, which has the stored ``examples``
    and code for ``machine`` only. Code for another machine than this one runs in an emulator."""
    for number in range(len(entry.variants)):
        prefix = f"{name}/{number}/"
        stored = {key.removeprefix(prefix): t for key, t in examples.items() if key.startswith(prefix)}
        if not stored:
            return ""
        file = path.with_suffix(".results")
        try:
            results = results_of(path, file, name, entry, number, stored, machine)
            difference = _difference(results, stored, as_stored=entry.kind == "step")
        except _Failed as error:
            return f"fails: {str(error).removeprefix(f'package {path}: ')}"
        finally:
            file.unlink(missing_ok=True)
        if difference:
            return f"is wrong: variant {number}: {difference}"
    return VERIFIED


class _Failed(Exception):
    """The C library refused the call, or its process ended."""


def _difference(results: Named, stored: Mapping[str, torch.Tensor], *, as_stored: bool) -> str:
    """Return the first difference above its tolerance, or "". Gradients of gradients need PyTorch's runtime and are
    skipped."""
    names = {
        n
        for n in stored_results.names_of(stored)
        if not n.startswith(("second-order ", "third-order ", "fourth-order "))
    }
    if missing := sorted(names - {n for n, t in results.items() if t is not None}):
        return f"{missing[0]} is missing"
    for result in sorted(names):
        tensor = results[result]
        assert tensor is not None
        try:
            comparison = stored_results.compare_stored(result, tensor, stored, as_stored=as_stored)
        except (stored_results.Differs, PackageError) as error:
            return str(error)
        if comparison.wrong:
            return f"{result} is off by {comparison.error:.3g}, {comparison.allowed:.3g} is allowed"
    return ""


def results_of(
    path: Path, file: Path, name: str, entry: EntrySpec, number: int, stored: Mapping[str, torch.Tensor], machine: str
) -> Named:
    """Run that variant of the entry on its stored example in a separate process."""
    variant, states = entry.variants[number], _states(entry)
    request = {
        "path": str(path),
        "file": str(file),
        "entry": name,
        "kind": entry.kind,
        "variant": number,
        "mode": variant.mode,
        "seed": SEED,
        "steps": step_check.STEPS,
        "backward": entry.kind == "module" and variant.backward is not None,
        "outputs": len(variant.outputs),
        "inputs": [_as_bytes(as_dtype(spec.dtype, stored[f"input/{i}"])) for i, spec in enumerate(variant.inputs)],
        "incoming": [
            _as_bytes(as_dtype(spec.dtype, stored[f"cotangent/{i}"]))
            for i, spec in enumerate(variant.cotangents)
            if entry.kind == "module"
        ],
        "states": states,
    }
    answer = _answer(request) if machine == platform.machine() else emulated.run(request, machine)
    if "error" in answer:
        raise _Failed(answer["error"])
    data = (
        torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        if file.stat().st_size
        else torch.empty(0, dtype=torch.uint8)
    )
    return _named(answer["results"], data, entry, variant, states, stored)


def _answer(request: Mapping[str, Any]) -> Any:
    process = subprocess.run([sys.executable, "-P", _PROCESS], input=pickle.dumps(request), capture_output=True)
    if process.returncode:
        message = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _Failed(f"the process ended with status {process.returncode}{message and f': {message}'}")
    return pickle.loads(process.stdout)  # noqa: S301  # written by the process above


def _states(entry: EntrySpec) -> dict[str, str]:
    """Return the C library's names of the compared tensors of the state, by their label in results."""
    if entry.step is None:
        return {f"buffer {s.name}": s.name for s in entry.state if not s.parameter} if entry.kind != "grad" else {}
    own = {s.name.removeprefix("module."): s for s in entry.state if s.name.startswith("module.")}

    def added(name: str) -> str:
        while name in own:
            name = f"step/{name}"
        return name

    out = {f"{'parameter' if s.parameter else 'buffer'} {name}": name for name, s in own.items()}
    out |= {
        f"{slot.key} of {parameter}": added(slot.state) for slot in entry.step.state for parameter in slot.parameters
    }
    return out | {f"{s.name[8:]} of the loss": added(s.name) for s in entry.state if s.name.startswith("loss_fn.")}


def _named(
    results: Mapping[str, Any],
    data: torch.Tensor,
    entry: EntrySpec,
    variant: VariantSpec,
    states: Mapping[str, str],
    stored: Mapping[str, torch.Tensor],
) -> Named:
    def read(ref: tuple[str, tuple[int, ...], int] | None) -> torch.Tensor | None:
        if ref is None:
            return None
        dtype, shape, begin = getattr(torch, ref[0]), ref[1], ref[2]
        count = math.prod(shape) * dtype.itemsize
        return data[begin : begin + count].clone().view(dtype).view(shape)

    def all_of(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {label: t for label, ref in tensors.items() if (t := read(ref)) is not None}

    if entry.kind == "step":
        losses = {f"loss {i}": t for i, ref in enumerate(results["losses"]) if (t := read(ref)) is not None}
        return step_check.steps_as_stored(all_of(results["before"]), losses, all_of(results["after"]), stored)
    named: Named = {f"output[{i}]": read(ref) for i, ref in enumerate(results["outputs"])}
    if entry.kind == "grad":
        assert variant.gradient is not None
        by_target = dict(zip(entry.wrt, entry.names, strict=True))
        names = [by_target[g.of] for g in variant.gradient.gradients]
    else:
        places = [g.of.partition(":") for g in variant.backward.gradients] if variant.backward is not None else []
        names = [key if kind == "parameter" else variant.inputs[int(key)].name for kind, _, key in places]
    named |= {f"gradient of {n}": read(ref) for n, ref in zip(names, results["gradients"], strict=True)}
    return named | all_of(results["after"])


def _as_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return (
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        b"".join(map(bytes, tensor_chunks(tensor.detach()))),
    )
