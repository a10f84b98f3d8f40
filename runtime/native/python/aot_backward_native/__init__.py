"""Run packages of aot-backward without PyTorch, through the C library.

    import aot_backward_native as abn

    energy = abn.load("energy.pt2").grad()
    value, gradient = energy(positions)

Arguments are CPU arrays with the buffer protocol or DLPack (NumPy, ``array.array``, PyTorch, JAX). Results are NumPy arrays if NumPy is imported,
else :class:`Tensor`, which has both protocols. ``tensor("bfloat16", (2, 3), data)`` makes one from row-major bytes. This module imports neither NumPy
nor PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from . import _extension
from ._extension import Tensor, tensor
from .errors import (
    OF_STATUS,
    AotBackwardError,
    ExecutionError,
    IncompatibleError,
    InputError,
    OutOfMemoryError,
    PackageError,
    SignatureError,
    StateError,
)

__version__ = "0.1.0"
__all__ = [
    "AotBackwardError",
    "ExecutionError",
    "Grad",
    "IncompatibleError",
    "InputError",
    "Module",
    "OutOfMemoryError",
    "Package",
    "PackageError",
    "SignatureError",
    "StateError",
    "Step",
    "Tensor",
    "cmake_dir",
    "include_dir",
    "library_dir",
    "load",
    "tensor",
]

_extension.errors(OF_STATUS)
_INPUTS, _OUTPUTS, _GRADIENTS, _INCOMING, _STATES, _NUMBERS = range(6)  # aotb_part
_FOLDER = Path(__file__).parent


def load(
    path: str | os.PathLike[str], *, backend: str | None = None, public_key: str | os.PathLike[str] | None = None, unchecked: bool = False
) -> Package:
    """Open a package and check its archive and manifest. No code is run.

    ``backend`` is "standalone", which needs no PyTorch; "libtorch"; or the path of a ``libtorch_cpu.so``. The default is ``$AOT_BACKWARD_BACKEND``
    if it is set, else "standalone". Standalone refuses entries that export did not compare with eager on it, unless ``unchecked`` is true.
    ``public_key`` is a PEM file; the package must be signed by its key. Raises :class:`PackageError`, :class:`IncompatibleError`,
    :class:`SignatureError`.
    """
    return Package(_extension.open(path, backend, public_key, unchecked), os.fspath(path))


class Package:
    """Open package. Each function made from it has its own weights."""

    def __init__(self, opened: Any, path: str):
        self._opened, self._path = opened, path

    @property
    def entries(self) -> dict[str, str]:
        """Return name and kind ("grad", "module", "step") of each entry that can be called without PyTorch."""
        return dict(self._opened.entries())

    def grad(self, name: str | None = None) -> Grad:
        """Return the named gradient function; the name is optional if there is only one. Each call makes a new object: use one per thread."""
        return Grad(*self._new("grad", name))

    def module(self, name: str | None = None) -> Module:
        """Return the named module; the name is optional if there is only one."""
        return Module(*self._new("module", name))

    def step(self, name: str | None = None) -> Step:
        """Return the named training step; the name is optional if there is only one."""
        return Step(*self._new("step", name))

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the process (dropout) like ``torch.manual_seed``."""
        self._opened.seed(seed)

    def threads(self, count: int) -> None:
        """Set the number of threads of compiled code in this process."""
        self._opened.threads(count)

    def _new(self, kind: str, name: str | None) -> tuple[str, Any]:
        entries = self.entries
        names = [n for n, k in entries.items() if k == kind]
        if name is None and len(names) == 1:
            name = names[0]
        if name is None or name not in names:
            wanted = f"one {kind} entry" if names and name is None else f"a {kind} entry" + (f" {name!r}" if name is not None else "")
            has = ", ".join(f"{k} {n!r}" for n, k in entries.items()) or "none that can be called without PyTorch"
            ways = " or ".join(f"load(path).{k}({n!r})" for n, k in entries.items() if n in (name, *names) or not names)
            raise PackageError(f"{self._path}: expected {wanted}, got {has}. {f'Call {ways}.' if ways else 'Export one.'}")
        return name, self._opened.function(name)


