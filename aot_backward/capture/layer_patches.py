"""Patches for PyTorch layers that a trace would drop in part, reject, or specialise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched
from aot_backward_runtime.errors import ExportError

from . import diagnostics, recurrent_layers
from .user_code import source_location

aten = torch.ops.aten


@contextlib.contextmanager
def traceable_layers() -> Iterator[None]:
    """Replace all these layers by forms that can be traced completely."""
    with (
        plain_checkpoints(),
        _bodies_with_results_of_their_own(),
        patched(
            torch_api.decompositions,
            _rnn_helper=_recurrent_layers(torch_api.decompositions._rnn_helper),
            one_layer_lstm=recurrent_layers.lstm(torch_api.decompositions.one_layer_lstm),
            one_layer_rnn=recurrent_layers.rnn(torch_api.decompositions.one_layer_rnn),
        ),
        patched(torch_api.transformer, _detect_is_causal_mask=_causal_if_declared),
        patched(torch_api._BatchNorm, forward=_cumulative(torch_api._BatchNorm.forward)),
        patched(
            torch,
            max_pool1d=_over_open_lengths(torch.max_pool1d, torch.max_pool2d),
            max_pool1d_with_indices=_over_open_lengths(torch.max_pool1d_with_indices, aten.max_pool2d_with_indices),
        ),
        contextlib.ExitStack() as stack,
    ):
        for module, (name, forward) in _FAKE_QUANTIZATION.items():
            if module in sys.modules:  # if not imported, no program has such a layer
                stack.enter_context(patched(getattr(sys.modules[module], name), forward=forward))
        yield


def _over_open_lengths(original: Callable[..., Any], images: Callable[..., Any]) -> Callable[..., Any]:
    """Pool a dynamic length as images one pixel high, as ATen computes it; ATen's C++ would ask for the length on the
    way."""

    def pooled(
        input: torch.Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        if not isinstance(input.shape[-1], torch.SymInt):
            return original(input, kernel_size, stride, padding, dilation, ceil_mode)
        kernel, gap, border, spacing = (_single(v) for v in (kernel_size, stride or kernel_size, padding, dilation))
        results = images(input.unsqueeze(-2), [1, kernel], [1, gap], [0, border], [1, spacing], ceil_mode)
        return pytree.tree_map(lambda result: result.squeeze(-2), results)

    return pooled


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) else value


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Run the function of ``checkpoint(use_reentrant=True)`` without its own backward, which cannot be traced and gives
    the same gradients.

    If no input requires a gradient, the parameters get none either.
    """

    def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        requires_grad = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
            return run(*args)

    with patched(torch.utils.checkpoint.CheckpointFunction, apply=apply):
        yield


def _recurrent_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the dropout between recurrent layers, and give final states the shapes of the initial ones. torch's
    decomposition looks for a layer after the last one and drops the dropout; in torch 2.11 and 2.12 an LSTM's states
    have an extra dimension."""

    def layers(
        input: torch.Tensor,
        hidden: Any,
        params: Any,
        biases: bool,
        count: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
        layer: Any,
    ) -> Any:
        if not (dropout and train):
            x, finals = original(input, hidden, params, biases, count, dropout, train, both, batch_first, layer)
            return x, _of_shape(finals, hidden)
        x = input.transpose(0, 1) if batch_first else input
        directions, finals = 2 if both else 1, []
        for i in range(count):
            layer_slice = slice(i * directions, (i + 1) * directions)
            x, final = original(x, hidden[layer_slice], params[layer_slice], biases, 1, 0.0, train, both, False, layer)
            finals += _of_shape(final, hidden[layer_slice])
            if i < count - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), finals

    return layers


def _of_shape(finals: Any, hidden: Any) -> list[Any]:
    """Return ``finals`` with the shapes of ``hidden``: a list of tensors, or of pairs of tensors."""
    return [
        pytree.tree_map(lambda f, h: f if f.dim() == h.dim() else f.view(h.shape), f, h)
        for f, h in zip(finals, hidden, strict=True)
    ]


def _causal_if_declared(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Do not read the mask. Transformer layers check whether it is causal, only for speed, but a trace has no
    values."""
    return is_causal is True


