"""Export tries each entry without PyTorch; the backend refuses entries that did not pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import aot_backward_native as abn
import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward.checks import standalone
from aot_backward.packaging.rebuild import rebuild
from aot_backward_runtime.format.elf import numeric, read_elf
from aot_backward_runtime.package.archive import open_package

from ..entries import test_subsets
from ..support import c_library, golden_files
from .test_functions import kinds

PAIR = golden_files.FOLDER / "1.0-pair.pt2"


def test_an_export_says_what_runs_without_pytorch() -> None:
    found = {name: entry.standalone for name, entry in open_package(kinds()).manifest.entries.items()}
    waves = found.pop("waves")
    assert waves.startswith("calls ")
    assert {"aten._fft_r2c", "aten.abs", "aten.slice_scatter"} <= {*waves.removeprefix("calls ").split(", ")}
    assert found == dict.fromkeys(("attention", "bag", "conv"), "verified")


def test_each_variant_is_tried_and_can_be_called() -> None:
    """Five variants have ever fewer gradients of the same inputs. Each has its own verdict, and the caller selects
    one."""
    path, net = test_subsets.exported(), test_subsets.net()
    entry = open_package(path).manifest.entries["net"]
    assert entry.standalone == "verified"
    x, y = torch.randn(3, 6, requires_grad=True), torch.randn(3, 4)
    head, tail = net(x, y)
    (head.sum() + 2 * tail.sum()).backward()
    module, of = abn.load(path).module(), {"x": x, **dict(net.named_parameters())}
    for number, variant in enumerate(entry.variants):
        module.use_variant(number)
        if variant.backward is None:
            with pytest.raises(abn.InputError, match="entry net has no gradients"):
                module.forward(x.detach(), y)
            torch.testing.assert_close(torch.from_dlpack(module(x.detach(), y)[0]), head.detach())
            continue
        module.forward(x.detach(), y)
        found = module.backward(torch.ones(3, 4), torch.full((3, 4), 2.0))
        assert {*found} == {
            g.of.partition(":")[2] if g.of.startswith("parameter:") else "x" for g in variant.backward.gradients
        }
        for name, gradient in found.items():
            torch.testing.assert_close(torch.from_dlpack(gradient), of[name].grad)
    with pytest.raises(abn.PackageError, match="entry net has no variant 5; it has 5"):
        module.use_variant(5)
    module.use_variant(None).forward(x.detach(), y)
    assert module._function.served == 0


def test_code_and_libraries_load_on_older_systems(tmp_path: Path) -> None:
    """Built code requires glibc 2.27 at most, though this machine's glibc has newer versions of these functions."""

    def powers(x: torch.Tensor) -> torch.Tensor:
        return (
            (x.abs() ** 1.37).sum()
            + torch.hypot(x, x + 1).sum()
            + torch.fmod(x, 0.3).sum()
            + x.exp2().sum()
            + x.abs().log().sum()
        )

    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    ab.export(
        tmp_path / "powers.pt2",
        {"powers": ab.Grad(powers, [ab.Variant((x,))], wrt="x")},
        runtime="standalone",
        tune="none",
    )
    libraries = open_package(tmp_path / "powers.pt2").manifest.libraries.values()
    folder = Path(abn.library_dir())
    needed = [
        *(b.glibc for b in libraries),
        *(read_elf(folder / name).versions["GLIBC"] for name in ("libaot_backward.so", "libaotb_core.so")),
    ]
    assert len(needed) >= 3 and max(map(numeric, needed)) <= (2, 27)
    value, gradient = abn.load(tmp_path / "powers.pt2").grad()(x.detach())
    expected = powers(x)
    expected.backward()
    torch.testing.assert_close(torch.from_dlpack(value), expected.detach())
    torch.testing.assert_close(torch.from_dlpack(gradient), x.grad)


