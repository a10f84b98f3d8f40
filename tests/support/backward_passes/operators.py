"""Operators and layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .scenario import Seen, Step, backward_of, batch, clear, grads, leaf, named, scenario


@backward_of(lambda: leaf(6, 4))
def indexing(i: int, w: Any) -> Any:
    n = batch(i)
    index = torch.randint(0, 6, (n,))
    g = torch.gather(w, 0, torch.randint(0, 6, (n, 4)))
    s = torch.zeros(7, 4).scatter_add(0, torch.randint(0, 7, (n, 4)), w[index])
    t = torch.zeros(7, 4).index_add(0, index, w.index_select(0, index)) + w.new_zeros(7, 4).scatter(
        0, torch.randint(0, 7, (n, 4)), g
    )
    u = torch.where(w > 0, w, w * 0.1).masked_fill(w > 1, 0.0).take(index)
    return (
        g.sin().sum()
        + s.exp().sum()
        + t.square().sum()
        + u.sum()
        + w[index, 1:3].sum()
        + w[w > 0].sum()
        + w[..., None, -1].sum()
    )


@backward_of(lambda: leaf(1, 4))
def as_many_outputs_as_rows(i: int, w: Any) -> Any:
    """The engine's cache does not tell the number of outputs of ``unbind`` and ``split``."""
    x = w * torch.randn(2 * [3, 5, 2][i], 4)
    first, second = x.unbind(0)[:2]
    third, fourth = x.split(2)[:2]
    return (first.exp() * second + third.sin().sum() * fourth.sum() + x.unbind(0)[1]).sum()


@backward_of(lambda: (leaf(4, 6), leaf(2, 6)))
def cat_split_stack_pad(i: int, w: Any, v: Any) -> Any:
    x = torch.randn(batch(i), 6)
    a, b, c = torch.cat([w, v * 2, x, w[:1]], 0).split([2, 3, batch(i) + 2])
    s = torch.stack([a, a.exp(), w[:2]], 1)
    p = functional.pad(b, (1, 2), value=0.5) + functional.pad(b[None], (1, 2), mode="reflect")[0]
    return (
        s.sum()
        + p.square().sum()
        + c.sin().sum()
        + torch.roll(w, 1, 0).repeat(2, 1).mul(0.1).sum()
        + w.unbind()[1].sum()
    )


@backward_of(lambda: leaf(4, 5))
def reductions_and_sorts(i: int, w: Any) -> Any:
    x = torch.randn(batch(i), 4) @ w
    y = (
        x.max(1).values
        + x.min(1)[0]
        + x.sort(1).values[:, 1]
        + x.topk(2, 1).values.sum(1)
        + x.median(1).values
        + x.amax(1)
        + x.norm(dim=1)
    )
    z = (
        x.softmax(1).log_softmax(0).sum()
        + x.logsumexp(1).sum()
        + x.cumsum(1).prod(1).sum()
        + x.std(1).sum()
        + x.var()
        + x.cumprod(1).sum()
    )
    return y.sum() + z + torch.einsum("ij,kj->ik", x, x).sum()


@backward_of(lambda: leaf(4, 4, dtype=torch.float64))
def linear_algebra(i: int, w: Any) -> Any:
    a = w @ w.t() + 4 * torch.eye(4, dtype=torch.float64)
    x = torch.linalg.solve(a, torch.randn(4, batch(i), dtype=torch.float64))
    return (
        x.sum()
        + torch.linalg.cholesky(a).sum()
        + torch.logdet(a)
        + torch.linalg.eigvalsh(a).prod()
        + a.inverse().trace()
    )


@backward_of(lambda: (leaf(4, dtype=torch.complex64), leaf(4)))
def complex_numbers(i: int, w: Any, v: Any) -> Any:
    x = torch.randn(batch(i), 4, dtype=torch.complex64)
    y = (w * x + v).exp() * w.conj() + torch.fft.fft(v * w.real) + (2 - 1j) * w
    return y.abs().square().sum() + torch.view_as_real(w).sum() + y.imag.sum() + y.angle().sum()


@scenario
def sparse_embedding() -> Step:
    table, dense = nn.Embedding(10, 4, sparse=True), leaf(4)

    def step(i: int) -> Seen:
        if i != 1:
            clear(table, dense)
        x = table(torch.randint(0, 10, (batch(i), 3))) * dense
        (x.sum() + table(torch.randint(0, 10, (batch(i),))).exp().sum()).backward()
        return grads(table, dense)

    return step


@scenario
def sparse_and_dense_gradients() -> Step:
    table = nn.Embedding(10, 4, sparse=True)

    def step(i: int) -> Seen:
        x = table(torch.randint(0, 10, (batch(i), 3)))
        clear(table)
        (x.sum() + (table.weight * 2).exp().sum()).backward()
        return grads(table)

    return step


