"""``transformers.Trainer`` on a tiny GPT-2: dropout, accumulation over two batches, clipping, the default schedule."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from modes import STEPS, docstrings, main
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

ROWS, LENGTH = 400, 32


class Losses(TrainerCallback):
    """Keeps the Trainer's logged losses, and ends the training after ``steps`` of the :data:`STEPS` in its schedule."""

    def __init__(self, steps: int):
        self.steps = steps
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def train(steps: int) -> tuple[list[float], list[list[int]]]:
    text = b"\n".join(paragraph for _, paragraph in docstrings())
    tokens = torch.tensor(list(text)).clamp(max=127)
    rows = [{"input_ids": row, "labels": row} for row in tokens[: ROWS * LENGTH].view(ROWS, LENGTH)]
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    watching = Losses(steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watching]).train()  # type: ignore[arg-type]
    return watching.losses, [[8, LENGTH]] * (2 * steps)


if __name__ == "__main__":
    main(train, recorded=6)