class Choosing(nn.Module):
    """A branch on the number of rows, and convolutions of few or many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).tanh())
        return torch.cond(y.shape[0] > 30, lambda y: y.square().mean(), lambda y: y.sin().mean(), (y,))  # type: ignore[no-any-return]


def test_branches_by_the_number_of_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Choosing()
    rows = torch.export.Dim("rows", min=2, max=1000)
    entry = ab.Grad(net, [ab.Variant((torch.randn(4, 3, 14, 14),), dynamic_shapes={"x": {0: rows}})])
    ab.export(tmp_path / "choosing.pt2", {"choosing": entry}, runtime="standalone", tune="none")
    gradients = abn.load(tmp_path / "choosing.pt2").grad()
    for count in (2, 4, 31, 200):
        x = torch.randn(count, 3, 14, 14)
        value, found = gradients(x)
        expected = net(x)
        torch.testing.assert_close(torch.from_dlpack(value), expected.detach())
        for name, gradient in zip(net.state_dict(), torch.autograd.grad(expected, list(net.parameters())), strict=True):
            torch.testing.assert_close(torch.from_dlpack(found[name]), gradient, rtol=1e-4, atol=1e-6)


def test_what_did_not_run_is_refused() -> None:
    words = r"waves does not run on the backend standalone: it calls aten\._fft_c2c, aten\._fft_r2c, .*: open the package with the backend libtorch"
    with pytest.raises(abn.IncompatibleError, match=words):
        abn.load(kinds()).grad("waves")


@golden_files.needed
def test_what_an_earlier_version_did_not_try_is_refused() -> None:
    with pytest.raises(
        abn.IncompatibleError, match="entry loss was not tried on the backend standalone when it was exported"
    ):
        abn.load(PAIR).grad()
    x = torch.randn(4, 3)
    with c_library.opened(PAIR) as package, package.function("loss") as loss:
        value, _ = abn.load(PAIR, unchecked=True).grad()(x)
        torch.testing.assert_close(
            torch.from_dlpack(value) if hasattr(value, "__dlpack__") else torch.tensor(value), loss.run(x)[0]
        )


def test_an_export_for_it_fails_with_what_stands_in_the_way(tmp_path: Path) -> None:
    def volume(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x).prod()

    words = r"entry 'volume' calls aten\._linalg_svd: this does not run without PyTorch; nothing was written"
    with pytest.raises(ab.ExportError, match=words):
        ab.export(
            tmp_path / "x.pt2",
            {"volume": ab.Grad(volume, [ab.Variant((torch.eye(3) + 1,))])},
            runtime="standalone",
            tune="none",
        )
    assert not list(tmp_path.iterdir())


def _pooled(x: torch.Tensor) -> torch.Tensor:
    pooled = nn.functional.adaptive_avg_pool2d(x, (4, 3)).square().sum() + nn.functional.avg_pool2d(x, 7).square().sum()
    return pooled + nn.functional.pad(x, (2, 1, 3, 2), mode="replicate").square().sum()


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, y).sin().sum() + torch.cdist(x, y, p=3.0).cos().sum()


def _weighted(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return nn.functional.bilinear(x, y, torch._weight_norm(w, g, 0)).square().sum()


def test_operators_that_are_missing_are_decomposed(tmp_path: Path) -> None:
    """Only ``runtime="standalone"`` decomposes them; a size may be dynamic."""
    rows = torch.export.Dim("rows", min=2, max=20)  # from 26 rows on, eager computes distances by products
    distances = ab.Grad(
        _distances, [ab.Variant((torch.randn(5, 3), torch.randn(7, 3)), dynamic_shapes=({0: rows}, {}))]
    )
    entries = {
        "pooled": ab.Grad(_pooled, [ab.Variant((torch.randn(2, 3, 10, 9),))]),
        "distances": distances,
        "weighted": ab.Grad(
            _weighted, [ab.Variant((torch.randn(5, 3), torch.randn(5, 4), torch.randn(6, 3, 4), torch.rand(6, 1, 1)))]
        ),
    }
    ab.export(tmp_path / "f.pt2", entries, tune="none", runtime="standalone")
    rebuild(tmp_path / "f.pt2", tmp_path / "again.pt2")  # its stored graphs are the decomposed ones
    ab.export(tmp_path / "distances.pt2", {"distances": distances}, tune="none")
    verdicts = {
        name: [e.standalone for e in open_package(tmp_path / name).manifest.entries.values()]
        for name in ("again.pt2", "distances.pt2")
    }
    assert verdicts == {
        "again.pt2": ["verified"] * 3,
        "distances.pt2": ["calls aten._cdist_backward, aten._cdist_forward"],
    }
    package = abn.load(tmp_path / "f.pt2")
    for name, function, shapes in (
        ("pooled", _pooled, [(2, 3, 10, 9)]),
        ("distances", _distances, [(9, 3), (7, 3)]),
        ("weighted", _weighted, [(5, 3), (5, 4), (6, 3, 4), (6, 1, 1)]),
    ):
        inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        expected = function(*inputs)
        expected.backward()
        value, gradients = package.grad(name)(*[t.detach() for t in inputs])
        torch.testing.assert_close(torch.as_tensor(value), expected.detach())
        for found, tensor in zip(
            gradients.values() if isinstance(gradients, dict) else [gradients], inputs, strict=True
        ):
            torch.testing.assert_close(torch.as_tensor(found), tensor.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.as_tensor(found), tensor.grad)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"runtime": "tpu"}, "runtime is 'tpu'"),
        ({"runtime": "standalone", "weights": False}, "leave out weights=False"),
        ({"runtime": "standalone", "target": "cuda"}, "CPUs"),
    ],
)
def test_a_runtime_that_cannot_be_had(more: dict, words: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    with pytest.raises(ab.ExportError, match=words):
        ab.export(tmp_path / "x.pt2", {"f": ab.Grad(torch.sum, [ab.Variant((torch.ones(3),))])}, **more)


def test_without_the_c_library_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(standalone, "is_installed", lambda: False)
    entries = {"f": ab.Grad(lambda x: x.square().sum(), [ab.Variant((torch.ones(3),))])}
    ab.export(tmp_path / "f.pt2", entries, tune="none")
    assert open_package(tmp_path / "f.pt2").manifest.entries["f"].standalone == ""
    with pytest.raises(ab.ExportError, match="pip install aot-backward-native"):
        ab.export(tmp_path / "g.pt2", entries, tune="none", runtime="standalone")


def test_wrong_results_are_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check notices a backend that computes something else."""
    results = standalone.results_of
    monkeypatch.setattr(
        standalone, "results_of", lambda *args: {n: None if t is None else t + 1e-3 for n, t in results(*args).items()}
    )
    net = nn.Linear(3, 2)
    step = ab.Step(
        net,
        [ab.Variant((torch.randn(5, 3), torch.randint(2, (5,))))],
        torch.optim.SGD(net.parameters(), 0.1),
        loss_fn=nn.functional.cross_entropy,
    )
    ab.export(tmp_path / "fit.pt2", {"fit": step}, tune="none")
    said = open_package(tmp_path / "fit.pt2").manifest.entries["fit"].standalone
    assert said.startswith("is wrong: variant 0: ") and " is off by 0.00" in said
    monkeypatch.undo()
    rebuild(tmp_path / "fit.pt2", tmp_path / "again.pt2")
    assert open_package(tmp_path / "again.pt2").manifest.entries["fit"].standalone == "verified"


