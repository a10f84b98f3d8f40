"""ONNX graphs of in-place writes and parametrized weights, and refusals that name the parameter concerned."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.export import Dim
from torch.nn.utils import parametrizations, weight_norm

import aot_backward as ab
from aot_backward.cli import main
from aot_backward_exporters import torch_api

from ..support.onnx_files import gradients

BATCH = {0: Dim("batch", min=3, max=64)}
Write = Callable[[torch.Tensor, torch.Tensor], Any]

WRITES: dict[str, str] = {
    "a column": "h[:, 0] = 0",
    "a row": "h[0] = 0",
    "behind an ellipsis": "h[..., 0] = 0",
    "the last row": "h[-1] = 0",
    "a slice": "h[:, 1:3] = 0",
    "a slice with steps": "h[:, ::2] = 0",
    "both": "h[1:, :2] = 4",
    "an element": "h[0, 0] = 0",
    "nothing": "h[2:2] = 0",
    "a tensor of one number": "h[:, 1:3] = torch.tensor(3.0)",
    "a number that has a gradient": "h[1] = x[0, 0]",
    "a row for all": "h[:, 1:3] = x[0, :2]",
    "a whole": "h.copy_(x.sum())",
    "a view of a view": "h[1:].t()[0] = 0",
    "flat": "h.view(-1)[:2] = 0",
    "a diagonal": "h[:3, :3].diagonal()[:] = 7",
    "where": "h[h > 0] = 0",
    "where, a tensor": "h[h > 0] = x.sum()",
    "columns by a mask": "h[:, torch.tensor([True, False, True, False, False])] = 0",
    "put": "h.index_put_((torch.tensor([0, 1]),), x.mean(), accumulate=True)",
    "added": "h[1:, :2] += 1",
    "a number that is true": "h[:, 0] = torch.tensor(True)",
    "integers": "i = (h * 3).to(torch.int64); i[:, 0] = 2; h = h * i",
}


class Writes(nn.Module):
    """Every write on a separate value, all returned: one export costs less than many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.writes = [compile(code, name, "exec") for name, code in WRITES.items()]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for number, write in enumerate(self.writes, start=1):
            names = {"h": (x @ self.weight * (1 + number / 8)).sin(), "x": x, "torch": torch}
            exec(write, names)
            out.append(names["h"] * 2)
        return out


def compared(folder: Path, module: nn.Module, named: dict[str, torch.Tensor]) -> None:
    """Compare the exported files with eager: outputs and every gradient."""
    results = module(*named.values())
    flat = results if isinstance(results, list) else [results]
    incoming = [torch.randn_like(t) for t in flat]
    torch.autograd.backward(flat, incoming)
    names = [f"output.{i}" for i in range(len(flat))] if len(flat) > 1 else ["output"]
    found = gradients(folder, "m", named, {f"grad.{n}": g for n, g in zip(names, incoming, strict=True)})
    for n, (name, wanted) in enumerate(zip(names, flat, strict=True)):
        np.testing.assert_allclose(found[name], wanted.detach().numpy(), rtol=2e-5, atol=2e-6, err_msg=f"{n}")
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            torch.from_numpy(found[f"grad.{name}"]), parameter.grad, rtol=2e-5, atol=2e-5, msg=name
        )
    module.zero_grad()


def test_writes_in_place_equal_eagers(tmp_path: Path) -> None:
    module = Writes()
    ab.export_onnx(
        tmp_path / "m.onnx", {"m": ab.Module(module, [ab.Variant((torch.randn(4, 4),), dynamic_shapes=(BATCH,))])}
    )
    compared(tmp_path, module, {"x": torch.randn(7, 4)})


