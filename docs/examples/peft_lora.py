"""PEFT: a LoRA adapter on a frozen model, whose weights have neither gradients nor optimizer state.

python docs/examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import dtrcompile


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    base = GPT2LMHeadModel(config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.compile(backend="dtr", options={"budget": "8MiB", "optimizer": optimizer})
    ids = torch.randint(0, 128, (8, 32))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for report in dtrcompile.reports():
        print(report)


if __name__ == "__main__":
    main()
