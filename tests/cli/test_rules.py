from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptkit.cli.options import command, rules_options
from ckptkit.cli.output import Reply

import ckptkit
from tests.cli.programs import ckpt, document

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (20, 16),
    "model.layers.0.input_layernorm.weight": (16,),
    "model.layers.0.mlp.gate_proj.weight": (24, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.q_proj.weight": (16, 16),
}


def write(run: Path, *others: str) -> Path:
    """A step of a little of a llama, and of tensors that are none of it."""
    with ckptkit.Writer(run, step=7) as writer:
        for name, shape in SHAPES.items() | {(other, (3,)) for other in others}:
            writer.add(f"model/{name}", np.zeros(shape, np.float32), role="param")
    return run


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path / "llama")


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    return write(tmp_path / "strange", "odd", "odder")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 16, "num_attention_heads": 4, "rope": {"a": 1.5}}))
    return path


def test_every_tensor_has_a_line(llama: Path, config: Path) -> None:
    result = ckpt("rules", llama, "--to", "tp:4,fsdp:2", "--config", config)
    assert (result.exit_code, result.stderr) == (0, "")
    head, *lines = result.stdout.splitlines()
    assert head.split() == ["NAME", "SHAPE", "CUTS", "PART", "WHY"]
    assert len(lines) == len(SHAPES)
    (keys,) = [line for line in lines if "k_proj" in line]
    assert "tp shard(0, unit=4); fsdp shard(0)" in keys
    assert "(8, 16)" in keys
    assert "(2, 16)" in keys
    assert keys.endswith(r"llama: re:.*self_attn\.[qkv]_proj\.(weight|bias)")
    (norm,) = [line for line in lines if "layernorm" in line]
    assert "  fsdp shard(0)  " in norm


def test_the_document_has_it_all(llama: Path) -> None:
    found = document("rules", llama, "--to", "tp:4", "--set", "head_dim=4")
    assert (found["to"], found["unknown"], found["unknown_sizes"]) == ("tp:4", [], [])
    tensors = {each["name"]: each for each in found["tensors"]}
    assert tensors["model/model.layers.0.self_attn.k_proj.weight"] == {
        "name": "model/model.layers.0.self_attn.k_proj.weight",
        "shape": [8, 16],
        "placements": [{"axis": "tp", "placement": "shard(0, unit=4)"}],
        "part": [4, 16],
        "why": r"llama: re:.*self_attn\.[qkv]_proj\.(weight|bias)",
        "unknown": [],
        "unknown_sizes": [],
    }


def test_what_cannot_be_checked_is_told(llama: Path) -> None:
    result = ckpt("rules", llama, "--to", "tp:2")
    assert result.exit_code == 0
    assert result.stderr == (
        "head_dim is unknown: attention heads may be cut in two, which `ckpt reshard` refuses;"
        " pass --config config.json\n"
    )
    assert document("rules", llama, "--to", "tp:2")["unknown_sizes"] == ["head_dim"]


def test_a_reshard_never_cuts_heads_in_two_unasked(
    llama: Path, config: Path, tmp_path: Path
) -> None:
    to = (llama, tmp_path / "new", "--to", "tp:2", "--dry-run")
    given: tuple[object, ...]
    for given in ((), ("--set", "num_attention_heads=4")):
        result = ckpt("reshard", *to, *given)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(
            "error: llama: without head_dim nobody knows whether attention heads are cut in two, of"
            " 2 tensors: model/model.layers.0.self_attn.k_proj.weight, model/"
        )
        assert "\nhint: pass --config config.json, or --set head_dim=N " in result.stderr
    for given in (("--config", config), ("--set", "head_dim=4"), ("--allow-split-heads",)):
        assert ckpt("reshard", *to, *given).exit_code == 0
    assert ckpt("reshard", *to[:3], "fsdp:3", "--dry-run").exit_code == 0


