"""Export on this machine and compare with eager: models, precisions, layouts, training steps."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel

import aot_backward as ab
from aot_backward_runtime import load
from tests.tools.cross import programs

from .compared import NOT_RUN, Row, beside


class Attention(nn.Module):
    """Scaled dot-product attention with dropout, by the given backend."""

    def __init__(self, backend: SDPBackend, dropout: float, causal: bool) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.backend, self.dropout, self.causal = backend, dropout, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.project(x).view(b, s, 3, 4, 16).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, s, 64))


@dataclass(frozen=True)
class Case:
    """A module, its example, the inputs to compare at, and a context for the export and every call."""

    module: nn.Module
    example: torch.Tensor
    inputs: list[torch.Tensor]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    relative: float | None = None


def _rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    out = x.detach()[torch.arange(rows, device=x.device) % x.shape[0]]
    return out + 0.1 * torch.randn_like(out)


def _case(name: str, device: str) -> Case:
    torch.manual_seed(0)
    if name in ("mlp", "convolutions", "attention"):
        module, x = programs.module(name)
        module, x = module.to(device), x.detach().to(device)
        return Case(
            module,
            x,
            [_rows(x, n) for n in (7, 2)],
            relative=2e-3 if name == "convolutions" and device == "cuda" else None,
        )
    if name == "channels last":  # cuDNN rounds to TF32 by default, also in eager
        module, x = programs.module("convolutions")
        module = module.to(device, memory_format=torch.channels_last)
        x = x.detach().to(device, memory_format=torch.channels_last)
        return Case(
            module, x, [_rows(x, n).contiguous(memory_format=torch.channels_last) for n in (7, 2)], relative=2e-3
        )
    if name == "misaligned":
        module, x = programs.module("mlp")
        flat = torch.randn(6 * 8 + 1, device=device)[1:]
        return Case(
            module.to(device),
            x.detach().to(device),
            [flat.view(6, 8), torch.randn(8, 12, device=device).t()[:, :8][3:]],
        )
    if name.startswith("flash"):
        module = Attention(SDPBackend.FLASH_ATTENTION, 0.1 if "dropout" in name else 0.0, True).to(
            device, torch.bfloat16
        )
        x = torch.randn(3, 10, 64, device=device, dtype=torch.bfloat16)
        # Its kernels do not support float64 as a reference
        return Case(module, x, [_rows(x, 4), _rows(x, 2)], relative=3e-2)
    if name.startswith("efficient"):
        module = Attention(SDPBackend.EFFICIENT_ATTENTION, 0.1 if "dropout" in name else 0.0, False).to(device)
        x = torch.randn(3, 10, 64, device=device)
        return Case(module, x, [_rows(x, 4), _rows(x, 2)], relative=1e-3)
    dropout = [nn.Dropout(0.1)] if "dropout" in name else []
    module = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), *dropout, nn.Linear(64, 8)).to(device)
    x = torch.randn(6, 32, device=device)
    inputs = [_rows(x, 9), _rows(x, 2)]
    if name == "TF32":
        return Case(module, x, inputs, _tf32, relative=2e-3)
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    relative = 3e-2 if dropout else None  # in float64 a GPU draws different masks
    if "weights" in name:
        return Case(module.to(dtype), x.to(dtype), [t.to(dtype) for t in inputs], relative=relative)
    return Case(module, x, inputs, lambda: torch.autocast(device, dtype=dtype), relative)


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def native(device: str, quick: bool) -> Iterator[Row]:
    """Compare forward and every gradient at new sizes. With dropout, the masks must be eager's."""
    every = ("mlp", "misaligned", "convolutions", "channels last", "attention", "TF32")
    yield from _cases(every[:2] if device == "cpu" or quick else every, device)


def precision(device: str, quick: bool) -> Iterator[Row]:
    """Compare 16-bit weights and autocast."""
    every = (
        "bf16 autocast",
        "fp16 autocast",
        "bf16 weights",
        "fp16 weights",
        "bf16 autocast, dropout",
        "fp16 weights, dropout",
    )
    yield from _cases(every[:1] if device == "cpu" or quick else every, device)


def attention(device: str, quick: bool) -> Iterator[Row]:
    """Compare the kernels of scaled dot-product attention. The masks must be eager's, from the same seed."""
    if device == "cpu":
        yield "flash, memory-efficient", NOT_RUN, "not without a GPU"
        return
    every = ("flash", "efficient, dropout", "flash, dropout", "efficient")
    yield from _cases(every[:1] if quick else every, device)


