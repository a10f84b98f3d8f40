"""Nothing between the trace and native code narrows a declared size range: not the trace, the passes over joint graphs,
the partitioner, the decompositions or lowering. Each may test a size only for speed, and each new torch tests
elsewhere. If the program itself narrows a size, the export fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_runtime import load

LEAST, MOST = 2, 200


class Pairs(nn.Module):
    """Matrix products with the dynamic size in each of their dimensions, also in two: atoms x atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, pos: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(pos))
        near = torch.softmax(hidden @ hidden.T, 1)
        return self.second(near @ hidden).square().mean() + (near.T @ near).sum()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Words(nn.Module):
    """Two dynamic sizes that views merge. Each may be 1 if torch's trace allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(self.embed(tokens)).flatten(0, 1), tokens.flatten())


class Heads(nn.Module):
    """A layer views an attention's output as rows. The output's strides do not follow from its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, 2, width // 2).transpose(1, 2) for t in self.mixed(x).split(width, dim=2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(rows, length, width)).square().mean()


def dynamic(*names: str, least: int = LEAST) -> dict[int, Dim]:
    return {i: Dim(name, min=least, max=MOST) for i, name in enumerate(names)}


CASES = {
    "pairs": (
        Pairs,
        lambda n: (torch.randn(n, 3, requires_grad=True),),
        [dynamic("atoms")],
        ("module", "grad", "step"),
    ),
    "images": (Images, lambda n: (torch.randn(n, 1, 8, 8),), [dynamic("rows", least=1)], ("module", "grad")),
    "words": (
        Words,
        lambda n: (torch.randint(0, 10, (n, n)),),
        [dynamic("rows", "length", least=1)],
        ("module", "grad"),
    ),
    "heads": (Heads, lambda n: (torch.randn(n, n, 8),), [dynamic("rows", "length", least=1)], ("module", "grad")),
}


@pytest.mark.parametrize("name", CASES)
def test_no_pass_narrows_a_declared_range(name: str, tmp_path: Path) -> None:
    if name in ("words", "heads") and not torch_api.at_least("2.13"):
        pytest.skip("Inductor before 2.13 asks for the product of two sizes whether it is at least 2")
    make, inputs, shapes, kinds = CASES[name]
    torch.manual_seed(0)
    model = make()
    variants = [ab.Variant(inputs(5), dynamic_shapes=shapes)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = {
        "module": lambda: ab.Module(model, variants),
        "grad": lambda: ab.Grad(model, variants, wrt="parameters"),
        "step": lambda: ab.Step(model, variants, optimizer),
    }
    package = load(ab.export(tmp_path / "open.pt2", {kind: made[kind]() for kind in kinds}))
    for kind, entry in package.manifest.entries.items():
        (variant,) = entry.variants
        assert variant.guards == (), kind
        assert {(s.label, s.minimum, s.maximum) for s in variant.symbols} == {
            (d.__name__, d.min, MOST) for d in shapes[0].values()
        }, kind
    grad = package.grad("grad")
    for n in (shapes[0][0].min, 33, MOST - 1):  # around and beyond each limit in torch
        args = inputs(n)
        expected = dict(
            zip(
                [k for k, _ in model.named_parameters()],
                torch.autograd.grad(model(*args), list(model.parameters())),
                strict=True,
            )
        )
        torch.testing.assert_close(dict(grad(*args)[1]), expected, rtol=1e-3, atol=1e-5)


class Filled(nn.Module):
    """Second derivatives of abs, and writes into columns, with a dynamic number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def filled(x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros_like(x)
            y[:, 0] += x[:, 2].abs()
            y[:, 0] += x[:, 2].abs()
            return y.square().sum()

        return (torch.func.grad(filled)(x) * x).sum()


class Slopes(nn.Module):
    """Forward mode through a layer whose bias has no tangent, with and without vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1]
        return slope.square().sum() + torch.func.vmap(torch.func.jacfwd(lambda q: self.net(q).tanh()))(x).square().sum()


