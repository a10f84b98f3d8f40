"""Trace recurrent layers as loops over their steps.

PyTorch's decomposition of ``LSTM``, ``GRU`` and ``RNN`` repeats the cell for each step: the code grows with the length,
which must be static. Here one layer in one direction is one ``scan`` in the forward and one in the backward. The loops
hold only what depends on the step before: the product with ``weight_hh`` and the gates. The gradients of the weights
and of the input are one product each, over all steps, after the loop. Layers in 16 bits, under autocast too, compute in
float32 and round their results; eager rounds after each step.

Shapes: T steps, B rows, H hidden units, G gates (4 H in an LSTM, 3 H in a GRU, H in an RNN). P, the size of the hidden
state, is H without projections. The order of the gates is that of ``torch.nn``: input, forget, cell, output; reset,
update, new.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aot_backward_exporters import sixteen_bits, torch_api
from aot_backward_runtime.errors import ExportError

LONGEST_UNROLLED = 10
"""Static lengths up to this are unrolled. An LSTM of 16 units, unrolled, is 1.2 times as fast as the loop at 10 steps,
and 0.8 times at 24."""


@dataclass(frozen=True)
class _Kind:
    """A kind of layer. ``cell`` and ``backward`` are one step, ``gradients`` concerns all of them. The weights are
    weight_hh, then weight_hr of an LSTM with projections, or bias_hh of a GRU.

    ``cell``: (*carry, x [B, G], *weights) -> [*next carry, hidden state, *saved]. The last of ``saved`` is the hidden
    state before the step. ``backward``: (*gradients of the next carry, gradient of the hidden state, *saved, *weights)
    -> [*gradients of the carry, gradient of the product with weight_hh [B, G], *others].
    ``gradients``: (gradients of the products [T, B, G], others, saved) -> (gradient of x, *gradients of the weights
    after weight_hh)."""

    cell: Callable[..., list[Tensor]]
    backward: Callable[..., list[Tensor]]
    gradients: Callable[[Tensor, list[Tensor], list[Tensor]], tuple[Tensor, ...]]


def _lstm_cell(h: Tensor, c: Tensor, x: Tensor, weight: Tensor, *projection: Tensor) -> list[Tensor]:
    i, f, g, o = (h @ weight.t() + x).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    t = new.tanh()
    hidden = o * t
    if projection:
        hidden = hidden @ projection[0].t()
    return [hidden, new, hidden, i, f, g, o, t, c, h]


def _lstm_backward(dh: Tensor, dc: Tensor, dy: Tensor, *rest: Tensor) -> list[Tensor]:
    i, f, g, o, t, c, _, weight, *projection = rest
    d = dy + dh
    dm = d @ projection[0] if projection else d
    dc = dc + dm * o * (1 - t * t)
    part = torch.cat([dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dm * t * o * (1 - o)], 1)
    return [part @ weight, dc * f, part, *([d] if projection else [])]


def _lstm_gradients(part: Tensor, others: list[Tensor], saved: list[Tensor]) -> tuple[Tensor, ...]:
    _, _, _, o, t, _, _ = saved
    return part, *(_over_steps(d, o * t) for d in others)


def _gru_cell(h: Tensor, x: Tensor, weight: Tensor, *bias: Tensor) -> list[Tensor]:
    product = h @ weight.t()
    product = product + bias[0] if bias else product
    (r, z, n), (pr, pz, pn) = x.chunk(3, 1), product.chunk(3, 1)
    r, z = (r + pr).sigmoid(), (z + pz).sigmoid()
    n = (n + r * pn).tanh()
    hidden = (h - n) * z + n
    return [hidden, hidden, r, z, n, pn, h]


def _gru_backward(dh: Tensor, dy: Tensor, *rest: Tensor) -> list[Tensor]:
    r, z, n, pn, h, weight, *_ = rest
    d = dy + dh
    dn = d * (1 - z) * (1 - n * n)
    dr, dz = dn * pn * r * (1 - r), d * (h - n) * z * (1 - z)
    part = torch.cat([dr, dz, dn * r], 1)
    return [d * z + part @ weight, part, torch.cat([dr, dz, dn], 1)]


def _gru_gradients(part: Tensor, others: list[Tensor], saved: list[Tensor]) -> tuple[Tensor, ...]:
    return others[0], part.sum((0, 1))


def _rnn(activation: Callable[[Tensor], Tensor], derivative: Callable[[Tensor, Tensor], Tensor]) -> _Kind:
    """``derivative``: (gradient of the hidden state, hidden state) -> gradient before the activation."""

    def cell(h: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        hidden = activation(h @ weight.t() + x)
        return [hidden, hidden, hidden, h]

    def backward(dh: Tensor, dy: Tensor, hidden: Tensor, _: Tensor, weight: Tensor) -> list[Tensor]:
        part = derivative(dy + dh, hidden)
        return [part @ weight, part]

    return _Kind(cell, backward, lambda part, others, saved: (part,))


_LSTM = _Kind(_lstm_cell, _lstm_backward, _lstm_gradients)
_GRU = _Kind(_gru_cell, _gru_backward, _gru_gradients)
_RNN = {
    torch.tanh: _rnn(torch.tanh, lambda d, hidden: d * (1 - hidden * hidden)),
    torch.relu: _rnn(torch.relu, lambda d, hidden: torch.where(hidden <= 0, 0.0, d)),
}


class _Layer(torch.autograd.Function):
    """(kind, number of weights, x [T, B, G], *weights, *initial states) -> (hidden states [T, B, P], *final states).

    x is the input's product with weight_ih. It holds the biases, too, except a GRU's bias_hh, which the reset gate
    scales. The hidden states that are returned are not saved: a caller may change them in place."""

    @staticmethod
    def forward(ctx: Any, kind: _Kind, count: int, x: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        last, (hidden, *saved) = _scan(kind.cell, inputs[count:], [x], inputs[:count])
        ctx.kind, ctx.count = kind, count
        ctx.save_for_backward(x, *inputs, *saved)
        return hidden, *last

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *dlast: Tensor) -> Any:
        kind, count, num_inputs = ctx.kind, ctx.count, ctx.count + len(dlast)
        x, *tensors = ctx.saved_tensors
        inputs, saved = tensors[:num_inputs], tensors[num_inputs:]
        if torch.is_grad_enabled():  # the gradient is differentiated again; autograd takes what was saved for constants
            return None, None, *_differentiable(kind, count, [x, *inputs], ctx.needs_input_grad[2:], [dy, *dlast])
        dcarry, (part, *others) = _scan(kind.backward, dlast, [dy, *saved], inputs[:count], reverse=True)
        dx, *dextra = kind.gradients(part, others, saved)
        return None, None, dx, _over_steps(part, saved[-1]), *dextra[: count - 1], *dcarry


def _scan(
    body: Callable[..., list[Tensor]], carry: Any, rows: list[Tensor], weights: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Return the last carry and the stacked results of ``body(*carry, *a row of each, *weights)``, which returns the
    next carry, then the results. ``reverse``: begin with the last rows."""
    out = torch.ops.higher_order.scan(
        body, list(carry), [row.flip(0) for row in rows] if reverse else rows, tuple(weights)
    )
    last, stacked = out[: len(carry)], out[len(carry) :]
    return last, [s.flip(0) for s in stacked] if reverse else stacked


