"""A loop over texts of varying lengths: LSTM, attention with a padding mask, BatchNorm, clipping, a cosine schedule; a
DataLoader pads."""

from __future__ import annotations

import torch
from modes import STEPS, docstrings, main
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TEXTS, BATCH, WIDTH = 78, 8, 32
EPOCH = -(-TEXTS // BATCH)


class Classifier(nn.Module):
    """Maps bytes (batch, length), padded with 0, to the logits (batch, 4) of the modules that they may come from."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        padded = text == 0
        hidden = self.encoder(self.lstm(self.embedding(text))[0], src_key_padding_mask=padded)
        weights = (~padded).unsqueeze(-1).to(hidden.dtype)
        return self.head(self.norm((hidden * weights).sum(1) / weights.sum(1)))  # type: ignore[no-any-return]


def collate(batch: list[tuple[int, bytes]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [torch.tensor(list(text)) for _, text in batch]
    return pad_sequence(texts, batch_first=True), torch.tensor([label for label, _ in batch])


def train(steps: int) -> tuple[list[float], list[list[int]]]:
    texts = docstrings()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:TEXTS]
    torch.manual_seed(1)
    net = Classifier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader([texts[i] for i in order], BATCH, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    losses: list[float] = []
    shapes: list[list[int]] = []
    while True:
        for text, label in loader:
            if len(losses) == steps:
                return losses, shapes
            optimizer.zero_grad()
            loss = cross_entropy(net(text), label)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            shapes.append(list(text.shape))


if __name__ == "__main__":
    main(train, recorded=EPOCH)
