"""The runtime's promise: a whole forward and backward without Dynamo, Inductor or a compiler. A second test proves that
the first can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..support import exports, zoo

FORBIDDEN = (
    *(
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "onnx",
        "click",
        "aot_backward",
        "aot_backward_exporters",
        "aot_backward_runtime.training.distributed",
        "safetensors",
    ),
    *("model_signing", "sigstore", "cryptography", "OpenSSL"),
)

SCRIPT = """
import sys
{first}
import torch
base = set(sys.modules)
import aot_backward_runtime
model = aot_backward_runtime.load(sys.argv[1]).module()
inputs = torch.load(sys.argv[2], weights_only=True)
out = model(*inputs)
tensors = [t for t in (out.values() if isinstance(out, dict) else [out]) if isinstance(t, torch.Tensor) and t.requires_grad]
sum(t.sum() for t in tensors).backward()  # given gradients explicitly, torch.autograd.backward itself imports sympy
assert sum(p.grad is not None for p in model.parameters()) == int(sys.argv[3]), "gradients"
forbidden = {forbidden!r}
bad = sorted(m for m in set(sys.modules) - base if any(m == f or m.startswith(f + ".") for f in forbidden))
assert not bad, f"imported {{bad[:5]}}"
print("thin")
"""


def _run(tmp_path: Path, name: str, first: str = "") -> subprocess.CompletedProcess[str]:
    package = exports.module(name, dynamic=True)
    case = zoo.make(name)
    inputs = tmp_path / "inputs.pt"
    torch.save([a.detach() for a in case.args(4)], inputs)
    expected = sum(p.requires_grad for p in case.module.parameters())
    if name == "two":
        expected -= 2  # the unused layer
    empty = tmp_path / "empty"
    empty.mkdir()
    script = SCRIPT.format(first=first, forbidden=FORBIDDEN)
    environment = {
        "PATH": str(empty),
        "HOME": str(empty),
        "AOT_BACKWARD_CACHE": str(empty / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(empty / "inductor"),
    }
    return subprocess.run(
        [sys.executable, "-c", script, str(package), str(inputs), str(expected)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )


@pytest.mark.parametrize("name", ["two", "embedding"])
def test_nothing_that_traces_or_compiles_is_imported(name: str, tmp_path: Path) -> None:
    """PATH has no g++ and the cache folders are empty. ``embedding`` uses the proxy executor."""
    done = _run(tmp_path, name)
    assert done.returncode == 0 and done.stdout == "thin\n", done.stderr
    assert not (tmp_path / "empty" / "inductor").exists()


def test_the_test_above_can_fail(tmp_path: Path) -> None:
    """It fails if the runtime imports Inductor."""
    spoil = (
        "import importlib.abc\n"
        "class Spoil(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'aot_backward_runtime.entries.module':\n"
        "            import torch._dynamo\n"
        "sys.meta_path.insert(0, Spoil())"
    )
    done = _run(tmp_path, "two", spoil)
    assert done.returncode != 0 and "AssertionError: imported ['" in done.stderr, done.stderr


def test_importing_the_library_is_light() -> None:
    script = "import sys, torch; base = set(sys.modules); import aot_backward; print(sorted(m for m in set(sys.modules) - base if 'aot' not in m))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    loaded = done.stdout
    assert done.returncode == 0 and "_dynamo" not in loaded and "_inductor" not in loaded and "sympy" not in loaded, (
        done.stderr + loaded
    )


def test_the_facade_of_the_runtime_is_light_and_tells_its_names() -> None:
    script = (
        "import sys, aot_backward_runtime as r; assert 'torch' not in sys.modules; assert {*r.__all__} <= {*dir(r)}; r.load, r.replay, r.Package;"
        "import aot_backward_runtime.loader, aot_backward_runtime.passes.session; assert callable(r.load) and callable(r.replay)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