@scenario
def embedding_bags() -> Step:
    bags = nn.ModuleList(
        nn.EmbeddingBag(10, 4, mode=mode, padding_idx=pad) for mode, pad in (("sum", None), ("mean", 1), ("max", None))
    )
    renormed = nn.Embedding(10, 4, padding_idx=0, scale_grad_by_freq=True)

    def step(i: int) -> Seen:
        clear(bags, renormed)
        tokens = torch.randint(0, 10, (batch(i), 3))
        y = (
            bags[0](tokens, per_sample_weights=torch.rand(batch(i), 3))
            + bags[1](tokens)
            + bags[2](tokens)
            + renormed(tokens).sum(1)
        )
        y.square().sum().backward()
        return grads(bags, renormed)

    return step


@backward_of(lambda: nn.LSTM(4, 8, 2, batch_first=True, bidirectional=True))
def lstm(i: int, net: Any) -> Any:
    x = leaf(batch(i), 5, 4)
    y, (h, _) = net(x)
    return y.square().mean() + h.sum(), x


@backward_of(lambda: (nn.GRU(4, 8, 2, dropout=0.1), nn.RNNCell(8, 8)))
def gru_and_packed_sequence(i: int, net: Any, cell: Any) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, batch(i), 4), [5] * (batch(i) - 1) + [3])
    y, h = net(packed)
    y, _ = nn.utils.rnn.pad_packed_sequence(y)
    return cell(h[0], h[1]).sum() + y.square().sum()


@scenario
def convolutions() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1, groups=2), nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 4, 2, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip

    def step(i: int) -> Seen:
        clear(net)
        x = leaf(batch(i), 3, 10, 10)
        x = x if i < 2 else x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        up = functional.interpolate(x, scale_factor=0.5, mode="bilinear")
        (net(x).square().mean() + functional.avg_pool2d(up, 2).exp().sum()).backward()
        return {**grads(net, x), **named([b.clone() for b in net.buffers()])}

    return step


@backward_of(lambda: (nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
def attention(i: int, q: Any, k: Any, v: Any) -> Any:
    x = leaf(batch(i), 5, 8)
    heads = [f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (q, k, v)]
    y = functional.scaled_dot_product_attention(*heads, is_causal=True)
    z = functional.scaled_dot_product_attention(*heads, attn_mask=torch.randn(5, 5), dropout_p=0.1)
    return y.square().sum() + z.sum(), x


@backward_of(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
def transformer_layer(i: int, net: Any) -> Any:
    return net(torch.randn(batch(i), 5, 8)).square().mean()


@backward_of(
    lambda: nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.Linear(8, 8), nn.RReLU(), nn.Dropout1d(0.3)
    )
)
def dropouts(i: int, net: Any) -> Any:
    return net(torch.randn(batch(i), 4)).square().sum()


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)))
def autocast(i: int, net: Any) -> Any:
    x = leaf(batch(i), 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
        loss = functional.mse_loss(y.float(), torch.randn(batch(i), 3)) + (net[0](x) @ net[3].weight.t()).sum()
    return loss, x


@backward_of(lambda: leaf(4, 5))
def losses(i: int, w: Any) -> Any:
    n = batch(i)
    x = torch.randn(n, 4) @ w
    target = torch.randint(0, 5, (n,))
    target[0] = -100
    other = torch.randn(n, 5)
    total = functional.cross_entropy(x, target, label_smoothing=0.1) + functional.nll_loss(
        x.log_softmax(1), target, weight=torch.rand(5)
    )
    total = (
        total
        + functional.huber_loss(x, other)
        + functional.kl_div(x.log_softmax(1), other.softmax(1), reduction="batchmean")
    )
    total = (
        total
        + functional.binary_cross_entropy_with_logits(x, other.sigmoid())
        + functional.smooth_l1_loss(x, other, beta=0.5)
    )
    total = (
        total
        + functional.cosine_similarity(x, other).sum()
        + functional.triplet_margin_loss(x, other, other * 2)
        + functional.l1_loss(x, other)
    )
    total = (
        total
        + functional.cross_entropy(x, other.softmax(1))
        + functional.margin_ranking_loss(x[:, 0], x[:, 1], torch.ones(n))
    )
    return total


@backward_of(lambda: leaf(4, 6))
def ctc(i: int, w: Any) -> Any:
    n = batch(i)
    x = (torch.randn(7, n, 4) @ w).log_softmax(2)
    return functional.ctc_loss(x, torch.randint(1, 6, (n, 3)), torch.full((n,), 7), torch.full((n,), 3))


@backward_of(
    lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)),
        nn.PReLU(),
    )
)
def normalizations_of_weights(i: int, net: Any) -> Any:
    return net(torch.randn(batch(i), 4)).square().sum()


@backward_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)))
def checkpointed(i: int, net: Any) -> Any:
    x = leaf(batch(i), 4)
    y = checkpoint(net, x, use_reentrant=False)
    return checkpoint(net, y, use_reentrant=False).square().sum(), x


@scenario
def checkpointed_reentrant() -> Step:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
    first = nn.Linear(4, 4)

    def step(i: int) -> Seen:
        clear(net, first)
        y = checkpoint(net, first(torch.randn(batch(i), 4)), use_reentrant=True)
        checkpoint(net, y, use_reentrant=True).square().sum().backward()
        return grads(net, first)

    return step
