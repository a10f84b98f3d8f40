"""Lowers one graph to C++ files with Inductor: every parameter and buffer is a constant of the library, bound by
pointer."""

from __future__ import annotations

import contextlib
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..graph import Graph
from ..process_state import sizes_of_one_open
from ..rewrites.sequence import rewrite
from . import graph_fixes, large_products, patches, selections, spread_values, updates
from .cache_key import Canonical
from .complex_numbers import complex_numbers_as_tensors
from .loops import scans_as_loops
from .settings import settings_for
from .targets import Processor

_CONSTANT = re.compile(r'constants_info_\[\d+\]\.(name|original_fqn) = "(.*)";')


@dataclass(frozen=True)
class GeneratedCode:
    """Inductor's output for a graph."""

    wrapper: str  # the generated C++ around the kernels
    files: tuple[Path, ...]
    guards: list[str]
    cacheable: bool
    least_product: int  # multiplications of a matrix product that may be oneDNN's; 0 if the graph has none so large

    def constants(self) -> dict[str, str]:
        """Return the library's name of each constant -> the attribute that it represents."""
        matches = _CONSTANT.findall(self.wrapper)
        names = [value for kind, value in matches if kind == "name"]
        return dict(zip(names, [value for kind, value in matches if kind == "original_fqn"], strict=True))

    def file(self, suffix: str) -> Path | None:
        return next((f for f in self.files if f.name.endswith(suffix)), None)


def lower(
    graph: Graph, form: Canonical, folder: Path, fake_mode: Any, known: int, built_for: Processor
) -> GeneratedCode:
    """Lower ``graph``. ``known``: the capture's number of guards. All later ones count as this graph's: an earlier
    graph's may have shaped its code.

    Sizes stay dynamic. If Inductor cannot avoid comparing two (``evaluate_min`` of a diagonal's sides), the comparison
    becomes a guard."""
    try:
        try:
            return _lowered(graph, form, folder, fake_mode, known, built_for, open_sizes=True)
        except torch_api.InductorError as first:
            if not form.symbols:
                raise
            try:
                return _lowered(graph, form, folder, fake_mode, known, built_for, open_sizes=False)
            except torch_api.InductorError as second:
                raise second from first
    except torch_api.InductorError as error:
        reason = str(error).partition("\n")[0]
        match = re.search(r"^\s*target: (\S+)", str(error), re.MULTILINE)
        operator = match[1] if match else _operator_of(error)
        raise ExportError.of(
            operator,
            f"{graph.name}: Inductor cannot compile {operator or 'the graph'}: {reason}. Leave it to eager, or make it a custom operator "
            "(torch.library.custom_op with register_fake and register_autograd); TORCH_LOGS=+inductor shows more",
        ) from error


def _lowered(
    graph: Graph,
    form: Canonical,
    folder: Path,
    fake_mode: Any,
    num_guards: int,
    built_for: Processor,
    *,
    open_sizes: bool,
    update_calls: bool = True,
) -> GeneratedCode:
    config, V = torch_api.inductor_config, torch_api.V
    module = graph_fixes.copied(graph.module)
    graph_fixes.call_kernels(module)
    complex_numbers_as_tensors(module, fake_mode)
    graph_fixes.refuse_negative_indices(module, fake_mode)
    graph_fixes.expanded_arguments_copied(module, fake_mode)
    with torch.no_grad(), sizes_of_one_open():  # comparing a size would narrow it
        if rounds := selections.is_rounded(module):
            selections.round_as_eager(module, fake_mode)  # first: a rewrite replaces nodes, and their marks are lost
        if not graph_fixes.calls_eager_kernels(module):  # a rewrite may have caused the wrong numbers
            rewrite(module, fake_mode)
        selections.store_what_is_compared(module, fake_mode)
        for each in module.modules():  # the bodies of loops run when they are traced
            if isinstance(each, torch.fx.GraphModule):
                each.recompile()
        scans_as_loops(module, fake_mode)
        calls_updates = update_calls and updates.as_calls(module, fake_mode)
    least_product = large_products.least(module)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    try:
        with (
            torch.no_grad(),
            patches.torch_warnings_ignored(),
            patches.missing_kernels_unlogged(),
            V.set_aot_compilation(True),
            config.patch(
                {**settings_for(built_for), "aot_inductor.output_path": str(folder), "aot_inductor.metadata": {}}
            ),
            config.patch(torch_api.get_cpp_wrapper_config()),
            config.patch({"emulate_precision_casts": rounds}),
            V.set_fake_mode(fake_mode),
            torch_api.functorch_config.patch(unlift_effect_tokens=True),
            torch_api._compiling_state_context(),
            patches.sizes_left_open(),
            patches.generated_code(),
            spread_values.stored(),
            sizes_of_one_open() if open_sizes else contextlib.nullcontext(),
            patches.generating_for(built_for),
            patches.donating(graph, fake_mode) as donates_inputs,
        ):
            compiled_graph = torch_api.compile_fx_inner(
                module,
                inputs,
                static_input_idxs=[],
                is_inference=not donates_inputs,
                is_backward=donates_inputs,
                cpp_wrapper=True,
            )
    except torch_api.InductorError:
        if not calls_updates:
            raise
        # Inductor may make several loops of an update. It is private code: the exports of a torch in which it differs
        # still succeed, only slower.
        return _lowered(
            graph, form, folder, fake_mode, num_guards, built_for, open_sizes=open_sizes, update_calls=False
        )
    files = tuple(Path(f) for f in compiled_graph.filename)
    wrapper = next(f for f in files if f.name.endswith(".wrapper.cpp")).read_text()
    new_guards = [
        g.expr for g in fake_mode.shape_env.guards[num_guards:] if not g.expr.free_symbols.isdisjoint(form.symbols)
    ]
    code = GeneratedCode(
        wrapper=wrapper,
        files=files,
        # As text, torch's // would return as a fraction
        guards=[sympy.srepr(guard.xreplace(form.symbols)) for guard in new_guards],
        # Only the other graph can interpret a guard that ties this graph's sizes to its own.
        least_product=least_product,
        cacheable=all(guard.free_symbols <= form.symbols.keys() for guard in new_guards),
    )
    _check_constants(graph, code.constants())
    return code


def _check_constants(graph: Graph, constants: dict[str, str]) -> None:
    for name, attribute in constants.items():
        if attribute not in graph.constants:
            raise ExportError(
                f"{graph.name}: the graph holds a tensor that is neither parameter nor buffer ({name}): register it as a buffer"
            )
    # Tied weights have two attributes and one weight
    bound = {graph.constants[attribute][0] for attribute in constants.values()}
    for weight, _ in graph.constants.values():
        if weight not in bound:
            raise ExportError(
                f"{graph.name}: the compiled code does not read {weight}: Inductor folded its value into the code; report this as a bug"
            )


def _operator_of(error: BaseException) -> str:
    """Return the operator that Inductor was lowering when it raised, from the local variables of its frames; "" if none
    holds a node."""
    operator = ""
    for exception in (error, error.__cause__, getattr(error, "inner_exception", None)):
        for frame, _ in traceback.walk_tb(exception.__traceback__ if exception is not None else None):
            nodes = [
                v
                for k, v in frame.f_locals.items()
                if k in ("n", "node", "fx_node", "origin_node") and isinstance(v, torch.fx.Node)
            ]
            operator = next((str(v.target) for v in nodes if v.op == "call_function"), operator)
    return operator