def _over_steps(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over steps and rows of the outer products of [T, B, m] and [T, B, n]: [m, n]."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


def _step_by_step(kind: _Kind, count: int, x: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the same as :class:`_Layer`, with a copy of the cell for each step."""
    weights, carry, hidden = inputs[:count], list(inputs[count:]), []
    for row in x:
        *carry, out = kind.cell(*carry, row, *weights)[: len(carry) + 1]
        hidden.append(out)
    return torch.stack(hidden), *carry


def _differentiable(
    kind: _Kind, count: int, inputs: list[Tensor], needed: Any, grads: list[Tensor]
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again."""
    if isinstance(inputs[0].shape[0], torch.SymInt):
        raise ExportError(
            "the gradient of a recurrent layer is differentiated again, and its length is dynamic. Make the length static."
        )
    indices = [n for n, needs_grad in enumerate(needed) if needs_grad]
    gradients = torch.autograd.grad(
        _step_by_step(kind, count, *inputs), [inputs[n] for n in indices], grads, create_graph=True, allow_unused=True
    )
    by_index = dict(zip(indices, gradients, strict=True))
    return [by_index.get(n) for n in range(len(inputs))]


def lstm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``one_layer_lstm`` of ``torch._decomp``: one layer in one direction."""

    def layer(inp: Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False) -> Any:
        if _in_16_bits(inp):
            low, projected = _low(inp), len(params) in (3, 5)
            with torch.autocast("cpu", enabled=False):
                out, (h, c) = layer(
                    inp.float(), [t.float() for t in hidden], [p.float() for p in params], has_biases, reverse
                )
            return out.to(low), (h.to(low), c.to(torch.promote_types(low, hidden[1].dtype) if projected else low))
        if _unrolled(inp):
            return original(inp, hidden, params, has_biases, reverse)
        weight_ih, weight_hh, *rest = params
        biases, projection = (rest[:2], rest[2:]) if has_biases else ([], rest)
        out, *last = _layer(_LSTM, inp, weight_ih, biases, [weight_hh, *projection], hidden, reverse)
        return out, tuple(last)

    return layer


def rnn(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``one_layer_rnn`` of ``torch._decomp``, which is for GRU and RNN. ``hidden_fn``: torch's cell."""

    def layer(inp: Tensor, hidden: Tensor, params: Any, has_biases: bool, hidden_fn: Any, reverse: bool = False) -> Any:
        if _in_16_bits(inp):
            is_gru = hidden_fn is torch_api.decompositions.gru_cell
            dtype = torch.promote_types(_low(inp), hidden.dtype) if is_gru else _low(inp)
            with torch.autocast("cpu", enabled=False):
                results = layer(
                    inp.float(), hidden.float(), [p.float() for p in params], has_biases, hidden_fn, reverse
                )
            return tuple(result.to(dtype) for result in results)
        if _unrolled(inp):
            return original(inp, hidden, params, has_biases, hidden_fn, reverse)
        weight_ih, weight_hh, *biases = params
        if hidden_fn is torch_api.decompositions.gru_cell:
            return _layer(_GRU, inp, weight_ih, biases[:1], [weight_hh, *biases[1:]], [hidden], reverse)
        kind = _RNN[inspect.getclosurevars(hidden_fn).nonlocals["nonlinearity"]]
        return _layer(kind, inp, weight_ih, biases, [weight_hh], [hidden], reverse)

    return layer


def _in_16_bits(inp: Tensor) -> bool:
    """Return whether eager computes the layer in bfloat16 or float16. The loops compute it in float32, and round the
    results."""
    return (
        inp.device.type == "cpu"
        and (torch.is_autocast_enabled("cpu") or inp.dtype in sixteen_bits.DTYPES)
        and inp.dtype != torch.float64
    )


def _low(inp: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inp.dtype


def _unrolled(inp: Tensor) -> bool:
    if not torch_api.at_least("2.13") or inp.device.type != "cpu" or inp.dtype not in (torch.float32, torch.float64):
        return True  # before 2.13 the body of a loop gets the wrong inputs
    if torch_api.is_transformed():
        return True  # the loops are for gradients by autograd.Function
    return not isinstance(inp.shape[0], torch.SymInt) and inp.shape[0] <= LONGEST_UNROLLED


def _layer(
    kind: _Kind, inp: Tensor, weight_ih: Tensor, biases: Any, weights: list[Tensor], carry: Any, reverse: bool
) -> tuple[Tensor, ...]:
    x = functional.linear(inp, weight_ih, sum(biases[1:], biases[0]) if biases else None)
    hidden, *last = _Layer.apply(kind, len(weights), x.flip(0) if reverse else x, *weights, *carry)
    return hidden.flip(0) if reverse else hidden, *last
