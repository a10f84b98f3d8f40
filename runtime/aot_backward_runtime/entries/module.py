"""``load(path).module()``: a package's entry as an ``nn.Module`` whose forward and backward are native code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import torch_api
from ..errors import GradientError, InputError, StateDictError, WeightsError
from ..format.manifest import StateSpec
from ..native import tensor_values
from ..native.plan import Binding, Lease, Runnable, Variant
from ..native.pytree import unflatten
from .dispatch import Entry, MatchedCall

_NO_DOUBLE = (
    "a derivative was asked for of a compiled backward that holds none of that order: export the module with order=2 for the second, or the "
    "gradients themselves as a program (export_grad of a function that calls torch.autograd.grad(..., create_graph=True)), or use eager"
)


class LoadedModule(nn.Module):
    """Behaves as the exported module does: parameters, buffers, ``state_dict``, ``train``/``eval`` and autograd.

    Submodules are empty ``nn.Module``\\ s that carry the names. Inputs and outputs have the shapes and dtypes that
    ``aot-backward inspect`` lists; :class:`InputError` names what does not fit. Incoming gradients may be any, of any strides.
    """

    def __init__(self, entry: Entry, tensors: dict[str, torch.Tensor]):
        """``tensors``: the entry's state by weight key."""
        super().__init__()
        for name in entry.spec.modules:
            _submodule(self, name)
        made: dict[str, torch.Tensor] = {}
        for spec in entry.spec.state:
            _place(self, spec, made, tensors)
        self._aot_entry = entry
        self._aot_slots = _Slots([_slot(self, name) for name in entry.state.names])
        modes = {v.spec.mode: frozenset(v.spec.set_apart) for v in entry.variants}
        self._aot_apart = {mode: modes.get(mode, frozenset()) for mode in ("train", "eval")}
        self.train(entry.spec.training)

    @torch_api.opaque_to_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        entry = self._aot_entry
        current = self._aot_current()
        if torch_api.in_forward_mode():
            torch_api.refuse_duals(current)
        asked = None
        if entry.specialised and torch.is_grad_enabled():
            pairs = zip(entry.state.names, current, entry.state.owned, strict=True)
            asked = frozenset([f"parameter:{name}" for name, tensor, owned in pairs if owned and tensor is not None and tensor.requires_grad])
        matched = entry.match("train" if self.training else "eval", args, kwargs, asked)
        variant = matched.variant
        binding = entry.state.refresh(current)
        runnable = variant.plans.get("inference") or variant.plans["forward"]
        if runnable.writes:
            runnable.refuse_its_own(runnable.written(binding, current), matched.given, variant.spec.inputs)
        if torch.is_grad_enabled():
            targets, sources = _wanted(entry, variant, current, matched)
            if targets:
                run = _Run(matched, variant.plans["forward"], binding, current, targets)
                return self._aot_assemble(run.runnable, matched, current, _Native.apply(run, *sources))
        with torch.no_grad():
            _note_writes(runnable, current)
            values = runnable.call(binding, matched.flat, matched.sizes)
        if variant.spec.shared:
            variant.share(runnable, values, matched.sizes)
        return self._aot_assemble(runnable, matched, current, [values[i] for i in runnable.results])

    def train(self, mode: bool = True) -> LoadedModule:
        apart = self._aot_apart["train" if mode else "eval"]
        for name, module in self.named_modules(remove_duplicate=False):
            if name == "" or isinstance(module, _Part):
                module.training = mode != (name in apart)
            elif type(module) is not _Part:
                module.train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, but all or nothing: :class:`StateDictError` names what does not fit before anything is changed."""
        if isinstance(state_dict, Mapping) and not torch_api.has_loading_hooks(self):
            self._aot_check_state(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _aot_check_state(self, given: Mapping[str, Any], strict: bool, assign: bool) -> None:
        entry = self._aot_entry
        own = {s.name: t for s, t in zip(entry.spec.state, self._aot_current(), strict=True)}
        persistent = {s.name: own[s.name] for s in entry.spec.state if s.persistent}
        if problem := tensor_values.unlike(persistent, {n: v for n, v in given.items() if n in persistent}, strict=strict):
            raise StateDictError(f"state of entry {entry.name!r}: {problem}; nothing was changed")
        added = tuple(f"{n}." for n, m in self.named_children() if type(m) is not _Part)  # the caller's own
        others = {*dict(self.named_parameters(remove_duplicate=False)), *dict(self.named_buffers(remove_duplicate=False))} - own.keys()
        unexpected = sorted(map(str, given.keys() - persistent.keys() - others))
        if strict and (unexpected := [n for n in unexpected if not n.startswith(added)]):
            raise StateDictError(f"state of entry {entry.name!r}: unexpected {unexpected[:5]}; nothing was changed")
        if assign:
            try:
                entry.state.check([given.get(n, t).detach() if n in persistent else t for n, t in own.items()])
            except WeightsError as error:
                raise StateDictError(f"state of entry {entry.name!r}: {error}; nothing was changed") from error

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), _Part) and not isinstance(value, _Part):
            _refuse_change(name)
        super().__setattr__(name, value)

    def _aot_current(self) -> list[torch.Tensor]:
        try:
            return [owner[name] for owner, name in self._aot_slots.pairs]
        except KeyError as error:
            raise WeightsError(f"the parameter or buffer {error.args[0]!r} was deleted from the loaded module; load the package again") from error

    def _aot_assemble(self, runnable: Runnable, matched: MatchedCall, current: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Any:
        made = iter(results)
        flat = []
        for kind, where in runnable.outputs:
            flat.append(next(made) if kind == "result" else matched.given[where] if kind == "input" else current[self._aot_entry.index[where]])
        return unflatten(matched.variant.spec.out_tree, flat, matched.sizes, self._aot_entry.types)

    def __reduce__(self) -> Any:
        raise TypeError("a loaded module cannot be pickled: pickle its state_dict(), and load the package again")

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModule:
        entry = self._aot_entry
        for spec, tensor in zip(entry.spec.state, self._aot_current(), strict=True):
            if tensor is None:
                raise WeightsError(f"{spec.name} is None, and compiled code reads it: give it a tensor before the copy, or load the package again")
        tensors = {s.weight: t.detach().clone() for s, t in zip(entry.spec.state, self._aot_current(), strict=True)}
        out = LoadedModule(copy.deepcopy(entry, memo), tensors)
        out.train(self.training)
        for mine, theirs in zip(self._aot_current(), out._aot_current(), strict=True):
            if isinstance(mine, nn.Parameter):
                theirs.requires_grad_(mine.requires_grad)
                theirs.grad = None if mine.grad is None else mine.grad.clone()
        memo[id(self)] = out
        for name, value in self.__dict__.items():  # what is the person's own: attributes and hooks
            if name not in out.__dict__ or name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                out.__dict__[name] = copy.deepcopy(value, memo)
        for name, module in self._modules.items():
            if name not in out._modules:
                out.add_module(name, copy.deepcopy(module, memo))
        return out

    def extra_repr(self) -> str:
        entry = self._aot_entry
        modes = sorted({v.spec.mode for v in entry.variants})
        return f"entry={entry.name!r}, {len(entry.variants)} variant(s), modes={modes}"


class _Slots:
    """Where the state is looked up. A type of its own, so that tools that walk through a module's lists and dicts leave it alone."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[dict[str, Any], str]]):
        self.pairs = pairs


