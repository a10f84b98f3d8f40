"""The models: the ones of :mod:`tests.support.zoo` and more. Add a line to ``_CASES`` to add a row to the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ...support import zoo
from ...support.zoo import Case


class Residual(nn.Module):
    """Two blocks like in a ResNet."""

    def __init__(self) -> None:
        super().__init__()

        def block(n: int, m: int, stride: int) -> nn.Module:
            first = [nn.Conv2d(n, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m), nn.ReLU(inplace=True)]
            return nn.Sequential(*first, nn.Conv2d(m, m, 3, 1, 1, bias=False), nn.BatchNorm2d(m))

        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.one, self.two, self.short = block(8, 8, 1), block(8, 16, 2), nn.Conv2d(8, 16, 1, 2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.one(x))
        return self.head(torch.relu(self.short(x) + self.two(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear")
        )
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 4, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(x)
        return self.up(torch.cat([h, self.middle(h)], 1))


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5), persistent=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.body(source, target, tgt_mask=self.mask)


class Autoencoder(nn.Module):
    """A variational autoencoder. From the same seed, its sample must be eager's."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return self.decode(sample), (mean.pow(2) + log.exp() - 1 - log).sum(1)


class Mixture(nn.Module):
    """A mixture of experts: the best two of four for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, which = self.gate(x).topk(2, dim=1)
        weight = torch.zeros(x.shape[0], 4).scatter(1, which, best.softmax(1))
        return sum(weight[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Recommender(nn.Module):
    """DLRM: embedding tables, dense features, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (40, 30))
        self.dense, self.top = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(11, 1)

    def forward(self, dense: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        d = self.dense(dense)
        parts = torch.stack([d, self.tables[0](first), self.tables[1](second)], 1)
        i, j = torch.triu_indices(3, 3, 1)
        return self.top(torch.cat([d, (parts @ parts.transpose(1, 2))[:, i, j]], 1))


class GraphConvolutions(nn.Module):
    """Sums messages over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        def summed(h: torch.Tensor) -> torch.Tensor:
            degree = torch.ones_like(h[:, :1]).index_add(
                0, edges[1], torch.ones_like(h[:1, :1]).expand(edges.shape[1], 1)
            )
            return (h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])) / degree

        return self.two(summed(torch.relu(self.one(summed(x)))))


class GraphAttention(nn.Module):
    """Takes a softmax over the edges into each node."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(6, 8), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.value(x)
        scores = nn.functional.leaky_relu(self.score(torch.cat([h[edges[0]], h[edges[1]]], 1))).exp()
        total = torch.zeros_like(h[:, :1]).scatter_add(0, edges[1][:, None], scores)
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * scores / total[edges[1]])