class LastChannels(nn.Module):
    """Operators that ask C++ whether a size is 1: a channels_last convolution, a view, sums and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.PixelShuffle(2), nn.GroupNorm(1, 1)).to(
            memory_format=torch.channels_last
        )
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x.contiguous(memory_format=torch.channels_last)).flatten(1)[:, :12].view(-1, 3, 4)
        y = self.attend(y, y, y, need_weights=False)[0]
        return (
            torch.einsum("bij,bik->jk", y, y).square().sum()
            + y.cumsum(0).transpose(0, 1).contiguous().view(-1).square().sum()
        )


class Pooled(nn.Module):
    """A length that is twice another size, which may be 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2).prod(1).square().sum()


class Pictures(nn.Module):
    """Consecutive convolutions over a dynamic height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


class Signals(nn.Module):
    """Max pooling of a dynamic length, with and without indices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, places = nn.functional.max_pool1d(x, 3, 2, 1, 1, False, True)
        return (values * places).sum() + nn.functional.max_pool1d(x[0], [2], dilation=2).square().sum()


class Neighbours(nn.Module):
    """Two sizes: as in eager, the first is at least the second, and they may be equal."""

    def forward(self, x: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        return (torch.gather(x, 1, near.expand(-1, -1, 3)) - x[:, : near.shape[1]]).square().sum()


def _rows(name: str = "rows", least: int = 1) -> dict[int, Dim]:
    return {0: Dim(name, min=least, max=MOST)}


SERVED = {
    "filled": (Filled, lambda n: (torch.randn(n, 4),), (_rows(),), [(1,), (5,), (MOST,)]),
    "slopes": (Slopes, lambda n: (torch.randn(n, 3),), (_rows(),), [(1,), (5,), (MOST,)]),
    "channels": (LastChannels, lambda n: (torch.randn(n, 4, 4, 4),), (_rows(),), [(1,), (5,), (MOST,)]),
    "pooled": (
        Pooled,
        lambda n: (torch.randn(n),),
        ({0: 2 * Dim("half", min=2, max=MOST)},),
        [(4,), (6,), (2 * MOST,)],
    ),
    "pictures": (
        Pictures,
        lambda n, m=7: (torch.randn(2, 2, n, m),),
        ({2: Dim("height", min=4, max=MOST), 3: Dim("width", min=4, max=MOST)},),
        [(4, 4), (9, 5), (5, 64)],
    ),
    "signals": (
        Signals,
        lambda n: (torch.randn(2, 3, n),),
        ({2: Dim("length", min=4, max=MOST)},),
        [(4,), (9,), (MOST,)],
    ),
    "neighbours": (
        Neighbours,
        lambda n, m=3: (torch.randn(2, n, 3), torch.randint(n, (2, m, 1))),
        ({1: Dim("every", min=1, max=MOST)}, {1: Dim("near", min=1, max=MOST)}),
        [(1, 1), (5, 5), (5, 1), (MOST, MOST), (MOST, 1)],
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_each_declared_size_and_pair_of_sizes_is_served(name: str, tmp_path: Path) -> None:
    make, inputs, shapes, sizes = SERVED[name]
    torch.manual_seed(0)
    model = make().double()
    grad = load(
        ab.export_grad(
            model,
            tuple(t.double() if t.is_floating_point() else t for t in inputs(6)),
            wrt="inputs",
            dynamic_shapes=shapes,
            path=tmp_path / "open.pt2",
            tune="none",
        )
    ).grad()
    for at in sizes:
        first, *rest = inputs(*at)
        x = (first := first.double()).clone().requires_grad_()
        (expected,) = torch.autograd.grad(model(x, *rest), x)
        torch.testing.assert_close(grad(first, *rest)[1], expected)


class Corners(nn.Module):
    """Torch specialises the convolution at each size whose output is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin().sum()


class Sequences(nn.Module):
    """Conditions that hold for each size, but which a range does not prove; adaptive pooling, whose windows Inductor
    would write out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(2, 2)
        pooled = nn.functional.max_pool1d(x, 2, ceil_mode=True)
        image = x[:, :, None]
        means, maxima = (
            pool(image, (1, 3)) for pool in (nn.functional.adaptive_avg_pool2d, nn.functional.adaptive_max_pool2d)
        )
        return (
            parts[0].sin().sum()
            + parts[1].cos().sum()
            + (pooled * 2).sin().sum()
            + means.sin().sum()
            + maxima.cos().sum()
        )


def at_one(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.reshape(-1, 1) if x.shape[0] != 1 else x
    return y.sin().sum() + x[i].sum()


def squeezed(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.squeeze().sin().sum() + x[i].sum()


def summed_up(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0).sin().sum() + torch.fft.rfft(torch.cat([x, x])).abs().square().sum()


_n, _k = Dim("n", min=1, max=MOST), Dim("k", min=0, max=MOST)
SERVED_APART = {
    "a convolution of two dynamic sizes": (
        Corners(),
        lambda h, w: (torch.randn(2, 1, h, w),),
        ({2: Dim("h", max=MOST), 3: Dim("w", min=3, max=MOST)},),
        [(3, 3), (3, 7), (8, 3), (8, 7)],
        4,
    ),
    "conditions that hold": (
        Sequences(),
        lambda n: (torch.randn(2, 3, n),),
        ({2: Dim("n", min=2, max=MOST)},),
        [(2,), (3,), (6,), (MOST,)],
        1,
    ),
    "a branch": (
        at_one,
        lambda n, k: (torch.randn(n), torch.zeros(k, dtype=torch.long)),
        ({0: _n}, {0: _k}),
        [(1, 3), (1, 40), (4, 0), (4, 3)],
        2,
    ),
    "squeeze": (
        squeezed,
        lambda n, k: (torch.randn(n), torch.zeros(k, dtype=torch.long)),
        ({0: _n}, {0: _k}),
        [(1, 1), (4, 3)],
        2,
    ),
    "a size of 0 and one of 1": (
        summed_up,
        lambda n: (torch.randn(n),),
        ({0: Dim("n", min=1, max=MOST)},),
        [(1,), (2,), (5,)],
        2,
    ),
}


@pytest.mark.parametrize("name", SERVED_APART)
def test_a_few_sizes_that_the_code_excludes_get_variants_of_their_own(name: str, tmp_path: Path) -> None:
    fn, inputs, shapes, sizes, variants = SERVED_APART[name]
    torch.manual_seed(0)
    path = ab.export_grad(
        fn, inputs(*sizes[-1]), wrt="x", dynamic_shapes=shapes, path=tmp_path / "apart.pt2", tune="none"
    )
    package = load(path)
    assert len(package.manifest.entries["grad"].variants) == variants
    for at in sizes:
        x, *rest = inputs(*at)
        x.requires_grad_()
        torch.testing.assert_close(package.grad()(x.detach(), *rest)[1], torch.autograd.grad(fn(x, *rest), x)[0])


def test_a_step_gets_a_variant_for_a_size_that_its_code_excludes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 1)).double()
    length = {2: Dim("length", min=3, max=MOST)}
    path = ab.export_step(
        net,
        (torch.randn(4, 2, 9, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)),
        loss_fn=lambda out, target: (out - target).square().mean(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        dynamic_shapes=(length, None),
        path=tmp_path / "step.pt2",
        tune="none",
    )
    step, optimizer = load(path).step(), torch.optim.SGD(net.parameters(), lr=0.1)
    for size in (9, 3, 5):
        x, target = torch.randn(4, 2, size, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
        optimizer.zero_grad()
        loss = (net(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, target), loss.detach())


def test_more_sizes_apart_than_few_fail_the_export(tmp_path: Path) -> None:
    def three(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum() if x.shape[0] > 3 else x.cos().sum()

    with pytest.raises(
        ab.ExportError,
        match=r"n \(x\.shape\[0\]\): expected code for 1 to 200, as declared, got code for 4 to 200, in three \(",
    ):
        ab.export_grad(
            three, (torch.randn(5),), wrt="x", dynamic_shapes=({0: _n},), path=tmp_path / "no.pt2", tune="none"
        )


def long(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return (x * 2 if x.shape[0] < 100 else x).sum()


def paired(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 2).prod(1).sum()


def equal(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return (x * i).sum()


def different(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum() if x.shape[0] != i.shape[0] else x.sum()


def ramp(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return (torch.linspace(1, 2, x.shape[0]) * x * i).sum()


REFUSED = {
    long: r"n \(x\.shape\[0\]\) is declared .* in long \(.*is valid only if n < 100: declare sizes for which that holds",
    paired: r"n \(x\.shape\[0\]\) is declared .* in paired \(.*is valid only if \(n % 2\) == 0: declare .*2 \* Dim",
    equal: r"n \(x\.shape\[0\]\) is declared .* in equal \(.*aten\.mul\.Tensor, is valid only if it is equal to k \(i\.shape\[0\]\): give both",
    different: r"expected code for all declared sizes, got code that is valid only if n != k, which excludes n .* in different \(",
    ramp: r"n \(x\.shape\[0\]\) is declared .* in ramp \(.*is valid only for 4",
}


@pytest.mark.parametrize("program", REFUSED)
def test_a_declared_size_that_is_not_served_fails_the_export(
    program: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """It names each size once, with the bound, the line and the alternative. Sizes left to the trace (``Dim.AUTO``) are
    narrowed."""
    second = 4 if program in (equal, ramp) else 3
    args = (torch.randn(4), torch.arange(second))
    shared = Dim("n", min=1, max=MOST)
    other = shared if program is ramp else Dim("k", min=1, max=MOST)
    with pytest.raises(ab.ExportError, match=REFUSED[program]) as raised:
        ab.export_grad(
            program, args, wrt="x", dynamic_shapes=({0: shared}, {0: other}), path=tmp_path / "no.pt2", tune="none"
        )
    assert str(raised.value).count("is declared") <= 1 and "mark_dynamic" not in str(raised.value)


def test_sizes_left_to_the_trace_are_narrowed_and_those_beside_them_stay(tmp_path: Path) -> None:
    shapes = ({0: Dim.AUTO}, {0: Dim("k", min=1, max=MOST)})
    path = ab.export_grad(
        at_one,
        (torch.randn(4), torch.arange(3)),
        wrt="x",
        dynamic_shapes=shapes,
        path=tmp_path / "auto.pt2",
        tune="none",
    )
    (variant,) = load(path).manifest.entries["grad"].variants
    assert {s.label: s.minimum for s in variant.symbols}["k"] == 1
    grad = load(path).grad()
    torch.testing.assert_close(
        grad(x := torch.randn(5), torch.zeros(1, dtype=torch.long))[1], x.cos() + torch.eye(5)[0]
    )
    with pytest.raises(ab.InputError, match=r"is valid only if x\.shape\[0\] != 1"):
        grad(torch.randn(1), torch.zeros(1, dtype=torch.long))


def test_a_size_of_1_that_eager_refuses_is_left_out(tmp_path: Path) -> None:
    net = nn.BatchNorm1d(3)
    path = ab.export_module(
        net, (torch.randn(5, 3),), dynamic_shapes=(_rows(),), path=tmp_path / "norm.pt2", tune="none"
    )
    (variant,) = load(path).manifest.entries["module"].variants
    assert [s.minimum for s in variant.symbols] == [2]


def test_a_size_of_0_is_served_if_compiled_code_computes_what_eager_does(tmp_path: Path) -> None:
    """BatchNorm's gradients over no values are 0 in eager and NaN in compiled code."""
    net, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()), torch.randn(3, 1, 4, 4)
    least = {}
    for name, layers in (("norm", net), ("none", net[0])):
        path = ab.export_module(
            layers, (x,), dynamic_shapes=({0: Dim("rows")},), path=tmp_path / f"{name}.pt2", tune="none"
        )
        (variant,) = load(path).manifest.entries["module"].variants
        least[name] = variant.symbols[0].minimum
    assert least == {"norm": 1, "none": 0}
    with pytest.raises(ab.InputError, match=r"rows \(input\.shape\[0\]\) is 0; expected at least 1"):
        load(tmp_path / "norm.pt2").module()(x[:0])
