"""The cases: each differentiable operator of torch's test databases, with a few of the calls that torch's tests
make."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward.capture import preserve

DATABASES = {
    "op_db": "torch.testing._internal.common_methods_invocations",
    "module_db": "torch.testing._internal.common_modules",
    "autograd_function_db": "torch.testing._internal.autograd_function_db",
    "custom_op_db": "torch.testing._internal.custom_op_db",
    "hop_db": "torch.testing._internal.hop_db",
}
FAULTS = "faults"  # operators that misbehave, for the tests of this tool
DTYPE = torch.float32
SEED = 1
CANDIDATES = 24  # samples of an operator to choose from

Named = dict[str, torch.Tensor | None]


class Call(nn.Module):
    """One call as a module. Its inputs are the tensors; other arguments are constants. It returns the tensors among the
    results.

    ``held`` has, by number, the tensors that become buffers: the call updates them in place, as batch norm updates its
    statistics.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Any,
        finish: Callable[[Any], Any],
        held: Mapping[int, torch.Tensor],
    ):
        super().__init__()
        self.function, self.finish = function, finish
        for number, tensor in held.items():
            self.register_buffer(f"held_{number}", tensor)
        self.held = tuple(held)
        flat, self.spec = pytree.tree_flatten(arguments)
        self.constants = [None if isinstance(v, torch.Tensor) else v for v in flat]
        self.places = [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat, given = list(self.constants), iter(tensors)
        for number, place in enumerate(self.places):
            flat[place] = getattr(self, f"held_{number}") if number in self.held else next(given)
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        return tuple(
            v for v in pytree.tree_leaves(self.finish(self.function(*args, **kwargs))) if isinstance(v, torch.Tensor)
        )


@dataclass(frozen=True)
class Round:
    """One run of a case: its inputs and eager's results. ``differentiable``: the outputs that get an incoming
    gradient."""

    inputs: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]
    differentiable: tuple[int, ...]
    eager: Named
    random: bool
    changed: tuple[int, ...]  # inputs that the call updated in place


@dataclass(frozen=True)
class Case:
    """One call of an operator. A second round has other numbers, if the operator has such a sample."""

    database: str
    operator: str
    sample: str
    module: Call
    training: bool
    rounds: tuple[Round, ...]

    @property
    def name(self) -> str:
        return f"{self.database}:{self.operator}#{self.sample}"


@dataclass(frozen=True)
class _Sample:
    name: str
    module: Call
    arguments: Any
    inputs: tuple[torch.Tensor, ...]
    training: bool = True

    def holding(self, numbers: tuple[int, ...]) -> _Sample:
        """Return the same sample with inputs ``numbers`` as buffers."""
        held = {i: own(self.inputs[i]) for i in numbers}
        module = Call(self.module.function, self.arguments, self.module.finish, held).train(self.training)
        return replace(self, module=module, inputs=tuple(t for i, t in enumerate(self.inputs) if i not in numbers))

    @property
    def form(self) -> tuple[Any, ...]:
        """The form of a sample: structure, ranks, dtypes and flags, but not sizes and values."""
        constants = [v if isinstance(v, (bool, str)) else type(v).__name__ for v in self.module.constants]
        return (
            str(self.module.spec),
            self.training,
            *constants,
            *((t.dim(), t.dtype, t.requires_grad) for t in self.inputs),
        )

    @property
    def empty(self) -> bool:
        return any(t.layout is torch.strided and not t.is_nested and t.numel() == 0 for t in self.inputs)

    @property
    def asks_a_gradient(self) -> bool:
        return any(t.requires_grad for t in self.inputs) or any(p.requires_grad for p in self.module.parameters())