class Fourier(nn.Module):
    """A layer of a Fourier neural operator, with complex weights for the lowest modes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(2, 8), nn.Linear(8, 1)
        self.modes = nn.Parameter(torch.randn(8, 8, 4, dtype=torch.complex64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x).transpose(1, 2)
        spectrum = torch.einsum("bim,iom->bom", torch.fft.rfft(h)[..., :4], self.modes)
        return self.drop(nn.functional.gelu(torch.fft.irfft(spectrum, n=16) + h).transpose(1, 2))


class DeepONet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))
        self.trunk = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, function: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ni->bn", self.branch(function), self.trunk(points))


class ForceField(nn.Module):
    """Energy from distances, and forces, which are its derivatives. Training on forces needs second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Embedding(5, 8)
        self.filter, self.out = (
            nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 8)),
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1)),
        )

    def forward(self, positions: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            difference = positions[:, None] - positions[None]
            distance = (difference.pow(2).sum(-1) + torch.eye(positions.shape[0])).sqrt()
            basis = (
                torch.exp(-(distance[..., None] - torch.arange(6.0)).pow(2))
                * (1 - torch.eye(positions.shape[0]))[..., None]
            )
            energy = self.out((self.filter(basis) * self.kind(kinds)[None]).sum(1)).sum()
            (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


class Ode(nn.Module):
    """Four steps of the Runge-Kutta method."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + 0.05 * a)
            c = self.field(x + 0.05 * b)
            x = x + (a + 2 * b + 2 * c + self.field(x + 0.1 * c)) / 60
        return x


class Language(nn.Module):
    """A model of ``transformers`` as a function from tokens or pixels to one tensor."""

    def __init__(self, kind: str, config: str, result: str = "logits", **settings: Any) -> None:
        super().__init__()
        import transformers

        self.model, self.result = getattr(transformers, kind)(getattr(transformers, config)(**settings)), result
        self.encodes = kind.startswith("T5")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.encodes:
            return self.model(input_ids=x, decoder_input_ids=x, use_cache=False)[self.result]
        return (
            self.model(x)[self.result]
            if x.is_floating_point() or self.result != "logits"
            else self.model(x, use_cache=False)[self.result]
        )


_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SMALL = {"vocab_size": 60, "intermediate_size": 32, "max_position_embeddings": 32, **_SIZES}
_TOKENS = lambda n: (torch.randint(2, 60, (n, 7)),)  # noqa: E731


def _rows(*names: str, least: int = 1) -> dict[str, Any]:
    return {n: {0: Dim("batch", min=least, max=64)} for n in names}


def _graph(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n + 2, 6).requires_grad_(), torch.randint(0, n + 2, (2, 3 * n))


_DYNAMIC_GRAPH = {"x": {0: Dim("nodes", min=2, max=64)}, "edges": {1: Dim("edges", min=2, max=500)}}


def _language(kind: str, config: str, result: str = "logits", **settings: Any) -> Callable[[], Case]:
    # transformers compares the batch with 1
    return lambda: Case(Language(kind, config, result, **settings), _TOKENS, _rows("x", least=2))


_CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: zoo.make(name) for name in zoo.NAMES},  # type: ignore[misc]
    "resnet": lambda: Case(Residual(), zoo._real(3, 16, 16), _rows("x", least=2)),
    "unet": lambda: Case(UNet(), zoo._real(1, 8, 8), _rows("x")),
    "gru": lambda: Case(Gru(), zoo._real(5, 6), _rows("x")),
    "seq2seq": lambda: Case(
        Seq2Seq(), lambda n: (torch.randn(n, 6, 16).requires_grad_(), torch.randn(n, 5, 16).requires_grad_()), _rows("source", "target")
    ),
    "vae": lambda: Case(Autoencoder(), zoo._real(12), _rows("x")),
    "mixture": lambda: Case(Mixture(), zoo._real(8), _rows("x")),
    "dlrm": lambda: Case(
        Recommender(),
        lambda n: (torch.randn(n, 5).requires_grad_(), torch.randint(0, 40, (n, 3)), torch.randint(0, 30, (n, 2))),
        _rows("dense", "first", "second"),
    ),
    "gcn": lambda: Case(GraphConvolutions(), _graph, _DYNAMIC_GRAPH),
    "gat": lambda: Case(GraphAttention(), _graph, _DYNAMIC_GRAPH),
    "fno": lambda: Case(Fourier(), zoo._real(16, 2), _rows("x")),
    "deeponet": lambda: Case(
        DeepONet(),
        lambda n: (torch.randn(n, 10).requires_grad_(), torch.randn(2 * n, 2).requires_grad_()),
        {"function": {0: Dim("batch", min=1, max=64)}, "points": {0: Dim("points", min=1, max=64)}},
    ),
    "forcefield": lambda: Case(
        ForceField(),
        lambda n: (torch.randn(n, 3).requires_grad_(), torch.randint(0, 5, (n,))),
        {"positions": {0: Dim("atoms", min=2, max=64)}, "kinds": {0: Dim("atoms", min=2, max=64)}},
    ),
    "ode": lambda: Case(Ode(), zoo._real(4), _rows("x")),
    "gpt2": _language("GPT2LMHeadModel", "GPT2Config", vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "qwen2": _language("Qwen2ForCausalLM", "Qwen2Config", **_SMALL, num_key_value_heads=1),
    "mistral": _language("MistralForCausalLM", "MistralConfig", **_SMALL, num_key_value_heads=1),
    "opt": _language(
        "OPTForCausalLM", "OPTConfig", vocab_size=60, ffn_dim=32, max_position_embeddings=32, word_embed_proj_dim=16, **_SIZES
    ),
    "t5": _language("T5ForConditionalGeneration", "T5Config", vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2),
    "distilbert": _language("DistilBertModel", "DistilBertConfig", "last_hidden_state", vocab_size=60, dim=16, n_layers=2, n_heads=2, hidden_dim=32),
    "albert": _language("AlbertModel", "AlbertConfig", "last_hidden_state", **_SMALL, embedding_size=8),
    "electra": _language("ElectraModel", "ElectraConfig", "last_hidden_state", **_SMALL, embedding_size=8),
    "vit": lambda: Case(
        Language(
            "ViTModel", "ViTConfig", "last_hidden_state", intermediate_size=32, image_size=8, patch_size=4, **_SIZES
        ),
        zoo._real(3, 8, 8),
        _rows("x"),
    ),
}  # fmt: skip
NAMES = tuple(_CASES)


def make(name: str) -> Case:
    """Return the case of that name, from the same seed each time."""
    torch.manual_seed(7)
    return _CASES[name]()
