"""Names as published checkpoints have them, with and without the prefix of the model."""

from __future__ import annotations

import pytest

from ckptkit.checkpoint.rules_file import load_rules
from ckptkit.errors import RulesError
from ckptkit.model import Strategy
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import Placed, decide

ATTENTION = {
    f"self_attn.{each}_proj.weight": (32 if each in "qo" else 8, 32)
    for each in ("q", "k", "v", "o")
}
NORMS = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
OUTSIDE = {"embed_tokens.weight": (40, 32), "norm.weight": (32,), "lm_head.weight": (40, 32)}
EXPERTS = {
    f"block_sparse_moe.experts.{expert}.{name}.weight": (32, 24) if name == "w2" else (24, 32)
    for expert in range(6)
    for name in ("w1", "w2", "w3")
}
QWEN_EXPERTS = {
    f"mlp.experts.{expert}.{name}_proj.weight": (32, 24) if name == "down" else (24, 32)
    for expert in range(6)
    for name in ("gate", "up", "down")
}
Shapes = dict[str, tuple[int, ...]]


def layers(of: Shapes, prefix: str) -> Shapes:
    return {f"{prefix}.{layer}.{name}": shape for layer in range(2) for name, shape in of.items()}


def fused(inside: str, *, norm: str = "input_layernorm") -> Shapes:
    return {
        f"{inside}.query_key_value.weight": (96, 32),
        f"{inside}.query_key_value.bias": (96,),
        f"{inside}.dense.weight": (32, 32),
        f"{inside}.dense.bias": (32,),
        "mlp.dense_h_to_4h.weight": (64, 32),
        "mlp.dense_h_to_4h.bias": (64,),
        "mlp.dense_4h_to_h.weight": (32, 64),
        "mlp.dense_4h_to_h.bias": (32,),
        f"{norm}.weight": (32,),
        f"{norm}.bias": (32,),
    }


GPT2: Shapes = {
    "ln_1.weight": (32,),
    "attn.bias": (1, 1, 16, 16),
    "attn.c_attn.weight": (32, 96),
    "attn.c_attn.bias": (96,),
    "attn.c_proj.weight": (32, 32),
    "attn.c_proj.bias": (32,),
    "ln_2.bias": (32,),
    "mlp.c_fc.weight": (32, 64),
    "mlp.c_fc.bias": (64,),
    "mlp.c_proj.weight": (64, 32),
    "mlp.c_proj.bias": (32,),
}
VIT: Shapes = {
    **{f"attention.attention.{name}.weight": (32, 32) for name in ("query", "key", "value")},
    **{f"attention.attention.{name}.bias": (32,) for name in ("query", "key", "value")},
    "attention.output.dense.weight": (32, 32),
    "attention.output.dense.bias": (32,),
    "intermediate.dense.weight": (64, 32),
    "intermediate.dense.bias": (64,),
    "output.dense.weight": (32, 64),
    "output.dense.bias": (32,),
    "layernorm_before.weight": (32,),
    "layernorm_after.bias": (32,),
}
PUBLISHED: dict[str, tuple[str, Shapes]] = {
    "mixtral": (
        "mixtral",
        {
            **layers({**ATTENTION, **NORMS, **EXPERTS}, "model.layers"),
            **layers({"block_sparse_moe.gate.weight": (6, 32)}, "model.layers"),
            **{name if "head" in name else f"model.{name}": s for name, s in OUTSIDE.items()},
        },
    ),
    "qwen moe": (
        "mixtral",
        {
            **layers({**ATTENTION, **NORMS, **QWEN_EXPERTS}, "model.layers"),
            **layers({"mlp.gate.weight": (6, 32)}, "model.layers"),
            "model.norm.weight": (32,),
        },
    ),
    "deepseek": (
        "deepseek",
        {
            **layers({**NORMS, **QWEN_EXPERTS}, "model.layers"),
            "model.layers.0.self_attn.q_proj.weight": (80, 32),
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (16, 32),
            "model.layers.0.self_attn.kv_a_layernorm.weight": (12,),
            "model.layers.0.self_attn.kv_b_proj.weight": (88, 12),
            "model.layers.0.self_attn.o_proj.weight": (32, 40),
            "model.layers.1.mlp.gate.weight": (6, 32),
            "model.layers.1.mlp.shared_experts.down_proj.weight": (32, 24),
        },
    ),
    "torchtitan with experts": (
        "llama-meta",
        {
            **layers({f"attention.w{each}.weight": (32, 32) for each in "qkvo"}, "layers"),
            **layers({"attention_norm.weight": (32,), "ffn_norm.weight": (32,)}, "layers"),
            **layers({"moe.experts.w1": (6, 24, 32), "moe.experts.w2": (6, 32, 24)}, "layers"),
            **layers({"moe.experts.w3": (6, 24, 32), "moe.expert_bias": (6,)}, "layers"),
            **layers({"moe.shared_experts.w1.weight": (24, 32)}, "layers"),
            **layers({"moe.shared_experts.w2.weight": (32, 24)}, "layers"),
            **layers({"moe.router.gate.weight": (6, 32)}, "layers"),
            "tok_embeddings.weight": (40, 32),
            "norm.weight": (32,),
            "output.weight": (40, 32),
        },
    ),
    "llama without its head": (
        "llama",
        {
            **layers({**ATTENTION, **NORMS, "self_attn.rotary_emb.inv_freq": (2,)}, "layers"),
            **layers({"mlp.gate_proj.weight": (24, 32)}, "layers"),
            **OUTSIDE,
        },
    ),
    "gpt2 without its head": (
        "gpt2",
        {
            **layers(GPT2, "h"),
            "wte.weight": (40, 32),
            "wpe.weight": (16, 32),
            "ln_f.weight": (32,),
        },
    ),
    "gpt-neox": (
        "gpt-neox",
        {
            **layers(fused("attention"), "gpt_neox.layers"),
            **layers({"attention.rotary_emb.inv_freq": (2,)}, "gpt_neox.layers"),
            **layers({"attention.bias": (1, 1, 16, 16)}, "gpt_neox.layers"),
            "gpt_neox.embed_in.weight": (40, 32),
            "gpt_neox.final_layer_norm.bias": (32,),
            "embed_out.weight": (40, 32),
        },
    ),
    "bloom without its head": (
        "bloom",
        {
            **layers(fused("self_attention"), "h"),
            "word_embeddings.weight": (40, 32),
            "word_embeddings_layernorm.weight": (32,),
            "ln_f.weight": (32,),
        },
    ),
    "vit before transformers 5": (
        "vit",
        {
            **layers(VIT, "vit.encoder.layer"),
            "vit.embeddings.cls_token": (1, 1, 32),
            "vit.embeddings.patch_embeddings.projection.weight": (32, 3, 4, 4),
            "vit.layernorm.weight": (32,),
            "classifier.weight": (2, 32),
        },
    ),
}


