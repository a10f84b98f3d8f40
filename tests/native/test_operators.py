"""Compare each operator of the standalone backend with libtorch's of the same name and C interface: values, dtypes,
shapes and strides. Compiled code relies on the strides without a check."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy
import torch

from aot_backward_exporters.toolchain import gcc, native_libraries

from ..support import c_library, core_calls
from ..support.core_calls import Optional, Refused

FLOATS = [torch.float32, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
_CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.float64: 7,
    torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
EMULATED = shlex.split(os.environ.get("AOT_BACKWARD_TEST_PYTHON", ""))


@functools.cache
def core() -> core_calls.Library | core_calls.Emulated:
    """``libaotb_core.so`` of this machine, or with ``AOT_BACKWARD_TEST_PYTHON`` that of the machine of this Python
    (``make arm``)."""
    if EMULATED:
        return core_calls.Emulated(EMULATED, str(built() / "libaotb_core.so"))
    return core_calls.Library(str(built() / "libaotb_core.so"))


def built() -> Path:
    return native_libraries.built(c_library.NATIVE, "aarch64") if EMULATED else c_library.build()


@functools.cache
def libtorch() -> core_calls.Library:
    return core_calls.Library(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def call(
    library: core_calls.Library | core_calls.Emulated, name: str, arguments: Sequence[Any], results: int
) -> list[torch.Tensor | None]:
    """Return the results of ``aoti_torch_cpu_NAME``; tensors that it writes are changed."""
    with plain(arguments) as given:
        return list(map(tensor_of, library.call(name, given, results)))


@contextmanager
def plain(arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """Give the arguments with a copy of each tensor, and then copy the memory back."""
    copies: dict[int, tuple[torch.Tensor, core_calls.Tensor]] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Optional):
            return Optional(copied(value.value))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copy = core_calls.Tensor(_CODES[value.dtype], value.shape, value.stride())
            copy.data[:] = ctypes.string_at(value.data_ptr(), copy.reach)
            copies[id(value)] = value, copy
        return copies[id(value)][1]

    yield list(map(copied, arguments))
    for tensor, copy in copies.values():
        ctypes.memmove(tensor.data_ptr(), bytes(copy.data), copy.reach)


def tensor_of(given: core_calls.Tensor | None) -> torch.Tensor | None:
    if given is None:
        return None
    dtype = _DTYPES[given.code]
    if not given.data:
        return torch.empty_strided(given.sizes, given.strides, dtype=dtype)
    return torch.frombuffer(given.data, dtype=dtype).as_strided(given.sizes, given.strides)


def assert_like(actual: torch.Tensor, expected: torch.Tensor, ulps: float) -> None:
    """Check dtype, shape and strides, and values to ``ulps`` units in the last place of 1 or of the largest value,
    since inputs are around 1."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert [s for s, n in zip(actual.stride(), actual.shape, strict=True) if n > 1] == [
        s for s, n in zip(expected.stride(), expected.shape, strict=True) if n > 1
    ]
    if not expected.is_floating_point() or not ulps:
        assert torch.equal(actual, expected)
    elif expected.numel():
        largest = max(1.0, float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=ulps * torch.finfo(expected.dtype).eps * largest, equal_nan=True
        )


def both(name: str, *arguments: Any, results: int = 1, ulps: float = 16) -> None:
    ours, theirs = call(core(), name, arguments, results), call(libtorch(), name, arguments, results)
    for a, e in zip(ours, theirs, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert_like(a, e, ulps)


def in_place(name: str, out: torch.Tensor, *arguments: Any, ulps: float = 16) -> None:
    """Compare as ``both`` does, for a function that writes its first argument."""
    ours = (
        torch.full_like(out, 0).as_strided_(out.size(), out.stride()).copy_(out) if out.is_contiguous() else out.clone()
    )
    theirs = out.clone()
    call(core(), name, [ours, *arguments], 0)
    call(libtorch(), name, [theirs, *arguments], 0)
    assert_like(ours, theirs, ulps)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "row-major") -> torch.Tensor:
    """Return random numbers with the strides of ``layout``."""
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "gaps":
        return torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., 1 : shape[-1] + 1].copy_(x)
    if layout == "expanded":
        return x[..., :1].expand(shape)
    if layout == "channels last":
        return x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    return x


