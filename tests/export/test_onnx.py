"""ONNX graphs of modules, gradient functions and training steps, run by onnxruntime and compared with eager; names,
shapes and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.checker
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward.cli import main
from aot_backward_exporters.decompositions import convolution

from ..conftest import PROGRAM
from ..support import oracle, zoo
from ..support.onnx_files import Session, gradients, train
from ..tools.model_table import models

BATCH = Dim("batch", min=2, max=64)


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():  # functional dropout, of attention and of recurrent layers
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return module


def assert_close(actual: dict[str, np.ndarray], wanted: dict[str, torch.Tensor], relative: float = 3e-4) -> None:
    """Compare by norm each tensor of ``wanted`` that a graph gives. A gradient that eager has must exist."""
    largest = max(float(t.double().norm()) for n, t in wanted.items() if n.startswith("grad."))
    for name, tensor in wanted.items():
        if name not in actual:
            assert name.startswith("updated."), name  # a buffer that is not written
            continue
        found = torch.from_numpy(actual[name].copy())
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        scale = max(float(tensor.double().norm()), 0.05 * largest if name.startswith("grad.") else 0.0, 1e-6)
        error = float((found.double() - tensor.double()).norm())
        assert error <= relative * scale, f"{name}: off by {error:.3g} of {scale:.3g}"


MODELS = (*zoo.NAMES, "resnet", "vit", "gpt2", "t5")


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models_equal_eagers_at_two_sizes(name: str, tmp_path: Path) -> None:
    case = models.make(name)
    module = without_dropout(case.module).train()
    state = {n: t.clone() for n, t in module.state_dict().items()}
    variant = ab.Variant(case.args(case.sizes[0]), dynamic_shapes=case.dynamic_shapes)
    files = ab.export_onnx(tmp_path / "m.onnx", {"module": ab.Module(module, [variant])})
    assert [f.path.name for f in files] == ["m.forward.onnx", "m.backward.onnx"]
    assert all(f.compared.startswith("onnxruntime ") for f in files)
    forward = Session(tmp_path / "m.forward.onnx")
    for size in case.sizes:
        module.load_state_dict(state)
        args = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in case.args(size))
        inputs = list(forward.required)
        outputs = [n for n in forward.outputs if not n.startswith(("saved.", "updated."))]
        named = dict(zip(inputs, args, strict=False))
        value = module(*args)
        flat = oracle.tensors(value)
        keyed = _keyed(value, outputs, flat)
        incoming = {n: torch.randn_like(t) for n, t in keyed.items() if t.requires_grad}
        torch.autograd.backward([keyed[n] for n in incoming], list(incoming.values()))
        wanted = {n: t.detach() for n, t in keyed.items()}
        wanted |= {f"grad.{n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
        wanted |= {f"grad.{n}": a.grad for n, a in named.items() if a.grad is not None}
        wanted |= {f"updated.{n}": b for n, b in module.named_buffers()}
        assert_close(
            gradients(tmp_path, "m", named, {f"grad.{n}": g for n, g in incoming.items()}),
            wanted,
            case.relative or 3e-4,
        )
        module.zero_grad()


def _keyed(value: Any, names: list[str], flat: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {n: value[n.removeprefix("output.")] for n in names}  # an input of the same name adds "output."
    return dict(zip(names, flat, strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a gradient function, and a module whose inputs and outputs have names of all kinds."""
    folder = tmp_path_factory.mktemp("onnx")
    done = CliRunner().invoke(
        main, ["export", f"{PROGRAM}:entries", "-o", str(folder / "small.onnx"), "--format", "onnx", "--json"]
    )
    assert done.exit_code == 0, done.stderr
    (folder / "said.json").write_text(done.stdout)
    return folder


def test_what_export_says(files: Path) -> None:
    said = json.loads((files / "said.json").read_text())["files"]
    assert [(Path(f["path"]).name, f["entry"], f["graph"], f["opset"], f["data"]) for f in said] == [
        ("small.net.forward.onnx", "net", "forward", 18, None),
        ("small.net.backward.onnx", "net", "backward", 18, None),
        ("small.distance.onnx", "distance", "gradient", 18, None),
    ]
    assert all(f["nodes"] > 0 and f["compared"].startswith("onnxruntime") for f in said)


