"""Tiny models of every architecture that has a preset, of random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

LLAMA = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
WITHOUT_GROUPS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
FALCON = {
    key: value
    for key, value in WITHOUT_GROUPS.items()
    if key not in ("intermediate_size", "max_position_embeddings")
}
SHORT = {"n_layer": 2, "n_head": 8, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1}
WORDS = torch.tensor([[3, 39, 7, 22, 15, 30]])


def _words(model: nn.Module) -> Tensor:
    return _logits(model(input_ids=WORDS, use_cache=False))


def _masked(model: nn.Module) -> Tensor:
    return _logits(model(input_ids=WORDS))


def _translated(model: nn.Module) -> Tensor:
    return _logits(model(input_ids=WORDS, decoder_input_ids=WORDS[:, :4] - 1, use_cache=False))


def _pixels(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return _logits(model(pixel_values=torch.randn(1, 3, 8, 8, generator=generator)))


def _logits(output: Any) -> Tensor:
    found: Tensor = output.logits
    return found


@dataclass(frozen=True)
class Kind:
    """One architecture: its class and config, the preset that is to know it, and how it is run."""

    preset: str
    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    forward: Callable[[nn.Module], Tensor] = _words
    renamed: tuple[tuple[str, str], ...] = ()
    """What parts of names are called in the checkpoint."""

    def stored(self, name: str) -> str:
        """The name that a tensor of the model has in the checkpoint."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        return f"model/{name}"

    def build(self) -> nn.Module:
        """The model, every parameter of which matters."""
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = config._experts_implementation = "eager"
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_scale = ("norm" in name.lower() and name.endswith("weight")) or "ln_" in name
                parameter.copy_(torch.randn_like(parameter) * 0.3 + is_scale)
        return model


META = (
    ("model.", ""),
    ("self_attn.o_proj", "attention.wo"),
    ("self_attn.q_proj", "attention.wq"),
    ("self_attn.k_proj", "attention.wk"),
    ("self_attn.v_proj", "attention.wv"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("embed_tokens", "tok_embeddings"),
    ("lm_head", "output"),
)
KINDS: dict[str, Kind] = {
    "llama, first names": Kind(
        "llama-meta", "LlamaForCausalLM", "LlamaConfig", LLAMA, renamed=META
    ),
    "llama": Kind("llama", "LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama with biases, tied": Kind(
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": Kind("llama", "MistralForCausalLM", "MistralConfig", LLAMA),
    "qwen2": Kind("llama", "Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen3": Kind("llama", "Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 6}),
    "gemma": Kind("llama", "GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 6}),
    "gemma2": Kind("gemma", "Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "head_dim": 6}),
    "gemma3": Kind("gemma", "Gemma3ForCausalLM", "Gemma3TextConfig", {**LLAMA, "head_dim": 6}),
    "phi3": Kind("phi3", "Phi3ForCausalLM", "Phi3Config", LLAMA),
    "mixtral": Kind(
        "mixtral", "MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}
    ),
    "qwen3 moe": Kind(
        "mixtral",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **LLAMA,
            "head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [0],
        },
    ),
    "qwen2 moe": Kind(
        "mixtral",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **LLAMA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "deepseek": Kind(
        "deepseek",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **LLAMA,
            "num_key_value_heads": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "q_lora_rank": 10,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
        },
    ),
    "gpt2": Kind(
        "gpt2", "GPT2LMHeadModel", "GPT2Config", {**SHORT, "n_embd": 32, "n_positions": 16}
    ),
    "gpt-neox": Kind("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", WITHOUT_GROUPS),
    "bloom": Kind("bloom", "BloomForCausalLM", "BloomConfig", {**SHORT, "hidden_size": 32}),
    "falcon 7b": Kind(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "multi_query": True, "new_decoder_architecture": False},
    ),
    "falcon 40b": Kind(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "num_kv_heads": 4, "new_decoder_architecture": True, "bias": True},
    ),
    "falcon rw": Kind(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        {
            **FALCON,
            "multi_query": False,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "bias": True,
            "alibi": True,
        },
    ),
    "bert": Kind("bert", "BertForMaskedLM", "BertConfig", WITHOUT_GROUPS, _masked),
    "roberta": Kind("bert", "RobertaForMaskedLM", "RobertaConfig", WITHOUT_GROUPS, _masked),
    "t5": Kind(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "num_heads": 8, "d_kv": 6, "num_layers": 2, "d_ff": 24, "vocab_size": 40},
        _translated,
    ),
    "t5 1.1": Kind(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 32,
            "num_heads": 8,
            "d_kv": 6,
            "num_layers": 2,
            "d_ff": 24,
            "vocab_size": 40,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        _translated,
    ),
    "vit": Kind(
        "vit",
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "image_size": 8,
            "patch_size": 4,
        },
        _pixels,
    ),
}