LAYOUTS = ["row-major", "transposed", "gaps", "expanded"]
# Sizes around the edges of the kernels' blocks, and sizes that make a product a vector or empty.
SIZES = [
    (1, 1, 1),
    (5, 7, 3),
    (16, 16, 16),
    (33, 65, 17),
    (1, 40, 9),
    (40, 1, 9),
    (12, 24, 300),
    (16, 48, 130),
    (7, 33, 257),
    (30, 512, 40),
    (16, 256, 70),
    (130, 70, 50),
    (0, 4, 3),
    (4, 0, 3),
    (4, 5, 0),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matrix_products(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = size
    added = [(c, *factors) for c in ((n,), (m, n), (m, 1)) for factors in ((1.0, 1.0), (0.0, 2.0), (0.5, -1.0))]
    layouts = itertools.product(LAYOUTS, LAYOUTS) if m * n * k else [("row-major", "row-major")]
    for i, (a, b) in enumerate(layouts):
        x, y = drawn(m, k, dtype=dtype, layout=a), drawn(k, n, dtype=dtype, layout=b)
        in_place("mm_out", torch.zeros(m, n, dtype=dtype), x, y, ulps=2 + k)
        for c, beta, alpha in added if i == 0 else added[i % 9 : i % 9 + 1]:
            in_place("addmm_out", torch.zeros(m, n, dtype=dtype), drawn(*c, dtype=dtype), x, y, beta, alpha, ulps=2 + k)


@pytest.mark.skipif(bool(EMULATED), reason="NumPy's OpenBLAS is for this machine")
def test_matrix_products_by_a_library_of_the_machines() -> None:
    """This runs in a separate process because the library is chosen once. NumPy's wheels include OpenBLAS."""
    folders = (Path(module.__file__).parent.with_name(f"{module.__name__}.libs") for module in (numpy, scipy))
    found = [path for folder in folders for path in folder.glob("libscipy_openblas*")]
    if not found:
        pytest.skip("neither NumPy nor SciPy brings OpenBLAS along here")
    for path in found:
        program = (
            "import sys, torch\n"
            "from tests.native import test_operators as t\n"
            "before = open('/proc/self/maps').read().count(sys.argv[1])\n"
            "for dtype in t.FLOATS:\n"
            "    for a in t.LAYOUTS:\n"
            "        for b in t.LAYOUTS:\n"
            "            x, y = t.drawn(150, 170, dtype=dtype, layout=a), t.drawn(170, 160, dtype=dtype, layout=b)\n"
            "            t.in_place('mm_out', torch.zeros(150, 160, dtype=dtype), x, y, ulps=172)\n"
            "            t.in_place('addmm_out', torch.zeros(150, 160, dtype=dtype), t.drawn(160, dtype=dtype), x, y, 0.5, 2.0, ulps=172)\n"
            "print(before, open('/proc/self/maps').read().count(sys.argv[1]) > 0)"
        )
        environment = {**os.environ, "AOT_BACKWARD_BLAS": str(path), "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", program, path.name], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0 and done.stdout.endswith(" True\n"), done.stdout + done.stderr


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_products_of_batches(batch: int, layout: str, dtype: torch.dtype) -> None:
    x, y = drawn(batch, 6, 9, dtype=dtype, layout=layout), drawn(batch, 9, 4, dtype=dtype)
    in_place("bmm_out", torch.zeros(batch, 6, 4, dtype=dtype), x, y, ulps=12)
    in_place("bmm_out", torch.zeros(batch, 6, 4, dtype=dtype), x, y[:1].expand(batch, 9, 4) if batch else y, ulps=12)
    in_place(
        "bmm_out", torch.zeros(batch, 6, 4, dtype=dtype), x.transpose(0, 1).contiguous().transpose(0, 1), y, ulps=12
    )
    in_place(
        "baddbmm_out", torch.zeros(batch, 6, 4, dtype=dtype), drawn(batch, 6, 1, dtype=dtype), x, y, 0.5, 2.0, ulps=12
    )


# input, weight, stride, padding, dilation, groups
CONVOLUTIONS = {
    "plain": ((2, 3, 8, 9), (4, 3, 3, 3), 1, 0, 1, 1),
    "padded": ((2, 3, 8, 9), (4, 3, 3, 3), 1, 1, 1, 1),
    "strided": ((3, 4, 11, 10), (6, 4, 3, 2), 2, 1, 1, 1),
    "dilated": ((1, 2, 12, 12), (4, 2, 3, 3), 1, 2, 2, 1),
    "one by one": ((2, 8, 5, 5), (16, 8, 1, 1), 1, 0, 1, 1),
    "groups": ((2, 6, 7, 7), (8, 3, 3, 3), 1, 1, 1, 2),
    "depthwise": ((2, 6, 9, 9), (6, 1, 3, 3), 2, 1, 1, 6),
    "one channel": ((2, 1, 8, 8), (4, 1, 3, 3), 1, 0, 1, 1),
    "a line": ((2, 3, 16), (5, 3, 4), 2, 1, 1, 1),
    "a line in groups": ((2, 4, 16), (4, 1, 3), 1, 1, 1, 4),
    "one image": ((1, 3, 6, 6), (2, 3, 6, 6), 1, 0, 1, 1),
    "a volume": ((2, 3, 5, 6, 7), (4, 3, 2, 3, 3), 1, 1, 1, 1),
    "a volume in groups": ((2, 4, 6, 7, 5), (6, 2, 3, 2, 3), 2, 1, 1, 2),
    "a dilated volume": ((1, 2, 7, 8, 9), (3, 2, 3, 2, 2), 1, 2, 2, 1),
    "volumes, one by one": ((2, 3, 4, 5, 6), (4, 3, 1, 1, 1), 1, 0, 1, 1),
}


def spread(value: int, weight: Sequence[int]) -> list[int]:
    return [value] * (len(weight) - 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str, bias: bool, dtype: torch.dtype) -> None:
    shape, weight, stride, padding, dilation, groups = CONVOLUTIONS[case]
    for x_layout in ("row-major", "channels last") if len(shape) > 3 else ("row-major", "transposed"):
        for w_layout in ("row-major", "channels last") if len(shape) > 3 else ("row-major",):
            x, w = drawn(*shape, dtype=dtype, layout=x_layout), drawn(*weight, dtype=dtype, layout=w_layout)
            b = drawn(weight[0], dtype=dtype) if bias else None
            numbers = [
                spread(stride, weight),
                spread(padding, weight),
                spread(dilation, weight),
                False,
                spread(0, weight),
                groups,
            ]
            both("convolution", x, w, Optional(b), *numbers, ulps=64)
            y = torch.ops.aten.convolution(x, w, b, *numbers)
            for mask in ([True, True, bias], [False, True, bias], [True, False, False]):
                both(
                    "convolution_backward",
                    torch.randn_like(y),
                    x,
                    w,
                    Optional([weight[0]]),
                    *numbers,
                    mask,
                    results=3,
                    ulps=64,
                )


def test_what_is_not_finite_spoils_what_it_belongs_to_alone() -> None:
    """Image rows lie side by side with a border between them, so each weight also meets places outside its row."""
    x, w = drawn(3, 2, 6, 7), drawn(4, 2, 3, 3)
    x[1, 0, 2, 6] = math.inf
    numbers = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    gy = torch.zeros(3, 4, 6, 7)
    gy[1, :, 2, 6], gy[0] = 1, drawn(4, 6, 7)  # only in the row of that element
    for mask in ([True, True, True], [False, True, False]):
        both("convolution_backward", gy, x, w, Optional([4]), *numbers, mask, results=3, ulps=64)
    both("convolution", x, w, Optional(None), *numbers, ulps=64)
    spoilt = torch.ops.aten.convolution_backward(gy, x, w, [4], *numbers, [False, True, False])[1]
    assert 0 < int(spoilt.isfinite().sum()) < spoilt.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride, padding, dilation, more", [(1, 0, 1, 0), (2, 1, 1, 1), (3, 0, 2, 1)])
def test_transposed_convolutions(
    stride: int, padding: int, dilation: int, more: int, groups: int, dtype: torch.dtype
) -> None:
    for shape, weight in (((2, 4, 5, 6), (4, 3, 3, 3)), ((2, 4, 7), (4, 2, 3)), ((2, 4, 3, 4, 5), (4, 2, 3, 2, 3))):
        x, w, b = drawn(*shape, dtype=dtype), drawn(*weight, dtype=dtype), drawn(weight[1] * groups, dtype=dtype)
        numbers = [
            spread(stride, weight),
            spread(padding, weight),
            spread(dilation, weight),
            True,
            spread(more, weight),
            groups,
        ]
        both("convolution", x, w, Optional(b), *numbers, ulps=64)
        y = torch.ops.aten.convolution(x, w, b, *numbers)
        both(
            "convolution_backward",
            torch.randn_like(y),
            x,
            w,
            Optional([len(b)]),
            *numbers,
            [True, True, True],
            results=3,
            ulps=64,
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["row-major", "channels last", "gaps"])
@pytest.mark.parametrize(
    "kernel, stride, padding, dilation, ceil",
    [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 2, 1, 1, True), (2, 3, 0, 2, True), (3, 1, 1, 2, False)],
)
def test_max_pooling(
    kernel: int, stride: int, padding: int, dilation: int, ceil: bool, layout: str, dtype: torch.dtype
) -> None:
    x = drawn(2, 3, 10, 9, dtype=dtype, layout=layout)
    x[0, 0, 3, 4] = math.nan
    numbers = [[kernel] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, ceil]
    both("max_pool2d_with_indices", x, *numbers, results=2, ulps=0.1)
    y, places = torch.ops.aten.max_pool2d_with_indices(x, *numbers)
    both("max_pool2d_with_indices_backward", torch.randn_like(y), x, *numbers, places)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("lengths", [(5, 5), (1, 7), (33, 33), (64, 20)], ids=str)
def test_attention(lengths: tuple[int, int], causal: bool, dtype: torch.dtype) -> None:
    name, (length, s) = "_scaled_dot_product_flash_attention_for_cpu", lengths
    if causal and length != s:
        return
    for layout in ("heads", "lengths"):
        shapes = [(2, 3, n, 8) for n in (length, s, s)]
        q, k, v = (
            drawn(*shape, dtype=dtype)
            if layout == "heads"
            else drawn(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
            for shape in shapes
        )
        for mask in (
            None,
            *(
                []
                if causal
                else [drawn(2, 3, length, s, dtype=dtype), drawn(2, 1, length, s, dtype=dtype).expand(2, 3, length, s)]
            ),
        ):
            for scale in (None, 0.3):
                arguments = [0.0, causal, Optional(mask), Optional(scale)]
                both(name, q, k, v, *arguments, results=2, ulps=64)
                out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q, k, v, 0.0, causal, attn_mask=mask, scale=scale
                )
                both(f"{name}_backward", torch.randn_like(out), q, k, v, out, sums, *arguments, results=3, ulps=256)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("how", ["sum", "amax", "amin"])
def test_scatter_reduce(how: str, dtype: torch.dtype) -> None:
    for shape, dim in (((9,), 0), ((9, 5), 0), ((9, 5), 1), ((4, 3, 6), 1)):
        for layout in ("row-major", "gaps"):
            out = drawn(*shape, dtype=dtype)
            count = [n + 20 if d == dim else n for d, n in enumerate(shape)]
            index, src = torch.randint(shape[dim], count), drawn(*count, dtype=dtype, layout=layout)
            for given in (index, index.narrow(-1, 0, 1).expand(count)):
                ours, theirs = out.clone(), out.clone()
                call(core(), "scatter_reduce_two_out", [ours, ours, dim, given, src, how, True], 0)
                call(libtorch(), "scatter_reduce_two_out", [theirs, theirs, dim, given, src, how, True], 0)
                assert_like(ours, theirs, 16)


def test_an_index_out_of_bounds_is_refused() -> None:
    out = torch.zeros(4)
    with pytest.raises(Refused, match="index 4 is out of bounds for dimension 0 with size 4"):
        call(core(), "scatter_reduce_two_out", [out, out, 0, torch.tensor([4]), torch.ones(1), "sum", True], 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("mode", [0, 1], ids=["sum", "mean"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("padding", [-1, 3])
def test_embedding_bags(padding: int, last: bool, mode: int, index: torch.dtype, dtype: torch.dtype) -> None:
    weight, offsets = drawn(20, 6, dtype=dtype), torch.tensor([0, 3, 3, 8, *([11] if last else [])], dtype=index)
    indices = torch.randint(20, (11,), dtype=index)
    indices[4], indices[8] = 3, 3
    for rows in (weight, drawn(20, 6, dtype=dtype, layout="transposed")):
        for factors in (None, drawn(11, dtype=dtype)) if mode == 0 else (None,):
            arguments = rows, indices, offsets, False, mode, False, Optional(factors), last, padding
            both("_embedding_bag", *arguments, results=4)
            ours, theirs = (
                call(library, "_embedding_bag_forward_only", arguments, 4) for library in (core(), libtorch())
            )
            assert ours[0] is not None and theirs[0] is not None
            assert_like(ours[0], theirs[0], 16)
            if factors is not None:
                of = torch.ops.aten._embedding_bag(rows, indices, offsets, False, mode, False, factors, last, padding)[
                    1
                ]
                both(
                    "_embedding_bag_per_sample_weights_backward",
                    drawn(4, 6, dtype=dtype),
                    rows,
                    indices,
                    offsets,
                    of,
                    mode,
                    padding,
                )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_running_sums_and_products(name: str, dim: int, dtype: torch.dtype) -> None:
    x = drawn(4, 7, 5) * (10 if name == "cumsum" else 2)
    for given in (x.to(dtype), x.to(dtype).transpose(0, 2), x.to(dtype)[:, ::2], x.to(dtype)[:0], x[0, 0, 0].to(dtype)):
        both(name, given, dim if given.dim() else 0, Optional(None))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [0, -1])
def test_running_logarithms_of_sums(dim: int, dtype: torch.dtype) -> None:
    x = drawn(6, 7, dtype=dtype) * 100
    x[0, 1], x[2, 2], x[3, 3], x[0, 4], x[:, 5] = -math.inf, math.inf, math.nan, math.inf, -math.inf
    for given in (x, x.t(), x[:, ::2]):
        both("logcumsumexp", given, dim)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_running_extremes(name: str, dim: int, dtype: torch.dtype) -> None:
    x = (drawn(6, 7) * 3).round().to(dtype)
    if dtype.is_floating_point:
        x[2, 3], x[4, 3], x[0, 0], x[1, 1] = math.nan, math.nan, math.inf, -0.0
    for given in (x, x.t(), x[:, ::2], x[0, 0]):
        both(name, given, dim if given.dim() else 0, results=2, ulps=0 if not dtype.is_floating_point else 0.1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, -1])
def test_topk(dim: int, largest: bool, dtype: torch.dtype) -> None:
    x = (drawn(6, 9) * 1000).to(dtype)
    if dtype.is_floating_point:
        x[2, 3] = math.nan
    for given in (x, x.t().contiguous().t()):
        for k in (0, 1, 5):
            both("topk", given, k, dim, largest, True, results=2, ulps=0.1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sorting(dim: int, descending: bool, dtype: torch.dtype) -> None:
    x = (drawn(2, 3, 4, 5) * 3).round().to(dtype)  # has many equal values
    if dtype.is_floating_point:
        x[0, 1, 2, 3], x[1, 1, 2, 2], x[1, 0, 0], x[0, 0, 0, 0] = math.nan, math.nan, -0.0, math.inf
    else:
        x[0, 0, 0, 0], x[1, 2, 3, 4] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    last = x.to(memory_format=torch.channels_last)
    for given in (x, last, x.transpose(1, 2), x[:, :, ::2], x[:, :, :, :1].expand(2, 3, 4, 6), x[:0], x[0, 0, 0, 0]):
        both("sort_stable", given, Optional(True), dim if given.dim() else 0, descending, results=2, ulps=0.1)


def by_name(
    library: core_calls.Library | core_calls.Emulated, operator: str, arguments: Sequence[Any], results: int
) -> list[torch.Tensor | None]:
    with plain(arguments) as given:
        return list(map(tensor_of, library.by_name(operator, given, results, 2 << 56 | 13 << 48)))


def both_by_name(operator: str, *arguments: Any, results: int, ulps: float) -> list[torch.Tensor]:
    ours, theirs = by_name(core(), operator, arguments, results), by_name(libtorch(), operator, arguments, results)
    for a, e in zip(ours, theirs, strict=True):
        assert a is not None and e is not None
        assert_like(a, e, ulps)
    return [t for t in theirs if t is not None]


def square(*shape: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return matrices that are far from singular and not diagonally dominant, so that rows are exchanged."""
    x = drawn(*shape, dtype=dtype) + 3 * torch.eye(shape[-1], dtype=dtype).roll(1, 0)
    return {"row-major": x, "column-major": x.mT.contiguous().mT, "gaps": torch.cat([x, x], -1)[..., : shape[-1]]}[
        layout
    ]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["row-major", "column-major", "gaps"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_linear_algebra(n: int, batch: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    a = square(*batch, n, n, dtype=dtype, layout=layout)
    both_by_name("_linalg_det", a, results=3, ulps=500)
    both_by_name("_linalg_slogdet", a, results=4, ulps=500)
    both_by_name("linalg_inv_ex", a, False, results=2, ulps=500)
    lu, pivots, _ = both_by_name("linalg_lu_factor_ex", a, True, False, results=3, ulps=500)
    definite = a @ a.mT + torch.eye(n, dtype=dtype)
    for upper in (False, True):
        both_by_name("linalg_cholesky_ex", definite, upper, False, results=2, ulps=500)
    for left in (True, False):
        for b in (
            drawn(*batch, n, 5, dtype=dtype),
            drawn(*batch, 5, n, dtype=dtype).mT,
            drawn(n, 5, dtype=dtype),
            drawn(1, n, 2, dtype=dtype),
        ):
            b = b if left else b.mT
            both_by_name("_linalg_solve_ex", a, b, left, False, results=4, ulps=500)
            for transposed in (False, True):
                both_by_name("linalg_lu_solve", lu, pivots, b, left, transposed, results=1, ulps=500)
            for upper in (False, True):
                for unit in (False, True) if n < 17 else (False,):
                    both_by_name("linalg_solve_triangular", definite, b, upper, left, unit, results=1, ulps=2000)
    both_by_name("_linalg_solve_ex", a, drawn(*batch, n, dtype=dtype), True, False, results=4, ulps=500)


def test_matrices_that_have_no_inverse_are_refused() -> None:
    a = torch.stack([torch.eye(3), torch.ones(3, 3)])
    _, info = by_name(core(), "linalg_inv_ex", [a, False], 2)
    assert info is not None and info.tolist() == [0, 2]
    with pytest.raises(Refused, match=r"linalg.inv: \(Batch element 1\): the matrix is singular: pivot 2 is 0"):
        by_name(core(), "_linalg_check_errors", [info, "linalg.inv", False], 0)
    _, info = by_name(core(), "linalg_cholesky_ex", [torch.diag(torch.tensor([1.0, 2.0, -1.0])), False, False], 2)
    assert info is not None and info.item() == 3
    with pytest.raises(
        Refused, match=r"linalg.cholesky: the matrix is not positive-definite: see its leading minor of order 3"
    ):
        by_name(core(), "_linalg_check_errors", [info, "linalg.cholesky", True], 0)
    by_name(core(), "_linalg_check_errors", [torch.zeros(2, dtype=torch.int32), "linalg.inv", False], 0)
    with pytest.raises(Refused, match="of matrices that are not square"):
        by_name(core(), "linalg_inv_ex", [torch.ones(2, 3), False], 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_has_eagers_masks(dtype: torch.dtype) -> None:
    for x in (
        drawn(7, 33, dtype=dtype),
        drawn(7, 33, dtype=dtype, layout="transposed"),
        drawn(2, 3, 4, 5, dtype=dtype, layout="channels last"),
    ):
        for p, train in ((0.3, True), (0.0, True), (1.0, True), (0.5, False)):
            core().seed(11)
            torch.manual_seed(11)
            both("native_dropout", x, p, Optional(train), results=2, ulps=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (16,), (37,), (4, 16)], ids=str)
def test_normal_numbers_are_eagers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    core().seed(5)
    torch.manual_seed(5)
    code = Optional(_CODES[dtype])
    for _ in range(2):  # the generator may keep a number for the next call
        ours = call(core(), "randn", [list(shape), code, None, None, False, None], 1)
        theirs = torch.randn(shape, dtype=dtype)
        assert ours[0] is not None
        torch.testing.assert_close(ours[0], theirs, rtol=8 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert_same_state()


def assert_same_state() -> None:
    """Check that both generators are in the same state."""
    expected = torch.rand(3)
    torch.set_rng_state(torch.tensor(list(core().random_state()), dtype=torch.uint8))
    assert torch.equal(torch.rand(3), expected)


def drawn_by_both(name: str, *arguments: Any) -> None:
    """Check that both draw equal numbers bit for bit and leave the generator in the same state."""
    core().seed(7)
    torch.manual_seed(7)
    for _ in range(2):
        both(name, *arguments, ulps=0)
    assert_same_state()


_PLACE = None, None, False, None  # layout, device with its number, pinned memory


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_numbers_are_eagers(dtype: torch.dtype) -> None:
    drawn_by_both("rand", [3, 37], Optional(_CODES[dtype]), *_PLACE)
    for layout in ("row-major", "transposed", "channels last"):
        like = drawn(2, 3, 4, 5, dtype=dtype, layout=layout)
        drawn_by_both("rand_like", like, None, *_PLACE, None)


@pytest.mark.parametrize(
    "low, high",
    [(0, 10), (-5, 5), (3, 4), (0, (1 << 28) - 1), (0, 1 << 28), (-(1 << 40), 1 << 41), (-(1 << 63), (1 << 63) - 1)],
)
def test_random_integers_are_eagers(low: int, high: int) -> None:
    drawn_by_both("randint_low", low, high, [5, 7], Optional(_CODES[torch.int64]), *_PLACE)
    drawn_by_both("randint", abs(high), [9], Optional(_CODES[torch.int64]), *_PLACE)
    drawn_by_both("randint_low", max(low, -100), min(high, 100), [9], None, *_PLACE)
    with pytest.raises(Refused, match="expects 'from' to be less than 'to'"):
        call(core(), "randint", [0, [3], None, *_PLACE], 1)


def test_permutations_are_eagers() -> None:
    for n in (0, 1, 2, 100):
        drawn_by_both("randperm", n, None, *_PLACE)


def test_copies_and_constants() -> None:
    for x in (
        drawn(3, 4),
        drawn(3, 4, layout="transposed"),
        drawn(2, 3, 4, 5, layout="channels last"),
        drawn(3, 4, layout="gaps"),
        torch.randint(9, (3, 2)),
        torch.tensor(2.5),
    ):
        both("clone", x, ulps=0)


# --- functions on vectors ---------------------------------------------------------------------------------------------

_DOMAINS: dict[str, tuple[float, float]] = {
    "acos": (-1, 1), "asin": (-1, 1), "acosh": (1, 50), "atanh": (-0.999, 0.999), "log": (1e-30, 1e30), "log2": (1e-30, 1e30), "log10": (1e-30, 1e30),
    "log1p": (-0.99, 1e5),
    "exp": (-87, 88), "exp2": (-120, 120), "expm1": (-80, 80), "sinh": (-80, 80), "cosh": (-80, 80),
    "lgamma": (0.01, 50), "pow": (0.01, 20), "erfc": (-5, 9),
}  # fmt: skip


_EXACT = ("copysign", "fmod", "nextafter")
_OF_TWO = ("atan2", "pow", "hypot", *_EXACT)


def exported() -> list[str]:
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(built() / "libaotb_core.so")], capture_output=True, text=True, check=True
    ).stdout.split()
    return sorted(n for n in names if n.startswith("Sleef_"))


def parts(name: str) -> tuple[str, str, int]:
    """Split ``Sleef_atan2f8_u10`` into atan2, f, 8."""
    head = name.removeprefix("Sleef_").partition("_")[0]
    lanes = next(n for n in (16, 8, 4, 2) if head.endswith((f"f{n}", f"d{n}")))
    head = head.removesuffix(str(lanes))
    return head[:-1], head[-1], lanes


@functools.cache
def vectors() -> Path:
    """Compile each function in a loop over arrays: void NAME(const T *x, const T *y, T *out, long count)."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["AOT_BACKWARD_TEST_FOLDER"]))
    lines = ["typedef float f; typedef double d;"]
    for name in exported():
        function, kind, lanes = parts(name)
        size = lanes * (4 if kind == "f" else 8)
        target = {16: "sse2", 32: "avx2,fma", 64: "avx512f,avx512vl,avx512dq,avx2,fma"}[size]
        attribute = "" if EMULATED else f'__attribute__((target("{target}"))) '
        two = function in _OF_TWO
        lines.append(f"""typedef {kind} v_{name} __attribute__((vector_size({size}), aligned({size // lanes})));
typedef {kind} w_{name} __attribute__((vector_size({size})));
w_{name} {name}(w_{name}{f", w_{name}" if two else ""});
{attribute}void loop_{name}(const {kind} *x, const {kind} *y, {kind} *out, long count) {{
  for (long i = 0; i < count; i += {lanes})
    *(v_{name} *)(out + i) = {name}(*(const v_{name} *)(x + i){f", *(const v_{name} *)(y + i)" if two else ""});
}}""")
    source, made = folder / "vectors.c", folder / "vectors.so"
    source.write_text("\n".join(lines))
    compiler = gcc.c_compiler("aarch64") if EMULATED else ["gcc"]
    flags = ["-O1", "-shared", "-fPIC", "-Wno-psabi"]
    argv = [*compiler, *flags, str(source), "-o", str(made), f"-L{built()}", "-laotb_core", f"-Wl,-rpath,{built()}"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def exactly(function: str) -> Callable[..., torch.Tensor]:
    return torch.lgamma if function == "lgamma" else getattr(torch, function)


@pytest.mark.parametrize("lanes", [4, 8, 16, 2])
def test_functions_on_vectors(lanes: int) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    tried = 0
    for name in exported():
        function, kind, width = parts(name)
        if width != lanes or (width * (4 if kind == "f" else 8) == 64 and "avx512dq" not in flags):
            continue
        dtype = torch.float32 if kind == "f" else torch.float64
        low, high = _DOMAINS.get(function, (-20, 20))
        x = (torch.rand(4096, dtype=torch.float64) * (high - low) + low).to(dtype)
        if function in ("log", "log2", "log10"):
            x = torch.exp(torch.rand(4096, dtype=torch.float64) * 60 - 30).to(dtype)
        special = torch.tensor(
            [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, 3e4, -3e4, 1e-3], dtype=dtype
        )
        x[: len(special)] = special
        y = torch.rand(4096, dtype=torch.float64).mul(4).sub(2).to(dtype)
        out = torch.empty_like(x)
        with plain([x, y, out]) as given:
            core().loop(str(vectors()), f"loop_{name}", given, 4096)
        if function in _EXACT:
            assert torch.equal(out.nan_to_num(77), getattr(torch, function)(x, y).nan_to_num(77)), name
            tried += 1
            continue
        exact = exactly(function)(x.double(), y.double()) if function in _OF_TWO else exactly(function)(x.double())
        assert torch.equal(out.isnan(), exact.isnan()), name
        finite = exact.isfinite() & (exact.abs() <= torch.finfo(dtype).max)
        assert torch.equal(
            out[~finite & ~exact.isnan()].double(), exact[~finite & ~exact.isnan()].to(dtype).double()
        ), name
        unit = torch.maximum(
            exact[finite].abs() * torch.finfo(dtype).eps, torch.tensor(torch.finfo(dtype).tiny, dtype=torch.float64)
        )
        limit = 4.0 if function not in ("lgamma",) else 1e3  # near its zeros lgamma has no correct digits
        off = ((out[finite].double() - exact[finite]).abs() / unit).max().item()
        assert off <= limit, f"{name}: off by {off} units in the last place"
        tried += 1
    assert tried or lanes == 16 or (EMULATED and lanes == 8)
