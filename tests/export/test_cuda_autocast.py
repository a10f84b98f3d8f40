"""Programs captured on a CPU for a GPU: autocast follows CUDA's lists, and attention with dropout is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import aot_backward as ab
from aot_backward.capture import cuda_semantics, partition, trace
from aot_backward.packaging.rebuild import _refuse_other_autocast
from aot_backward_exporters.inductor import compile
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.package.archive import open_package

LOW = "lower"
X = torch.linspace(-1, 1, 16).reshape(4, 4)  # float32
RNN = nn.LSTMCell(4, 4)

RESULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any, Any]] = {
    # result dtypes under CUDA's autocast for a lower-precision and a float32 input (docs of torch.amp, CUDA Op-Specific
    # Behavior)
    "linear": (lambda x: F.linear(x, X), LOW, LOW),
    "conv2d": (lambda x: F.conv2d(x[None, None], X[None, None, :2, :2]), LOW, LOW),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None, None], X[None, None], X[None, None]), LOW, LOW),
    "softmax": (lambda x: x.softmax(-1), torch.float32, torch.float32),
    "softmax, with a dtype": (lambda x: x.softmax(-1, dtype=torch.float64), torch.float64, torch.float64),
    "sum over a dimension": (lambda x: x.sum(0), torch.float32, torch.float32),
    "sum of integers": (lambda x: (x > 0).sum(), torch.int64, torch.int64),
    "norm over a dimension": (lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]), torch.float32, torch.float32),
    "addcmul": (lambda x: torch.addcmul(x, x, x), LOW, torch.float32),
    "addcmul, of both": (lambda x: torch.addcmul(x, x, X), torch.float32, torch.float32),
    "grid_sample": (
        lambda x: F.grid_sample(x[None, None], X[None, None, :, :2], align_corners=False),
        torch.float32,
        torch.float32,
    ),
    "cat": (lambda x: torch.cat([x, x]), LOW, torch.float32),  # in no list: the input's dtype
    "a reflecting border": (lambda x: F.pad(x[None], (1, 1), "reflect"), LOW, torch.float32),  # only in the CPU's lists
    "matmul of float64": (lambda x: x.double() @ X.double(), torch.float64, torch.float64),
}


def dtypes(low: torch.dtype) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    return {name: (call(X.to(low)).dtype, call(X).dtype) for name, (call, *_) in RESULTS.items()}


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_lists_are_those_of_a_gpu(low: torch.dtype) -> None:
    with torch.autocast("cpu", low):
        before = dtypes(low)
        with cuda_semantics.as_on_gpu():
            found = dtypes(low)
        after = dtypes(low)
    wanted = {n: tuple(low if d == LOW else d for d in of) for n, (_, *of) in RESULTS.items()}
    assert found == wanted
    assert after == before != wanted  # the CPU's own lists again


def test_the_whole_lists_are_read() -> None:
    lists = cuda_semantics.lists()
    assert {p: (n[0], n[-1]) for p, n in lists.items() if p != "DIFFERENT_REDISPATCH_SIGNATURE"} == {
        "LOWER_PRECISION_FP": ("_convolution.deprecated", "scaled_dot_product_attention"),
        "FP32": ("acos", "_upsample_bicubic2d_aa"),
        "FP32_SET_OPT_DTYPE": ("prod", lists["FP32_SET_OPT_DTYPE"][-1]),
        "PROMOTE": ("addcdiv", "scatter_add"),
    }
    assert (
        lists["FP32_SET_OPT_DTYPE"][-1].startswith("sum.dim_")
        and lists["DIFFERENT_REDISPATCH_SIGNATURE"][0] == "norm.Scalar"
    )


class Normed(nn.Module):
    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.first, self.norm, self.last, self.device = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3), device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16) if self.device else contextlib.nullcontext():
            return self.last(self.norm(self.first(x))).softmax(-1)


def values(graph: torch.fx.GraphModule, target: Any) -> set[torch.dtype]:
    found = [n.meta["val"] for n in graph.graph.find_nodes(op="call_function", target=target)]
    return {(v[0] if isinstance(v, tuple) else v).dtype for v in found}


@contextlib.contextmanager
def switched_on(device: str) -> Iterator[None]:
    """Enable autocast if the program does not do it itself."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not device):
        yield


@pytest.mark.parametrize(
    "device", ["", "cuda", "cpu"], ids=["around the export", "cuda in the forward", "cpu in the forward"]
)
def test_forward_and_backward_are_captured_so(device: str) -> None:
    torch.manual_seed(0)
    net, x = Normed(device), torch.randn(5, 4, requires_grad=True)
    plain = Normed()
    with torch.autocast("cpu", torch.bfloat16):
        # torch must not reuse its cached casts of this
        before = trace.trace_program(plain, (x,), {}, None, signature=plain.forward).graph.code
    with switched_on(device), cuda_semantics.as_on_gpu():
        traced = trace.trace_program(net, (x,), {}, None, signature=net.forward)
        out = net(x)
        assert traced.ambient.autocast == ("" if device else "bfloat16")
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            trace.trace_program(plain, (x,), {}, None, signature=plain.forward).graph.code
            == before
            != traced.graph.code
        )
    assert out.dtype is torch.float32  # a softmax in float32
    pieces = partition.split_module(
        traced, "net", {n: (n, p.detach()) for n, p in net.named_parameters()}, forward_only=False
    )
    forward, backward = (g.module for g in pieces.graphs)
    aten = torch.ops.aten
    assert values(forward, aten.addmm.default) == {torch.bfloat16}
    assert values(forward, aten.rsqrt.default) == {torch.float32}
    assert values(backward, aten.mm.default) == {torch.bfloat16}
    given = forward(x.detach())[0]
    torch.testing.assert_close(given, out, rtol=1e-2, atol=1e-2)
    assert [g.dtype for g in pieces.graphs[1].outputs] == ["float32"] * 7  # of float32 weights and a float32 input


