"""Runs plans: opens the compiled graphs of an entry, keeps their constants bound to the entry's state, and calls them.

The containers are entered one caller at a time: ``run`` holds the interpreter lock from its first instruction to its last. Graphs with
operators that go through the proxy executor can give it up in between, so those have a lock of their own.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import torch_api
from ..errors import ExecutionError, IncompatibleError, InputError, PackageError, WeightsError
from ..format.expressions import evaluate
from ..format.manifest import EntrySpec, LibrarySpec, Plan, TensorSpec, VariantSpec, WeightSpec
from . import tensor_values
from .guards import Contract, Fast, check_ambient, dtype_of
from .memory import Ranges, extent
from .pytree import arguments, flatten

ROLES = ("forward", "backward", "inference", "gradient", "step", "accumulate")
"""The plans that a variant may have, by their names in :class:`VariantSpec`."""

_Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Binding = tuple[Mapping[str, torch.Tensor], tuple[int, ...]]
"""The tensors that constants point at, by weight key, and the addresses of the entry's own."""


class Library:
    """One compiled graph, opened when it is first run. A copy (``deepcopy``) opens it again: constants are bound to each by itself."""

    def __init__(self, path: Callable[[], Path], spec: LibrarySpec, device: torch.device):
        self.path, self.spec, self.device = path, spec, device
        self._runner: Any = None
        self._stated: torch_api.Stated | None = None
        self._bound: tuple[int, ...] | None = None
        self._keep: list[torch.Tensor] = []
        self.lock = threading.RLock()

    lends = False
    """Whether :meth:`lend` gives more than :meth:`run`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Library:
        return type(self)(self.path, self.spec, self.device)

    def bind(self, binding: Binding) -> bool:
        """Points the constants at the tensors of ``binding``, unless they already are; the addresses are compared by identity first. Whether the
        addresses are others than before."""
        tensors, addresses = binding
        if self._bound is addresses:
            return False
        if self._runner is None:
            runner = self._open()
            self._check_layouts(tensors)
            self._runner = runner
        moved = self._bound != addresses
        if moved and self.spec.constants:
            self._bound = None  # what is broken off half-way is done again
            bound = {c.name: tensors[c.weight].detach() for c in self.spec.constants}
            try:
                self._runner.bind(bound)
            except ValueError as error:
                raise IncompatibleError(f"{self.spec.member} was not compiled for these weights: {error}") from error
            self._keep = list(bound.values())  # those from before had to stay until now
        self._bound = addresses
        return moved

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the graph. Inputs must have been checked; results are new tensors."""
        try:
            return self.raw_run(inputs)
        except RuntimeError as error:
            raise self.failed(error) from error

    def _run_locked(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.lock:
            return self._runner.run(inputs)

    def failed(self, error: RuntimeError) -> ExecutionError:
        """What an error of native code comes to."""
        return ExecutionError(f"{self.spec.member}: native code failed ({reason_of(error)}); the next call may go well")

    def lend(
        self, operands: Sequence[tuple[str, Any]], inputs: list[torch.Tensor], holder: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], Lease | None]:
        """:meth:`run` for a forward whose backward is to come: results that may lie where a later call would write, and what sees to it that none
        does while ``holder`` lives. ``operands``: what the inputs are. ``hooked``: saved-tensor hooks get hold of the results."""
        return self.run(inputs), None

    @property
    def is_one_call(self) -> bool:
        """Whether :attr:`raw_run` is one call of C++, which an interrupt comes before or after, and never into."""
        return not self.spec.operators

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """What :meth:`run` comes to, without the call in between, and with errors as they are; the library must have been bound."""
        return self._run_locked if self.spec.operators else self._runner.run

    def _load(self) -> Any:
        path = str(self.path())
        runner = torch_api.Runner(path, self.device)
        if self.device.type == "cpu":
            self._stated = torch_api.stated(path)
            self._check_counts(self._stated)
        return runner

    def _check_counts(self, stated: torch_api.Stated) -> None:
        """:class:`IncompatibleError` where the library takes or gives another number of tensors than the manifest says: it would read beyond what it
        is given."""
        listed = (len(self.spec.inputs), len(self.spec.outputs))
        if (stated.inputs, stated.outputs) != listed:
            raise IncompatibleError(
                f"{self.spec.member} takes {stated.inputs} tensors and gives {stated.outputs}; the manifest says {listed[0]} and {listed[1]}: "
                "the package was put together of parts that do not belong together; export it again"
            )

    def _open(self) -> Any:
        try:
            runner = self._load()
        except RuntimeError as error:
            raise IncompatibleError(f"{self.spec.member} could not be opened: {str(error).splitlines()[0]}{self._hint()}") from error
        listed = {c.name for c in self.spec.constants}
        if runner.constants != listed:
            raise IncompatibleError(f"{self.spec.member} has the constants {sorted(runner.constants)}, the manifest lists {sorted(listed)}")
        return runner

    def _check_layouts(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """:class:`IncompatibleError` where a constant's strides spread it over more memory than it had when the library was compiled, or expand it
        over less. The library states that memory alone, not its strides; a tensor that was part of a larger one had more."""
        if self._stated is None:
            return
        for constant in self.spec.constants:
            tensor, looks = tensors[constant.weight], self._stated.looks.get(constant.name)
            if looks is not None and looks != _spelled(tensor, looks):
                raise IncompatibleError(
                    f"{self.spec.member} was compiled for {constant.weight} as {looks}; by the manifest it is {_spelled(tensor, '')}: the "
                    "manifest is not that of this code; export it again"
                )
            expanded = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            held, had = -(-extent(tensor) // 64) * 64, self._stated.constants[constant.name]
            if held > had or (expanded and held != had):
                raise IncompatibleError(
                    f"{self.spec.member} was compiled for {had} bytes of {constant.weight}; with the manifest's strides {tensor.stride()} it has "
                    f"{held}: the manifest is not that of this code; export it again"
                )

    def _hint(self) -> str:
        if not self.spec.operators:
            return ""
        return f"; it calls {', '.join(self.spec.operators)}: import the modules that register these operators before load()"


def _spelled(tensor: torch.Tensor, looks: str) -> str:
    """``float32 [2,3] [3,1]``; strides that no index is multiplied with are those of ``looks``, as they do not matter."""
    theirs = looks.rpartition("[")[2].rstrip("]").split(",")
    theirs = theirs if len(theirs) == tensor.dim() else list(map(str, tensor.stride()))
    strides = [their if n <= 1 else str(s) for n, s, their in zip(tensor.shape, tensor.stride(), theirs, strict=True)]
    return f"{str(tensor.dtype).removeprefix('torch.')} [{','.join(map(str, tensor.shape))}] [{','.join(strides)}]"


_KERNEL = re.compile(r"^Exception raised from (\w+) at", re.MULTILINE)
_INDEX = re.compile(r"index out of bounds|out of range")


def reason_of(error: BaseException) -> str:
    """What native code says, in one line: its own text goes on with the stack. Kernels are named after the operators that were fused into them."""
    if isinstance(error, ExecutionError) and error.__cause__ is not None:
        return reason_of(error.__cause__)
    text = str(error)
    reason, kernel = text.partition("\n")[0].strip(), _KERNEL.search(text)
    if kernel and kernel[1].startswith(("cpp_", "triton_")):
        reason += f", in {kernel[1]}"
    if _INDEX.search(reason):
        reason += ": an index among the inputs (of an embedding, a gather, a class label) is negative or too large"
    return reason


class Lease(Protocol):
    """Results of a forward that lie at places which are used again."""

    def input(self, number: int, given: torch.Tensor) -> torch.Tensor:
        """Input ``number`` of the forward, where it lies; ``given`` where that is not known."""

    def shown(self, to_caller: Iterable[int]) -> list[torch.Tensor]:
        """The results, with copies of those that go to the caller."""

    def run(self, library: Library, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        """The backward, by ``library``. Its results are new tensors."""

    def end(self) -> None:
        """The places may be used again."""


class State:
    """The parameters and buffers that an entry's libraries are bound to, one per distinct weight."""

    def __init__(self, entry: EntrySpec, weights: Mapping[str, WeightSpec], fixed: Mapping[str, torch.Tensor], device: torch.device):
        """``fixed``: tensors by weight key that are constants of the program, not state of the entry. ``device``: where the code runs."""
        self._device = device
        self.names = tuple(s.name for s in entry.state)
        self._weights = [(s.name, s.weight, weights[s.weight]) for s in entry.state]
        keys = [s.weight for s in entry.state]
        self.owned = [key not in keys[:i] for i, key in enumerate(keys)]  # False for the later names of a tie
        self._ties = [(i, keys.index(key)) for i, key in enumerate(keys) if not self.owned[i]]
        self._fixed = dict(fixed)
        self.binding: Binding = (self._fixed, ())
        self._same: Callable[[Sequence[torch.Tensor]], bool] | None = None  # whether tensors at the same addresses also look the same
        self._storages: list[torch.UntypedStorage] = []  # of what is bound: kept, so that nothing else can come to lie there
        self._sizes: list[int] = []  # of those in bytes: one can be shrunk where it lies

    def copy(self) -> State:
        """The same contract, bound to nothing yet."""
        out = copy.copy(self)
        out.binding, out._same, out._storages, out._sizes = (self._fixed, ()), None, [], []
        return out

    def refresh(self, current: Sequence[torch.Tensor]) -> Binding:
        """``current``: the tensors of :attr:`names` now. New ones are checked first; where they do not fit, the old binding stays."""
        try:
            addresses = tuple(map(torch.Tensor.data_ptr, current))
        except (RuntimeError, TypeError, ValueError):  # one without memory, None, or an UninitializedParameter
            for tensor, (name, _, spec) in zip(current, self._weights, strict=True):
                check_weight(name, tensor, spec, self._device)
            raise
        resized = list(map(len, self._storages)) != self._sizes
        if resized or addresses != self.binding[1] or self._same is None or not self._looks_the_same(current):
            self._same = None
            tensors = self.check(current)
            self.binding = (tensors, self.binding[1] if addresses == self.binding[1] else addresses)
            own = [t for t, owned in zip(current, self.owned, strict=True) if owned]
            self._storages = [t.untyped_storage() for t in own]
            self._sizes = list(map(len, self._storages))
            self._same = Fast(own).looks_alike if own else lambda _: True
        return self.binding

    def check(self, current: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """``current``, and what is fixed, by weight key; :class:`WeightsError` where libraries could not be bound to it."""
        tensors = dict(self._fixed)
        for tensor, (name, key, spec) in zip(current, self._weights, strict=True):
            check_weight(name, tensor, spec, self._device)
            if key not in tensors:
                tensors[key] = tensor.detach()  # what is there now, also if the parameter is given other memory (.data = …) later
            elif tensors[key].data_ptr() != tensor.data_ptr():
                tied = next(n for n, k, _ in self._weights if k == key)
                raise WeightsError(f"{name} and {tied} were one tensor when the package was exported; give both the same, or export it untied")
        return tensors

    def _looks_the_same(self, current: Sequence[torch.Tensor]) -> bool:
        """In C, but for ties, whose later names must hold the very tensor of the first (the check in C takes no tensor twice)."""
        assert self._same is not None
        if not self._ties:
            return self._same(current)
        return all(current[i] is current[first] for i, first in self._ties) and self._same(
            [t for t, owned in zip(current, self.owned, strict=True) if owned]
        )


def check_weight(name: str, tensor: torch.Tensor | None, spec: WeightSpec, device: torch.device | None = None) -> None:
    """:class:`WeightsError` where native code compiled for ``spec``, which runs on ``device``, could not read ``tensor``."""
    if tensor is None:
        raise WeightsError(f"{name} is None, and compiled code reads it: give it a tensor of shape {spec.shape}, or load the package again")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or torch_api.is_functorch_wrapped(tensor):
        raise WeightsError(f"{name} is a {type(tensor).__qualname__} that native code cannot read; expected a plain tensor or Parameter")
    if device is not None and tensor.device != device:
        raise WeightsError(
            f"{name} is on {tensor.device}; the loaded code runs on {device}: move it back, or load(path, device={str(tensor.device)!r})"
        )
    if problem := tensor_values.unplain(tensor):
        raise WeightsError(f"{name} {problem}")
    if tensor.dtype is not dtype_of(spec.dtype):
        raise WeightsError(f"{name} has dtype {tensor.dtype}; the package was compiled for torch.{spec.dtype}: export it with that dtype")
    if tuple(tensor.shape) != spec.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}; the package was compiled for {spec.shape}")
    if problem := tensor_values.unbacked(tensor):
        raise WeightsError(f"{name} {problem}")
    if any(n > 1 and s != w for n, s, w in zip(tensor.shape, tensor.stride(), spec.stride, strict=True)):
        raise WeightsError(f"{name} has strides {tensor.stride()}; the package was compiled for {spec.stride}: copy it into the old tensor instead")
    if tensor.is_cuda and tensor.numel() and tensor.data_ptr() % 16:
        raise WeightsError(f"{name} lies at an address that is no multiple of 16 bytes, which kernels on a GPU count on: copy it (.clone())")
    if tensor.is_conj() or tensor.is_neg():
        raise WeightsError(f"{name} is a lazily conjugated or negated view; resolve it first (tensor.resolve_conj().resolve_neg())")


class Variant:
    """A variant made ready: contracts, the fast check of what was accepted last, and the plans with their libraries."""

    def __init__(self, spec: VariantSpec, libraries: Mapping[str, Library], device: torch.device):
        self.spec, self.device, self._kind = spec, device, device.type  # asking a device for its type costs 50 ns
        self.contract = Contract(spec.inputs, spec.symbols, spec.guards, device)
        self.cotangents = Contract(spec.cotangents, (), (), device)
        self.plans = {role: Runnable(plan, libraries) for role in ROLES if (plan := getattr(spec, role)) is not None}
        self.double = Variant(spec.double, libraries, device) if spec.double is not None else None
        backward = spec.backward
        self.gradient_targets = frozenset(g.of for g in backward.gradients) if backward else frozenset()
        self.covered = self.gradient_targets.union(spec.unreached)
        self.differentiable = frozenset(spec.differentiable)
        self._reaching: dict[tuple[str, ...], frozenset[int]] = {}
        forward = self.plans.get("forward")
        outputs = [n for n, (kind, _) in enumerate(forward.outputs) if kind == "result"] if forward else []
        self.incoming = [outputs.index(i) for i in spec.differentiable if i in outputs]  # places among autograd's incoming gradients
        self._fast: list[tuple[Fast, Mapping[str, int]]] = []
        positional, keywords = spec.in_tree.children
        plain = [c.index for c in positional.children if c.kind == "tensor"]
        self.flat_arguments = not keywords.children and plain == list(range(len(positional.children)))
        self._names = [*spec.argument_names, *(f"args[{i}]" for i in range(len(spec.argument_names), len(positional.children)))]

    def reaching(self, targets: Sequence[str]) -> frozenset[int]:
        """The outputs that one of the targets reaches: the others require no gradient."""
        if len(targets) == len(self.gradient_targets):
            return self.differentiable
        found = self._reaching.get(tuple(targets))
        if found is None:
            assert self.spec.backward is not None
            asked = frozenset(targets)
            numbers = {n for g in self.spec.backward.gradients if g.of in asked for n in g.cotangents}
            found = self._reaching[tuple(targets)] = frozenset(self.spec.differentiable[n] for n in numbers)
        return found

    def share(self, runnable: Runnable, results: list[torch.Tensor], sizes: Mapping[str, int], detached: Collection[int] = ()) -> None:
        """Puts views in the place of results that lie in another one's memory. ``detached``: outputs that autograd knows nothing of."""
        for shared in self.spec.shared:
            (kind, place), (of, base) = runnable.outputs[shared.output], runnable.outputs[shared.base]
            if kind == of == "result" and place != base:
                spec, whole = self.spec.outputs[shared.output], results[base]
                if shared.output in detached:
                    whole = whole.detach()
                shape, stride = ([evaluate(s, sizes) for s in many] for many in (spec.shape, shared.stride or spec.stride))
                with torch.enable_grad():  # else it could not be written to in place outside of no_grad
                    try:
                        results[place] = whole.as_strided(shape, stride, whole.storage_offset() + evaluate(shared.offset, sizes))
                    except RuntimeError as error:
                        raise PackageError(f"{spec.name} does not lie within {self.spec.outputs[shared.base].name}, as the package says") from error

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The flat tensors of a call; :class:`InputError` names the argument that has another structure."""
        spec = self.spec
        args, kwargs = arguments(spec.in_tree, spec.argument_names, args, kwargs)
        out: list[torch.Tensor] = []
        positional, keywords = spec.in_tree.children
        for tree, name, value in zip(positional.children, self._names, args, strict=True):
            flatten(tree, value, out, name)
        for key, tree in zip(keywords.keys, keywords.children, strict=True):
            flatten(tree, kwargs[str(key)], out, str(key))
        return out

    def index_state(self, index: Mapping[str, int]) -> None:
        """Turns names of parameters and buffers into places in the entry's state."""
        for runnable in self.plans.values():
            runnable.index_state(index)
        if self.double is not None:
            self.double.index_state(index)

    def materialized(self, given: Sequence[torch.Tensor | None], sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Incoming gradients, zeros where there is none."""
        return [
            torch.zeros([evaluate(s, sizes) for s in spec.shape], dtype=dtype, device=self.device) if t is None else t
            for t, spec, dtype in zip(given, self.cotangents.specs, self.cotangents.dtypes, strict=True)
        ]

    def fit_cotangents(self, given: Sequence[torch.Tensor | None], sizes: Mapping[str, int]) -> Sequence[torch.Tensor]:
        """The incoming gradients as native code may have them: copied where they lie otherwise (``y.sum().backward()`` gives stride 0),
        zeros where there is none."""
        tensors = self.materialized(given, sizes)
        for fast, known in self._fast:
            if known is sizes and fast.holds(tensors):
                return tensors
        fitting, _, untouched = self.cotangents.fit(tensors, sizes)
        if untouched and tensors:
            self._fast.insert(0, (Fast(tensors), sizes))
            del self._fast[4:]
        return fitting

    def check_ambient(self) -> None:
        check_ambient(self.spec.ambient, self._kind)


class Runnable:
    """A plan with its library, and its operands sorted by where they come from."""

    def __init__(self, plan: Plan, libraries: Mapping[str, Library]):
        self.plan = plan
        self.library = libraries[plan.call.library] if plan.call else None
        self.operands = [parse(o) for o in plan.call.operands] if plan.call else []
        self.outputs = [parse(o) for o in plan.outputs]
        self.results = [i for kind, i in self.outputs if kind == "result"]
        self.saved = [parse(s) for s in plan.saved]
        self.gradients = {g.of: parse(g.source)[1] for g in plan.gradients if g.source}
        self.consumes = plan.consumes
        self.watched: list[tuple[str, Any]] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self._names: Mapping[str, int] = {}
        self._written: tuple[Any, Ranges] = (None, Ranges(()))

    def written(self, binding: Binding, current: Sequence[torch.Tensor]) -> Ranges:
        """The memory that the call writes. ``current``: the entry's state, which ``binding`` is of; :class:`WeightsError` where something else of it
        lies there, too: compiled code counts on their being apart."""
        if self._written[0] is not binding[1]:
            changed = {id(current[i]) for i in self.writes}
            places = {id(current[i]): (name, current[i]) for name, i in self._names.items()}
            ranges = Ranges(named for key, named in places.items() if key in changed)
            pair = ranges.overlap()
            for key, (name, tensor) in places.items():
                if pair is None and key not in changed and (other := ranges.reached_by(tensor)):
                    pair = other, name
            if pair is not None:
                raise WeightsError(
                    f"{pair[0]}, which the call updates in place, and {pair[1]} share memory, and did not when they were exported: clone one"
                )
            self._written = (binding[1], ranges)
        return self._written[1]

    def refuse_its_own(self, written: Ranges, inputs: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """:class:`InputError` where an input lies in memory that the call writes."""
        for tensor, spec in zip(inputs, specs, strict=True):
            if name := written.reached_by(tensor):
                raise InputError(f"{spec.name} shares memory with {name}, which the call updates in place: pass a copy ({spec.name}.clone())")

    def reached(self, given: Sequence[torch.Tensor | None]) -> dict[str, int]:
        """:attr:`gradients` without those that no defined incoming gradient reaches: they are None in eager."""
        defined = {i for i, t in enumerate(given) if t is not None}
        return {g.of: self.gradients[g.of] for g in self.plan.gradients if g.source and not defined.isdisjoint(g.cotangents)}

    def spared(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``saved`` with copies of what the call will leave with other values."""
        return [t.clone() if i in self.consumes else t for i, t in enumerate(saved)]

    def index_state(self, index: Mapping[str, int]) -> None:
        """Turns names of parameters and buffers into places in the entry's state."""
        self.watched = [(kind, index[where] if kind == "parameter" else where) for kind, where in map(parse, self.plan.watched)]
        self.reads = [index[n] for n in self.plan.reads]
        self.writes = [index[n] for n in self.plan.writes]
        self._names = index

    def call(
        self,
        binding: Binding,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
        saved: Sequence[torch.Tensor] = (),
        cotangents: Sequence[torch.Tensor] = (),
        lease: Lease | None = None,
    ) -> list[torch.Tensor]:
        """The results of the library. Every tensor must have been checked. ``lease``: of the forward that ``saved`` comes from."""
        if self.library is None:
            return []
        operands = self._operands(inputs, sizes, saved, cotangents)
        with self.library.lock:  # else another thread could bind other tensors in between
            self.library.bind(binding)
            return self.library.run(operands) if lease is None else lease.run(self.library, operands)

    def bound(self, binding: Binding, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> tuple[_Run, list[torch.Tensor]]:
        """What :meth:`call` would call, and with what; nobody else may bind this library in between."""
        if self.library is None:
            return (lambda _: []), []
        with self.library.lock:
            self.library.bind(binding)
        return self.library.raw_run, self._operands(inputs, sizes, (), ())

    def lend(
        self, binding: Binding, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], holder: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], Lease | None]:
        """:meth:`call` of a forward whose backward is to come (:meth:`Library.lend`)."""
        if self.library is None:
            return [], None
        operands = self._operands(inputs, sizes, (), ())
        with self.library.lock:
            self.library.bind(binding)
            return self.library.lend(self.operands, operands, holder, hooked)

    def _operands(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        operands = []
        for kind, where in self.operands:
            if kind == "input":
                operands.append(inputs[where])
            elif kind == "saved":
                operands.append(saved[where])
            elif kind == "cotangent":
                operands.append(cotangents[where])
            else:
                operands.append(torch.empty((evaluate(where, sizes), 0)))
        return operands


def parse(operand: str) -> tuple[str, Any]:
    """``input:3`` -> ("input", 3); of a size or a parameter the rest is text."""
    kind, _, rest = operand.partition(":")
    return kind, int(rest) if kind in ("input", "saved", "cotangent", "result") else rest