def test_a_step_that_tp_ranks_saved_has_its_heads_told_too(llama: Path, tmp_path: Path) -> None:
    tp = tmp_path / "tp"
    ckptkit.reshard(llama, tp, to="tp:2", allow_split_heads=True)
    with pytest.raises(ckptkit.errors.RulesError, match="heads are cut in two, of 2 tensors"):
        ckptkit.plan_reshard(tp, tmp_path / "new", to="tp:4")
    assert ckpt("rules", tp, "--to", "tp:2").stderr == ""
    assert "head_dim is unknown" in ckpt("rules", tp, "--to", "tp:4").stderr
    plan = ckptkit.plan_reshard(tp, tmp_path / "new", to="tp:4", sizes={"head_dim": 4})
    (keys,) = [array for array in plan.arrays if "k_proj" in array.name]
    assert [str(placement) for placement in keys.info.placements] == ["shard(0, unit=4)"]
    assert keys.why == "as in the source"


def test_unknown_tensors_are_an_answer_of_no(strange: Path) -> None:
    result = ckpt("rules", strange, "--to", "tp:2")
    assert result.exit_code == 1
    assert sum(line.endswith("no rule") for line in result.stdout.splitlines()) == 2
    assert "2 tensors of which no rule knows" in result.stderr
    found = document("rules", strange, "--to", "tp:2", code=1)
    assert found["unknown"] == ["model/odd", "model/odder"]


def test_unknown_tensors_can_be_replicated(strange: Path) -> None:
    found = document("rules", strange, "--to", "tp:2", "--replicate-unknown")
    assert found["unknown"] == []
    (odd,) = [each for each in found["tensors"] if each["name"] == "model/odd"]
    assert odd["placements"] == [{"axis": "tp", "placement": "replicate"}]


def test_rules_come_from_a_file(strange: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rules: [{match: '*odd*', tp: shard(0)}]\ndefault: replicate\n")
    found = document("rules", strange, "--to", "tp:2", "--rules", path)
    whys = {each["name"]: each["why"] for each in found["tensors"]}
    assert whys["model/odd"] == "mine.yaml: *odd*"
    assert whys["model/model.embed_tokens.weight"] == "mine.yaml: default"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--rules", "lama"], "did you mean llama?"),
        (["--rules", "none.yaml"], "none.yaml: cannot be read"),
        (["--set", "head_dim=5"], "a length of 8 is no multiple of the unit"),
        (["--set", "head_dim"], "'head_dim' is no size: write NAME=N"),
        (["--set", "head_dim=-1"], "is no size"),
        (["--config", "none.json"], "none.json: No such file"),
    ],
)
def test_what_cannot_be_right_is_wrong_usage(llama: Path, arguments: list[str], error: str) -> None:
    result = ckpt("rules", llama, "--to", "tp:4", *arguments)
    assert result.exit_code == 2
    assert error in result.stderr


def test_sizes_that_are_set_win_over_the_config(config: Path) -> None:
    given: list[dict[str, Any]] = []

    @command("ckpt sizes")
    @rules_options
    def sizes(*, sizes: dict[str, Any], **_: Any) -> Reply:
        given.append(sizes)
        return Reply(sizes)

    def found(*line: str) -> Any:
        sizes.main([*line], standalone_mode=False)
        return given.pop()

    said = found("--config", str(config), "--set", "hidden_size=32", "--set", "extra = 3")
    assert (said["hidden_size"], said["num_attention_heads"], said["extra"]) == (32, 4, 3)
    assert found() == {}


@pytest.mark.parametrize("text", ["[1]", "{", "\x00", "3"])
def test_a_config_is_a_json_object(llama: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    result = ckpt("rules", llama, "--to", "tp:4", "--config", path)
    assert result.exit_code == 2
    assert "bad.json is no" in result.stderr


def test_it_says_who_owns_what_as_the_reshard_decides(tmp_path: Path) -> None:
    source, new = tmp_path / "source", tmp_path / "new"
    names = ["d", "c", "b", "a"]
    with ckptkit.Writer(source, step=1) as writer:
        for name in sorted(names):
            writer.add(f"model/{name}", np.ones(4, np.float32), role="param")
            state = f"optimizer/{name}/exp_avg"
            writer.add(state, np.ones(4, np.float32), role="optimizer", of=f"model/{name}")
        writer.add_object("optimizer", [{"kind": "Adam", "groups": [{"params": names}]}])
    found = {each.name: each.placements for each in ckptkit.explain_rules(source, to="zero1:2")}
    ckptkit.reshard(source, new, to="zero1:2")
    with ckptkit.open(new) as checkpoint:
        for array in checkpoint.manifest.arrays:
            assert found[array.name] == (("zero1", str(array.placements[0])),)
