"""What the training examples train: a small transformer that reads Shakespeare's sonnets."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

TEXT = torch.tensor(list(Path(__file__).with_name("sonnets.txt").read_bytes()))
LETTERS, LENGTH, BATCH = 128, 64, 16  # of ASCII; of a passage; of passages in a step
DIM, HEAD = 64, 16
# How tensor parallelism cuts the model, by the names of its modules; others stay whole.
TP_PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    **{f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("o", "down")},
}


class Block(nn.Module):
    """Attention, then two layers that look at each letter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many heads as the columns that this rank has."""
        y = self.norm1(x)
        q, k, v = (
            cut(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for cut in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        done: torch.Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return done


class Transformer(nn.Module):
    """Says for each letter of a passage which one is next; without what other stages have."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(LETTERS, DIM)
        self.place: nn.Module | None = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(layers)})
        self.head: nn.Module | None = nn.Linear(DIM, LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From letters to scores, or what lies between where it has only some of the layers."""
        if self.embed is not None and self.place is not None:
            x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        done: torch.Tensor = x if self.head is None else self.head(x.flatten(0, 1))
        return done


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of the passages of a step, and their next letters: the same whoever asks."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=random)[part::parts]
    passages = TEXT[starts[:, None] + torch.arange(LENGTH + 1)]
    return passages[:, :-1], passages[:, 1:]


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How surprising the letters are, in nats."""
    return cross_entropy(scores, targets.flatten())