def decided(what: str, to: str) -> list[Placed]:
    preset, shapes = PUBLISHED[what]
    rules = load_rules("auto", names=shapes, sizes={"hidden_size": 32, "num_attention_heads": 8})
    assert rules.name == preset
    tensors = [
        Tensor(f"model/{name}", shape, 4, "param", None, ()) for name, shape in shapes.items()
    ]
    single = Strategy.parse("single")
    return decide(tensors, source=single, target=Strategy.parse(to), rules=rules)


@pytest.mark.parametrize("what", PUBLISHED)
def test_every_tensor_is_known(what: str) -> None:
    assert not [each.name for each in decided(what, "pp:2,ep:2,tp:2") if each.unknown]


@pytest.mark.parametrize("what", PUBLISHED)
def test_weights_of_layers_are_cut(what: str) -> None:
    cut = {each.name for each in decided(what, "tp:2") if str(each.placements[0]) != "replicate"}
    whole = ("gate.weight", "_with_mqa.weight", "norm", "ln_", "attn.bias", "attention.bias")
    for name, shape in PUBLISHED[what][1].items():
        if len(shape) == 2 and any(part.isdigit() for part in name.split(".")):
            assert (f"model/{name}" in cut) != name.endswith(whole), name


@pytest.mark.parametrize("what", ["mixtral", "qwen moe", "deepseek"])
def test_experts_are_given_to_ranks_in_runs(what: str) -> None:
    owners = {each.name: str(each.placements[0]) for each in decided(what, "ep:4")}
    for name, placement in owners.items():
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            assert placement == f"owner({expert // 2})"
        else:
            assert placement == "replicate"


def test_experts_in_one_tensor_are_cut_by_their_number_first() -> None:
    placed = decided("torchtitan with experts", "ep:2,tp:2")
    cuts = {each.name: list(map(str, each.placements)) for each in placed}
    assert cuts["model/layers.0.moe.experts.w1"] == ["shard(0)", "shard(1)"]
    assert cuts["model/layers.0.moe.experts.w2"] == ["shard(0)", "shard(2)"]
    assert cuts["model/layers.0.attention.wo.weight"][0] == "replicate"


def test_the_first_and_the_last_stage_have_what_is_outside_of_the_layers() -> None:
    stages = {each.name: str(each.placements[0]) for each in decided("gpt-neox", "pp:2")}
    assert stages["model/gpt_neox.embed_in.weight"] == "stage(0)"
    assert stages["model/gpt_neox.final_layer_norm.bias"] == "stage(1)"
    assert stages["model/embed_out.weight"] == "stage(1)"


def test_other_names_tell_nothing() -> None:
    assert load_rules("auto", names=["transformer.blocks.0.attn.Wqkv.weight"]).rules == ()


def test_names_that_tell_too_much_are_refused() -> None:
    names = [*PUBLISHED["gpt2 without its head"][1], *PUBLISHED["gpt-neox"][1]]
    with pytest.raises(RulesError, match="more than one preset fits: gpt-neox, gpt2"):
        load_rules("auto", names=names)