def test_native_code_that_ends_the_process_does_not_end_the_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = tmp_path / "process.py"
    process.write_text("import os, sys\nsys.stdin.buffer.read()\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(standalone, "_PROCESS", process)
    ab.export(
        tmp_path / "f.pt2", {"f": ab.Grad(lambda x: x.square().sum(), [ab.Variant((torch.ones(3),))])}, tune="none"
    )
    assert (
        open_package(tmp_path / "f.pt2").manifest.entries["f"].standalone == "fails: the process ended with status -9"
    )


def test_dtypes_that_the_buffer_protocol_lacks_and_constants_that_are_no_state(tmp_path: Path) -> None:
    table = torch.randn(3)

    def held(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * table).sum() + y.float().square().sum()

    example = torch.randn(2, 3), torch.randn(4, 2).bfloat16()
    ab.export(tmp_path / "held.pt2", {"held": ab.Grad(held, [ab.Variant(example)])}, tune="none", runtime="standalone")
    value, gradients = abn.load(tmp_path / "held.pt2").grad()(*example)
    x, y = (t.clone().requires_grad_() for t in example)
    held(x, y).backward()
    torch.testing.assert_close(torch.from_numpy(gradients["x"]), x.grad)
    torch.testing.assert_close(torch.from_dlpack(gradients["y"]), y.grad)
    again = abn.tensor("bfloat16", (4, 2), gradients["y"].tobytes())
    assert value.shape == () and again.shape == (4, 2) and again.tobytes() == gradients["y"].tobytes()
    with pytest.raises(ValueError, match="3 bytes for a tensor of dtype bfloat16"):
        abn.tensor("bfloat16", (4, 2), b"abc")


def test_it_is_shown() -> None:
    argv = [sys.executable, "-m", "aot_backward.cli", "inspect", str(kinds())]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert (
        "Without PyTorch: yes, with the stored results" in text
        and "Without PyTorch: no: it calls aten._fft_c2c, aten._fft_r2c, aten.abs, " in text
    )
    described = json.loads(subprocess.run([*argv, "--json"], capture_output=True, text=True, check=True).stdout)
    target = open_package(kinds()).manifest.target.label
    assert {n: e["standalone"] for n, e in described["entries"].items()}["attention"] == {target: "verified"}


def test_views_of_constants_are_dropped_once_whoever_does_it() -> None:
    """Code of torch 2.15 drops the views that it makes of its constants. Code of earlier versions leaves that to the
    backend."""
    script = """
import ctypes, sys

core, view, whole = ctypes.CDLL(sys.argv[1]), [ctypes.c_void_p() for _ in range(3)], ctypes.c_void_p()
core.core_views_begin.restype = ctypes.c_void_p
size, stride = ctypes.c_int64(5), ctypes.c_int64(1)
assert core.aoti_torch_empty_strided(ctypes.c_int64(1), ctypes.byref(size), ctypes.byref(stride), 6, 0, 0, ctypes.byref(whole)) == 0
for dropped in ((), (0,), (1,), (2,), (2, 0), (1, 2), (0, 1, 2)):
    views = ctypes.c_void_p(core.core_views_begin())
    for one in view:
        assert core.aoti_torch_new_tensor_handle(whole, ctypes.byref(one)) == 0
    core.core_views_end()
    core.aoti_torch_assign_tensors(whole, view[1])
    for number in dropped:
        core.aoti_torch_delete_tensor_object(view[number])
    core.core_views_drop(views)
    after = [ctypes.c_void_p() for _ in range(8)]  # memory that was dropped twice would be handed out twice
    for one in after:
        core.aoti_torch_new_tensor_handle(whole, ctypes.byref(one))
    assert len({one.value for one in after} | {whole.value}) == 9
    for one in after:
        core.aoti_torch_delete_tensor_object(one)
"""
    library = Path(abn.library_dir()) / "libaotb_core.so"
    ran = subprocess.run([sys.executable, "-c", script, str(library)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
