"""Every preset, proven: a model saved whole and resharded computes on the ranks of a
tensor-parallel job what it did before.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptkit
from ckptkit.checkpoint.rules_file import load_rules
from ckptkit.model.rules import Rules
from ckptkit.storage import MemoryStore
from tests.rules.models import KINDS
from tests.rules.simulated import run


@cache
def built(name: str) -> tuple[nn.Module, MemoryStore, Tensor]:
    """A model, a run that it is saved in, and what it computes."""
    kind = KINDS[name]
    model = kind.build()
    store = MemoryStore()
    known: dict[int, str] = {}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    with ckptkit.Writer(store, step=1) as writer:
        for key, tensor in model.state_dict(keep_vars=True).items():
            full = kind.stored(key)
            if id(tensor) in known:
                writer.add_alias(full, known[id(tensor)])
                continue
            known[id(tensor)] = full
            role = "buffer" if key in buffers else "param"
            writer.add(full, tensor.detach().numpy(), role=role)
    with torch.no_grad():
        return model, store, kind.forward(model)


def sizes_of(name: str) -> dict[str, Any]:
    """The config of a model, as its config.json has it."""
    config: Any = built(name)[0].config
    found: dict[str, Any] = config.to_dict()
    return found


def resharded(name: str, to: str, rules: str | Rules = "auto") -> ckptkit.Checkpoint:
    """The model, cut by the preset that its names show, with the sizes of its config."""
    destination = MemoryStore()
    store = built(name)[1]
    ckptkit.reshard(store, destination, to=to, rules=rules, sizes=sizes_of(name))
    return ckptkit.open(destination)


def assert_computes_the_same(name: str, checkpoint: ckptkit.Checkpoint) -> None:
    model, _, expected = built(name)
    outputs = run(model, KINDS[name], checkpoint)
    assert expected.std() > 0.05
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("to", ["tp:2", "tp:4"])
@pytest.mark.parametrize("name", KINDS)
def test_ranks_compute_what_the_whole_model_does(name: str, to: str) -> None:
    with resharded(name, to) as checkpoint:
        assert_computes_the_same(name, checkpoint)


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "falcon 7b"])
def test_one_head_of_queries_for_each_rank_is_enough(name: str) -> None:
    with resharded(name, "tp:8") as checkpoint:
        assert_computes_the_same(name, checkpoint)


@pytest.mark.parametrize("to", ["ep:2", "ep:4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "deepseek"])
def test_ranks_with_some_of_the_experts_do_too(name: str, to: str) -> None:
    with resharded(name, to) as checkpoint:
        assert_computes_the_same(name, checkpoint)


WRONG: dict[str, tuple[str, str, Any]] = {
    "whole heads of keys": ("llama", "re:.*self_attn\\.k_proj.*", "shard(0)"),
    "rows instead of columns": ("llama", "*self_attn.o_proj.weight", "shard(0)"),
    "columns that are not those of gate": (
        "llama",
        "*mlp.up_proj.weight",
        {"shard": 0, "blocks": 2},
    ),
    "norms of heads are for each": ("qwen3", "*self_attn.q_norm.weight", "shard(0)"),
    "query, key and value apart": ("phi3", "*self_attn.qkv_proj.weight", "shard(0)"),
    "gate and up apart": ("phi3", "*mlp.gate_up_proj.weight", "shard(0)"),
    "gate and up of experts apart": ("mixtral", "*experts.gate_up_proj", "shard(1)"),
    "three blocks": ("gpt2", "*.attn.c_attn.weight", "shard(1)"),
    "the bias as the weight": ("gpt2", "*.attn.c_attn.bias", "shard(0)"),
    "heads of three": ("gpt-neox", "*query_key_value.*", {"shard": 0, "blocks": 3}),
    "heads of three, again": ("bloom", "*query_key_value.*", {"shard": 0, "blocks": 3}),
    "keys for all": ("falcon 7b", "*query_key_value.*", "shard(0, unit=4)"),
    "groups": ("falcon 40b", "*query_key_value.*", {"shard": 0, "blocks": 2}),
    "both halves alike": ("deepseek", "*kv_b_proj.weight", {"shard": 0, "blocks": 2}),
    "latent halves whole": ("deepseek", "*kv_a_proj_with_mqa.weight", "shard(0)"),
    "positions of heads": ("t5", "*relative_attention_bias.weight", "replicate"),
    "sums before biases": ("bert", "*attention.output.dense.weight", "replicate"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_preset_that_were_wrong_would_be_noticed(what: str) -> None:
    name, pattern, tp = WRONG[what]
    rules = load_rules(KINDS[name].preset)
    wrong = Rules.from_doc({"rules": [{"match": pattern, "tp": tp}]}).rules
    broken = replace(rules, rules=(*wrong, *rules.rules))
    with (
        resharded(name, "tp:2" if name != "llama" else "tp:4", broken) as checkpoint,
        pytest.raises((AssertionError, RuntimeError, IndexError, threading.BrokenBarrierError)),
    ):
        assert_computes_the_same(name, checkpoint)


@pytest.mark.parametrize("name", KINDS)
def test_names_tell_the_preset_and_every_tensor_is_known(name: str) -> None:
    _, store, _ = built(name)
    rows = ckptkit.explain_rules(store, to="pp:2,tp:2,fsdp:2", sizes=sizes_of(name))
    assert not [row.name for row in rows if row.unknown or row.unknown_sizes]
    preset = KINDS[name].preset
    assert all(row.why.startswith(f"{preset}: ") or row.why == "0-d" for row in rows)
    stages = {row.name: dict(row.placements)["pp"] for row in rows}
    assert {"stage(0)", "stage(1)"} <= set(stages.values()) <= {"stage(0)", "stage(1)", "replicate"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_preset_says_what_it_cannot_check(name: str) -> None:
    _, store, _ = built(name)
    rows = ckptkit.explain_rules(store, to="tp:2")
    assert {size for row in rows for size in row.unknown_sizes} == {"head_dim"}
