"""The models that strategies are measured with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

WORDS, LENGTH, BATCH = 2048, 64, 16
_HIDDEN, _HEAD, _FEED, _LAYERS = 256, 32, 704, 6


class Layered(nn.Module):
    """A thousand tiny layers, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(1000))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes out of the last."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(_HIDDEN, _HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            cut(x).unflatten(-1, (-1, _HEAD)).transpose(1, 2)
            for cut in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        done: torch.Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return done


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(_HIDDEN, _FEED, bias=False)
        self.up_proj = nn.Linear(_HIDDEN, _FEED, bias=False)
        self.down_proj = nn.Linear(_FEED, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return done


class Block(nn.Module):
    """A layer of a Llama, under the names that its preset knows."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(_HIDDEN) for _ in range(2)
        )
        self.self_attn, self.mlp = _Attention(), _FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden state and what the layer adds to it."""
        x = x + self.self_attn(self.input_layernorm(x))
        done: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return done


class Llama(nn.Module):
    """A small language model, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, _HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(_LAYERS))
        self.norm = nn.RMSNorm(_HIDDEN)
        self.lm_head = nn.Linear(_HIDDEN, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of the next tokens."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        done: torch.Tensor = self.lm_head(self.norm(x))
        return done


def words() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, the same on every rank."""
    tokens = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())
