"""Code for aarch64, compiled on x86-64 and run in an emulator, without PyTorch. It needs Debian's
``g++-aarch64-linux-gnu`` and ``qemu-user``."""

from __future__ import annotations

import copy
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward.checks import emulated, standalone
from aot_backward_exporters.toolchain import native_libraries
from aot_backward_runtime import compatibility, load
from aot_backward_runtime.native.weights import load_examples
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import standalone_by_target

from ..support import exports, golden_packages

CROSS = "aarch64-linux-gnu-g++"
BOTH = "cpu:avx2,cpu:neon"
VERIFIED = {"cpu:avx2": "verified", "cpu:neon": "verified"}
needs_compiler = pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS}")
needs_emulator = pytest.mark.skipif(not emulated.emulator("aarch64"), reason="no qemu-aarch64")
pytestmark = [
    needs_compiler,
    needs_emulator,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the tests cross from x86-64"),
]


class Convolutions(nn.Module):
    """Without a bias before the normalization: its gradient is rounding, which AdamW would amplify."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, stride=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.head(nn.functional.gelu(self.second(hidden)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.drop(mixed))


def maths(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Call functions that at::vec takes from SLEEF or writes itself."""
    a = x.abs() + 0.1
    terms = [
        x.erf(),
        y.erfc(),
        a.pow(y),
        torch.atan2(x, y),
        x.sinh() * y.cosh(),
        (0.3 * x).tan(),
        x.asinh(),
        a.log2(),
        a.log10(),
        x.expm1(),
        y.exp2(),
    ]
    terms += [
        torch.hypot(x, y),
        a.lgamma(),
        x.tanh().asin(),
        (0.9 * y.tanh()).acos(),
        x.atan(),
        (1.5 + a).acosh(),
        torch.fmod(x, 0.7),
        x.round(),
    ]
    terms += [
        torch.copysign(x, y),
        x.sigmoid(),
        nn.functional.softplus(y),
        nn.functional.silu(x),
        y.floor(),
        a.log1p(),
        x.cos() * y.sin(),
    ]
    return torch.stack(terms).sum()