class Normed(nn.Module):
    """Weight normalization along either end, over the whole, and of a convolution; spectral normalization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = parametrizations.weight_norm(nn.Linear(4, 6))
        self.last = parametrizations.weight_norm(nn.Linear(6, 5), dim=1)
        self.whole = parametrizations.weight_norm(nn.Linear(5, 5), dim=None)
        self.conv = parametrizations.weight_norm(nn.Conv1d(5, 3, 1))
        self.back = parametrizations.weight_norm(nn.ConvTranspose1d(3, 4, 1))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 2)).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, but used in every vocoder
            self.hooked = weight_norm(nn.Linear(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.whole(self.last(self.first(x).tanh()))
        return self.hooked(self.spectral(self.back(self.conv(h[:, :, None]))[:, :, 0]))


def test_normed_weights(tmp_path: Path) -> None:
    module = Normed()
    ab.export_onnx(
        tmp_path / "m.onnx", {"m": ab.Module(module, [ab.Variant((torch.randn(4, 4),), dynamic_shapes=(BATCH,))])}
    )
    compared(tmp_path, module, {"x": torch.randn(6, 4)})


class Warped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.eye(2, 3)[None])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        grid = nn.functional.affine_grid(self.theta.expand(len(image), 2, 3), list(image.shape), align_corners=False)
        return nn.functional.grid_sample(image, grid, align_corners=False) * self.scale


def refusal(folder: Path, entry: Any) -> str:
    with pytest.raises(ab.ExportError) as caught:
        ab.export_onnx(folder / "x.onnx", {"m": entry})
    assert not list(folder.iterdir())
    return str(caught.value)


def test_a_refusal_names_the_parameter(tmp_path: Path) -> None:
    image, layers = torch.randn(2, 1, 4, 4), [nn.Linear(4, 4) for _ in range(3)]
    of_theta = (
        "aten.grid_sampler_2d_backward.default has no ONNX translation: leave this part to eager, or write it with "
        "other operators; it is part "
    )
    module, rate = Warped(), 0.1
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for entry, names in (
        (ab.Module(module, [ab.Variant((image,))]), "theta"),
        (ab.Module(module, [ab.Variant((image.clone().requires_grad_(),))]), "theta and image"),
        (
            ab.Grad(lambda image: module(image).sum(), [ab.Variant((image,))], wrt=["image", "module.theta"]),
            "image and module.theta",
        ),
        (ab.Step(module, [ab.Variant((image, image))], optimizer, loss_fn=nn.functional.mse_loss), "theta"),
        (
            ab.Step(module, [ab.Variant((image, image))], optimizer, loss_fn=nn.functional.mse_loss, accumulate=True),
            "theta",
        ),
    ):
        said = refusal(tmp_path, entry)
        assert said.startswith(f"{of_theta}of the gradient of {names}"), said
        # torch 2.12 keeps the model's line for more nodes
        assert "; it is called in forward" in said or not torch_api.at_least("2.12"), said
    orthogonal = nn.Sequential(*layers, parametrizations.orthogonal(nn.Linear(4, 4)))
    said = refusal(tmp_path, ab.Module(orthogonal, [ab.Variant((torch.randn(2, 4),))]))
    assert said.endswith("; it is computed from 3.parametrizations.weight.original"), said
    deep = nn.Sequential(*layers)
    said = refusal(
        tmp_path, ab.Grad(lambda x: torch.lgamma(deep(x).exp()).sum(), [ab.Variant((torch.randn(2, 4),))], wrt="x")
    )
    assert (
        "; it is computed from deep.2.bias, deep.1.bias" in said and " and 4 more; it is called in <lambda>" in said
    ), said


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, Any], *rest: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return batch["x"] * self.weight + batch["more"][0] * rest[0] + weight


def test_inspect_says_what_inputs_are_called_in_onnx(tmp_path: Path) -> None:
    def t() -> torch.Tensor:
        return torch.ones(2, 3)

    ab.export(
        tmp_path / "n.pt2", {"n": ab.Module(Nested(), [ab.Variant(({"x": t(), "more": [t()]}, t()), {"weight": t()})])}
    )
    described = json.loads(CliRunner().invoke(main, ["inspect", str(tmp_path / "n.pt2"), "--json"]).stdout)
    inputs = {i["name"]: i["onnx"] for i in described["entries"]["n"]["variants"][0]["inputs"]}
    assert inputs == {
        "batch['x']": "batch.x",
        "batch['more'][0]": "batch.more.0",
        "rest[0]": "rest.0",
        "weight": "input.weight",
    }
    forward = next(f for f in ab.convert(tmp_path / "n.pt2", tmp_path / "n.onnx") if f.graph == "forward")
    import onnx

    model = onnx.load(forward.path)
    assert [i.name for i in model.graph.input if i.name != "weight"] == list(inputs.values())
