"""``transformers.Trainer`` on a tiny BERT that fills in masked bytes. Each batch is padded to its longest text; the
last one is smaller."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from modes import STEPS, docstrings, main
from trainer_gpt2 import Losses
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

TEXTS, BATCH = 78, 8
EPOCH = -(-TEXTS // BATCH)


def train(steps: int) -> tuple[list[float], list[list[int]]]:
    tokenizer = ByT5Tokenizer(extra_ids=0, mask_token="<mask>")
    texts = [text.decode() for _, text in docstrings()]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    rows = [tokenizer(texts[i]) for i in order[:TEXTS]]
    shapes: list[list[int]] = []
    collator = DataCollatorForLanguageModeling(tokenizer)

    def collate(batch: list[Any]) -> Any:
        made = collator(batch)
        shapes.append(list(made["input_ids"].shape))
        return made

    set_seed(1)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=80,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForMaskedLM(config)
    watching = Losses(steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[watching]).train()  # type: ignore[arg-type]
    return watching.losses, shapes[:steps]  # the Trainer may have fetched one more


if __name__ == "__main__":
    main(train, recorded=EPOCH)
