"""Five of :mod:`.real_models` written for JAX, as its users write them: images are channels last, a recurrence is a
``scan``, ``jit`` compiles value and gradients, and a whole step with optax's AdamW. They take the weights of the
PyTorch model, so that gradients can be compared. The running statistics of the ResNet's BatchNorms are not kept.

JAX is not a dependency: ``pip install jax optax`` adds these peers to ``--only sizes``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Weights = Mapping[str, Any]  # by PyTorch's names; weights of convolutions as height, width, inputs, outputs
_IMAGES = ("NHWC", "HWIO", "NHWC")


def is_installed() -> bool:
    return importlib.util.find_spec("jax") is not None and importlib.util.find_spec("optax") is not None


def _linear(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _layer_norm(w: Weights, name: str, x: Any, eps: float) -> Any:
    import jax

    mean = x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + eps)
    return (x - mean) * scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def _mlp(w: Weights, x: Any) -> Any:
    import jax

    return _linear(w, "4", jax.nn.relu(_linear(w, "2", jax.nn.relu(_linear(w, "0", x)))))


def _gru(w: Weights, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    x = w["words.weight"][tokens].swapaxes(0, 1)  # time, rows, width
    for layer in (0, 1):
        gates = x @ w[f"layers.weight_ih_l{layer}"].T + w[f"layers.bias_ih_l{layer}"]
        weight, bias = w[f"layers.weight_hh_l{layer}"], w[f"layers.bias_hh_l{layer}"]

        def step(h: Any, given: Any, weight: Any = weight, bias: Any = bias) -> tuple[Any, Any]:
            r, z, n = jnp.split(given, 3, -1)
            hr, hz, hn = jnp.split(h @ weight.T + bias, 3, -1)
            z = jax.nn.sigmoid(z + hz)
            h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h
            return h, h

        _, x = jax.lax.scan(step, jnp.zeros((x.shape[1], 256)), gates)
    return _linear(w, "head", x[-1])


def _gpt2(w: Weights, tokens: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def dense(name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    words = w["model.transformer.wte.weight"]
    x = words[tokens] + w["model.transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(6):
        at = f"model.transformer.h.{layer}"
        q, k, v = (
            t.reshape(*t.shape[:2], 8, 32)
            for t in jnp.split(dense(f"{at}.attn.c_attn", _layer_norm(w, f"{at}.ln_1", x, 1e-5)), 3, -1)
        )
        x = x + dense(f"{at}.attn.c_proj", jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        hidden = jax.nn.gelu(dense(f"{at}.mlp.c_fc", _layer_norm(w, f"{at}.ln_2", x, 1e-5)), approximate=True)
        x = x + dense(f"{at}.mlp.c_proj", hidden)
    return (_layer_norm(w, "model.transformer.ln_f", x, 1e-5) @ words.T)[:, -1]


def _vit(w: Weights, images: Any) -> Any:
    import jax
    import jax.numpy as jnp

    at = "model.vit.embeddings"
    projection = w[f"{at}.patch_embeddings.projection.weight"]
    patches = jax.lax.conv_general_dilated(images, projection, (16, 16), "VALID", dimension_numbers=_IMAGES)
    patches = patches.reshape(len(images), -1, 192) + w[f"{at}.patch_embeddings.projection.bias"]
    first = jnp.broadcast_to(w[f"{at}.cls_token"], (len(images), 1, 192))
    x = jnp.concatenate([first, patches], 1) + w[f"{at}.position_embeddings"]
    for layer in range(12):
        at = f"model.vit.layers.{layer}"
        y = _layer_norm(w, f"{at}.layernorm_before", x, 1e-12)
        q, k, v = (_linear(w, f"{at}.attention.{n}_proj", y).reshape(*y.shape[:2], 3, 64) for n in "qkv")
        x = x + _linear(w, f"{at}.attention.o_proj", jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        hidden = _linear(w, f"{at}.mlp.fc1", _layer_norm(w, f"{at}.layernorm_after", x, 1e-12))
        x = x + _linear(w, f"{at}.mlp.fc2", jax.nn.gelu(hidden, approximate=False))
    return _linear(w, "model.classifier", _layer_norm(w, "model.vit.layernorm", x[:, 0], 1e-12))


def _resnet18(w: Weights, images: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def convolution(name: str, x: Any, stride: int) -> Any:
        weight = w[f"{name}.convolution.weight"]
        padding = [((weight.shape[0] - 1) // 2,) * 2] * 2
        x = jax.lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=_IMAGES)
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        scale = w[f"{name}.normalization.weight"] * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean) * scale + w[f"{name}.normalization.bias"]

    x = jax.nn.relu(convolution("model.resnet.embedder.embedder", images, 2))
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    for stage in range(4):
        for layer in range(2):
            at, stride = f"model.resnet.encoder.stages.{stage}.layers.{layer}", 2 if stage and not layer else 1
            y = convolution(f"{at}.layer.1", jax.nn.relu(convolution(f"{at}.layer.0", x, stride)), 1)
            x = jax.nn.relu(y + (convolution(f"{at}.shortcut", x, stride) if stride > 1 else x))
    return _linear(w, "model.classifier.1", x.mean((1, 2)))


MODELS: dict[str, Callable[[Weights, Any], Any]] = {
    "mlp": _mlp,
    "gru": _gru,
    "gpt2": _gpt2,
    "vit": _vit,
    "resnet18": _resnet18,
}


def calls(
    name: str, model: nn.Module, x: torch.Tensor, classes: torch.Tensor, rate: float
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, torch.Tensor]]]:
    """Return value and gradients, a step with AdamW, and a function that returns the gradients by PyTorch's names. They
    end when the results are there."""
    import jax
    import jax.numpy as jnp
    import optax

    def to_jax(tensor: torch.Tensor) -> Any:
        return jnp.asarray((tensor.permute(2, 3, 1, 0) if tensor.dim() == 4 else tensor).detach().numpy())

    weights = {n: to_jax(p) for n, p in model.named_parameters()}
    batch = jnp.asarray((x.permute(0, 2, 3, 1) if x.dim() == 4 else x).numpy()), jnp.asarray(classes.numpy())

    def loss(weights: Weights, x: Any, classes: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(MODELS[name](weights, x), classes).mean()

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    optimizer = optax.adamw(rate, weight_decay=1e-2)

    def update(weights: Weights, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, value

    compiled = jax.jit(update, donate_argnums=(0, 1))
    trained = {n: jnp.array(w) for n, w in weights.items()}
    state = optimizer.init(trained)

    def step() -> Any:
        nonlocal trained, state
        trained, state, value = compiled(trained, state, *batch)
        return value.block_until_ready()

    def gradients() -> dict[str, torch.Tensor]:
        found = value_and_grad(weights, *batch)[1]
        tensors = {n: torch.from_numpy(jax.device_get(g).copy()) for n, g in found.items()}
        return {n: t.permute(3, 2, 0, 1) if t.dim() == 4 else t for n, t in tensors.items()}

    return lambda: jax.block_until_ready(value_and_grad(weights, *batch)), step, gradients
