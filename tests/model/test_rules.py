from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import yaml

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model import Replicate, Shard
from ckptkit.model.rules import Cut, Experts, Expression, Pipeline, Rule, Rules, fits, sizes_of

TEXT = r"""
rules:
  - {match: "*.q_proj.weight", tp: shard(0)}
  - {match: "*.qkv_proj.weight", tp: {shard: 0, blocks: [heads*4, 4, 4], unit: head_dim}}
  - {match: "*.gate_up.weight", tp: {shard: 0, blocks: 2}}
  - {match: ["*norm*", "re:.*\\.(bias|scale)"], tp: replicate}
  - {match: "*.experts", ndim: 3, tp: "shard(1, blocks=[6,6], unit=2)", ep: shard(0)}
  - {match: "*.experts.*", ep: {expert: "experts\\.(\\d+)\\."}}
  - {match: "*.odd", when: {heads: 1}, tp: shard(1)}
pipeline: {layers: "layers.(\\d+)", split: [1, 3], first: "*embed*", last: head, every: [tied]}
default: replicate
sizes: {heads: 8}
"""
RULES = Rules.from_doc(yaml.safe_load(TEXT), where="test.yaml")


def tp(name: str, shape: tuple[int, ...], **sizes: int) -> Any:
    rule = RULES.find(name, shape)
    assert rule is not None
    assert rule.tp is not None
    return rule.tp.placement(shape, RULES.with_sizes(sizes).known)


def test_a_document_is_read_whole() -> None:
    assert (RULES.name, RULES.default, RULES.known) == ("test.yaml", "replicate", {"heads": 8})
    assert RULES.rules[0] == Rule(("*.q_proj.weight",), Cut(0))
    assert RULES.rules[2].tp == Cut(0, Expression("2"))
    assert RULES.rules[5] == Rule(("*.experts.*",), None, Experts("experts\\.(\\d+)\\."))
    assert RULES.pipeline == Pipeline(
        ("layers.(\\d+)",), (1, 3), ("*embed*",), ("head",), ("tied",)
    )


def test_the_first_match_wins() -> None:
    assert RULES.find("a.q_proj.weight", (4, 4)) is RULES.rules[0]
    assert RULES.find("norm.q_proj.weight", (4, 4)) is RULES.rules[0]
    assert RULES.find("a.q_proj.bias", (4,)) is RULES.rules[3]
    assert RULES.find("a.experts", (2, 2)) is None
    assert RULES.find("a.experts", (2, 2, 2)) is RULES.rules[4]
    assert RULES.find("head", (4, 4)) is None


def test_a_rule_can_ask_for_a_size() -> None:
    assert RULES.find("a.odd", (4, 4)) is None
    assert RULES.with_sizes({"heads": 1}).find("a.odd", (4, 4)) is RULES.rules[6]


def test_globs_and_regular_expressions_match_whole_names() -> None:
    assert fits("*.w", "a.b.w")
    assert not fits("*.w", "a.b.ww")
    assert not fits("*.W", "a.b.w")
    assert fits("re:a\\.\\d+", "a.12")
    assert not fits("re:a\\.\\d", "a.12")


def test_numbers_are_worked_out_from_sizes() -> None:
    assert tp("a.qkv_proj.weight", (40, 4), head_dim=2) == Shard(0, (32, 4, 4), 2)
    assert tp("a.gate_up.weight", (40, 4)) == Shard(0, (20, 20))
    assert tp("a.gate_up.weight", (0, 4)) == Shard(0)
    assert tp("a.norm", (4,)) == Replicate()


def test_what_a_rule_cannot_cut_is_refused() -> None:
    with pytest.raises(RulesError, match="needs to know head_dim"):
        tp("a.qkv_proj.weight", (40, 4))
    with pytest.raises(LayoutError, match="there is no dim 0"):
        tp("a.q_proj.weight", ())
    with pytest.raises(LayoutError, match="a length of 5 has no 2 equal blocks"):
        tp("a.gate_up.weight", (5, 4))


def test_what_a_preset_is_known_by_means_nothing_elsewhere() -> None:
    doc = {**yaml.safe_load(TEXT), "detect": {"all": ["*.q_proj.*"]}}
    assert Rules.from_doc(doc, where="test.yaml") == RULES
    with pytest.raises(RulesError, match="is empty"):
        Rules.from_doc({"detect": {"all": ["a"]}}, where="test.yaml")


def test_rules_are_values() -> None:
    again = Rules.from_doc(yaml.safe_load(TEXT), where="test.yaml")
    assert again == RULES
    assert hash(again) == hash(RULES)
    assert pickle.loads(pickle.dumps(RULES)) == RULES
    assert copy.deepcopy(RULES) == RULES


def test_given_sizes_win_over_those_of_the_file() -> None:
    assert RULES.with_sizes({"heads": 2, "width": 3}).known == {"heads": 2, "width": 3}


