"""``python -m tests.tools.ahead_of_time.one write|first WAY MODEL FOLDER`` and ``… changed WAY CASE``: one measurement
in a separate process.

The last line is JSON. ``first`` imports only the modules that the way needs before it has the first gradient.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aot_backward_runtime.errors import AotBackwardError

from .ways import WAYS

CLOCK = time.CLOCK_MONOTONIC  # all processes of the machine share this clock
_RELATIVE = 1e-5


def write(way: str, name: str, folder: Path) -> dict[str, Any]:
    program, args = _program(name)
    torch.save(args, folder / "args")
    start = time.perf_counter()
    WAYS[way].write(program, args, [None] * len(args), folder)
    return {"seconds": time.perf_counter() - start}


def first(way: str, name: str, folder: Path) -> dict[str, Any]:
    args = torch.load(folder / "args")
    call, module = WAYS[way].load(folder, lambda: _program(name)[0])
    torch.manual_seed(3)
    loss = call(*args)
    end = time.clock_gettime(CLOCK)
    norm = float(torch.stack([p.grad.double().norm() for p in module.parameters() if p.grad is not None]).norm())
    compilers = [m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules]
    return {"end": end, "modules": len(sys.modules), "compilers": compilers, "loss": float(loss), "norm": norm}


def _program(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    from ..model_table import models
    from ..model_table.one import Loss

    case = models.make(name)
    args = case.args(case.sizes[0])
    return Loss(case.module.train(case.mode == "train")), tuple(a.detach() for a in args)


class Small(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def _small(dropout: float = 0.0) -> Small:
    torch.manual_seed(5)
    return Small(dropout).train()


def _hook(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)


def _freeze(module: nn.Module) -> None:
    next(iter(module.parameters())).requires_grad_(False)


def _new_values(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.detach() + 1


def _nothing(module: nn.Module) -> None:
    pass


CASES: dict[str, tuple[Callable[[nn.Module], object], dict[str, Any]]] = {
    "nothing": (_nothing, {}),
    "new values in the parameters' `.data`": (_new_values, {}),
    "a hook on each parameter": (_hook, {}),
    "a parameter that is frozen": (_freeze, {}),
    "`module.eval()` with dropout": (lambda module: module.eval(), {"dropout": 0.5}),
    "autocast to bfloat16 around the call": (_nothing, {"autocast": True}),
    "the seed of dropout's mask": (_nothing, {"dropout": 0.5}),
    "an input of float64": (lambda module: module.double(), {"dtype": torch.float64}),
    "an input of another size": (_nothing, {"rows": 7}),
    "an input that is a transposed view": (_nothing, {"transposed": True}),
}
"""Per case: the change to the loaded module, and the settings of the call that differ from the capture."""


def changed(way: str, case: str) -> dict[str, Any]:
    """Return whether a loaded program gives eager's numbers after something has changed since the capture."""
    change, otherwise = CASES[case]
    dropout = otherwise.get("dropout", 0.0)
    torch.manual_seed(1)
    captured = torch.randn(3, 8)
    x = torch.randn(otherwise.get("rows", 3), 8, dtype=otherwise.get("dtype", torch.float32))
    x = x.t().contiguous().t() if otherwise.get("transposed") else x
    expected = _called("eager", Path(), change, otherwise, x)
    with tempfile.TemporaryDirectory() as folder:
        WAYS[way].write(_small(dropout), (captured,), [None], Path(folder))
        try:
            actual = _called(way, Path(folder), change, otherwise, x)
        except Exception as error:  # PyTorch's ways may raise anything; ours may raise only documented errors
            if way == "ours" and not isinstance(error, AotBackwardError):
                raise
            text = str(error).strip().splitlines()
            return {"verdict": "refused", "reason": f"{type(error).__name__}: {text[0] if text else ''}"[:300]}
    off = [name for name, e in expected.items() if not _same(e, actual[name])]
    return {"verdict": "differs" if off else "eager's", "reason": f"not eager's: {', '.join(off)}" if off else ""}


def _called(
    way: str, folder: Path, change: Callable[[nn.Module], object], otherwise: dict[str, Any], x: torch.Tensor
) -> dict[str, Any]:
    call, module = WAYS[way].load(folder, lambda: _small(otherwise.get("dropout", 0.0)))
    change(module)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=otherwise.get("autocast", False)):
        loss = call(x)
    return {"loss": loss} | {name: p.grad for name, p in module.named_parameters()}


def _same(expected: torch.Tensor | None, actual: torch.Tensor | None) -> bool:
    if expected is None or actual is None:
        return expected is actual
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return False
    return float((actual - expected).norm()) <= _RELATIVE * float(expected.norm())


def main() -> None:
    what, way, *rest = sys.argv[1:]
    warnings.simplefilter("ignore")
    if what == "changed":
        found = changed(way, rest[0])
    else:
        found = {"write": write, "first": first}[what](way, rest[0], Path(rest[1]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
