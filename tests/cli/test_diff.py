from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckptkit import PerRank, Sum, Writer
from tests.checkpoint.saving import Tensor, add, save_by
from tests.cli.conftest import TENSORS
from tests.cli.programs import ckpt, document, flip_a_bit


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same but for a few things, by one process."""
    changed = np.array([[1.0, np.inf], [0.0, 2.0]])

    def fill(writer: Writer) -> None:
        for name, tensor in TENSORS.items():
            if name != "model/w":
                whole = tensor.whole.reshape(6, 8) if name == "model/qkv" else tensor.whole
                add(writer, name, Tensor(whole))
        writer.add("model/new", changed, role="other")
        writer.add_object("rate", 0.25)
        writer.add_object("tokens", Sum(40))
        writer.add_object("seed", PerRank(b"\x00\x01"))

    save_by(tmp_path / "other", fill)
    return tmp_path / "other"


def test_the_same_state_is_0(run: Path) -> None:
    result = ckpt("diff", run, run / "step-0000000010")
    assert result.exit_code == 0
    assert result.stdout == (
        "the same state: 6 arrays, 6 objects, 380 B (A ddp:2,fsdp:2, B ddp:2,fsdp:2)\n"
    )
    found = document("diff", run, run / "step-0000000010")
    assert found["same"]
    assert (found["a"]["step"], found["b"]["step"]) == (20, 10)
    assert (found["arrays"], found["objects"], found["array_differences"]) == (6, 6, [])


def test_differences_are_1_and_a_line_each(run: Path, other: Path) -> None:
    result = ckpt("diff", run, other)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:5] == [
        "model/new: only in B",
        "model/qkv: shape (8, 6) != (6, 8)",
        "model/tied: only in A",
        "model/w: only in A",
        "object evil: only in A",
    ]
    assert "object rate: 0.5 != 0.25" in lines
    assert lines[-1] == "4 of 7 arrays and 5 of 6 objects differ (A ddp:2,fsdp:2, B single)"
    found = document("diff", run, other, code=1)
    assert not found["same"]
    assert [each["kind"] for each in found["array_differences"]] == [
        "only_b",
        "shape",
        "only_a",
        "only_a",
    ]


def test_values_are_counted_and_what_json_lacks_is_told(other: Path, tmp_path: Path) -> None:
    def fill(writer: Writer) -> None:
        writer.add("model/new", np.array([[1.0, 2.0], [0.5, 2.0]]), role="other")

    save_by(tmp_path / "third", fill)
    options = ("--include", "new")
    result = ckpt("diff", other, tmp_path / "third", *options)
    assert result.stdout == (
        "model/new: 2 of 4 elements differ by inf at most, first at [0, 1]\n"
        "1 of 1 array differs (A single, B single)\n"
    )
    (found,) = document("diff", other, tmp_path / "third", *options, code=1)["array_differences"]
    assert found["values"] == {
        "count": 2,
        "of": 4,
        "max_abs": {"type": "float", "text": "inf"},
        "first": [0, 1],
    }
    loose = ("--atol", 0.5, *options)
    (near,) = document("diff", other, tmp_path / "third", *loose, code=1)["array_differences"]
    assert near["values"]["count"] == 1


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--include", "nothing"), 2, "nothing in either step has such a name"),
        (("--memory", "1MiB"), 2, "too little memory"),
        (("--memory", "much"), 2, "no size"),
        (("--atol", "-1"), 2, "atol"),
        (("--atol", "nan"), 2, "atol"),
    ],
)
def test_what_is_asked_wrongly_is_2(
    run: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    result = ckpt("diff", run, run, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_damage_is_3_and_what_is_absent_4(run: Path, tmp_path: Path) -> None:
    assert ckpt("diff", run, tmp_path / "nowhere").exit_code == 4
    flip_a_bit(run / "step-0000000020")
    result = ckpt("diff", run, run / "step-0000000010")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "has the checksum" in result.stderr


def test_names_cannot_steer_a_terminal(run: Path, other: Path) -> None:
    assert "\x1b" not in ckpt("diff", run, other).stdout
    assert json.loads(ckpt("diff", run, other, "--json").stdout)
