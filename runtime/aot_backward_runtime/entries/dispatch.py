"""Matching of calls of a loaded module, gradient function or step to variants, and of arguments to native code's
tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError, WeightsError
from ..format.manifest import EntrySpec
from ..native import tensor_values
from ..native.bound_state import BoundState
from ..native.guards import Fast
from ..native.library import Library
from ..native.pytree import Types, signature
from ..native.variant import Variant

_MAX_SIGNATURES = 8  # signatures with a fast check; each adds one failing check to calls of later ones
# Signatures with a known variant: bounds their memory; further ones try the variants in order. A guess
_RESOLVED = 1024


class MatchedCall:
    """A call with arguments that a variant accepts."""

    __slots__ = ("flat", "given", "sizes", "variant")

    def __init__(
        self, variant: Variant, given: Sequence[torch.Tensor], flat: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ):
        self.variant = variant
        self.given = given  # the caller's own tensors
        self.flat = flat  # the tensors passed to native code
        self.sizes = sizes


class Entry:
    """An entry's variants and state."""

    def __init__(
        self,
        name: str,
        spec: EntrySpec,
        libraries: Mapping[str, Library],
        state: BoundState,
        types: Types,
        device: torch.device,
        reopen: Callable[[], Any] | None = None,
    ):
        """``reopen``: a function that can be pickled and loads the entry again from its file."""
        self.name = name
        self.spec = spec
        self.state = state
        self.types = types
        self.device = device
        self.reopen = reopen
        self.libraries = libraries
        self.variants = [Variant(v, libraries, device) for v in spec.variants]
        by_mode: dict[str, set[frozenset[str]]] = {}
        for v in self.variants:
            by_mode.setdefault(v.spec.mode, set()).add(v.covered)
        self.specialised = any(len(kinds) > 1 for kinds in by_mode.values())
        """True if variants differ in the tensors that they differentiate."""
        self.index = {name: i for i, name in enumerate(state.names)}
        """Indices in the state, by name."""
        for variant in self.variants:
            variant.index_state(self.index)
        self._fast: list[tuple[Fast, Variant, Mapping[str, int], frozenset[str]]] = []
        self._resolved: dict[Any, Variant] = {}
        self.known_calls: Any = None
        """Tensors that the last calls with gradients differentiated (``KnownCalls``)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        libraries = {n: copy.deepcopy(lib, memo) for n, lib in self.libraries.items()}
        return Entry(self.name, self.spec, libraries, self.state.copy(), self.types, self.device, self.reopen)

    def match(
        self, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: frozenset[str] | None = None
    ) -> MatchedCall:
        """Find the variant that serves these arguments. :class:`InputError` gives the reason if none does.

        ``parameters``, if the entry is :attr:`specialised` and gradients are recorded: the parameters that require
        gradients."""
        if torch_api.is_watched():
            return self._match_watched(mode, args, kwargs, parameters)
        for fast, variant, sizes, wrt in self._fast:
            tensors = _leaves(variant, args, kwargs) if variant.spec.mode == mode else None
            if (
                tensors is not None
                and fast.holds(tensors)
                and (not self.specialised or _needed_gradients(parameters, tensors) == wrt)
            ):
                variant.check_ambient()
                return MatchedCall(variant, tensors, tensors, sizes)
        return self._match_slowly(mode, args, kwargs, parameters)

    def _match_watched(
        self, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: frozenset[str] | None
    ) -> MatchedCall:
        if torch_api.is_traced():
            raise InputError(
                "called during tracing (make_fx, torch.export), which would record the results and not the call; keep this call out of the trace"
            )
        matched = self._match_slowly(mode, args, kwargs, parameters)
        torch_api.refuse_duals(matched.given)
        return matched

    def _match_slowly(
        self, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: frozenset[str] | None
    ) -> MatchedCall:
        candidates = [v for v in self.variants if v.spec.mode == mode]
        if not candidates:
            modes = sorted({v.spec.mode for v in self.variants})
            raise InputError(
                f"entry {self.name!r} is in mode {mode!r} and was exported for {', '.join(map(repr, modes))}: call .{modes[0]}() on it, "
                f"or export a Variant with mode={mode!r}"
            )
        failures: list[tuple[Variant, InputError]] = []
        key = _key(mode, args, kwargs), parameters
        if key in self._resolved:
            candidates.sort(key=lambda v: v is not self._resolved[key])
        elif self.specialised:
            candidates.sort(key=lambda v: (len(v.wrt), len(v.covered)))
        partial_match: MatchedCall | None = None  # a match that lacks some requested gradients
        for variant in candidates:
            try:
                matched, untouched = self._try(variant, args, kwargs)
            except InputError as error:
                failures.append((variant, error))
                continue
            wrt = _needed_gradients(parameters, matched.given)
            if self.specialised and not wrt <= variant.covered:
                partial_match = matched  # the last one is the largest
                continue
            if len(self._resolved) < _RESOLVED:
                self._resolved[key] = variant
            if untouched:
                self._fast.insert(0, (Fast(matched.flat), variant, matched.sizes, wrt))
                del self._fast[_MAX_SIGNATURES:]
            return matched
        if partial_match is not None:
            return partial_match
        if len(failures) == 1:
            raise failures[0][1]
        reasons = "; ".join(
            f"variant {self.variants.index(v)} {signature(v.spec.in_tree, v.spec.argument_names)}: {e}"
            for v, e in failures
        )
        raise InputError(f"none of the {len(failures)} variants of entry {self.name!r} serves this call: {reasons}")

    def _try(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[MatchedCall, bool]:
        tensors = variant.leaves(args, kwargs)
        try:
            flat, sizes, untouched = variant.contract.fit(tensors)
        except RuntimeError as error:
            if not torch_api.in_functorch():
                raise
            raise InputError(
                "called inside a torch.func transform (vmap, grad, jvp), which cannot transform native code; export the transformed function"
            ) from error
        variant.check_ambient()
        return MatchedCall(variant, tensors, flat, sizes), untouched

    def load_state(self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], strict: bool) -> None:
        """Copy ``tensors`` into ``own`` in place; change nothing if one of them does not fit."""
        if not isinstance(tensors, Mapping):
            raise WeightsError(
                f"the state of entry {self.name!r} is a {type(tensors).__name__}; expected tensors by name, as state_dict() gives them"
            )
        if problem := tensor_values.unlike(own, tensors, strict=strict):
            raise WeightsError(f"state of entry {self.name!r}: {problem}; nothing was changed")
        tensor_values.write([(own[name], tensors[name]) for name in own if name in tensors])


def _needed_gradients(parameters: frozenset[str] | None, tensors: Sequence[torch.Tensor]) -> frozenset[str]:
    """Return the tensors that a call needs gradients of, as the manifest names them; empty if gradients are not
    recorded."""
    return (
        frozenset()
        if parameters is None
        else parameters.union(f"input:{i}" for i, t in enumerate(tensors) if t.requires_grad)
    )


def _leaves(variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor] | None:
    """Return the flat tensors if the arguments have the variant's structure; None if the slow path must decide."""
    if variant.flat_arguments:
        return args if not kwargs and len(args) == len(variant.spec.inputs) else None
    try:
        return variant.leaves(args, kwargs)
    except InputError:
        return None


def _key(mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def part(value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested:
            return value.dtype, value.shape, value.requires_grad
        if isinstance(value, (tuple, list)):
            return tuple(map(part, value))
        if isinstance(value, Mapping):
            return tuple((str(k), part(v)) for k, v in value.items())
        return value if value is None or type(value) in (bool, int, float, str) else type(value)

    return mode, part(args), part(kwargs)