def test_names_of_inputs_outputs_and_dimensions(files: Path) -> None:
    forward, backward, loss = (
        onnx.load(files / f"small.{n}.onnx") for n in ("net.forward", "net.backward", "distance")
    )
    assert _ends(forward.graph.input) == {
        "batch.x": ["rows", 4], "batch.weight": ["rows", 1], "layer.weight": [3, 4], "layer.bias": [3],
    }  # fmt: skip
    # Defaults that you may replace
    assert {"layer.weight", "layer.bias"} <= {i.name for i in forward.graph.initializer}
    outputs = _ends(forward.graph.output)
    assert outputs.pop("out") == ["rows", 3] and outputs.pop("largest") == ["rows"]
    assert all(n.startswith("saved.") for n in outputs)
    given = _ends(backward.graph.input)
    assert given["grad.out"] == ["rows", 3] and "grad.largest" not in given
    assert _ends(backward.graph.output) == {
        "grad.layer.weight": [3, 4],
        "grad.layer.bias": [3],
        "grad.batch.x": ["rows", 4],
    }
    assert (_ends(loss.graph.input), _ends(loss.graph.output)) == (
        {"pos": [3], "target": [3]},
        {"loss": [], "grad.pos": [3]},
    )
    about = {p.key: p.value for p in forward.metadata_props}
    assert (about["entry"], about["kind"], about["graph"], about["torch"]) == (
        "net",
        "module",
        "forward",
        torch.__version__,
    )
    assert json.loads(about["dimensions"]) == {"rows": {"minimum": 2, "maximum": 64}}
    assert about["opset"].startswith("18: ")
    assert forward.producer_name == "aot-backward" and forward.ir_version == 8 and forward.opset_import[0].version == 18
    assert any("cli_program.py" in n.doc_string and "aten." in n.doc_string for n in forward.graph.node)
    assert all(n.name for n in forward.graph.node) and not any(
        str(Path.cwd()) in n.doc_string for n in forward.graph.node
    )


def _ends(values: Any) -> dict[str, list[Any]]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


def test_a_gradient_function_and_replaced_weights(files: Path) -> None:
    pos, target = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    found = Session(files / "small.distance.onnx")({"pos": pos, "target": target})
    np.testing.assert_allclose(found["loss"], np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(found["grad.pos"], (pos - target) / np.sqrt(2), rtol=1e-6)
    x, scale, weight = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((7, 4), (7, 1), (3, 4)))
    forward = Session(files / "small.net.forward.onnx")
    bias = np.zeros(3, np.float32)
    found = forward({"batch.x": x, "batch.weight": scale, "layer.weight": weight, "layer.bias": bias})
    np.testing.assert_allclose(found["out"], np.tanh(x @ weight.T) * scale, rtol=1e-5, atol=1e-6)


