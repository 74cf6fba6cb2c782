from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

import ckptkit
from ckptkit.checkpoint.rules_file import load_rules, presets, rules_between
from ckptkit.errors import RulesError
from ckptkit.model import Strategy
from ckptkit.model.rules import Rules
from ckptkit.storage import MemoryStore
from tests.checkpoint.reshard.toy import RULES as TOY

ROOT = Path(__file__).parents[2]
DOC: dict[str, Any] = {"rules": [{"match": "*.w", "tp": {"shard": 0, "unit": "head_dim"}}]}
NAMES = [
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.input_layernorm.weight",
]


@pytest.mark.parametrize("name", ["rules.yaml", "rules.yml", "rules.json", "rules"])
def test_files_are_yaml_or_json(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(DOC) if name.endswith("json") else yaml.safe_dump(DOC))
    for what in (path, str(path)):
        assert load_rules(what) == Rules.from_doc(DOC, where=name)


def test_rules_come_as_documents_and_as_what_they_are() -> None:
    rules = load_rules(DOC)
    assert rules == Rules.from_doc(DOC, where="rules")
    assert load_rules(rules) is not rules
    assert load_rules(rules) == rules


def test_sizes_may_be_a_whole_config() -> None:
    config = {"hidden_size": 32, "num_attention_heads": 4, "architectures": ["A"], "dropout": 0.1}
    for what in (DOC, Rules.from_doc(DOC, where="rules"), "llama"):
        known = load_rules(what, sizes=config).known
        assert (known["head_dim"], known["num_key_value_heads"]) == (8, 4)
    file = {**DOC, "sizes": {"hidden_size": 64, "num_attention_heads": 4}}
    assert load_rules(file).known["head_dim"] == 16
    assert load_rules(file, sizes={"head_dim": 2}).known["head_dim"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: [", "neither YAML nor JSON"),
        ("!!python/object/apply:os.getcwd []", "neither YAML nor JSON"),
        ("\x00", "neither YAML nor JSON"),
        ("", "must be a map"),
        (
            "rules: [{match: 'a', tp: sharp}]",
            r"mine.yaml: not rules:\n  rules.0.tp: not a placement",
        ),
    ],
)
def test_a_file_that_holds_no_rules_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RulesError, match=message):
        load_rules(path)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="cannot be read: No such file"):
        load_rules(tmp_path / "none.yaml")
    with pytest.raises(RulesError, match="no preset of this name, nor a file") as caught:
        load_rules("lama")
    assert "did you mean llama? presets are bert, " in caught.value.hint


def test_auto_is_the_preset_that_fits_the_names() -> None:
    assert load_rules("auto", names=NAMES) == presets()["llama"].rules
    assert load_rules("auto", names=["a", "b"]).rules == ()


@pytest.mark.parametrize(
    ("source", "target", "cuts", "stages"),
    [
        ("fsdp:2", "tp:2", True, False),
        ("fsdp:2", "pp:2,tp:2", True, True),
        ("tp:2", "pp:2,tp:4", True, True),
        ("tp:2", "pp:2,tp:2", False, True),
        ("tp:2", "tp:4", True, False),
        ("pp:2,tp:2", "tp:4,pp:2", True, False),
        ("pp:2", "pp:2,tp:4", True, False),
        ("pp:2,tp:2", "pp:4,tp:2", False, True),
        ("tp:1", "tp:2", True, False),
        ("tp:2", "ep:2", True, False),
        ("pp:2", "a=pp:2,b=pp:2", False, True),
    ],
)
def test_rules_are_detected_for_what_the_source_does_not_tell(
    source: str, target: str, cuts: bool, stages: bool
) -> None:
    found = rules_between(Strategy.parse(source), Strategy.parse(target), None, names=NAMES)
    assert found is not None
    assert (found.rules != (), found.pipeline is not None) == (cuts, stages)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp:2", "ddp:4"),
        ("tp:2", "fsdp:2,tp:2"),
        ("pp:2,tp:2", "tp:2,pp:2"),
        ("tp:2", "fsdp:2,tp:1"),
        ("pp:4", "a=pp:2,b=pp:2"),
    ],
)
def test_nothing_is_detected_where_the_source_tells_all(source: str, target: str) -> None:
    assert rules_between(Strategy.parse(source), Strategy.parse(target), None, names=[]) is None


def test_rules_that_are_given_are_taken_whole() -> None:
    found = rules_between(Strategy.parse("tp:2"), Strategy.parse("tp:4"), DOC, names=[])
    assert found == Rules.from_doc(DOC, where="rules")


SCHEMA = json.loads((ROOT / "schemas" / "rules.schema.json").read_text())


def test_the_schema_accepts_every_preset() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(TOY)
    for path in (ROOT / "ckptkit" / "presets").iterdir():
        doc = yaml.safe_load(path.read_text())
        assert set(doc["detect"]) <= {"all", "none"}
        validator.validate(doc)


def test_a_preset_is_a_file_to_begin_with(tmp_path: Path) -> None:
    for path in (ROOT / "ckptkit" / "presets").iterdir():
        mine = tmp_path / path.name
        mine.write_text(path.read_text())
        assert replace(load_rules(mine), name=path.stem) == presets()[path.stem].rules


def test_the_example_in_the_documentation_is_one() -> None:
    text = (ROOT / "schemas" / "RULES.md").read_text()
    doc = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    jsonschema.Draft202012Validator(SCHEMA).validate(doc)
    assert len(Rules.from_doc(doc, where="example").rules) == len(doc["rules"])


def test_the_documentation_names_every_preset() -> None:
    text = (ROOT / "schemas" / "RULES.md").read_text().split("## 6. Presets")[1]
    assert [name for name in presets() if f"`{name}`" not in text] == []


def test_every_tensor_is_explained() -> None:
    store = MemoryStore()
    with ckptkit.Writer(store, step=3) as writer:
        writer.add("model/a.w", np.zeros((6, 4), np.float32), role="param")
        writer.add("model/b", np.zeros((3,), np.float32), role="param")
        writer.add(
            "optimizer/a.w/m", np.zeros((6, 4), np.float32), role="optimizer", of="model/a.w"
        )
    first, second, third = ckptkit.explain_rules(
        store, to="tp:2,fsdp:2", rules=DOC, sizes={"head_dim": 2}
    )
    assert first == ckptkit.Explained(
        name="model/a.w",
        shape=(6, 4),
        placements=(("tp", "shard(0, unit=2)"), ("fsdp", "shard(0)")),
        part=(2, 4),
        why="rules: *.w",
    )
    assert (second.part, second.unknown) == ((2,), ("tp",))
    assert (third.name, third.placements) == ("optimizer/a.w/m", first.placements)
    found = ckptkit.explain_rules(
        store, to="tp:2", rules=DOC, sizes={"head_dim": 2}, replicate_unknown=True
    )
    assert not any(each.unknown for each in found)
    assert ckptkit.explain_rules(store, to="fsdp:2")[0].why == "parameter"