def operators(database: str) -> dict[str, Any]:
    """Return the database's entries of operators that have gradients in float32 on a CPU, by name."""
    if database == FAULTS:
        from . import faults

        return dict(faults.OPERATORS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(DATABASES[database])
    found = getattr(module, database)
    if database == "module_db":
        return {info.name: info for info in found if DTYPE in info.supported_dtypes("cpu")}
    if database == "op_db":
        # Random operators set the seed within their call, and tracing would lose that. Here the caller sets it.
        seeding, module.wrapper_set_seed = module.wrapper_set_seed, _plainly
        for operator in found:
            if operator.gradcheck_wrapper is seeding:
                operator.gradcheck_wrapper = _plainly
    served = [
        o
        for o in found
        if o.supports_autograd and DTYPE in o.supported_dtypes("cpu") and DTYPE in o.supported_backward_dtypes("cpu")
    ]
    return {o.full_name: o for o in served}


def _plainly(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def of(database: str, name: str, operator: Any, count: int) -> list[Case]:
    """Return at most ``count`` cases of one operator.

    The first case is the first sample that has a gradient. The others come from the end of the list and have different
    forms. Raise ``ValueError`` if no sample has a gradient in eager.
    """
    samples = [s for s in _samples(database, operator, SEED) if s.asks_a_gradient]
    others = {s.name: s for s in _samples(database, operator, SEED + 1)}
    cases: list[Case] = []
    forms = set()
    why = "no sample asks for a gradient"

    def consider(sample: _Sample) -> None:
        nonlocal why
        other, form = others.get(sample.name), sample.form
        try:
            changed = evaluate(sample.module, sample.inputs).changed
            if changed:
                sample, other = sample.holding(changed), other and other.holding(changed)
            rounds = _rounds(sample, other)
        except Exception as error:  # eager rejects this sample
            why = f"eager: {type(error).__name__}: {first_line(error)}"
            return
        if not rounds:
            why = "no output of a sample has a gradient"
            return
        cases.append(Case(database, name, sample.name, sample.module, sample.training, rounds))
        forms.add(form)

    for sample in samples:
        if not cases:
            consider(sample)
    for sample in reversed(samples):
        if 0 < len(cases) < count and sample.form not in forms and not sample.empty:
            consider(sample)
    if not cases:
        raise ValueError(why)
    return cases


def module_of(database: str, operator: Any, sample: str, held: tuple[int, ...]) -> Call:
    """Make the module of a case again, in another process: it cannot be pickled."""
    found = next(s for s in _samples(database, operator, SEED) if s.name == sample)
    return (found.holding(held) if held else found).module


def _samples(database: str, operator: Any, seed: int) -> list[_Sample]:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    make = _of_a_module if database == "module_db" else _of_an_operator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(make(database, operator))


def _of_an_operator(database: str, operator: Any) -> Iterator[_Sample]:
    # only in op_db does gradcheck_wrapper take the operator; elsewhere it takes results
    function = functools.partial(operator.gradcheck_wrapper, operator.op) if database == "op_db" else operator.op
    samples = operator.sample_inputs("cpu", DTYPE, requires_grad=True, set_seed=False)

    for i, sample in enumerate(itertools.islice(samples, CANDIDATES)):
        yield _sample(
            str(i),
            function,
            ((sample.input, *sample.args), sample.kwargs),
            sample.output_process_fn_grad or (lambda value: value),
        )


def _of_a_module(_: str, info: Any) -> Iterator[_Sample]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        samples = info.module_inputs_func(info, device="cpu", dtype=DTYPE, requires_grad=True, training=training)
        for i, sample in enumerate(itertools.islice(samples, CANDIDATES)):
            made, call = sample.constructor_input, sample.forward_input
            module = info.module_cls(*made.args, **made.kwargs)
            if info.is_lazy:
                module(*call.args, **call.kwargs)  # the first call makes the parameters
            module = module.to(DTYPE).train(training)
            yield _sample(
                f"{i}{'' if training else ' eval'}", module, (call.args, call.kwargs), lambda value: value, training
            )


def _sample(
    name: str, function: Callable[..., Any], arguments: Any, finish: Callable[[Any], Any], training: bool = True
) -> _Sample:
    inputs = tuple(own(v) for v in pytree.tree_leaves(arguments) if isinstance(v, torch.Tensor))
    return _Sample(name, Call(function, arguments, finish, {}).train(training), arguments, inputs, training)


def _rounds(sample: _Sample, other: _Sample | None) -> tuple[Round, ...]:
    first = evaluate(sample.module, sample.inputs)
    if not first.differentiable:
        return ()
    if other is None or not _fits(sample, other):
        return (first,)
    try:
        return first, evaluate(sample.module, other.inputs)
    except Exception:  # eager raises for the other numbers, such as a singular matrix
        return (first,)


def _fits(sample: _Sample, other: _Sample) -> bool:
    def shapes(inputs: tuple[torch.Tensor, ...]) -> list[Any]:
        return [(t.shape, t.dtype, t.layout, t.requires_grad) for t in inputs]

    same = repr(sample.module.constants) == repr(other.module.constants)
    return same and sample.module.spec == other.module.spec and shapes(sample.inputs) == shapes(other.inputs)


def evaluate(
    module: Call, inputs: tuple[torch.Tensor, ...], cotangents: tuple[torch.Tensor, ...] | None = None
) -> Round:
    """Return eager's outputs, gradients of inputs and parameters, and buffers. Restore the buffers. ``cotangents`` are
    random by default."""
    leaves = [own(t) for t in inputs]
    versions = [t._version for t in leaves]
    with preserve.values_kept(module.buffers()), torch.enable_grad():
        torch.manual_seed(SEED)
        before = torch.get_rng_state()
        outputs = module(*leaves)
        drew = not torch.equal(before, torch.get_rng_state())
        differentiable = tuple(i for i, t in enumerate(outputs) if t.requires_grad)
        roots = [outputs[i] for i in differentiable]
        if cotangents is None:
            cotangents = tuple(torch.randn(r.shape, dtype=r.dtype) for r in roots)
        out: Named = {f"output[{i}]": t for i, t in enumerate(outputs)}
        if roots:
            targets = {f"gradient of input[{i}]": t for i, t in enumerate(leaves) if t.requires_grad}
            targets |= {f"gradient of {n}": p for n, p in module.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(roots, list(targets.values()), cotangents, allow_unused=True)
            out |= dict(zip(targets, gradients, strict=True))
        out |= {f"buffer {n}": b for n, b in module.named_buffers()}
        values = {n: None if t is None else t.detach().clone() for n, t in out.items()}
        # batch norm's kernel does not increase the version of the tensors that it writes
        changed = tuple(
            i
            for i, t in enumerate(leaves)
            if t._version != versions[i] or (not t.requires_grad and _differ(t, inputs[i]))
        )
    return Round(inputs, cotangents, differentiable, values, drew, changed)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout is torch.strided and not a.is_nested and not torch.equal(a, b)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor as a leaf."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