def test_the_checker_finds_every_graph_whole(files: Path) -> None:
    found = sorted(files.glob("*.onnx"))
    assert len(found) == 3
    for path in found:
        onnx.checker.check_model(path, full_check=True)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def stepping(optimizer: torch.optim.Optimizer, module: nn.Module, **options: Any) -> ab.Step:
    example = torch.randn(4, 5), torch.randint(3, (4,))
    variant = ab.Variant(example, dynamic_shapes=({0: BATCH}, {0: BATCH}))
    return ab.Step(module, [variant], optimizer, loss_fn=nn.functional.cross_entropy, **options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_eagers(name: str, tmp_path: Path) -> None:
    module = net()
    optimizer = OPTIMIZERS[name](module.parameters())
    path = tmp_path / "step.onnx"
    (file,) = ab.export_onnx(path, {"step": stepping(optimizer, module)})
    assert file.path == path
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(9, 5, generator=generator), torch.randint(3, (9,), generator=generator)
    losses, state = train(path, 10, {"input": x, "target": y})
    for loss in losses:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(module(x), y)
        assert abs(value.item() - loss) <= 2e-5 * max(1.0, abs(loss))
        value.backward()
        optimizer.step()
    for key, tensor in module.state_dict().items():
        torch.testing.assert_close(
            torch.from_numpy(state[key]), tensor, rtol=2e-4, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}"
        )
    names = {id(p): n for n, p in module.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for key, tensor in slots.items():
            found = state.get(f"optimizer.{key}.{names[id(parameter)]}")
            if isinstance(tensor, torch.Tensor) and found is not None:
                torch.testing.assert_close(torch.from_numpy(found), tensor, rtol=2e-3, atol=1e-5)
    step = Session(path)
    assert step.defaults["optimizer.0.lr"].type == "tensor(double)" and {"input", "target"} == set(step.required)
    assert ("optimizer.first" in step.defaults) == (name == "sgd") == ("updated.optimizer.first" in step.outputs)
    moved, _ = train(path, 3, {"input": x, "target": y, "optimizer.0.lr": np.array(0.0)})
    assert moved[0] == pytest.approx(moved[1], rel=1e-6)  # no training without a rate


def test_clipping_skipping_and_waiting_gradients(tmp_path: Path) -> None:
    module = net()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    ab.export_onnx(tmp_path / "clip.onnx", {"step": stepping(optimizer, module, clip_norm=0.1, skip_nonfinite=True)})
    step = Session(tmp_path / "clip.onnx")
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    good = step({"input": x, "target": y})
    assert good["finite"] and good["grad_norm"] > 0.1 and good["updated.optimizer.first"] == 0
    bad = step({"input": x * float("nan"), "target": y})
    assert not bad["finite"] and bad["updated.optimizer.first"] == 1
    np.testing.assert_array_equal(bad["updated.0.weight"], module[0].weight.detach().numpy())
    files = ab.export_onnx(tmp_path / "wait.onnx", {"step": stepping(optimizer, module, accumulate=True)})
    assert [f.path.name for f in files] == ["wait.onnx", "wait.accumulate.onnx", "wait.update.onnx"]
    add, update = Session(files[1].path), Session(files[2].path)
    first = add({"input": x, "target": y})
    kept = {n.removeprefix("updated."): v for n, v in first.items() if n.startswith("updated.")}
    second = add({"input": x, "target": y, "optimizer.accumulate": np.array(1.0), **kept})
    np.testing.assert_allclose(
        second["updated.gradient.3.bias"], 2 * first["updated.gradient.3.bias"], rtol=1e-4, atol=1e-6
    )
    after = update({n.removeprefix("updated."): v for n, v in second.items()})
    assert not np.array_equal(after["updated.3.bias"], module[3].bias.detach().numpy())


def test_convert_gives_what_export_gives(tmp_path: Path) -> None:
    module = net()
    image = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    entries = {
        "step": stepping(OPTIMIZERS["adamw"](module.parameters()), module),
        "image": ab.Module(image, [ab.Variant((torch.randn(3, 1, 8, 8),), dynamic_shapes=({0: BATCH},))]),
    }
    ab.export(tmp_path / "p.pt2", entries)
    ours = ab.export_onnx(tmp_path / "a.onnx", entries)
    theirs = ab.convert(tmp_path / "p.pt2", tmp_path / "b.onnx")
    assert [f.path.name.replace("a.", "b.", 1) for f in ours] == [f.path.name for f in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert _comparable(a.path) == _comparable(b.path), a.path.name
    done = CliRunner().invoke(
        main, ["convert", str(tmp_path / "p.pt2"), "-o", str(tmp_path / "c.onnx"), "--entry", "step", "--variant", "0"]
    )
    assert (
        done.exit_code == 0
        and f"wrote {tmp_path / 'c.onnx'}" in done.stdout
        and "compared by onnxruntime" in done.stdout
    )


def _comparable(path: Path) -> bytes:
    """Return the file without its guards: the compiler may have added some to the package's."""
    model = onnx.load(path)
    kept = [p for p in model.metadata_props if p.key != "guards"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return model.SerializeToString(deterministic=True)


def test_a_squeeze_of_a_dynamic_dimension_leaves_it(tmp_path: Path) -> None:
    """PyTorch's squeeze does; ONNX's Squeeze raises an error if the size is not one."""
    x = torch.randn(5, 1, 4, requires_grad=True)
    for i, squeeze in enumerate((lambda x: x.sin().squeeze(0), lambda x: x.sin().squeeze((0, 1)))):
        entry = ab.Module(Calls(squeeze), [ab.Variant((x,), dynamic_shapes={"x": {0: BATCH}})])
        ab.export_onnx(tmp_path / f"{i}.onnx", {"m": entry})  # export compares


def test_distances_and_their_gradients(tmp_path: Path) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.cdist(x, y, p=p).sin().sum() for p in (1.0, 2.0, 3.0, float("inf"))]).sum()

    x, y = torch.randn(4, 3), torch.randn(5, 3)
    rows = torch.export.Dim("rows", min=3, max=25)  # from 26 on eager uses matrix products
    entry = ab.Grad(loss, [ab.Variant((x, y), dynamic_shapes=({0: rows}, {}))], wrt=["x", "y"])
    (file,) = ab.export_onnx(tmp_path / "m.onnx", {"m": entry})
    x = torch.randn(7, 3)
    given = x.clone().requires_grad_(), y.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(*given), given)
    found = Session(file.path)({"x": x, "y": y})
    for name, gradient in zip(("x", "y"), wanted, strict=True):
        np.testing.assert_allclose(found[f"grad.{name}"], gradient.numpy(), rtol=2e-5, atol=2e-5)