@pytest.mark.parametrize(
    ("doc", "problem"),
    [
        ([], "test: must be a map"),
        ({}, "is empty"),
        (None, "must be a map"),
        ({"rules": {}}, "rules: must be a list"),
        ({"rules": ["a"]}, "rules.0: must be a map"),
        ({"rule": []}, "has an unknown key 'rule'"),
        ({"rules": [{"tp": "replicate"}]}, "rules.0: lacks match"),
        ({"rules": [{"match": "a"}]}, "rules.0: says of neither tp nor ep"),
        ({"rules": [{"match": "", "tp": "replicate"}]}, "rules.0.match: must be a pattern"),
        ({"rules": [{"match": 3, "tp": "replicate"}]}, "rules.0.match: must be a pattern"),
        ({"rules": [{"match": "re:(", "tp": "replicate"}]}, "rules.0.match: no regular"),
        ({"rules": [{"match": "a", "tp": "shard"}]}, "rules.0.tp: not a placement"),
        ({"rules": [{"match": "a", "tp": "owner(1)"}]}, "rules.0.tp: a rule cuts or replicates"),
        ({"rules": [{"match": "a", "tp": 3}]}, "rules.0.tp: no placement"),
        ({"rules": [{"match": "a", "tp": None}]}, "rules.0.tp: no placement"),
        ({"rules": [{"match": "a", "tp": {"blocks": 2}}]}, "rules.0.tp.shard: must be a dim"),
        ({"rules": [{"match": "a", "tp": {"shard": True}}]}, "rules.0.tp.shard: must be a dim"),
        ({"rules": [{"match": "a", "tp": {"shard": -1}}]}, "rules.0.tp.shard: must be a dim"),
        ({"rules": [{"match": "a", "tp": {"shard": 0, "block": 2}}]}, "unknown key 'block'"),
        ({"rules": [{"match": "a", "tp": {"shard": 0, "blocks": []}}]}, "blocks: cannot be empty"),
        ({"rules": [{"match": "a", "tp": {"shard": 0, "blocks": [0]}}]}, "blocks.0: must be a pos"),
        ({"rules": [{"match": "a", "tp": {"shard": 0, "unit": "2 %"}}]}, "unit: not a number"),
        ({"rules": [{"match": "a", "tp": {"shard": 0, "unit": 1.5}}]}, "unit: must be a positive"),
        (
            {"rules": [{"match": "a", "ep": {"expert": "e\\.\\d"}}]},
            "ep.expert: must have one group",
        ),
        ({"rules": [{"match": "a", "ep": {"expert": 3}}]}, "ep.expert: must be a regular"),
        ({"rules": [{"match": "a", "tp": "replicate", "ndim": "3"}]}, "ndim: must be a number"),
        ({"rules": [{"match": "a", "tp": "replicate", "when": {"a": "b"}}]}, "when: must be names"),
        ({"pipeline": {"split": "balanced"}}, "pipeline.layers: must be a regular"),
        ({"pipeline": {"layers": []}}, "pipeline.layers: cannot be empty"),
        ({"pipeline": {"layers": "l"}}, "pipeline.layers: must have one group"),
        ({"pipeline": {"layers": "l(\\d+)", "split": "even"}}, "pipeline.split: must be balanced"),
        ({"pipeline": {"layers": "l(\\d+)", "split": [3, 2]}}, "pipeline.split: must be rising"),
        ({"pipeline": {"layers": "l(\\d+)", "split": [0, 2]}}, "pipeline.split: must be rising"),
        ({"pipeline": {"layers": "l(\\d+)", "last": 3}}, "pipeline.last: must be a pattern"),
        ({"rules": [], "default": "shard"}, "default: must be error or replicate"),
        ({"rules": [], "sizes": {"a": 1.5}}, "sizes: must be names with integers"),
    ],
)
def test_a_document_that_is_wrong_says_where(doc: Any, problem: str) -> None:
    with pytest.raises(RulesError) as caught:
        Rules.from_doc(doc, where="test")
    assert problem in str(caught.value)
    assert "schemas/RULES.md" in caught.value.hint


def test_all_problems_are_told_at_once() -> None:
    doc = {"rules": [{"match": "a", "tp": "shrad(0)"}, {"tp": 3, "x": 1}], "default": 1}
    with pytest.raises(RulesError, match="not rules, for 5 reasons") as caught:
        Rules.from_doc(doc, where="mine.yaml")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:6]] == [
        "rules.0.tp",
        "rules.1",
        "rules.1",
        "rules.1.tp",
        "default",
    ]
    assert lines[0].startswith("mine.yaml: ")


def test_a_config_gives_sizes_under_the_names_of_rules() -> None:
    assert sizes_of({"n_head": 8, "n_embd": 32, "torch_dtype": "float32", "tied": True}) == {
        "n_head": 8,
        "n_embd": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_size": 32,
        "head_dim": 4,
    }


def test_what_a_config_says_itself_is_not_worked_out() -> None:
    found = sizes_of(
        {"num_attention_heads": 8, "hidden_size": 32, "head_dim": 6, "num_key_value_heads": 2}
    )
    assert (found["head_dim"], found["num_key_value_heads"]) == (6, 2)
    assert "head_dim" not in sizes_of({"num_attention_heads": 3, "hidden_size": 32})


def test_a_nested_text_model_comes_first() -> None:
    config = {"hidden_size": 7, "image": 3, "text_config": {"hidden_size": 32, "n_head": 4}}
    found = sizes_of(config)
    assert (found["hidden_size"], found["head_dim"], found["image"]) == (32, 8, 3)


@pytest.mark.parametrize(("new", "keys"), [(False, 1), (True, 71)])
def test_keys_for_all_heads_are_one(new: bool, keys: int) -> None:
    config = {
        "num_attention_heads": 71,
        "num_kv_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": new,
    }
    assert sizes_of(config)["num_key_value_heads"] == keys
