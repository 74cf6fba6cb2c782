"""The sizes of a model, under the names that rules use, whatever its config calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NESTED = ("text_config", "llm_config", "language_config")
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model", "n_embed", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
    "head_dim": ("d_kv",),
}


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The integers of a Hugging Face config, those of a nested text model first, and what follows
    from them: other names, `head_dim`, and `num_key_value_heads`.
    """
    found: dict[str, int] = {}
    for part in (*(config.get(key) for key in _NESTED), config):
        if isinstance(part, Mapping):
            integers = {str(key): value for key, value in part.items() if type(value) is int}
            found = {**integers, **found}
    for name, others in _SYNONYMS.items():
        known = next((found[other] for other in others if other in found), None)
        if known is not None:
            found.setdefault(name, known)
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    if heads and _shares_keys(config):
        found["num_key_value_heads"] = 1
    elif heads:
        found.setdefault("num_key_value_heads", heads)
    if heads and hidden and hidden % heads == 0:
        found.setdefault("head_dim", hidden // heads)
    return found


def _shares_keys(config: Mapping[str, Any]) -> bool:
    """Falcon and others say so apart, and give a number of heads that then means nothing."""
    return config.get("multi_query") is True and config.get("new_decoder_architecture") is not True
