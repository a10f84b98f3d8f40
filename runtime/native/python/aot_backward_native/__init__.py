"""Packages of aot-backward without PyTorch: the C library, from Python.

    import aot_backward_native as abn

    energy = abn.load("energy.pt2").grad()
    value, gradient = energy(positions)

Arrays come in by the buffer protocol or DLPack (NumPy, ``array.array``, PyTorch, JAX), on the CPU. They go out as NumPy's where NumPy is imported,
else as :class:`Tensor`, which has both protocols and which ``tensor("bfloat16", (2, 3), data)`` makes of row-major bytes. This module imports
neither NumPy nor PyTorch.
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
    """Opens a package: its archive and manifest are checked, nothing is run.

    ``backend``: "standalone", which needs no PyTorch; "libtorch", or the path of a ``libtorch_cpu.so``; without one ``$AOT_BACKWARD_BACKEND``, else
    "standalone". It refuses entries that were not compared with eager on it when they were exported, unless ``unchecked``. ``public_key``: a PEM
    file, by whose key the package must be signed. Raises :class:`PackageError`, :class:`IncompatibleError`, :class:`SignatureError`.
    """
    return Package(_extension.open(path, backend, public_key, unchecked), os.fspath(path))


class Package:
    """An open package. Functions made of it have weights of their own."""

    def __init__(self, opened: Any, path: str):
        self._opened, self._path = opened, path

    @property
    def entries(self) -> dict[str, str]:
        """Name and kind ("grad", "module", "step") of each entry that can be called without PyTorch."""
        return dict(self._opened.entries())

    def grad(self, name: str | None = None) -> Grad:
        """The gradient function of that name; a sole one needs no name. A new object with each call, for a thread of its own."""
        return Grad(*self._new("grad", name))

    def module(self, name: str | None = None) -> Module:
        """The module of that name; a sole one needs no name."""
        return Module(*self._new("module", name))

    def step(self, name: str | None = None) -> Step:
        """The training step of that name; a sole one needs no name."""
        return Step(*self._new("step", name))

    def seed(self, seed: int) -> None:
        """Of the random numbers of the process (dropout), as ``torch.manual_seed``."""
        self._opened.seed(seed)

    def threads(self, count: int) -> None:
        """How many threads compiled code of this process uses."""
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
        """Name, dtype and shape of each argument of the first variant; a dynamic size is a text such as "s0"."""
        return [d[:3] for d in self._function.describe(0, _INPUTS)]

    def train(self, mode: bool = True) -> Any:
        """Serves calls from the variants of that mode; returns itself."""
        self._function.train(mode)
        return self

    def eval(self) -> Any:
        return self.train(False)

    def use_variant(self, number: int | None) -> Any:
        """Serves calls from that variant alone, such as one exported for fewer gradients (None: from any); returns itself."""
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
        """Of the variant that served the last call."""
        number = self._function.served
        if number not in self._gradients:
            self._gradients[number] = [d[0] for d in self._function.describe(number, _GRADIENTS)]
        return self._gradients[number]

    def _states(self) -> dict[str, Any]:
        return {d[0]: _shown(self._function.state(d[0])) for d in self._function.describe(0, _STATES)}


class Grad(_Entry):
    """A value and its gradients in one native call."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The outputs (one as itself, more as a tuple) and the gradients: by name, a sole one as itself, None where there is none."""
        results = list(map(_shown, self._function.run(*self._arguments(args, kwargs))))
        names = self._gradient_names()
        outputs, gradients = results[: -len(names)], results[-len(names) :]
        return _single(outputs), gradients[0] if len(names) == 1 else dict(zip(names, gradients, strict=True))

    @property
    def parameters(self) -> dict[str, Any]:
        """Live views of parameters and buffers: they may be written between calls."""
        return self._states()


class Module(_Entry):
    """A module: inference by calling it, or a forward and its backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, computed without gradients: one as itself, more as a tuple."""
        return _single(list(map(_shown, self._function.run(*self._arguments(args, kwargs)))))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As a call, for a :meth:`backward`. The inputs must stay as they are until then."""
        self._kept = self._arguments(args, kwargs)
        return _single(list(map(_shown, self._function.forward(*self._kept))))

    def backward(self, *incoming: Any) -> dict[str, Any]:
        """Gradients by what they are of, given those of the outputs that have one (None: none)."""
        names = self._gradient_names()
        return dict(zip(names, map(_shown, self._function.backward(*incoming)), strict=True))

    @property
    def state(self) -> dict[str, Any]:
        """Live views of parameters and buffers: they may be written between calls."""
        return self._states()


class Step(_Entry):
    """A training step: loss, gradients, clipping and the optimizer's update in one native call."""

    def __call__(self, *args: Any, update: bool = True, **kwargs: Any) -> Any:
        """Makes one update, or with ``update=False`` adds up gradients, and returns the outputs, of which the first is the loss."""
        inputs = self._arguments(args, kwargs)
        return _single(list(map(_shown, (self._function.run if update else self._function.accumulate)(*inputs))))

    def step(self) -> None:
        """One update by the gradients that were added up."""
        self._function.update()

    def zero_grad(self) -> None:
        """Drops the gradients that were added up."""
        self._function.zero_grad()

    @property
    def param_groups(self) -> list[Group]:
        """The numbers of each parameter group, which a schedule may set: ``step.param_groups[0]["lr"] = 1e-4``."""
        numbers = self._function.describe(0, _NUMBERS)
        return [Group(self._function, number) for number in range(1 + max((d[3] for d in numbers), default=-1))]

    @property
    def clipping(self) -> Group:
        """``clip_norm``, ``clip_value``: numbers of the whole step."""
        return Group(self._function, -1)

    @property
    def parameters(self) -> dict[str, Any]:
        """Live views of the module's parameters and buffers and of the optimizer's state: they may be written between calls."""
        return self._states()

    @property
    def count(self) -> int:
        """Updates made."""
        return int(self._function.progress()[0])

    @property
    def skipped(self) -> int:
        """Updates that were skipped because a gradient was not finite."""
        return int(self._function.progress()[1])

    @property
    def accumulated(self) -> int:
        """Calls since the last update."""
        return int(self._function.progress()[2])

    @property
    def grad_norm(self) -> float:
        """Of the last update, before clipping; NaN where the step has none."""
        return float(self._function.progress()[3])

    @property
    def loss_scale(self) -> float:
        """1 where the step has none."""
        return float(self._function.progress()[4])

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Writes the whole training to a file, which PyTorch's runtime reads too, or nothing. ``extra``: anything that JSON can hold."""
        self._function.save(path, json.dumps(extra))

    def resume(self, path: str | os.PathLike[str]) -> Any:
        """Restores it bit for bit, the random numbers too, and returns ``extra``."""
        return json.loads(self._function.resume(path))


class Group(MutableMapping[str, float]):
    """Numbers of a parameter group by option. One of a list is called "betas[1]"."""

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
    """The folder of ``aot_backward.h``."""
    return str(_FOLDER / "include")


def library_dir() -> str:
    """The folder of ``libaot_backward.so``, ``libaotb_core.so`` and ``pkgconfig``."""
    return str(_FOLDER / "lib")


def cmake_dir() -> str:
    """What CMake's ``aot_backward_DIR`` must be for ``find_package(aot_backward)``."""
    return str(_FOLDER / "lib" / "cmake" / "aot_backward")


def _shown(tensor: Any) -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.asarray(tensor) if numpy is not None and tensor is not None and tensor.dtype != "bfloat16" else tensor


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
