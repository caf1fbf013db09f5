"""Hugging Face's Trainer: evaluation, checkpoints, resuming.

    DTRCOMPILE_RESERVE=optimizer python docs/examples/transformers_trainer.py

The model is compiled in place before the Trainer gets it, so its checkpoints have clean names.
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import dtrcompile


class Tokens(torch.utils.data.Dataset):
    """Random texts; the last batch is smaller than the others."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 128, (32,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def make_trainer(folder: str, epochs: int) -> Trainer:
    """A new model, as after a restart."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    model.compile(backend="dtr", options={"budget": "8MiB"})
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, epochs=1).train()
        (checkpoint,) = Path(folder).glob("checkpoint-*")
        trainer = make_trainer(folder, epochs=2)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        print(trainer.evaluate())
    for report in dtrcompile.reports():
        print(report)


if __name__ == "__main__":
    main()
