"""Wrap a module or a function as a module of flat tensors for tracing, and name its state and its arguments."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.entries.named_tensors import state_of
from aot_backward_runtime.errors import ExportError

from .shapes import output_aliasing

_INNER = "program"  # the attribute of FlatProgram that holds the caller's module


class FlatProgram(nn.Module):
    """A program as a function of its flat tensors; other arguments are fixed (the tracer would make symbols of
    integers).

    Outputs that share memory with an input or with each other are copied: a graph compiled to native code cannot return
    a view of an outside tensor to autograd.
    """

    def __init__(self, program: nn.Module, arguments: tuple[Any, ...], copied: frozenset[int], first_only: bool):
        """``arguments``: the fake ``(args, kwargs)``. ``copied``: the flat outputs to copy. ``first_only``: only the
        first output is differentiated."""
        super().__init__()
        self.program, self.copied, self.first_only = program, copied, first_only
        self.flat, self.spec = pytree.tree_flatten(arguments)
        self.places: dict[int, output_aliasing.Place] = {}  # memory of the flat outputs before they were copied
        self.constants: dict[int, Any] = {}  # non-tensor flat outputs, unchanged (the traced graph turns True into 1)

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if isinstance(v, torch.Tensor) else v for v in self.flat], self.spec
        )
        flat, spec = pytree.tree_flatten(self.program(*args, **kwargs))
        self.constants = {i: v for i, v in enumerate(flat) if not isinstance(v, torch.Tensor)}
        self.places = output_aliasing.places(flat, (*tensors, *state_of(self.program).values()))
        for i, value in enumerate(flat):
            if i in self.copied:
                value = value.clone()
            if self.first_only and i and isinstance(value, torch.Tensor) and value.requires_grad:
                value = value.detach()
            flat[i] = value
        return pytree.tree_unflatten(flat, spec)


class FunctionModule(nn.Module):
    """A plain function as a module. Modules that it closes over become its submodules, so that their parameters have
    names."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        try:
            inspect.signature(function)
        except ValueError as error:
            called = getattr(function, "__name__", repr(function))
            raise ExportError(
                f"{called}: expected a function with named arguments, got a built-in one without a signature. "
                f"Wrap it: lambda x: {called}(x)"
            ) from error
        for name, value in _names_used(function).items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif any(
                isinstance(v, nn.Module) or (isinstance(v, torch.Tensor) and v.requires_grad)
                for v in pytree.tree_leaves(value)
            ):
                raise ExportError(
                    f"the function closes over {name!r}, and its tensors require gradients but would become constants. Close over the module that "
                    f"they belong to, or pass them as arguments"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _names_used(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the globals that the function loads, the variables of its closure, and ``self`` of a bound method."""
    if isinstance(function, type) or not callable(function):
        raise ExportError(f"{function!r} is not a function or module")
    out: dict[str, Any] = {}
    owner = getattr(function, "__self__", None)  # a bound method's object
    if isinstance(owner, nn.Module):
        out["self"] = owner
    code = inspect.unwrap(function)
    if isinstance(code, nn.Module):  # torch.vmap(net)
        out["module"] = code
    if inspect.isfunction(code) or inspect.ismethod(code):
        variables = inspect.getclosurevars(code)
        # getclosurevars also reports attributes as globals
        loads = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
        out.update({n: v for n, v in variables.globals.items() if n in loads} | dict(variables.nonlocals))
    return out


class SignatureOwner(nn.Module):
    """An object for ``make_fake_inputs``, which needs a ``forward`` with a signature that names the arguments."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        code = inspect.unwrap(function)
        self.forward = function if hasattr(code, "__code__") else (lambda *args, **kwargs: function(*args, **kwargs))


def forward_of(program: nn.Module) -> Callable[..., Any]:
    """Return the function with the signature that names the program's arguments."""
    return program.function if isinstance(program, FunctionModule) else program.forward


def inner_name(name: str) -> str:
    """Return the name in the program itself of a parameter or buffer of :class:`FlatProgram`."""
    return name.removeprefix(f"{_INNER}.")


def device_type(args: Any, kwargs: Any, program: nn.Module) -> str:
    """Return the device type of the first tensor among arguments and parameters, or "cpu"."""
    for value in [*pytree.tree_leaves((args, kwargs)), *program.parameters()]:
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"
