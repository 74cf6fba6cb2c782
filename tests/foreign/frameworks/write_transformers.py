"""Write checkpoints with transformers: `python write_transformers.py OUT`.

A model that `save_pretrained` cuts into several files, and what the Trainer leaves after three
steps. What is wanted of them is what `from_pretrained` loads.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def note(place: Path, out: Path) -> None:
    """Keep what transformers itself finds there."""
    model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    found = {}
    for name, tensor in model.state_dict().items():
        is_brain = tensor.dtype == torch.bfloat16
        found[f"model/{name}"] = (tensor.view(torch.uint16) if is_brain else tensor).numpy()
    np.savez(out, **found)


def main(out: Path) -> None:
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(CONFIG)
    model.to(torch.bfloat16).save_pretrained(out / "sharded", max_shard_size="2KB")
    note(out / "sharded", out / "sharded.npz")
    tokens = torch.arange(8) % CONFIG.vocab_size
    arguments = TrainingArguments(
        output_dir=str(out / "trained"),
        per_device_train_batch_size=1,
        max_steps=3,
        save_steps=3,
        use_cpu=True,
        report_to=[],
    )
    examples = [{"input_ids": tokens, "labels": tokens}] * 4
    Trainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=examples).train()
    place = out / "trained" / "checkpoint-3"
    (place / "training_args.bin").write_bytes(b"")  # it has the paths of this machine
    note(place, out / "trained.npz")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
