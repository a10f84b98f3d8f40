"""Models of the sizes that people train or fine-tune on a CPU, 39 thousand to 66 million parameters, with one batch
each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]  # arguments of the model, classes

CLASSES = 10


class _Output(nn.Module):
    """One field of a transformers model's output."""

    def __init__(self, model: nn.Module, field: str = "logits", **more: Any) -> None:
        super().__init__()
        self.model, self.field, self.more = model, field, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(self.model(x, **self.more), self.field)
        return out[:, -1] if out.dim() == 3 else out  # a language model's next token


class _Autocast(nn.Module):
    """The model under autocast to bfloat16, with float32 results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: torch.Tensor = self.model(*args)
        return out.float()


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 128)
        self.layers = kind(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.words(x))[0][:, -1])
        return out


class _Graph(nn.Module):
    """Three layers of messages along edges, summed at the receiving nodes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.nodes = nn.Linear(16, width)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
            for _ in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, h: torch.Tensor, pos: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        h = self.nodes(h)
        distance = (pos[i] - pos[j]).square().sum(1, keepdim=True)
        for message in self.messages:
            h = h + torch.zeros_like(h).index_add(0, i, message(torch.cat([h[i], h[j], distance], 1)))
        out: torch.Tensor = self.head(h).mean(0, keepdim=True)
        return out


def _block(i: int, o: int) -> nn.Sequential:
    first, second = nn.Conv2d(i, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(8, o), nn.SiLU(), second, nn.GroupNorm(8, o), nn.SiLU())


class _UNet(nn.Module):
    """Two halvings with GroupNorm; with ``attention`` four heads attend at the smallest resolution, as diffusion models
    do."""

    def __init__(self, attention: bool, c: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, c), _block(c, 2 * c), _block(2 * c, 4 * c)])
        self.attention = nn.MultiheadAttention(4 * c, 4, batch_first=True) if attention else None
        self.up = nn.ModuleList([_block(6 * c, 2 * c), _block(3 * c, c)])
        self.head = nn.Conv2d(c, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        c = self.down[2](F.max_pool2d(b, 2))
        if self.attention is not None:
            tokens = c.flatten(2).transpose(1, 2)
            c = c + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(c.shape)
        d = self.up[0](torch.cat([F.interpolate(c, scale_factor=2, mode="bilinear"), b], 1))
        e = self.up[1](torch.cat([F.interpolate(d, scale_factor=2, mode="bilinear"), a], 1))
        out: torch.Tensor = self.head(e).mean((2, 3))
        return out


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _Output(BertForSequenceClassification(config))


def _distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return _Output(
        DistilBertForSequenceClassification(
            DistilBertConfig(num_labels=CLASSES, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)
        )
    )


def _gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=4000, n_embd=256, n_layer=6, n_head=8, n_positions=128, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _Output(GPT2LMHeadModel(config), use_cache=False)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=96, patch_size=16, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _Output(ViTForImageClassification(config))


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=CLASSES
    )
    return _Output(ResNetForImageClassification(config))


def _mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.75, image_size=96, num_labels=CLASSES, classifier_dropout_prob=0.0)
    return _Output(MobileNetV2ForImageClassification(config))


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return _Output(
        ConvNextForImageClassification(
            ConvNextConfig(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], num_labels=CLASSES)
        )
    )


def _images(rows: int, size: int) -> Callable[[], Batch]:
    return lambda: ((torch.randn(rows, 3, size, size),), torch.randint(CLASSES, (rows,)))


def _tokens(words: int, rows: int, length: int, classes: int = CLASSES) -> Callable[[], Batch]:
    return lambda: ((torch.randint(0, words, (rows, length)),), torch.randint(classes, (rows,)))


def _edges() -> Batch:
    ends = torch.randint(400, (8000,)), torch.randint(400, (8000,))
    return (torch.randn(400, 16), torch.randn(400, 3), *ends), torch.randint(CLASSES, (1,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "mlp": (_mlp, lambda: ((torch.randn(128, 784),), torch.randint(CLASSES, (128,)))),
    "lstm": (lambda: _Recurrent(nn.LSTM), _tokens(2000, 16, 32)),
    "gru": (lambda: _Recurrent(nn.GRU), _tokens(2000, 16, 32)),
    "graph": (_Graph, _edges),
    "bert": (_bert, _tokens(8000, 8, 64)),
    "distilbert": (_distilbert, _tokens(30522, 8, 128)),
    "gpt2": (_gpt, _tokens(4000, 4, 128, 4000)),
    "vit": (_vit, _images(8, 96)),
    "resnet18": (_resnet, _images(8, 64)),
    "mobilenet": (_mobilenet, _images(8, 96)),
    "convnext": (_convnext, _images(4, 96)),
    "unet": (lambda: _UNet(False), _images(4, 64)),
    "unet-attention": (lambda: _UNet(True), _images(4, 64)),
}
AUTOCAST = {f"{name}-bf16": name for name in ("mlp", "bert", "gpt2", "vit")}
"""Models that are measured under autocast too."""
OPEN = {"gru": {1: torch.export.Dim("time", min=2, max=512)}}
"""Dimensions of the first argument that are dynamic in the exports; the other models are exported for one size."""


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], torch.Tensor]:
    """The model in training mode, its arguments and the classes: the same each time."""
    torch.manual_seed(7)
    build, batch = MODELS[AUTOCAST.get(name, name)]
    model = build().train()
    if name in AUTOCAST:
        model = _Autocast(model)
    torch.manual_seed(1)
    args, classes = batch()
    return model, args, classes