def _cases(names: Sequence[str], device: str) -> Iterator[Row]:
    for name in names:
        try:
            yield f"{name}, native", *_case_beside(name, device)
        except Exception as error:  # the others go on
            yield f"{name}, native", f"FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}", ""


def _case_beside(name: str, device: str) -> tuple[str, str]:
    case = _case(name, device)
    rows = ({0: Dim("batch", min=2, max=64)},)
    with tempfile.TemporaryDirectory() as folder, case.around():
        path = Path(folder) / "m.pt2"
        ab.export_module(case.module, (case.example.requires_grad_(),), dynamic_shapes=rows, path=path, target=device)
        return beside(load(path).module(), case.module, case.inputs, case.relative)


def step(device: str, quick: bool) -> Iterator[Row]:
    """Compare three steps of AdamW with eager."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = [(torch.randn(n, 4, device=device), torch.randint(0, 3, (n,), device=device)) for n in (6, 9, 2)]
    with tempfile.TemporaryDirectory() as folder:
        path = ab.export_step(
            net, batches[0], loss_fn=nn.functional.cross_entropy, optimizer=optimizer, dynamic_shapes=(programs.ROWS[0],) * 2,
            path=Path(folder) / "s.pt2", target=device,
        )  # fmt: skip
        loaded = load(path).step()
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            ours = loaded(*batch)
        errors = {n: _error(loaded.parameters[n], p) for n, p in net.named_parameters()} | {"loss": _error(ours, loss)}
    worst = max(errors, key=lambda n: errors[n])
    yield (
        "AdamW, three steps",
        "right" if errors[worst] <= 1e-4 else f"{worst} is off",
        f"{errors[worst]:.1e} relative ({worst})",
    )
    if device == "cuda" or not quick:
        yield "fp16 autocast, GradScaler", *_scaled(device)


def recorded(device: str, quick: bool) -> Iterator[Row]:
    """Record backward passes of a script on this device, and replay them at new sizes."""
    from aot_backward_runtime import replay

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 2)).to(device)

    def gradients(rows: int) -> dict[str, torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(rows)
        net(torch.randn(rows, 8, device=device)).square().mean().backward()
        return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bw.pt2"
        with ab.record(path, target=device, tune="none") as recording:
            for rows in (3, 5, 6):
                gradients(rows)
        expected = {rows: gradients(rows) for rows in (4, 9)}
        with replay(path, strict=True) as session:
            found = {rows: gradients(rows) for rows in expected}
        worst = max(_error(found[rows][n], e) for rows in expected for n, e in expected[rows].items())
        right = worst <= 1e-5 and not recording.skipped and session.report.bindings == 1
        yield (
            "recorded and replayed",
            "right" if right else "off",
            f"{worst:.1e} relative; {session.report}".replace("\n", ";"),
        )


def _scaled(device: str) -> tuple[str, str]:
    """Train a loaded module in the fp16 loop: scaled loss, unscaled gradients, skipped updates."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    x = torch.randn(8, 16, device=device)
    with tempfile.TemporaryDirectory() as folder, torch.autocast(device, dtype=torch.float16):
        path = ab.export_module(net, (x,), path=Path(folder) / "m.pt2", target=device)
        loaded = load(path).module()
    found = []
    for module in (net, loaded):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**24)
        for i in range(12):  # the first scales are too large: those updates are skipped
            torch.manual_seed(i)
            batch = torch.randn(8, 16, device=device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                loss = module(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((scaler.get_scale(), {n: p.detach() for n, p in module.named_parameters()}))
    (scale, eagers), (ours_scale, ours) = found
    worst = max(_error(ours[n], e) for n, e in eagers.items())
    # fused code rounds to 16 bits less often than eager, so a gradient near the limit may overflow in only one of them
    right = 0.5 <= scale / ours_scale <= 2 and scale < 2.0**24 and worst <= (2e-3 if scale == ours_scale else 0.1)
    return (
        "right" if right else "off",
        f"{worst:.1e} relative after 12 steps, scale {ours_scale:g} and eager's {scale:g}",
    )


def _error(a: torch.Tensor, e: torch.Tensor) -> float:
    return float((a - e).detach().double().norm() / e.detach().double().norm().clamp_min(1e-12))