class _Part(nn.Module):
    """A submodule of a loaded module: it holds names and tensors. What it did is compiled into the whole, so that a change to it is an error."""

    def train(self, mode: bool = True) -> _Part:
        if mode != self.training:
            raise InputError(
                f"a submodule of a loaded module cannot be put into {'train' if mode else 'eval'} mode alone: it is compiled into the whole. "
                "Export the module with that submodule in that mode (which is kept), or call train() or eval() of the loaded module"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a submodule of a loaded module cannot be called: export it as an entry of its own")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "training" and not isinstance(value, torch.Tensor) and name not in self._slots():
            _refuse_change(name)
        super().__setattr__(name, value)

    def _slots(self) -> set[str]:
        return {*self.__dict__.get("_parameters", ()), *self.__dict__.get("_buffers", ())}

    def _hooked(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "a hook on a submodule of a loaded module would never run: put it on the loaded module, or on the module before it is exported"
        )

    register_forward_hook = register_forward_pre_hook = register_full_backward_hook = register_full_backward_pre_hook = _hooked
    register_backward_hook = _hooked


def _refuse_change(name: str) -> None:
    raise InputError(f"{name!r} of a loaded module cannot be changed: what it would do is compiled. Change it before the export")


class _Run:
    """One forward call, kept for its backward."""

    __slots__ = (
        *("__weakref__", "matched", "backward", "binding", "consumed", "current", "lease", "random", "runnable", "shared", "sources", "targets"),
    )

    def __init__(self, matched: MatchedCall, runnable: Runnable, binding: Binding, current: Sequence[torch.Tensor], targets: Sequence[str]):
        self.matched, self.runnable, self.binding, self.current, self.targets = matched, runnable, binding, current, targets
        self.backward = matched.variant.plans["backward"]
        self.sources: Sequence[torch.Tensor] = ()
        self.shared = False  # whether hooks have got hold of the saved tensors
        self.consumed = False  # whether a backward may have overwritten them
        self.lease: Lease | None = None  # where what was saved lies at places that are used again
        self.random: list[torch.Tensor] = []  # the state that the random numbers were drawn from, where they must be drawn again


class _Native(torch.autograd.Function):
    """One node of the autograd graph for the whole compiled program. Its tensor arguments are what gradients are asked for."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        runnable, flat, current, double = run.runnable, run.matched.flat, run.current, run.matched.variant.double
        ctx.set_materialize_grads(False)
        if double is not None and double.spec.random:
            run.random = _random_state(double)
        _note_writes(runnable, current)
        hooked = torch_api.saved_tensors_hooks(False) is not None  # they may give back copies, and keep what they got
        if runnable.library is not None and runnable.library.lends:
            results, run.lease = runnable.lend(run.binding, flat, run.matched.sizes, run, hooked)
            shown = results if run.lease is None else run.lease.shown(runnable.results)
        else:
            shown = results = runnable.call(run.binding, flat, run.matched.sizes)
        differentiable = run.matched.variant.reaching(run.targets)
        if run.matched.variant.spec.shared:
            detached = [n for n in range(len(runnable.outputs)) if n not in differentiable]
            run.matched.variant.share(runnable, shown, run.matched.sizes, detached)

        def pick(kind: str, where: Any) -> torch.Tensor:
            return results[where] if kind == "result" else flat[where] if kind == "input" else current[where]

        kept = [pick(*s) for s in runnable.saved]
        # what the backward reads itself, and what shares memory with what was saved, is kept for autograd's version check only
        read = [current[i] for i in run.backward.reads]
        if double is None:
            run.current = ()  # not to keep the parameters alive beside autograd's own references
        else:  # what is differentiated again comes back with its history, which only autograd knows
            read += [current[i] for i in double.plans["forward"].reads]
        if run.lease is not None:
            read += [shown[i] for kind, i in (*runnable.saved, *runnable.watched) if kind == "result" and shown[i] is not results[i]]
        ctx.save_for_backward(*kept, *(pick(*s) for s in runnable.watched), *read, *(sources if double is not None else ()))
        ctx.sources = len(sources)
        run.sources = sources
        run.shared = bool(run.backward.consumes) and hooked
        inputs = [] if hooked else [i for i, (kind, _) in enumerate(runnable.saved) if kind == "input"]
        ctx.memory = [(i, kept[i].data_ptr(), kept[i].shape) for i in inputs]
        ctx.run = run
        ctx.mark_non_differentiable(*(shown[i] for n, (kind, i) in enumerate(runnable.outputs) if kind == "result" and n not in differentiable))
        return tuple(shown[i] for i in runnable.results)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        run, saved = ctx.run, ctx.saved_tensors
        if run.consumed:
            raise GradientError(
                "an earlier backward of this graph failed half-way, and may have overwritten what it had saved: run the forward again"
            )
        for i, address, shape in ctx.memory:
            if saved[i].data_ptr() != address or saved[i].shape != shape:
                raise GradientError("an input was given other memory (.data = …) between forward and backward; pass a copy to the forward instead")
        variant, sizes = run.matched.variant, run.matched.sizes
        given = [incoming[i] for i in variant.incoming]
        if variant.double is not None and torch.is_grad_enabled():
            return (None, *_once_more(run, saved[len(saved) - ctx.sources :], given, ctx.needs_input_grad[1:]))
        with torch.no_grad():
            cotangents = variant.fit_cotangents(given, sizes)
            if run.backward.consumes:
                if run.shared or torch_api.keeps_graph():
                    saved = run.backward.spared(saved)
                else:
                    run.consumed = True
            if run.lease is None:
                results = run.backward.call(run.binding, run.matched.flat, sizes, saved, cotangents)
            else:
                results = _after(run, run.lease, saved, cotangents)
            made = run.backward.gradients if None not in given else run.backward.reached(given)
            gradients = [results[made[t]] if needed and t in made else None for t, needed in zip(run.targets, ctx.needs_input_grad[1:], strict=True)]
        if torch.is_grad_enabled():  # create_graph=True
            there = [g for g in gradients if g is not None]
            refusing = iter(_Refusing.apply(there, *run.sources, *(t for t in given if t is not None)))
            gradients = [None if g is None else next(refusing) for g in gradients]
        return (None, *gradients)


def _after(run: _Run, lease: Lease, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The backward of a forward that has lent what it saved. Inputs are taken where the forward read them: they still hold what they held, as
    autograd has checked."""
    inputs = [lease.input(i, t) for i, t in enumerate(run.matched.flat)]
    kept = [lease.input(w, t) if kind == "input" else t for (kind, w), t in zip(run.runnable.saved, saved, strict=False)]
    results = run.backward.call(run.binding, inputs, run.matched.sizes, kept, cotangents, lease)
    if not torch_api.keeps_graph():
        lease.end()
    return results


def _once_more(run: _Run, sources: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients by the program that can be differentiated again (``VariantSpec.double``). ``sources``: of the forward, as autograd knows them."""
    variant = run.matched.variant
    double = variant.double
    assert double is not None
    inputs: list[torch.Tensor] = list(run.matched.flat)
    parameters = []
    for target, source in zip(run.targets, sources, strict=True):
        kind, _, where = target.partition(":")
        if kind == "input":
            inputs[int(where)] = source
        else:
            parameters.append((target, source))
    tensors = [*inputs, *variant.materialized(given, run.matched.sizes)]
    fitting, sizes, _ = double.contract.fit(tensors)
    needing = [(f"input:{i}", t) for i, t in enumerate(tensors) if t.requires_grad] + parameters
    runnable = double.plans["forward"]
    again = _Run(MatchedCall(double, tensors, fitting, sizes), runnable, run.binding, run.current, [t for t, _ in needing])
    with _drawing_from(run.random, double):
        made = _Native.apply(again, *(source for _, source in needing))
    gradients = dict(zip(double.spec.gives, made, strict=True))
    reached = run.backward.gradients if None not in given else run.backward.reached(given)
    return [gradients.get(t) if asked and t in reached else None for t, asked in zip(run.targets, needed, strict=True)]


def _random_state(variant: Variant) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(variant.device)] if variant.device.type == "cuda" else [])]


@contextlib.contextmanager
def _drawing_from(states: Sequence[torch.Tensor], variant: Variant) -> Iterator[None]:
    """Random numbers inside are those that were drawn from ``states``, if any; the present state is left as it is."""
    if not states:
        yield
        return
    with torch.random.fork_rng(devices=[variant.device] if variant.device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], variant.device)
        yield


class _Refusing(torch.autograd.Function):
    """The same gradients, with a node behind them that raises when it is differentiated with regard to anything that they come from."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *history: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        raise GradientError(_NO_DOUBLE)


def _wanted(entry: Entry, variant: Variant, current: Sequence[torch.Tensor], matched: MatchedCall) -> tuple[list[str], list[torch.Tensor]]:
    """What gradients are asked for in this call, as the manifest names them, and the tensors; an error where the package has none for one."""
    known, covered = variant.gradient_targets, variant.covered
    targets, sources = [], []
    for name, tensor, owned in zip(entry.state.names, current, entry.state.owned, strict=True):
        if owned and tensor.requires_grad:
            target = f"parameter:{name}"
            if target not in covered:
                raise GradientError(
                    f"{name} requires a gradient, and was frozen when the package was exported: freeze it again, or export it unfrozen "
                    f"(a Variant with requires_grad=[…, {name!r}])"
                )
            if target in known:
                targets.append(target)
                sources.append(tensor)
    for i, tensor in enumerate(matched.given):
        if tensor.requires_grad:
            target = f"input:{i}"
            if target not in covered:
                name = variant.spec.inputs[i].name
                raise GradientError(
                    f"input {name} requires a gradient, and did not when the package was exported: pass {name}.detach(), or export a Variant "
                    f"with requires_grad=[…, {name!r}]"
                )
            if target in known:
                targets.append(target)
                sources.append(tensor)
    return targets, sources


def _note_writes(runnable: Runnable, current: Sequence[torch.Tensor]) -> None:
    """Native code writes buffers through pointers: bump their versions, so that whoever saved one of them notices. Before it runs, because an
    interrupt may come right behind it."""
    if runnable.writes:
        torch.autograd.graph.increment_version([current[i] for i in runnable.writes])


def _slot(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where the tensor of that name is looked up at each call: whatever is put there is what the call uses."""
    path, _, last = name.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if last in owner._parameters else owner._buffers), last


def _submodule(root: nn.Module, name: str) -> nn.Module:
    owner = root
    for part in name.split(".") if name else ():
        if part not in owner._modules:
            owner.add_module(part, _Part())
        owner = owner._modules[part]  # type: ignore[assignment]
    return owner


def _place(root: nn.Module, spec: StateSpec, made: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    path, _, last = spec.name.rpartition(".")
    owner = _submodule(root, path)
    if spec.weight not in made:
        tensor = tensors[spec.weight]
        made[spec.weight] = nn.Parameter(tensor, requires_grad=spec.requires_grad) if spec.parameter else tensor
    if spec.parameter:
        owner.register_parameter(last, made[spec.weight])  # type: ignore[arg-type]
    else:
        owner.register_buffer(last, made[spec.weight], persistent=spec.persistent)
