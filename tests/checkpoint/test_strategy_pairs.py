"""A small transformer under the strategies that people use: pairs of them, as one table."""

from __future__ import annotations

from functools import cache

import pytest

import ckptkit
from ckptkit import Strategy
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Tensor, assert_holds, random_values, same, save, take
from tests.checkpoint.test_any_to_any import read_as_rank

QKV = "shard(0, blocks=[32,8,8], unit=8)"

# How each kind of axis cuts each tensor; what is not said is replicated.
STRATEGIES: dict[str, dict[str, dict[str, str]]] = {
    "single": {},
    "ddp:3": {},
    "fsdp:4": {"fsdp": dict.fromkeys(("embed", "qkv", "down", "norm", "moment"), "shard(0)")},
    "fsdp:5": {"fsdp": dict.fromkeys(("embed", "qkv", "down", "norm", "moment"), "shard(0)")},
    "tp:2": {"tp": {"embed": "shard(0)", "qkv": QKV, "down": "shard(1)", "moment": QKV}},
    "ddp:2,fsdp:2": {"ddp": {}, "fsdp": dict.fromkeys(("embed", "qkv", "down"), "shard(0)")},
    "zero1:3": {"zero1": {"moment": "owner(1)", "step": "owner(2)"}},
    "fsdp:2,tp:2": {
        "fsdp": dict.fromkeys(("embed", "qkv", "down", "moment"), "strided(0)"),
        "tp": {"embed": "shard(0)", "qkv": "shard(0)", "down": "shard(1)", "moment": "shard(0)"},
    },
    "pp:2,tp:2": {
        "pp": {"embed": "stage(0)", "qkv": "stage(0)", "down": "stage(1)", "norm": "stage(1)"},
        "tp": {"embed": "shard(1)", "qkv": QKV, "down": "shard(1)", "moment": QKV},
    },
    # Dense weights over both axes, experts on a mesh of their own.
    "efsdp=fsdp:2,ep:2": {
        "efsdp": {
            **dict.fromkeys(("embed", "qkv", "down", "norm", "moment"), "shard(0)"),
            "experts": "shard(1)",
        },
        "ep": {
            **dict.fromkeys(("embed", "norm", "experts"), "shard(0)"),
            **dict.fromkeys(("qkv", "down", "moment"), "shard(1)"),
        },
    },
    "pp:2,fsdp:2,ep:2": {
        "pp": {"embed": "stage(1)", "experts": "stage(0)"},
        "fsdp": {"qkv": "shard(1)", "experts": "shard(1)"},
        "ep": {"experts": "shard(0)"},
    },
}

WHOLE = {
    "embed": random_values((51, 12), "bfloat16", 1),
    "qkv": random_values((48, 12), "float32", 2),
    "down": random_values((12, 22), "float8_e4m3fn", 3),
    "norm": random_values((12,), "float16", 4),
    "experts": random_values((4, 6, 5), "float32", 5),
    "moment": random_values((48, 12), "float64", 6),
    "step": random_values((), "int64", 7),
}


def state_under(strategy: str) -> dict[str, Tensor]:
    cuts = STRATEGIES[strategy]
    return {
        f"model/{name}": Tensor(
            values, {axis: cut[name] for axis, cut in cuts.items() if name in cut}
        )
        for name, values in WHOLE.items()
    }


@cache
def saved_under(strategy: str) -> MemoryStore:
    store = MemoryStore()
    save(store, state_under(strategy), strategy=strategy, chunk_bytes=256)
    return store


def in_core(source: str, target: str) -> bool:
    """Whether every run tries this pair: each is read as itself and as two that are far off."""
    names = list(STRATEGIES)
    return (names.index(source) - names.index(target)) % len(names) in (0, 4, 7)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(source, target, marks=() if in_core(source, target) else pytest.mark.long)
        for source in STRATEGIES
        for target in STRATEGIES
    ],
)
def test_what_one_strategy_wrote_another_reads(source: str, target: str) -> None:
    other = Strategy.of(target)
    with ckptkit.open(saved_under(source)) as checkpoint:
        for name, tensor in state_under(target).items():
            layout = tensor.layout(other)
            for rank in range(other.world_size):
                local = read_as_rank(checkpoint, name, layout, rank, verify=True)
                assert same(local, take(layout.part(rank), tensor.whole)), (name, rank)


@pytest.mark.parametrize("source", STRATEGIES)
def test_every_strategy_leaves_a_checkpoint_without_findings(source: str) -> None:
    assert ckptkit.verify(saved_under(source)) == []
    with ckptkit.open(saved_under(source)) as checkpoint:
        assert checkpoint.strategy == Strategy.of(source)
        assert_holds(checkpoint, state_under(source))
