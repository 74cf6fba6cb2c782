"""Models that the script beside has DeepSpeed train."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn


class Model(nn.Module):
    """Odd sizes, a frozen parameter, a tied one and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 11)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 0.3]))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(x)) * self.get_buffer("scale")[0]
        found: torch.Tensor = self.head(self.norm(x + torch.relu(self.up(x))[..., :5]))
        return found


class Embedding(nn.Module):
    """The first layer of a pipeline, and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x] * self.get_buffer("scale").to(self.weight.dtype)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 5)
        self.up.weight.requires_grad = False
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


def logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.nn.functional.linear(x, embedding.weight)
    return found


def distance(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x.float().square().mean()


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index % 7, 3, index % 5, 1]), torch.zeros(4)


class Block(nn.Module):
    """What ranks of tensor parallelism cut by columns, by rows, and in three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(6, 12)
        self.o_proj = nn.Linear(4, 6)
        self.up_proj = nn.Linear(6, 10)
        self.down_proj = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        x = x + self.o_proj(q * torch.sigmoid(k) + v)
        found: torch.Tensor = x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))
        return found


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 3)
        self.down = nn.Linear(3, 5, bias=False)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


class Mixed(nn.Module):
    """A layer of a pipeline with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.moe = MoE(5, Expert(), num_experts=4, ep_size=2, min_capacity=8)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.moe(self.norm(x))[0]


class Sparse(nn.Module):
    """Two layers of experts."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        given = {"num_experts": 4, "ep_size": ep_size, "min_capacity": 8}
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([MoE(5, Expert(), **given) for _ in range(2)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(self.norm(x))[0]
        return self.head(x)


def mixtral() -> Any:
    """A model of transformers, whose experts DeepSpeed's AutoEP shares out."""
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415 — takes seconds
    from transformers.utils import output_capturing  # noqa: PLC0415

    # DeepSpeed 0.19.8 asks it as transformers had it before 5.20.
    registry: Any = output_capturing._CanRecordRegistry
    registry.get = lambda self, key, default=None: dict.get(self, str(type(key)), default or {})
    sizes: Any = {"hidden_size": 8, "intermediate_size": 3, "num_local_experts": 4}
    sizes |= {"max_position_embeddings": 8, "vocab_size": 7}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes))