def test_what_a_gpu_refuses_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), cuda_semantics.as_on_gpu():
        with pytest.raises(
            ExportError,
            match=r"binary_cross_entropy under autocast raises on a GPU .*: use binary_cross_entropy_with_logits",
        ):
            F.binary_cross_entropy(torch.rand(3), torch.rand(3))
        with pytest.raises(
            RuntimeError, match=r"addcmul.* got torch.float16; expected torch.bfloat16 or torch.float32"
        ):
            torch.addcmul(X, X.half(), X)


def test_an_operator_with_a_rule_of_its_own_is_refused() -> None:
    with torch.library._scoped_library("aot_backward_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_autocast("aot_backward_tests::twice", "cuda", torch.float32, lib=library)
        twice = torch.ops.aot_backward_tests.twice
        with cuda_semantics.as_on_gpu():
            assert twice(X).dtype is torch.float32
            with (
                torch.autocast("cuda", torch.bfloat16),
                pytest.raises(ExportError, match=r"aot_backward_tests::twice has its own rule .* Export on"),
            ):
                twice(X)
        with torch.autocast("cpu", torch.bfloat16):
            assert twice(X).dtype is torch.float32


def test_the_program_sees_a_gpu_s_autocast() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled("cuda") and x.dtype is torch.float32
            return x @ X

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad @ X.T

    states = (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    with cuda_semantics.as_on_gpu():
        with torch.autocast("cuda"):  # float16 by default; the CPU's default is bfloat16
            assert torch.is_autocast_enabled() and (X @ X).dtype is torch.get_autocast_dtype("cuda") is torch.float16
            Custom.apply(X.half().requires_grad_()).sum().backward()
            with torch.autocast("cuda", enabled=False):
                assert (X @ X).dtype is torch.float32
            assert (X @ X).dtype is torch.float16
        with torch.autocast(X.device.type):  # a program that asks its input for the device does this
            assert (X @ X).dtype is torch.float16
        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cuda", enabled=False), torch.autocast("cuda"):
            assert (X @ X).dtype is torch.bfloat16
        assert not torch.is_autocast_enabled("cuda") and (X @ X).dtype is torch.float32
    assert states == (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch switches it off where there is no GPU")
def test_autocast_made_before_is_refused() -> None:
    decorated = torch.autocast("cuda", torch.bfloat16)(torch.relu)
    with (
        cuda_semantics.as_on_gpu(),
        pytest.raises(ExportError, match=r"created before the export, .* no GPU\. Create it in the forward"),
    ):
        decorated(X)


def test_dropout_in_attention_is_refused_but_for_the_formula() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.25)
    x = torch.randn(3, 2, 8)
    trace.trace_program(net, (x,), {}, None, signature=net.forward)
    with cuda_semantics.as_on_gpu():
        with pytest.raises(
            ExportError,
            match=r"with dropout 0.25: .* Export on a GPU \(target='cuda'\), or call it.*sdpa_kernel\(SDPBackend.MATH\)",
        ):
            trace.trace_program(net, (x,), {}, None, signature=net.forward)
        net.eval()
        trace.trace_program(net, (x,), {}, None, signature=net.forward)
        net.train()
        with sdpa_kernel(SDPBackend.MATH):
            traced = trace.trace_program(net, (x,), {}, None, signature=net.forward)
            net(x).sum().backward()
        assert traced.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default)
        double = net.double()  # a GPU has no other kernel for float64
        traced = trace.trace_program(double, (x.double(),), {}, None, signature=double.forward)
        assert traced.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default)
        net.float()
    trace.trace_program(net, (x,), {}, None, signature=net.forward)
    net(x).sum().backward()


def test_a_package_of_one_device_s_autocast_is_not_rebuilt_for_another() -> None:
    manifest = open_package(Path(__file__).parents[1] / "golden" / "1.0-pair.pt2").manifest
    _refuse_other_autocast(manifest, "cpu", "cuda:sm_90")
    name, entry = next(iter(manifest.entries.items()))
    cast = dataclasses.replace(
        entry.variants[0], ambient=dataclasses.replace(entry.variants[0].ambient, autocast="bfloat16")
    )
    manifest = dataclasses.replace(
        manifest, entries={name: dataclasses.replace(entry, variants=(*entry.variants, cast))}
    )
    _refuse_other_autocast(manifest, "cpu", "cpu:sse4")
    _refuse_other_autocast(manifest, "cuda", "cuda:sm_80")  # export does this with graphs captured for a GPU
    with pytest.raises(
        ExportError,
        match=f"'{name}' was captured under autocast bfloat16 for cpu, and cuda casts other .* target='cuda:sm_90'",
    ):
        _refuse_other_autocast(manifest, "cpu", "cuda:sm_90")


class Reached(Exception):
    pass


def test_rebuilding_under_autocast_casts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Export for a GPU rebuilds under the autocast of its capture, and casts nothing either."""

    def compile_graphs(graphs: Any, **_: Any) -> Any:
        assert not torch.is_autocast_enabled("cpu")
        raise Reached  # the graphs were read and match the package

    monkeypatch.setattr(compile, "compile_graphs", compile_graphs)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Reached):
        ab.rebuild(Path(__file__).parents[1] / "golden" / "1.4-targets.pt2", tmp_path / "net.pt2", target="cpu")
