"""Run packages of aot-backward without PyTorch, through the C library.

    import aot_backward_native as abn

    energy = abn.load("energy.pt2").grad()
    value, gradient = energy(positions)

Arguments are CPU arrays with the buffer protocol or DLPack (NumPy, ``array.array``, PyTorch, JAX); if NumPy is
installed, also lists, numbers, and anything that ``numpy.asarray`` takes. Results are NumPy arrays if NumPy is
imported, else :class:`Tensor`, which has both protocols. ``tensor("bfloat16", (2, 3), data)`` makes one from row-major
bytes. This module imports NumPy only for arguments that need it, and never PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Self

from . import _copies, _extension
from ._arrays import Door
from ._extension import Tensor, tensor
from ._structure import Reader, reader, spread
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
    "Function",
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
    "source_dir",
    "tensor",
]

_extension.errors(OF_STATUS)
_INPUTS, _OUTPUTS, _GRADIENTS, _INCOMING, _STATES, _NUMBERS = range(6)  # aotb_part
_FOLDER = Path(__file__).parent


def load(
    path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    public_key: str | os.PathLike[str] | None = None,
    unchecked: bool = False,
) -> Package:
    """Open a package and check its archive and manifest. No code is run.

    Args:
        path: The package.
        backend: "standalone", which needs no PyTorch; "libtorch"; or the path of a ``libtorch_cpu.so``. The default is
            ``$AOT_BACKWARD_BACKEND`` if it is set, else "standalone".
        public_key: A PEM file. The package must be signed by its key.
        unchecked: Whether "standalone" also runs entries that export did not compare with eager on it.

    Returns:
        The package.

    Raises:
        PackageError: The file is incomplete, altered, or of an unsupported format version.
        IncompatibleError: The package is for another processor, glibc, torch or backend.
        SignatureError: The package is not signed by that key.

    Examples:
        >>> energy = abn.load("energy.pt2").grad()
        >>> value, gradient = energy(numpy.zeros((4, 3), "float32"))
        >>> gradient.shape
        (4, 3)
    """
    options = {
        "backend": backend,
        "public_key": None if public_key is None else str(Path(public_key).absolute()),
        "unchecked": unchecked,
    }
    return Package(_extension.open(path, backend, public_key, unchecked), Path(path).absolute(), options)


class Package:
    """An open package. Each function made from it has its own weights.

    A copy is the same object, because an open package does not change. A pickle holds its path, its digest and the
    arguments of :func:`load`.
    """

    def __init__(self, opened: Any, path: Path, options: dict[str, Any]):
        self._opened, self._path, self._options = opened, path, options

    @property
    def entries(self) -> dict[str, str]:
        """Name and kind ("grad", "function", "module", "step") of each entry that can be called without PyTorch."""
        return dict(self._opened.entries())

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the package, given at export; {} if there is none. Entries have their own."""
        return dict(json.loads(self._opened.metadata(None)))

    @property
    def path(self) -> Path:
        """The absolute path of the file."""
        return self._path

    def function(self, name: str | None = None, *, cast: bool = False) -> Function:
        """Return a new function without gradients. Use one per thread.

        Args:
            name: The name of the entry; a sole one needs none.
            cast: Whether to convert arguments of another dtype: floating-point and integer dtypes of other widths,
                integers to floating-point numbers, and real to complex numbers. Otherwise another dtype is an error.

        Returns:
            The function, with separate weights.

        Raises:
            PackageError: There is no such entry, or there are several and ``name`` is None.
        """
        return Function(self, self._name("function", name), cast=cast)

    def grad(self, name: str | None = None, *, cast: bool = False, scale: Mapping[str, float] | None = None) -> Grad:
        """Return a new gradient function. Use one per thread.

        Args:
            name: The name of the entry; a sole one needs none.
            cast: Whether to convert arguments of another dtype: floating-point and integer dtypes of other widths,
                integers to floating-point numbers, and real to complex numbers. Otherwise another dtype is an error.
            scale: Factors of gradients by name. ``{"positions": -1.0}`` makes forces of the gradient of an energy.

        Returns:
            The function, with separate weights.

        Raises:
            PackageError: There is no such entry, or there are several and ``name`` is None.
        """
        return Grad(self, self._name("grad", name), cast=cast, scale=scale)

    def module(
        self, name: str | None = None, *, cast: bool = False, scale: Mapping[str, float] | None = None
    ) -> Module:
        """Return a new module. Use one per thread.

        Args:
            name: The name of the entry; a sole one needs none.
            cast: Whether to convert arguments of another dtype: floating-point and integer dtypes of other widths,
                integers to floating-point numbers, and real to complex numbers. Otherwise another dtype is an error.
            scale: Factors of gradients by name. ``{"positions": -1.0}`` makes forces of the gradient of an energy.

        Returns:
            The module, with separate weights.

        Raises:
            PackageError: There is no such entry, or there are several and ``name`` is None.
        """
        return Module(self, self._name("module", name), cast=cast, scale=scale)

    def step(self, name: str | None = None, *, cast: bool = False) -> Step:
        """Return a new training step. Use one per thread.

        Args:
            name: The name of the entry; a sole one needs none.
            cast: Whether to convert arguments of another dtype: floating-point and integer dtypes of other widths,
                integers to floating-point numbers, and real to complex numbers. Otherwise another dtype is an error.

        Returns:
            The step, with separate weights.

        Raises:
            PackageError: There is no such entry, or there are several and ``name`` is None.
        """
        return Step(self, self._name("step", name), cast=cast)

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the process (dropout) like ``torch.manual_seed``.

        Args:
            seed: An int, such as 0.
        """
        self._opened.seed(seed)

    def threads(self, count: int) -> None:
        """Set the number of threads of compiled code in this process.

        Args:
            count: The number of threads.
        """
        self._opened.threads(count)

    def __copy__(self) -> Package:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Package:
        return self

    def __reduce__(self) -> Any:
        return _copies.reopened, (str(self._path), self._opened.digest(), self._options)

    def _name(self, kind: str, name: str | None) -> str:
        entries = self.entries
        names = [n for n, k in entries.items() if k == kind]
        if name is None and len(names) == 1:
            name = names[0]
        if name is None or name not in names:
            wanted = (
                f"one {kind} entry"
                if names and name is None
                else f"a {kind} entry" + (f" {name!r}" if name is not None else "")
            )
            has = ", ".join(f"{k} {n!r}" for n, k in entries.items()) or "none that can be called without PyTorch"
            ways = " or ".join(f"load(path).{k}({n!r})" for n, k in entries.items() if n in (name, *names) or not names)
            raise PackageError(
                f"{self._path}: expected {wanted}, got {has}. {f'Call {ways}.' if ways else 'Export one.'}"
            )
        return name


class _Entry:
    """``cast`` and ``scale``: see :meth:`Package.grad`."""

    def __init__(self, package: Package, name: str, cast: bool = False, scale: Mapping[str, float] | None = None):
        self.name, self._package = name, package
        self._function = function = package._opened.function(name)
        self._made: dict[str, Any] = {"cast": bool(cast)}
        self._training: bool | None = None
        self._results: dict[int, tuple[dict[str, Any], Reader]] = {}
        self._gradients = dict[int, list[str]]()
        self._variants = function.variants
        parts = {
            part: [[d[:2] for d in function.describe(v, part)] for v in range(self._variants)]
            for part in (_INPUTS, _INCOMING)
        }
        self._names = [n for n, _ in parts[_INPUTS][0]]
        self._door = Door(parts)
        function.door(self._door)
        if cast:
            self._door.cast = True
            function.convert(True)
        if scale:
            self._made["scale"] = {gradient: float(factor) for gradient, factor in scale.items()}
            for gradient, factor in self._made["scale"].items():
                function.scale(gradient, factor)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry, given at export; {} if there is none."""
        return dict(json.loads(self._package._opened.metadata(self.name)))

    @property
    def inputs(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Name, dtype and shape of each argument of the first variant; a dynamic size is a string such as "s0"."""
        return [d[:3] for d in self._function.describe(0, _INPUTS)]

    def train(self, mode: bool = True) -> Self:
        """Select the variants of training mode.

        Args:
            mode: Whether to select training mode; otherwise select evaluation mode.

        Returns:
            The function itself.
        """
        self._function.train(mode)
        self._training = bool(mode)
        return self

    def eval(self) -> Self:
        """Call ``train(False)``, and return the function itself."""
        return self.train(False)

    def use_variant(self, number: int | None) -> Self:
        """Run only one variant, such as one exported for fewer gradients.

        Args:
            number: The number of the variant, from 0; None allows every variant.

        Returns:
            The function itself.
        """
        only = -1 if number is None else number
        self._function.use_variant(only)
        self._door.only = only
        return self

    def __copy__(self) -> Self:
        _copies.refuse_shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        _, arguments = self.__reduce__()
        return _copies.restored(*arguments)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        options = {
            "made": self._made,
            "training": self._training,
            "variant": None if self._door.only < 0 else self._door.only,
        }
        return _copies.restored, (type(self), self._package, self.name, options, self._changed())

    def _changed(self) -> _copies.State:
        return _copies.changed(self._function, self._package._opened.function(self.name))

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs:
            return args
        rest = self._names[len(args) :]
        if unknown := [k for k in kwargs if k not in rest]:
            raise InputError(
                f"entry {self.name}: no argument {unknown[0]!r}, or it is given twice; its arguments: {self._names}"
            )
        if missing := [n for n in rest if n not in kwargs]:
            raise InputError(f"entry {self.name}: argument {missing[0]!r} is missing; its arguments: {self._names}")
        return (*args, *(kwargs[n] for n in rest))

    def _structure(self, number: int) -> tuple[dict[str, Any], Reader]:
        """Return the structure of the results of a variant, and its reader."""
        if number not in self._results:
            tree = json.loads(self._function.structure(number))
            count = len(self._function.describe(number, _OUTPUTS))
            if isinstance(self, Grad):
                count += len(self._function.describe(number, _GRADIENTS))
            self._results[number] = tree, reader(tree, count)
        return self._results[number]

    def _called(self, call: Callable[..., list[Any]], args: tuple[Any, ...], out: Any) -> Any:
        """Return the results of a call in the caller's structure. ``out``: arrays that receive results, in that
        structure, or None."""
        function = self._function
        results = [_shown(t) for t in (call(*args) if out is None else call(*args, out=self._receivers(out)))]
        return self._structure(function.served)[1](results, function.size)

    def _receivers(self, out: Any) -> tuple[Any, ...]:
        only = self._door.only
        trees = [self._structure(number)[0] for number in (range(self._variants) if only < 0 else [only])]
        if any(tree != trees[0] for tree in trees):
            raise InputError(
                f"entry {self.name}: out: the variants return different structures. Select one by use_variant(number)."
            )
        found = dict[int, Any]()
        spread(trees[0], out, found, "out")
        return tuple(found.get(number) for number in range(1 + max(found, default=-1)))

    def _gradient_names(self, number: int) -> list[str]:
        """Return the gradient names of a variant."""
        if number not in self._gradients:
            self._gradients[number] = [d[0] for d in self._function.describe(number, _GRADIENTS)]
        return self._gradients[number]

    def _states(self) -> dict[str, Any]:
        return {d[0]: _shown(self._function.state(d[0])) for d in self._function.describe(0, _STATES)}


class Grad(_Entry):
    """A gradient function: a value and its gradients in one native call.

    Examples:
        >>> energy = abn.load("energy.pt2").grad()
        >>> value, gradient = energy(numpy.zeros((4, 3), "float32"))
    """

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """Return the outputs and the gradients.

        Args:
            *args: CPU arrays of the exported dtypes and shapes, with the buffer protocol or DLPack.
            out: Arrays that receive results, in the structure of the result; None, and a key left out, stand for no
                array. They are checked before any code runs, and returned in place of new arrays.
            **kwargs: Arrays by argument name.

        Returns:
            The pair of outputs, in the structure of the exported function's result, and gradients: one array if ``wrt``
                was one name, else a dict by name. A gradient is None if eager's is.

        Raises:
            InputError: An argument does not fit. No code was run.
            ExecutionError: Native code failed although its arguments were valid.
        """
        return self._called(self._function.run, self._arguments(args, kwargs), out)  # type: ignore[no-any-return]

    @property
    def parameters(self) -> dict[str, Any]:
        """Live views of parameters and buffers by name. You may write to them between calls."""
        return self._states()


class Function(_Entry):
    """A function without gradients.

    Examples:
        >>> distances = abn.load("distances.pt2").function()
        >>> distances(numpy.zeros((4, 3), "float32")).shape
        (4, 4)
    """

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Return the outputs.

        Args:
            *args: CPU arrays of the exported dtypes and shapes, with the buffer protocol or DLPack.
            out: Arrays that receive results, in the structure of the result; None, and a key left out, stand for no
                array. They are checked before any code runs, and returned in place of new arrays.
            **kwargs: Arrays by argument name.

        Returns:
            The outputs, in the structure of the exported function's result.

        Raises:
            InputError: An argument does not fit. No code was run.
            ExecutionError: Native code failed although its arguments were valid.
        """
        return self._called(self._function.run, self._arguments(args, kwargs), out)

    @property
    def parameters(self) -> dict[str, Any]:
        """Live views of parameters and buffers by name. You may write to them between calls."""
        return self._states()


class Module(_Entry):
    """A module: call it for inference, or use :meth:`forward` and :meth:`backward`.

    Examples:
        >>> model = abn.load("net.pt2").module()
        >>> output = model.forward(numpy.ones((4, 8), "float32"))
        >>> gradients = model.backward(numpy.ones_like(output))
    """

    _forwarded = 0  # the variant of the last forward

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Return the outputs, computed without gradients.

        Args:
            *args: CPU arrays of the exported dtypes and shapes, with the buffer protocol or DLPack.
            out: Arrays that receive results, in the structure of the result; None, and a key left out, stand for no
                array. They are checked before any code runs, and returned in place of new arrays.
            **kwargs: Arrays by argument name.

        Returns:
            The outputs, in the structure of the exported module's result.

        Raises:
            InputError: An argument does not fit. No code was run.
            ExecutionError: Native code failed although its arguments were valid.
        """
        return self._called(self._function.run, self._arguments(args, kwargs), out)

    def forward(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Return the outputs and save tensors for :meth:`backward`. Do not change the inputs in between.

        Args:
            *args: CPU arrays of the exported dtypes and shapes, with the buffer protocol or DLPack.
            out: Arrays that receive results, in the structure of the result; None, and a key left out, stand for no
                array. They are checked before any code runs, and returned in place of new arrays.
            **kwargs: Arrays by argument name.

        Returns:
            The outputs, in the structure of the exported module's result.

        Raises:
            InputError: An argument does not fit. No code was run.
            ExecutionError: Native code failed although its arguments were valid.
        """
        self._kept = self._arguments(args, kwargs)
        result = self._called(self._function.forward, self._kept, out)
        self._forwarded = self._function.served
        return result

    def backward(self, *incoming: Any, out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the gradients of the last :meth:`forward`.

        Args:
            *incoming: One gradient per differentiable output, with its shape and dtype; None for no gradient.
            out: Arrays that receive gradients, by name.

        Returns:
            The gradients by the names of the differentiated tensors.

        Raises:
            InputError: An incoming gradient does not fit, or no forward awaits its backward.
        """
        names = self._gradient_names(self._forwarded)
        receivers = None if out is None else tuple(self._receiver(out, names).get(n) for n in names)
        return dict(zip(names, map(_shown, self._function.backward(*incoming, out=receivers)), strict=True))

    def _receiver(self, out: Any, names: list[str]) -> Mapping[str, Any]:
        if not isinstance(out, Mapping) or not out.keys() <= {*names}:
            raise InputError(
                f"out: expected a dict with keys of {names}, got {list(out) if isinstance(out, Mapping) else type(out).__name__}."
            )
        return out

    @property
    def state(self) -> dict[str, Any]:
        """Live views of parameters and buffers by name. You may write to them between calls."""
        return self._states()


class Step(_Entry):
    """A training step: loss, gradients, clipping and the optimizer's update in one native call.

    Examples:
        >>> step = abn.load("step.pt2").step()
        >>> loss = step(numpy.ones((4, 8), "float32"), numpy.ones((4, 1), "float32"))
        >>> step.param_groups[0]["lr"] = 1e-4
    """

    def __call__(self, *args: Any, update: bool = True, out: Any = None, **kwargs: Any) -> Any:
        """Make one update, or accumulate gradients.

        Args:
            *args: The arguments of the exported step, as CPU arrays.
            update: Whether to update; False only accumulates gradients.
            out: Arrays that receive results, in the structure of the result; None, and a key left out, stand for no
                array. They are checked before any code runs, and returned in place of new arrays.
            **kwargs: Arrays by argument name.

        Returns:
            The loss; or all results of the exported module, in their structure, the loss first.

        Raises:
            InputError: An argument does not fit. No code was run.
            ExecutionError: Native code failed although its arguments were valid.
        """
        call = self._function.run if update else self._function.accumulate
        return self._called(call, self._arguments(args, kwargs), out)

    def _changed(self) -> _copies.State:
        return _copies.saved(self)

    def step(self) -> None:
        """Make one update with the accumulated gradients."""
        self._function.update()

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        self._function.zero_grad()

    @property
    def param_groups(self) -> list[Group]:
        """The hyperparameters of each parameter group. A schedule may set them:
        ``step.param_groups[0]["lr"] = 1e-4``."""
        numbers = self._function.describe(0, _NUMBERS)
        return [Group(self._function, number) for number in range(1 + max((d[3] for d in numbers), default=-1))]

    @property
    def clipping(self) -> Group:
        """The numbers ``clip_norm`` and ``clip_value``, which apply to the whole step."""
        return Group(self._function, -1)

    @property
    def parameters(self) -> dict[str, Any]:
        """Live views of parameters, buffers and optimizer state by name. You may write to them between calls."""
        return self._states()

    @property
    def count(self) -> int:
        """The number of updates made."""
        return int(self._function.progress()[0])

    @property
    def skipped(self) -> int:
        """The number of updates skipped because a gradient was not finite."""
        return int(self._function.progress()[1])

    @property
    def accumulated(self) -> int:
        """The number of calls since the last update."""
        return int(self._function.progress()[2])

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last update, before clipping; NaN if the step does not compute it."""
        return float(self._function.progress()[3])

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1 if the step does not scale its loss."""
        return float(self._function.progress()[4])

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Save the whole training state, or write nothing. PyTorch's runtime can read the file.

        Args:
            path: The file to write.
            extra: Any JSON value.

        Raises:
            StateError: The state cannot be saved; an old file stays.
        """
        self._function.save(path, json.dumps(extra))

    def resume(self, path: str | os.PathLike[str]) -> Any:
        """Restore a saved state bit for bit, including random numbers.

        Args:
            path: The file to read, written by this class or by PyTorch's runtime.

        Returns:
            The ``extra`` that was saved.

        Raises:
            StateError: The file does not match, or is damaged; nothing has changed.
        """
        return json.loads(self._function.resume(path))


class Group(MutableMapping[str, float]):
    """Hyperparameters of a parameter group by option. An item of a list is named "betas[1]"."""

    def __init__(self, function: Any, number: int):
        self._function, self._number = function, number
        listed = [d for d in function.describe(0, _NUMBERS) if d[3] == number]
        self._keys = {d[0] if d[4] < 0 else f"{d[0]}[{d[4]}]": (d[0], d[4]) for d in listed}

    def __getitem__(self, key: str) -> float:
        name, position = self._keys[key]
        return next(
            d[5]
            for d in self._function.describe(0, _NUMBERS)
            if d[3] == self._number and d[0] == name and d[4] == position
        )

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


def source_dir() -> str:
    """Return the folder of the C sources and their Makefile, for building the libraries for another machine."""
    return str(_FOLDER / "source")


def cmake_dir() -> str:
    """Return the value of CMake's ``aot_backward_DIR`` for ``find_package(aot_backward)``."""
    return str(_FOLDER / "lib" / "cmake" / "aot_backward")


def _shown(tensor: Any) -> Any:
    numpy = sys.modules.get("numpy")
    return (
        numpy.asarray(tensor) if numpy is not None and type(tensor) is Tensor and tensor.dtype != "bfloat16" else tensor
    )