def test_large_weights_lie_beside_the_graphs(tmp_path: Path) -> None:
    module = nn.Linear(300, 200)
    x = torch.randn(3, 300)
    files = ab.export_onnx(tmp_path / "big.onnx", {"m": ab.Module(module, [ab.Variant((x,))])}, external_data=True)
    data = tmp_path / "big.onnx.data"
    assert {f.data for f in files} == {data} and data.stat().st_size >= 300 * 200 * 4
    assert all(f.path.stat().st_size < 20_000 for f in files)
    for file in files:
        onnx.checker.check_model(file.path, full_check=True)
    found = Session(tmp_path / "big.forward.onnx")({"input": x})["output"]
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ab.ExportError, match="native_dropout"):
        ab.export_onnx(
            tmp_path / "big.onnx",
            {"m": ab.Module(nn.Dropout(), [ab.Variant((x.requires_grad_(),))])},
            external_data=True,
        )
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "aten.native_dropout.default": (nn.Dropout(0.5), "draws random numbers, and ONNX cannot draw eager's"),
    "aten.rand.default": (lambda x: x * torch.rand(x.shape), "draws random numbers"),
    "aten.linalg_inv_ex.default": (torch.linalg.inv, "has no ONNX translation"),
    "aten._linalg_eigh.default": (lambda x: torch.linalg.eigh(x @ x.T)[1].sum(), "has no ONNX translation"),
    "aten.lgamma.default": (torch.lgamma, "has no ONNX translation"),
    "aten.median.default": (torch.median, "has no ONNX translation"),
    "aten._fft_r2c.default": (lambda x: torch.fft.rfft(x).abs(), "complex64, and ONNX has no complex numbers"),
    "aten.special_erfcx.default": (torch.special.erfcx, "has no ONNX translation"),
}


@pytest.mark.parametrize("operator", REFUSED)
def test_what_has_no_translation_is_refused_by_name(operator: str, tmp_path: Path) -> None:
    function, words = REFUSED[operator]
    module = function if isinstance(function, nn.Module) else Calls(function)
    with pytest.raises(ab.ExportError) as caught:
        ab.export_onnx(
            tmp_path / "x.onnx", {"m": ab.Module(module, [ab.Variant((torch.eye(4).add(0.1).requires_grad_(),))])}
        )
    assert operator in str(caught.value) and words in str(caught.value) and caught.value.operator == operator
    assert isinstance(module, nn.Dropout) or "it is called in " in str(caught.value)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_other_refusals_name_what_to_do(tmp_path: Path) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    twice = ab.Module(nn.Linear(4, 2), [ab.Variant((x,))], order=2)
    for entries, words in (
        ({"m": twice}, "order=2"),
        ({"m": ab.Module(Calls(lambda x: (x, x * 2)), [ab.Variant((x,))])}, "return a copy"),
        ({"m": ab.Module(Calls(lambda x: x), [ab.Variant((x.detach(),))])}, "no graph to write"),
    ):
        with pytest.raises(ab.ExportError, match=words):
            ab.export_onnx(tmp_path / "x.onnx", entries)
    with pytest.raises(ab.ExportError, match=r"does not end in \.onnx"):
        ab.export_onnx(tmp_path / "x.pt2", {"m": ab.Module(nn.Linear(4, 2), [ab.Variant((x,))])})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "onnx", "--target", "cpu"], "--target does not apply to --format onnx"),
        (["--format", "onnx", "--tune", "none"], "--tune does not apply to --format onnx"),
        (["--format", "onnx", "--no-weights"], "--weights does not apply to --format onnx"),
        (["--format", "tflite"], "'tflite' is not one of"),
        (["--external-data"], "--external-data does not apply to --format pt2"),
        (["--format", "onnx", "--entry", "nothing"], "no entry of that name or kind"),
    ],
)
def test_nonsense_on_the_command_line_is_one_clear_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", f"{PROGRAM}:entries", "-o", str(tmp_path / "x.onnx"), *arguments])
    assert (
        done.exit_code == 2 and words in done.stderr and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    )


