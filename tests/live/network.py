"""The small model that all strategies spread, and its data."""

from __future__ import annotations

import os

import torch
from torch import nn

DEVICE = os.environ.get("CKPTKIT_TEST_DEVICE", "cpu")
"""Where jobs of several ranks train; `cuda` for those of `make test-gpu`."""

VOCABULARY, WIDTH, BATCH, LENGTH = 13, 6, 12, 12

PARTS = ("embed", "layers.0", "layers.1", "head")
"""What a pipeline may cut it into; the head comes with the last norm and the scale."""


class Block(nn.Module):
    """A residual block with buffers, which no output depends on and ranks may disagree about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state and what the block adds to it."""
        with torch.no_grad():
            self.seen += hidden.detach().mean(dim=(0, 1))
            self.calls += 1
        changed: torch.Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + changed


class Network(nn.Module):
    """Predicts tokens; parts of it can be missing, and the others keep their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scale: nn.Parameter | None = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of all tokens; the hidden state where the head is missing."""
        hidden = inputs if self.embed is None else self.embed(inputs)
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is None or self.head is None or self.scale is None:
            return hidden
        scores: torch.Tensor = self.head(self.norm(hidden)) * self.scale
        return scores

    def keep(self, parts: tuple[str, ...]) -> Network:
        """The model without the other parts."""
        if "embed" not in parts:
            self.embed = None
        for number in list(self.layers):
            if f"layers.{number}" not in parts:
                del self.layers[number]
        if "head" not in parts:
            self.norm = self.head = self.scale = None
        return self


def network(seed: int) -> Network:
    """The same model for the same seed, on every rank."""
    torch.manual_seed(seed)
    model = Network()
    # A test takes `to` away from all modules.
    return model if DEVICE == "cpu" else model.to(DEVICE)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    tokens = tokens.to(DEVICE)
    return tokens, (5 * tokens + 1) % VOCABULARY


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