@contextlib.contextmanager
def _bodies_with_results_of_their_own() -> Iterator[None]:
    """Make the body of a control-flow operator copy a result that shares memory with one of its inputs or with an
    earlier result.

    The operators refuse such a body, but PyTorch makes one itself: the forward of a scan also returns the tensors for
    its backward, and tanh, sigmoid and exp save their own result. A body that cannot be differentiated is refused with
    the line that calls the operator, because the error is raised in the backward, where no user code runs.
    """
    lines: list[str] = []
    utils = torch_api.higher_order_utils
    shares, trace = utils.has_potential_input_alias_or_mutation, utils.reenter_make_fx

    def only_mutation(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return False, shares(*args, **kwargs)[1]

    def traced(body: Callable[..., Any], *settings: Any, **options: Any) -> Callable[..., Any]:
        def with_own_results(*inputs: Any) -> Any:
            results, spec = pytree.tree_flatten(body(*inputs))
            if any(isinstance(r, torch.Tensor) and not (r.is_floating_point() or r.is_complex()) for r in results):
                lines.append(source_location.here())
            return pytree.tree_unflatten(_without_aliases(results, inputs), spec)

        function: Callable[..., Any] = trace(with_own_results, *settings, **options)
        return function

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(utils, has_potential_input_alias_or_mutation=only_mutation))
        for operator in torch_api.control_flow_modules():
            stack.enter_context(patched(operator, reenter_make_fx=traced))
        try:
            yield
        except AssertionError as error:
            reason, location = diagnostics.refused_control_flow(error), next((line for line in lines if line), "")
            if not reason or not location:
                raise
            raise ExportError(f"{reason}; it is called {location}") from error


def _without_aliases(results: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return ``results`` with a copy of each one that shares memory with an input or with an earlier result."""
    storages = {torch_api.storage_key(value) for value in inputs if isinstance(value, torch.Tensor)}
    out = []
    for result in results:
        if isinstance(result, torch.Tensor):
            if torch_api.storage_key(result) in storages:
                result = result.clone()
            storages.add(torch_api.storage_key(result))
        out.append(result)
    return out


def _cumulative(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the number of batches a tensor in ``BatchNorm(momentum=None)``, which averages over all batches: its own
    forward makes it a Python number."""

    def forward(self: Any, input: torch.Tensor) -> Any:
        if (
            self.momentum is not None
            or not (self.training and self.track_running_stats)
            or self.num_batches_tracked is None
        ):
            return original(self, input)
        self._check_input_dim(input)
        self.num_batches_tracked.add_(1)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = torch.nn.functional.batch_norm(
            input, mean, variance, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
        )
        with torch.no_grad():
            for running, of_batch in ((self.running_mean, mean), (self.running_var, variance)):
                part = self.num_batches_tracked.to(running.dtype).reciprocal()
                running.copy_(part * of_batch + (1 - part) * running)
        return out

    return forward


def _fake_quantized(self: Any, X: torch.Tensor) -> torch.Tensor:
    """Replace the forward of ``FakeQuantize``, which reads its switches (buffers) as Python numbers; its observer
    depends on values."""
    torch_api._assert_async(
        (self.observer_enabled == 0).all(),
        "the observer of a FakeQuantize is enabled, and no graph holds what it does: call disable_observer() before the export, or use "
        "FusedMovingAvgObsFakeQuantize",
    )
    observer, qparams = self.activation_post_process, (self.scale, self.zero_point)
    if self.is_per_channel:
        quantized = torch.fake_quantize_per_channel_affine(
            X, *qparams, self.ch_axis, observer.quant_min, observer.quant_max
        )
    else:
        quantized = torch.fake_quantize_per_tensor_affine(X, *qparams, observer.quant_min, observer.quant_max)
    return torch.where(self.fake_quant_enabled == 1, quantized, X)


def _learned_quantization(self: Any, X: torch.Tensor) -> torch.Tensor:
    """Replace the forward of ``_LearnableFakeQuantize``, which also writes to its parameters: each call checks that
    there is nothing to write."""
    symmetric = self.qscheme in (torch.per_channel_symmetric, torch.per_tensor_symmetric)
    fit = (
        (self.static_enabled == 0).all()
        & (self.scale >= self.eps).all()
        & ((self.zero_point == 0).all() if symmetric else True)
    )
    torch_api._assert_async(
        fit,
        "a _LearnableFakeQuantize estimates, clamps or resets its parameters, which no graph holds: call toggle_qparam_learning(True) and "
        "toggle_observer_update(False) before the export, with a scale of at least eps and, if symmetric, a zero point of 0",
    )
    factor = 1.0 / (X.numel() * self.quant_max) ** 0.5 if self.use_grad_scaling else 1.0
    qparams: Any = (self.scale, self.zero_point)
    limits: Any = (self.quant_min, self.quant_max, factor)
    if self.qscheme in (torch.per_channel_symmetric, torch.per_channel_affine):
        quantized = torch_api._fake_quantize_learnable_per_channel_affine(X, *qparams, self.ch_axis, *limits)
    else:
        quantized = torch_api._fake_quantize_learnable_per_tensor_affine(X, *qparams, *limits)
    return torch.where(self.fake_quant_enabled == 1, quantized, X)


_FAKE_QUANTIZATION = {
    "torch.ao.quantization.fake_quantize": ("FakeQuantize", _fake_quantized),
    "torch.ao.quantization._learnable_fake_quantize": ("_LearnableFakeQuantize", _learned_quantization),
}