def test_packages_that_cannot_be_converted(package: Path, tmp_path: Path) -> None:
    def fails(*arguments: object) -> str:
        done = CliRunner().invoke(main, ["convert", *map(str, arguments)])
        assert done.exit_code == 1 and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    out = tmp_path / "x.onnx"
    assert "has no entry 'nothing'; it has: net (module), distance (grad)" in fails(
        package, "-o", out, "--entry", "nothing"
    )
    assert "has no variant 3; it has 1" in fails(package, "-o", out, "--variant", 3)
    assert "does not end in .onnx" in fails(package, "-o", tmp_path / "x.bin")
    bare = tmp_path / "bare.pt2"
    variant = ab.Variant((torch.randn(3),))
    ab.export(bare, {"g": ab.Grad(lambda x: x.square().sum(), [variant])}, portable=False)
    assert "no portable graph of g.0.gradient" in fails(bare, "-o", out)
    ab.export(bare, {"m": ab.Module(nn.Linear(3, 1), [variant])}, weights=False)
    assert "without weights" in fails(bare, "-o", out)
    assert not out.exists()


def test_a_wrong_gradient_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above rely on this: a wrong translation fails the export, which names the gradient."""
    original = convolution._of_weight
    monkeypatch.setattr(convolution, "_of_weight", lambda *args: original(*args) * 1.001)
    image = nn.Conv2d(1, 2, 3)
    with pytest.raises(ab.ExportError, match="gradient of weight is wrong: off by"):
        ab.export_onnx(tmp_path / "x.onnx", {"m": ab.Module(image, [ab.Variant((torch.randn(2, 1, 6, 6),))])})
    assert not list(tmp_path.iterdir())


def test_without_onnxruntime_the_reference_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aot_backward.onnx import onnxruntime_backend

    monkeypatch.setattr(onnxruntime_backend, "engine", lambda: "onnx.reference")
    (file,) = ab.export_onnx(
        tmp_path / "x.onnx", {"g": ab.Grad(lambda x: x.tanh().sum(), [ab.Variant((torch.randn(3),))])}
    )
    assert file.compared.startswith(f"onnx.reference {onnx.__version__}")


def test_without_onnx_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.abc\n"
        "class Gone(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('onnx', 'onnxscript'): raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name in ('onnx', 'onnxscript') else found(name, *a)\n"
        "sys.meta_path.insert(0, Gone())\n"
        f"sys.argv = ['aot-backward', 'export', {str(PROGRAM) + ':entries'!r}, '-o', {str(tmp_path / 'x.onnx')!r}, '--format', 'onnx']\n"
        "from aot_backward.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: ONNX graphs need onnx and onnxscript, which are not installed: pip install 'aot-backward[onnx]'\n"
    )


class Integers(nn.Module):
    def forward(self, i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        floor, cut = torch.div(i, 7, rounding_mode="floor"), torch.div(i, 7, rounding_mode="trunc")
        return (
            x.square().sum(),
            floor,
            cut,
            i // 5,
            i % 7,
            torch.div(x, 0.1, rounding_mode="floor"),
            torch.remainder(x, 0.3),
            torch.isinf(x * 1e300),
        )


def test_large_integers_and_float64_keep_every_digit(tmp_path: Path) -> None:
    """torchlib divides integers in float32, and rounds Python's numbers to it."""
    i = torch.tensor([-(2**40) - 3, 2**40 + 5, -1, 0, 17, -17, 2**60 + 1])
    x = torch.tensor([1.0, -1.0, 0.3, 7.7, -1e20], dtype=torch.float64, requires_grad=True)
    ab.export_onnx(tmp_path / "i.onnx", {"m": ab.Module(Integers(), [ab.Variant((i, x))])})
    found = Session(tmp_path / "i.forward.onnx")({"i": i, "x": x})
    for n, wanted in enumerate(Integers()(i, x)[1:], start=1):
        np.testing.assert_array_equal(found[f"output.{n}"], wanted.detach().numpy(), err_msg=str(n))
