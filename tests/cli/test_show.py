from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.checkpoint.saving import Tensor, save
from tests.cli.programs import ckpt, document


def test_a_run_means_its_newest_committed_step(run: Path) -> None:
    assert document("show", run)["step"] == 20
    assert document("show", run / "step-0000000010")["step"] == 10


def test_a_step_that_a_run_lacks_names_those_that_it_has(run: Path) -> None:
    for asked, named in (
        ("85", "step-0000000020 or step-0000000030"),
        ("step_15", "step-0000000010 or step-0000000020"),
        ("10", "step-0000000010"),
    ):
        told = ckpt("show", run / asked)
        assert told.exit_code == 4
        assert f"hint: did you mean {named}? " in told.stderr
    assert "did you mean" not in ckpt("show", run / "lost").stderr


def test_the_document_says_how_it_was_written(run: Path) -> None:
    found = document("show", run)
    assert found["strategy"] == {
        "text": "ddp:2,fsdp:2",
        "world_size": 4,
        "axes": [
            {"name": "ddp", "kind": "ddp", "size": 2},
            {"name": "fsdp", "kind": "fsdp", "size": 2},
        ],
    }
    assert found["details"] == {"precision": "bf16"}
    assert found["packs"] == 4
    # qkv, w, none, scale, exp_avg; the tied w once.
    assert found["bytes"] == 8 * 6 * 4 + 5 * 6 * 2 + 0 + 8 + 5 * 6 * 4
    assert found["rank"] is None


def test_every_array_is_described(run: Path) -> None:
    arrays = {array["name"]: array for array in document("show", run)["arrays"]}
    assert list(arrays) == sorted(arrays)
    w = arrays["model/w"]
    assert (w["shape"], w["dtype"], w["role"], w["bytes"]) == ([5, 6], "bfloat16", "param", 60)
    assert w["placements"] == {"ddp": "replicate", "fsdp": "shard(0)"}
    assert w["parts"] == {"count": 2, "shape": [3, 6], "boxes": 1}
    assert arrays["model/qkv"]["parts"] == {"count": 2, "shape": [4, 6], "boxes": 3}
    assert arrays["model/tied"]["alias_of"] == "model/w"
    assert arrays["optimizer/w/exp_avg"]["of"] == "model/w"


def test_the_text_is_a_tree_with_one_line_for_each_array(run: Path) -> None:
    lines = _lines(ckpt("show", run).stdout)
    assert "strategy ddp:2,fsdp:2 (4 ranks: ddp 2 x fsdp 2)" in lines
    assert "details precision = 'bf16'" in lines
    assert "model/ 260 B" in lines
    assert "w bfloat16 (5, 6) param 2 x (3, 6) 60 B" in lines
    assert "qkv float32 (8, 6) param 2 x (4, 6) in 3 boxes 192 B" in lines
    assert "tied bfloat16 (5, 6) param = model/w" in lines
    assert "none int8 (0, 2) param empty 0 B" in lines
    assert "scale float64 () param whole 8 B" in lines
    assert "exp_avg float32 (5, 6) optimizer 2 x (3, 6) 120 B" in lines


def test_a_rank_holds_its_boxes(run: Path) -> None:
    found = document("show", run, "--rank", "3")
    assert found["rank"] == {"rank": 3, "coords": {"ddp": 1, "fsdp": 1}, "bytes": 96 + 24 + 8 + 48}
    parts = {array["name"]: array["part"] for array in found["arrays"]}
    assert parts["model/w"] == {
        "shape": [2, 6],
        "boxes": [{"offset": [3, 0], "shape": [2, 6]}],
        "bytes": 24,
    }
    assert [box["offset"][0] for box in parts["model/qkv"]["boxes"]] == [2, 5, 7]
    assert parts["model/none"]["boxes"] == []


def test_the_text_of_a_rank_shows_only_what_it_holds(run: Path) -> None:
    text = ckpt("show", run, "--rank", "3").stdout
    lines = _lines(text)
    assert "rank 3 (ddp 1, fsdp 1) holds 176 B of 5 arrays" in lines
    assert "qkv float32 (4, 6) param [2:4, :] [5:6, :] [7:8, :] 96 B" in lines
    assert "scale float64 () param whole 8 B" in lines
    assert "none" not in text


def test_a_pattern_picks_arrays_by_name(run: Path) -> None:
    def names(pattern: str) -> list[str]:
        return [array["name"] for array in document("show", run, pattern)["arrays"]]

    assert names("model/w") == ["model/w"]
    assert names("*w*") == ["model/w", "optimizer/w/exp_avg"]
    assert names("model/?") == ["model/w"]
    nothing = ckpt("show", run, "nothing*")
    assert nothing.exit_code == 4
    assert "'nothing*'" in nothing.stderr


def test_a_pattern_picks_the_numbers_that_it_names(tmp_path: Path) -> None:
    numbers = (0, 1, 2, 3, 5, 7, 11, 20)
    names = [f"model/{n}.w" for n in numbers] + ["model/2.in.w", "model/x.w"]
    save(tmp_path, {name: Tensor(np.zeros(2)) for name in names})

    def picked(pattern: str) -> list[str]:
        return [each["name"] for each in document("show", tmp_path, pattern)["arrays"]]

    assert picked("model/{1..3,7}.w") == [f"model/{n}.w" for n in (1, 2, 3, 7)]
    assert picked("model/{0..1,..,11}.w") == [f"model/{n}.w" for n in (0, 1, 11, 2, 3, 5, 7)]
    assert picked("*/{2,99}.*") == ["model/2.in.w", "model/2.w"]
    assert ckpt("show", tmp_path, "model/{4}.w").exit_code == 4


def test_objects_are_shown_whatever_they_are(run: Path) -> None:
    objects = {item["name"]: item for item in document("show", run)["objects"]}
    assert objects["rate"]["value"] == 0.5
    assert objects["tokens"] == {"name": "tokens", "semantics": "sum", "value": [10] * 4}
    assert objects["seed"]["value"] == [{"type": "bytes", "text": "<2 bytes>"}] * 4
    assert objects["odd"]["value"] == {
        "t": {"type": "tuple", "text": "(1, 2)"},
        "nan": {"type": "float", "text": "nan"},
        "array": {"type": "ndarray", "text": "<int64 of shape (3,)>"},
    }
    assert objects["evil"]["value"] == "\x1b[2J"
    assert objects["when"]["value"]["text"] == "2026-01-02T00:00:00+00:00"


def test_what_a_file_says_does_not_steer_the_terminal(run: Path) -> None:
    text = ckpt("show", run).stdout
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_a_rank_that_is_none_is_wrong_usage(run: Path) -> None:
    assert ckpt("show", run, "--rank", "4").exit_code == 2
    assert ckpt("show", run, "--rank", "-1").exit_code == 2


def _lines(text: str) -> list[str]:
    """The lines without their alignment."""
    return [" ".join(line.split()) for line in text.splitlines()]
