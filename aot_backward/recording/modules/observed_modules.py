"""Which modules a recorded script calls, how, and what the calls depend on."""

from __future__ import annotations

import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.format import module_source
from aot_backward_runtime.format.manifest import Ambient, ModuleSource
from aot_backward_runtime.module_calls.interception import Plain, depth, opened
from aot_backward_runtime.module_calls.live_module import class_name, facts_of, memory_of, modes_of, state_of, why_not_here, why_uncallable
from aot_backward_runtime.module_calls.module_facts import CODE, DEFAULT_DTYPE, GLOBAL, attributes, globals_read, names_in, resolved
from aot_backward_runtime.module_calls.plain_values import NotPlain, is_known
from aot_backward_runtime.passes import origin

from ...capture.ambient import current_ambient
from ..observation import TensorMetadata
from .watched_call import WatchedCall

_WATCHED = 3  # calls of each kind whose Python code is watched, and one of 64 of the further ones
_THEN = 64
MOST_KINDS = 4  # of calls of one module
_SIZES = 256  # different calls of a kind
_MODULES = 32
_INNER = 32  # besides those, of modules that others call which are refused
DEEPEST = 4  # modules around one
_REFUSED = 8  # of a class, after which no other one is looked at: some are made for each call


@dataclass
class CallKind:
    """Calls of one module that one variant serves. ``args``, ``kwargs``: of the first. ``sizes``: of all tensors, and how often they came."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: str
    apart: frozenset[str]
    ambient: Ambient
    trained: tuple[str, ...]
    count: int = 0
    sizes: dict[tuple[tuple[int, ...], ...], int] = field(default_factory=dict)


@dataclass
class ObservedModule:
    """A module that was called with gradients. ``inner``: by another one, which was refused. ``refused``: why its calls cannot be compiled, or "".
    ``differentiated``: whether its gradients are differentiated again; then those of what it calls may be, too."""

    module: nn.Module
    line: str
    inner: bool = False
    kinds: dict[Any, CallKind] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    attributes: dict[str, str] = field(default_factory=dict)  # as they were before the first watched call
    refused: str = ""
    differentiated: bool = False
    seconds: float = 0.0  # of its forwards

    def source(self) -> ModuleSource:
        """:class:`NotPlain` where something that the calls depend on cannot be told, or has changed since."""
        functions = [resolved(f) for f in self.functions]
        facts = facts_of(self.module, sorted(self.functions), sorted({n for f in functions for n in globals_read(f)}))
        if changed := [n for n, text in facts.items() if not n.startswith((CODE, GLOBAL, DEFAULT_DTYPE)) and self.attributes.get(n) != text]:
            raise NotPlain(f"{changed[0]} was changed after it was called")
        # no path of this machine goes into a package
        return ModuleSource(class_name(self.module), Path(self.line).name, facts)

    def entry_name(self, source: ModuleSource, autocast: str) -> str:
        """The same for modules that one entry serves."""
        state = [
            (n, str(t.dtype).removeprefix("torch."), tuple(t.shape), tuple(t.stride()), isinstance(t, nn.Parameter))
            for n, t in state_of(self.module).items()
        ]
        return module_source.entry_name(source, state, autocast)


class ObservedModules:
    """By the module. It keeps them alive until the recording is over."""

    def __init__(self, caller: types.CodeType | None = None) -> None:
        """``caller``: the function of this project that calls what is observed, once the script has ended."""
        self.modules: dict[int, ObservedModule] = {}
        self.line, self._caller = "", caller
        """``line``: where the script called what is called now, of a ``caller``."""

    def call(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call by the module itself, observed. Where it is refused, the calls of its submodules come here instead."""
        trained = tuple(n for n, p in module.named_parameters() if p.requires_grad)
        if not trained and next(module.parameters(), None) is None:  # a wrapper
            return opened(module, plain, args, kwargs)
        if why_not_here() or not (trained or _requires_grad(args, kwargs)):  # a frozen module may be differentiated with regard to its arguments
            return plain(module, *args, **kwargs)
        seen = self.modules.get(id(module)) or self._added(module)
        if seen is None:
            return (opened if self._refused(type(module)) else _closed)(module, plain, args, kwargs)
        if not seen.refused and (kind := self._kind(seen, trained, args, kwargs)) is not None:
            if kind.count <= _WATCHED or not kind.count % _THEN:
                return self._watched(seen, module, plain, args, kwargs, first=kind.count == 1)
            start = time.perf_counter()
            result = plain(module, *args, **kwargs)
            seen.seconds += time.perf_counter() - start
            return result
        return self._plainly(seen, plain, args, kwargs)

    def _added(self, module: nn.Module) -> ObservedModule | None:
        """None where it is not to be observed."""
        inner = depth() > 0
        if inner and (depth() > DEEPEST or not _is_worth_it(module)):
            return None
        if sum(s.inner == inner for s in self.modules.values()) >= (_INNER if inner else _MODULES) or self._refused(type(module)) >= _REFUSED:
            return None
        seen = self.modules[id(module)] = ObservedModule(module, origin.line(within=self._caller) or self.line, inner)
        return seen

    def _plainly(self, seen: ObservedModule, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not observed."""
        if not seen.refused or seen.differentiated:
            return plain(seen.module, *args, **kwargs)
        return opened(seen.module, plain, args, kwargs)

    def _refused(self, kind: type) -> int:
        """How many modules of that class are."""
        return sum(type(s.module) is kind and bool(s.refused) and not s.differentiated for s in self.modules.values())

    def _watched(self, seen: ObservedModule, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool) -> Any:
        call = WatchedCall(first=first)
        seen.refused = why_uncallable(module)
        try:
            before = {} if seen.refused else attributes(module)
        except NotPlain as error:
            seen.refused = str(error)
        if seen.refused:
            return self._plainly(seen, plain, args, kwargs)
        seen.attributes = seen.attributes or before
        tensors = [(t, t._version) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        with call.watching():
            result = plain(module, *args, **kwargs)
        seen.functions |= call.functions
        if seen.refused:  # meanwhile
            return result
        if call.refused:
            seen.refused = f"its forward {call.refused}"
        elif any(t._version != version for t, version in tensors):
            seen.refused = "its forward writes into its arguments"
        elif shared := _shared(result, [*(("an argument", t) for t, _ in tensors), *state_of(module).items()]):
            seen.refused = f"its result shares memory with {shared}"
        else:
            seen.refused = _changed(before, attributes(module), call.functions)
        return result

    def differentiated_again(self, leaves: set[int]) -> None:
        """``leaves``: ``id`` of tensors whose gradients are part of a graph that is differentiated again."""
        for seen in self.modules.values():
            if not leaves.isdisjoint(map(id, seen.module.parameters())):
                seen.differentiated = True
                seen.refused = "its gradients are differentiated again (create_graph=True)"

    def _kind(self, seen: ObservedModule, trained: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind | None:
        flat, tree = pytree.tree_flatten((args, kwargs))
        metadata = [TensorMetadata.of(v) if isinstance(v, torch.Tensor) else v for v in flat]
        if reason := _unsupported(metadata):
            seen.refused = reason
            return None
        mode, apart = modes_of(seen.module)
        tensors = [m for m in metadata if isinstance(m, TensorMetadata)]
        ambient = current_ambient(tensors[0].device if tensors else "cpu")
        looks = tuple(
            (m.dtype, m.device, m.requires_grad, tuple(n if n in (0, 1) else -1 for n in m.shape)) if isinstance(m, TensorMetadata) else repr(m)
            for m in metadata
        )
        key = (str(tree), looks, mode, apart, repr(ambient), trained)
        kind = seen.kinds.get(key)
        if kind is None:
            if len(seen.kinds) >= MOST_KINDS:
                if all(k.count == 1 for k in seen.kinds.values()):
                    seen.refused = f"its first {MOST_KINDS} calls were of as many kinds, and none came twice"
                return None
            kept = [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in flat]
            example, keywords = pytree.tree_unflatten(kept, tree)
            kind = seen.kinds[key] = CallKind(tuple(example), dict(keywords), mode, apart, ambient, trained)
        kind.count += 1
        sizes = tuple(m.shape for m in tensors)
        if sizes in kind.sizes or len(kind.sizes) < _SIZES:
            kind.sizes[sizes] = kind.sizes.get(sizes, 0) + 1
        return kind


def _requires_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves((args, kwargs)))


def _closed(module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return plain(module, *args, **kwargs)


def _is_worth_it(module: nn.Module) -> bool:
    """Whether ``module`` is more than one of PyTorch's layers."""
    layers = [m for m in module.modules() if not isinstance(m, nn.Sequential)]
    return len(layers) > 1 or any(not is_known(type(m).__module__) for m in layers)


def _changed(before: dict[str, str], after: dict[str, str], functions: set[str]) -> str:
    """Which attribute the code of a forward, that names it, has changed."""
    changed = [n for n in (*before, *after) if before.get(n) != after.get(n)]
    if not changed:
        return ""
    try:
        named = names_in(functions)
    except NotPlain as error:
        return str(error)
    return next((f"its forward changes {n}" for n in changed if n.rpartition(".")[2] in named), "")


def _shared(result: Any, given: Sequence[tuple[str, torch.Tensor]]) -> str:
    """What a result shares memory with that is another tensor: compiled code would give a copy, and who writes to the one would miss the other."""
    for value in pytree.tree_leaves(result):
        if isinstance(value, torch.Tensor) and not any(value is t for _, t in given):
            for name, tensor in given:
                if not memory_of([value]).isdisjoint(memory_of([tensor])):
                    return name
    return ""


def _unsupported(values: Sequence[Any]) -> str:
    for value in values:
        if isinstance(value, TensorMetadata):
            if value.unsupported:
                return f"an argument is {value.unsupported}"
            if value.device != "cpu":
                return f"an argument is on {value.device}; modules are recorded on the CPU"
        elif type(value) not in (bool, int, float, str, type(None)):
            return f"an argument is a {type(value).__module__}.{type(value).__qualname__}"
    return ""


def leaves_of(roots: Sequence[Any]) -> set[int]:
    """``id`` of the leaf tensors that a graph leads to."""
    pending: list[Any] = [r.grad_fn if isinstance(r, torch.Tensor) else r.node for r in roots]
    seen, found = set[Any](), set[int]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        pending += [following for following, _ in node.next_functions]
    return found