class _Entry:
    def __init__(self, name: str, function: Any):
        self.name, self._function = name, function
        self._names = [d[0] for d in function.describe(0, _INPUTS)]
        self._gradients = dict[int, list[str]]()

    @property
    def inputs(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return name, dtype and shape of each argument of the first variant; a dynamic size is a string such as "s0"."""
        return [d[:3] for d in self._function.describe(0, _INPUTS)]

    def train(self, mode: bool = True) -> Any:
        """Select the variants of that mode. Return self."""
        self._function.train(mode)
        return self

    def eval(self) -> Any:
        return self.train(False)

    def use_variant(self, number: int | None) -> Any:
        """Run only that variant, such as one exported for fewer gradients (None: any variant). Return self."""
        self._function.use_variant(-1 if number is None else number)
        return self

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs:
            return args
        rest = self._names[len(args) :]
        if unknown := [k for k in kwargs if k not in rest]:
            raise InputError(f"entry {self.name}: no argument {unknown[0]!r}, or it is given twice; its arguments: {self._names}")
        if missing := [n for n in rest if n not in kwargs]:
            raise InputError(f"entry {self.name}: argument {missing[0]!r} is missing; its arguments: {self._names}")
        return (*args, *(kwargs[n] for n in rest))

    def _gradient_names(self) -> list[str]:
        """Return the gradient names of the variant that the last call ran."""
        number = self._function.served
        if number not in self._gradients:
            self._gradients[number] = [d[0] for d in self._function.describe(number, _GRADIENTS)]
        return self._gradients[number]

    def _states(self) -> dict[str, Any]:
        return {d[0]: _shown(self._function.state(d[0])) for d in self._function.describe(0, _STATES)}


class Grad(_Entry):
    """Gradient function: a value and its gradients in one native call."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return outputs (a tuple if several) and gradients (a dict by name if several). A gradient is None if eager's is."""
        results = list(map(_shown, self._function.run(*self._arguments(args, kwargs))))
        names = self._gradient_names()
        outputs, gradients = results[: -len(names)], results[-len(names) :]
        return _single(outputs), gradients[0] if len(names) == 1 else dict(zip(names, gradients, strict=True))

    @property
    def parameters(self) -> dict[str, Any]:
        """Return live views of parameters and buffers. You may write to them between calls."""
        return self._states()


class Module(_Entry):
    """Module: call it for inference, or use :meth:`forward` and :meth:`backward`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs, computed without gradients; a tuple if several."""
        return _single(list(map(_shown, self._function.run(*self._arguments(args, kwargs)))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs and save tensors for :meth:`backward`. Do not change the inputs in between."""
        self._kept = self._arguments(args, kwargs)
        return _single(list(map(_shown, self._function.forward(*self._kept))))

    def backward(self, *incoming: Any) -> dict[str, Any]:
        """Return gradients by target name. ``incoming`` has one gradient per differentiable output (None: none)."""
        names = self._gradient_names()
        return dict(zip(names, map(_shown, self._function.backward(*incoming)), strict=True))

    @property
    def state(self) -> dict[str, Any]:
        """Return live views of parameters and buffers. You may write to them between calls."""
        return self._states()


class Step(_Entry):
    """Training step: loss, gradients, clipping and the optimizer's update in one native call."""

    def __call__(self, *args: Any, update: bool = True, **kwargs: Any) -> Any:
        """Make one update, or accumulate gradients if ``update=False``. Return the outputs; the first is the loss."""
        inputs = self._arguments(args, kwargs)
        return _single(list(map(_shown, (self._function.run if update else self._function.accumulate)(*inputs))))

    def step(self) -> None:
        """Make one update with the accumulated gradients."""
        self._function.update()

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        self._function.zero_grad()

    @property
    def param_groups(self) -> list[Group]:
        """Return the hyperparameters of each parameter group. A schedule may set them: ``step.param_groups[0]["lr"] = 1e-4``."""
        numbers = self._function.describe(0, _NUMBERS)
        return [Group(self._function, number) for number in range(1 + max((d[3] for d in numbers), default=-1))]

    @property
    def clipping(self) -> Group:
        """Return ``clip_norm`` and ``clip_value``, which apply to the whole step."""
        return Group(self._function, -1)

    @property
    def parameters(self) -> dict[str, Any]:
        """Return live views of parameters, buffers and optimizer state. You may write to them between calls."""
        return self._states()

    @property
    def count(self) -> int:
        """Return the number of updates made."""
        return int(self._function.progress()[0])

    @property
    def skipped(self) -> int:
        """Return the number of updates skipped because a gradient was not finite."""
        return int(self._function.progress()[1])

    @property
    def accumulated(self) -> int:
        """Return the number of calls since the last update."""
        return int(self._function.progress()[2])

    @property
    def grad_norm(self) -> float:
        """Return the gradient norm of the last update, before clipping; NaN if the step does not compute it."""
        return float(self._function.progress()[3])

    @property
    def loss_scale(self) -> float:
        """Return the loss scale; 1 if the step does not scale its loss."""
        return float(self._function.progress()[4])

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Save the whole training state, or write nothing. PyTorch's runtime can read the file. ``extra`` can be any JSON value."""
        self._function.save(path, json.dumps(extra))

    def resume(self, path: str | os.PathLike[str]) -> Any:
        """Restore the state bit for bit, including random numbers. Return ``extra``."""
        return json.loads(self._function.resume(path))


class Group(MutableMapping[str, float]):
    """Hyperparameters of a parameter group by option. An item of a list is named "betas[1]"."""

    def __init__(self, function: Any, number: int):
        self._function, self._number = function, number
        listed = [d for d in function.describe(0, _NUMBERS) if d[3] == number]
        self._keys = {d[0] if d[4] < 0 else f"{d[0]}[{d[4]}]": (d[0], d[4]) for d in listed}

    def __getitem__(self, key: str) -> float:
        name, position = self._keys[key]
        return next(d[5] for d in self._function.describe(0, _NUMBERS) if d[3] == self._number and d[0] == name and d[4] == position)

    def __setitem__(self, key: str, value: float) -> None:
        if key not in self._keys:
            raise InputError(f"group {self._number} has no number {key!r}; it has {list(self._keys)}")
        name, position = self._keys[key]
        self._function.number(self._number, name, position, value)

    def __delitem__(self, key: str) -> None:
        raise InputError(f"{key!r} belongs to the compiled code, and cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return repr(dict(self))


def include_dir() -> str:
    """Return the folder of ``aot_backward.h``."""
    return str(_FOLDER / "include")


def library_dir() -> str:
    """Return the folder of ``libaot_backward.so``, ``libaotb_core.so`` and ``pkgconfig``."""
    return str(_FOLDER / "lib")


def cmake_dir() -> str:
    """Return the value of CMake's ``aot_backward_DIR`` for ``find_package(aot_backward)``."""
    return str(_FOLDER / "lib" / "cmake" / "aot_backward")


def _shown(tensor: Any) -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.asarray(tensor) if numpy is not None and tensor is not None and tensor.dtype != "bfloat16" else tensor


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