def sorts(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    scattered = torch.zeros(7, x.shape[1], dtype=x.dtype).index_add(0, index, x).square().sum()
    return (
        scattered
        + (x.sort(1).values * torch.arange(x.shape[1])).sum()
        + x.logcumsumexp(1).sum()
        + x.topk(2, 1).values.sum()
        + x.std()
    )


def solves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    s = a @ a.mT + 3 * torch.eye(4, dtype=a.dtype)
    return torch.linalg.solve(s, b).square().sum() + torch.linalg.cholesky(s).diagonal().log().sum()


def halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        products = (x @ w).relu().float().square().mean()
    return products + (x.half() * 2).relu().float().sum()


def scans(x: torch.Tensor) -> torch.Tensor:
    return (
        x.cumsum(1).square().sum()
        + x.cumprod(0).sum()
        + x.softmax(1).square().sum()
        + x.logsumexp(0).sum()
        + x.cummax(1).values.sum()
    )


def gathers(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    chosen = x.gather(0, index[:3, None].expand(3, x.shape[1])).square().sum() + x[index].tanh().sum()
    return chosen + torch.zeros(9).scatter_reduce(0, index, x[: len(index), 0], "amax").sum()


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Have blocks of rows, of columns and of the sum, and rests of each."""
    return (
        (a @ b).square().mean()
        + (b.mT @ a.mT).tanh().mean()
        + torch.baddbmm(a[:, None, :5], a[:, None, :], b.expand(len(a), -1, -1)[..., :5]).sum()
    )


def integers(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    chosen = torch.where((i % 3 == 0) & (i > 2), x * i, x.square()).sum() + (x * (i // 2).float()).sum()
    return (
        chosen
        + (i.to(torch.uint8).float() * x).max()
        + x[i.clamp(0, 3)].sum()
        + (x * (i << 2 ^ 5).to(torch.int16)).sum()
    )


def entries() -> dict[str, Any]:
    torch.manual_seed(0)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    images = torch.randn(6, 1, 12, 12)
    convolutions = Convolutions()
    tokens = torch.randint(20, (3, 7))
    attention = Attention()
    adam = torch.optim.AdamW(convolutions.parameters(), lr=1e-2)
    sgd = torch.optim.SGD(attention.parameters(), lr=0.1, momentum=0.9)
    gradients: dict[str, tuple[Any, ...]] = {
        "maths": (maths, torch.randn(5, 23), torch.randn(5, 23)),
        "maths64": (maths, torch.randn(5, 23).double(), torch.randn(5, 23).double()),
        "sorts": (sorts, torch.randn(9, 5), torch.randint(7, (9,))),
        "solves": (solves, torch.randn(4, 4).double(), torch.randn(4, 2).double()),
        "halves": (halves, torch.randn(20, 33), torch.randn(33, 17)),
        "scans": (scans, torch.randn(6, 33)),
        "gathers": (gathers, torch.randn(9, 5), torch.randint(9, (7,))),
        "products": (products, torch.randn(130, 300), torch.randn(300, 150)),
        "integers": (integers, torch.randn(40), torch.arange(40)),
    }
    return {
        "convolutions": ab.Step(
            convolutions,
            [ab.Variant((images, torch.randint(3, (6,))), dynamic_shapes=(batch, batch))],
            adam,
            loss_fn=nn.functional.cross_entropy,
        ),
        "attention": ab.Step(
            attention,
            [ab.Variant((tokens, tokens))],
            sgd,
            loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()),
            clip_norm=1.0,
        ),
        "images": ab.Module(copy.deepcopy(convolutions).eval(), [ab.Variant((images,), dynamic_shapes=(batch,))]),
        "recurrent": ab.Module(
            nn.GRU(5, 6, batch_first=True), [ab.Variant((torch.randn(4, 7, 5),), dynamic_shapes=(batch,))]
        ),
        **{name: ab.Grad(f, [ab.Variant(tuple(args))]) for name, (f, *args) in gradients.items()},
    }


@pytest.fixture(scope="module")
def package() -> Path:
    return exports.shared("machines", lambda path: ab.export(path, entries(), target=BOTH, tune="none"))


def bend(x: torch.Tensor) -> torch.Tensor:
    return (x.tanh() * x.sum(1, keepdim=True)).square().mean()


def small(path: Path, **options: Any) -> dict[str, str]:
    """Export one gradient for both machines, and return its verdicts without PyTorch."""
    ab.export(
        path,
        {"bend": ab.Grad(bend, [ab.Variant((torch.linspace(-1, 1, 128).view(4, 32),))])},
        target=BOTH,
        tune="none",
        **options,
    )
    return standalone_by_target(open_package(path).manifest, "bend")


def test_each_entry_reproduces_the_stored_results_on_both(package: Path) -> None:
    manifest = open_package(package).manifest
    assert {name: standalone_by_target(manifest, name) for name in manifest.entries} == dict.fromkeys(
        manifest.entries, VERIFIED
    )
    text = subprocess.run(
        [sys.executable, "-m", "aot_backward.cli", "inspect", package], capture_output=True, text=True, check=True
    ).stdout
    assert text.count("Without PyTorch: yes, with the stored results") == len(manifest.entries)
    assert "\n  cpu:neon  cpu aarch64 armv8-a " in text
    assert " cpu:neon: not run: it was built for linux aarch64, this is linux x86_64" in text


def emulated_run(package: Path, entry: str, folder: Path) -> subprocess.CompletedProcess[str]:
    request = folder / "request"
    request.write_bytes(struct.pack("<3q", 0, 0, 0))
    program = native_libraries.built(Path(abn.source_dir()), "aarch64") / "run_entry"
    argv = [*emulated.emulator("aarch64"), program, package, entry, 0, "-", 0, 0, request, folder / "results"]
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)


def test_twenty_updates_are_those_of_the_other_machine(package: Path, tmp_path: Path) -> None:
    """Losses of 20 updates of AdamW as with PyTorch, and the parameters after them as those of the C library here."""
    step, native = load(package).step("convolutions"), abn.load(package).step("convolutions")
    torch.manual_seed(5)
    images, labels = torch.randn(6, 1, 12, 12), torch.randint(3, (6,))
    inputs = [("float32", tuple(images.shape), images.numpy().tobytes()), ("int64", (6,), labels.numpy().tobytes())]
    names = list(native.parameters)
    request = {
        "path": package,
        "file": tmp_path / "results",
        "entry": "convolutions",
        "kind": "step",
        "variant": 0,
        "mode": "",
        "seed": 0,
        "steps": 20,
    }
    request |= {"backward": False, "inputs": inputs, "incoming": [], "states": {name: name for name in names}}
    data, results = (tmp_path / "results"), emulated.run(request, "aarch64")["results"]

    def read(placed: Any) -> torch.Tensor:
        dtype, shape, begin = getattr(torch, placed[0]), placed[1], placed[2]
        count = dtype.itemsize * torch.Size(shape).numel()
        return torch.frombuffer(bytearray(data.read_bytes()[begin : begin + count]), dtype=dtype).view(shape)

    losses = [step(images, labels) for _ in range(20)]
    torch.testing.assert_close(
        torch.stack([read(placed) for placed in results["losses"]]), torch.stack(losses).detach(), rtol=1e-5, atol=1e-5
    )
    for _ in range(20):
        native(images, labels)
    for name in names:
        torch.testing.assert_close(
            read(results["after"][name]), torch.as_tensor(native.parameters[name]), rtol=1e-4, atol=1e-5
        )


def test_a_golden_package_runs_there(tmp_path: Path) -> None:
    """Built by an older version of this project."""
    path = Path(__file__).parents[1] / "golden" / "1.17-machines.pt2"
    archive = open_package(path)
    stored = {key.removeprefix("bend/0/"): tensor for key, tensor in load_examples(archive).items()}
    found = standalone.results_of(
        path, tmp_path / "results", "bend", archive.manifest.entries["bend"], 0, stored, "aarch64"
    )
    x = stored["input/0"].clone().requires_grad_()
    value = golden_packages.bend(x)
    value.backward()
    torch.testing.assert_close((found["output[0]"], found["gradient of x"]), (value.detach(), x.grad))


def test_a_wrong_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of the graphs, and not that of the C libraries, is made to call expm1 in place of exp."""
    for name, flag in (("g++", " -DSleef_expf4_u10=Sleef_expm1f4_u10"), ("gcc", "")):
        program = tmp_path / f"wrong-{name}"
        program.write_text(f'#!/bin/sh\nexec aarch64-linux-gnu-{name}{flag} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("CXX_AARCH64", str(tmp_path / "wrong-g++"))
    verdicts = small(tmp_path / "wrong.pt2")
    assert verdicts["cpu:avx2"] == "verified"
    assert re.match("is wrong: variant 0: .* is off by .*, .* is allowed", verdicts["cpu:neon"])
    with pytest.raises(
        ab.ExportError,
        match=r"entry 'bend' is wrong: .* for cpu:neon: this does not run without PyTorch; nothing was written",
    ):
        small(tmp_path / "refused.pt2", runtime="standalone")
    assert not (tmp_path / "refused.pt2").exists()


def test_without_an_emulator_it_is_not_called_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "emulator", lambda machine: [])
    verdicts = small(tmp_path / "bend.pt2", runtime="standalone")
    assert verdicts == {
        "cpu:avx2": "verified",
        "cpu:neon": "was not run: this machine is x86_64, and has no emulator (apt-get install qemu-user)",
    }


def test_a_target_that_did_not_run_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an older processor exports for a newer one, too."""
    monkeypatch.setattr(emulated, "cpu_flags", lambda: compatibility.cpu_flags() - {"avx2"})
    example = torch.linspace(-1, 1, 12).view(4, 3)
    ab.export(
        tmp_path / "bend.pt2",
        {"bend": ab.Grad(bend, [ab.Variant((example,))])},
        target="cpu:sse4,cpu:avx2",
        tune="none",
    )
    verdicts = standalone_by_target(open_package(tmp_path / "bend.pt2").manifest, "bend")
    assert verdicts == {"cpu:sse4": "verified", "cpu:avx2": "was not run: this processor lacks the CPU flags avx2"}
    value, _ = abn.load(tmp_path / "bend.pt2").grad()(example.numpy())
    torch.testing.assert_close(torch.as_tensor(value), bend(example))


def test_an_entry_that_was_not_run_does_not_count_as_one_without_pytorch(tmp_path: Path) -> None:
    """An export for the other machine alone has no results of eager to compare with."""
    with pytest.raises(
        ab.ExportError, match="entry 'bend' stores no example: this does not run without PyTorch; nothing was written"
    ):
        ab.export(
            tmp_path / "bend.pt2",
            {"bend": ab.Grad(bend, [ab.Variant((torch.ones(4, 32),))])},
            target="cpu:neon",
            tune="none",
            runtime="standalone",
        )


def test_the_libraries_are_built_for_a_cache_with_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "a cache"))
    folder = native_libraries.built(Path(abn.source_dir()), "aarch64")
    assert sorted(path.name for path in folder.iterdir()) == ["libaot_backward.so", "libaotb_core.so", "run_entry"]


def test_without_a_compiler_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX_AARCH64", "/no/compiler")
    with pytest.raises(
        ab.ExportError, match="code for aarch64 needs the compiler /no/compiler, and none was found: apt-get install"
    ):
        small(tmp_path / "bend.pt2")


def test_code_for_another_machine_is_refused_on_both(tmp_path: Path) -> None:
    ab.export(tmp_path / "here.pt2", {"bend": ab.Grad(bend, [ab.Variant((torch.ones(4, 3),))])})
    done = emulated_run(tmp_path / "here.pt2", "bend", tmp_path)
    assert done.returncode == 1 and "it was built for x86_64, this is aarch64" in done.stderr
    ab.rebuild(tmp_path / "here.pt2", tmp_path / "there.pt2", target="cpu:neon")
    reason = "it was built for linux aarch64, this is linux x86_64"
    with pytest.raises(ab.IncompatibleError, match=reason):
        load(tmp_path / "there.pt2")
    with pytest.raises(abn.IncompatibleError, match="it was built for aarch64, this is x86_64"):
        abn.load(tmp_path / "there.pt2")
    assert standalone_by_target(open_package(tmp_path / "there.pt2").manifest, "bend") == {"cpu:neon": "verified"}
