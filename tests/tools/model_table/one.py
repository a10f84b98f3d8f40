"""``python -m tests.tools.model_table.one NAME WAY static|dynamic``: one model in one way, in a separate process.

The last line of output is the verdict as JSON.

``WAY``: "ours", or a peer of :data:`PEERS`. ``python -m tests.tools.model_table.one NAME loaded PACKAGE SIZES``
compares an existing package with eager. It needs no compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...support.oracle import assert_same, clones, run
from ...support.zoo import Case
from ..ahead_of_time.ways import WAYS as WRITTEN
from . import models

RELATIVE = 1e-4
PEERS_RELATIVE = 1e-3  # a scalar loss has small gradients, and float32 rounding alone can change them by 2e-4
JOINT = "torch.export joint"
PEERS = (JOINT, *(way for way in WRITTEN if way not in ("eager", "ours")))


class Refused(Exception):
    """The way refuses the model. The text is the reason."""


class Wrong(Exception):
    """The numbers differ from eager's."""


def ours(name: str, case: Case, dynamic: bool) -> None:
    import aot_backward as ab

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        try:
            ab.export_module(
                case.module,
                case.args(case.sizes[0]),
                dynamic_shapes=case.dynamic_shapes if dynamic else None,
                path=path,
            )
        except ab.ExportError as error:
            raise (Wrong if "nothing was written" in str(error) else Refused)(f"ExportError: {error}") from error
        sizes = case.sizes if dynamic else case.sizes[:1]
        argv = [sys.executable, "-m", __spec__.name, name, "loaded", str(path), ",".join(map(str, sizes))]  # type: ignore[name-defined]
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PATH": empty})
        if done.returncode:
            raise Wrong(done.stderr.strip().splitlines()[-1])


def loaded(name: str, path: str, sizes: Sequence[int]) -> None:
    """Compare outputs, every gradient and every buffer with eager. Runs in a fresh process."""
    from aot_backward_runtime import load

    def types_of(value: Any) -> list[type]:
        return (
            [type(value), *(t for v in (value.values() if isinstance(value, dict) else value) for t in types_of(v))]
            if _nested(value)
            else []
        )

    case = models.make(name)
    eager = case.module.train(case.mode == "train")
    types = types_of(models.make(name).module.train(case.mode == "train")(*case.args(sizes[0])))
    before = frozenset(sys.modules)  # transformers imports parts of the compiler
    package = load(path, types=[t for t in types if t not in (dict, list, tuple)])
    for size in sizes:
        args = case.args(size)
        assert_same(
            run(package.module().train(eager.training), args, 5), run(eager, args, 5), case.relative or RELATIVE
        )
    assert not {"aot_backward", "torch._dynamo", "torch._inductor"} & (sys.modules.keys() - before), (
        "a compiler was loaded"
    )


def _nested(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


class Loss(nn.Module):
    """A scalar loss of all outputs: PyTorch's own ways need a scalar."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        outputs = [
            t
            for t in pytree.tree_leaves(self.module(*args))
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad
        ]
        return sum((t.float().square().mean() for t in outputs), start=torch.zeros(()))


def _parameters(program: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in program.named_parameters()}


def _eager(case: Case, args: Any) -> dict[str, torch.Tensor | None]:
    program = Loss(case.module)
    program.zero_grad()
    torch.manual_seed(3)
    loss = program(*clones(args))
    loss.backward()
    found = {n: None if g is None else g.clone() for n, g in _parameters(program).items()} | {"loss": loss.detach()}
    program.zero_grad()
    return found


def _compared(actual: dict[str, Any], expected: dict[str, Any], relative: float = PEERS_RELATIVE) -> None:
    for name, e in expected.items():
        a = actual.get(name)
        if (a is None) != (e is None):
            raise Wrong(f"the gradient of {name} is {'None' if a is None else 'not None'}")
        if e is None or a is None:
            continue
        scale = max(float(e.norm()), 1e-3 * max(float(v.norm()) for v in expected.values() if v is not None))
        error = float((a.detach() - e).norm())
        if not error <= relative * scale:
            raise Wrong(f"{name} is off by {error / scale:.2g} of its norm")


def exported_jointly(name: str, case: Case, dynamic: bool) -> None:
    from torch.export.experimental import _export_forward_backward

    args = case.args(case.sizes[0])
    program = Loss(case.module)
    shapes = (tuple(case.dynamic_shapes.values()),) if dynamic else None  # forward(*args) has one argument
    joint = _export_forward_backward(torch.export.export(program, args, dynamic_shapes=shapes, strict=False), 0)
    for size in case.sizes if dynamic else case.sizes[:1]:
        args = case.args(size)
        expected = _eager(models.make(name), args)
        torch.manual_seed(3)
        flat = joint._graph_module_flat_inputs(args, {})
        results = torch.fx.Interpreter(joint.graph_module).run(*flat)
        actual = {
            s.target or "loss": r
            for s, r in zip(joint.graph_signature.output_specs, results, strict=True)
            if "BUFFER" not in s.kind.name
        }
        for first, parameter in program.named_parameters():  # the caller must add the parts of a tied parameter
            tied = [
                n
                for n, p in program.named_parameters(remove_duplicate=False)
                if p is parameter and n != first and n in actual
            ]
            actual |= {first: sum((actual[n] for n in tied), start=actual[first])} if tied and first in actual else {}
        _compared(actual, expected, case.relative or PEERS_RELATIVE)


def stored(way: str, name: str, case: Case, dynamic: bool) -> None:
    """Compile with one of PyTorch's ways, store, load, and compare."""
    # precompile refuses inputs that require gradients; a force field needs them
    given = _detached if "precompile" in way and name != "forcefield" else clones
    args = given(case.args(case.sizes[0]))
    with tempfile.TemporaryDirectory() as folder:
        WRITTEN[way].write(
            Loss(case.module), args, list(case.dynamic_shapes.values()) if dynamic else [None] * len(args), Path(folder)
        )
        call, program = WRITTEN[way].load(Path(folder), lambda: Loss(case.module))
    for size in case.sizes if dynamic else case.sizes[:1]:
        args = case.args(size)
        expected = _eager(models.make(name), args)
        program.zero_grad()
        torch.manual_seed(3)
        loss = call(*given(args))
        _compared(_parameters(program) | {"loss": loss}, expected, case.relative or PEERS_RELATIVE)


def _detached(args: Any) -> Any:
    return tuple(a.detach().clone() for a in args)


WAYS: dict[str, Callable[[str, Case, bool], None]] = {
    "ours": ours,
    JOINT: exported_jointly,
    **{way: partial(stored, way) for way in PEERS[1:]},
}


def main() -> None:
    name, way, *rest = sys.argv[1:]
    warnings.simplefilter("ignore")
    if way == "loaded":
        loaded(name, rest[0], [int(n) for n in rest[1].split(",")])
        return
    start = time.perf_counter()
    verdict, reason = "pass", ""
    try:
        case = models.make(name)
        case.module.train(case.mode == "train")
        WAYS[way](name, case, rest[0] == "dynamic")
    except Wrong as error:
        verdict, reason = "wrong", str(error)
    except Exception as error:  # a peer or a model may raise anything
        text = str(error).strip().splitlines()
        verdict = "refused"
        reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {text[0] if text else ''}"
    print(json.dumps({"verdict": verdict, "reason": reason[:300], "seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
