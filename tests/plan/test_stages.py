from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import RulesError
from ckptkit.model import Strategy
from ckptkit.model.rules import Rules
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import balanced, place

SINGLE = Strategy.parse("single")


def sums(layers: list[int], stages: list[int], first: int, last: int) -> list[int]:
    found = [0] * (max(stages) + 1)
    for nbytes, stage in zip(layers, stages, strict=True):
        found[stage] += nbytes
    found[0] += first
    found[-1] += last
    return found


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_the_largest_stage_is_as_small_as_it_can_be(
    layers: list[int], stages: int, first: int, last: int
) -> None:
    if len(layers) < stages:
        return
    found = balanced(layers, stages, first, last)
    assert found == sorted(found)
    assert set(found) == set(range(stages))
    splits = combinations(range(1, len(layers)), stages - 1)
    every = [
        sums(layers, [sum(at <= i for at in split) for i in range(len(layers))], first, last)
        for split in splits
    ]
    mine = sums(layers, found, first, last)
    least = min(map(max, every))
    assert max(mine) == least
    assert sum(n * n for n in mine) == min(
        sum(n * n for n in split) for split in every if max(split) == least
    )


def test_equal_layers_are_split_evenly() -> None:
    assert balanced([1] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(map(balanced([1] * 7, 3).count, range(3))) == [2, 2, 3]


def test_what_the_ends_hold_besides_counts() -> None:
    assert balanced([2] * 4, 2, first=4) == [0, 1, 1, 1]
    assert balanced([2] * 4, 2, last=4) == [0, 0, 0, 1]


def model(layers: int, prefix: str = "layers") -> list[Tensor]:
    names = ["embed", *(f"{prefix}.{i}.w" for i in range(layers)), "head"]
    shapes: dict[str, tuple[int, ...]] = {"embed": (64, 8), "head": (8,)}
    return [
        Tensor(f"model/{name}", shapes.get(name, (8, 8)), 4, "param", None, ()) for name in names
    ]


def staged(tensors: list[Tensor], to: str, **pipeline: object) -> list[str]:
    doc = {"pipeline": {"layers": "layers\\.(\\d+)\\.", "first": ["embed"], "last": ["head"]}}
    doc["pipeline"].update(pipeline)  # type: ignore[arg-type]
    rules = Rules.from_doc(doc, where="mine")
    found = place(tensors, source=SINGLE, target=Strategy.parse(to), rules=rules)
    return [str(each.placements[0]).removeprefix("stage(").removesuffix(")") for each in found]


def test_layers_are_numbered_not_spelled() -> None:
    stages = staged(model(12), "pp:4", split=[3, 6, 9])
    assert stages[1:-1] == [str(i // 3) for i in range(12)]


def test_balanced_stages_count_all_bytes() -> None:
    state = [
        Tensor(f"optimizer/layers.0.w/{s}", (8, 8), 4, "optimizer", "model/layers.0.w", ())
        for s in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    ]
    tensors = model(5)
    tensors[0] = Tensor("model/embed", (1, 8), 4, "param", None, ())
    assert staged(tensors, "pp:2")[1:-1] == ["0", "0", "0", "1", "1"]
    assert staged([*tensors, *state], "pp:2")[1:] == ["0", "1", "1", "1", "1", "1", "0", "0", "0"]


def test_what_is_outside_goes_to_the_first_or_the_last_stage_or_every_one() -> None:
    assert staged(model(4), "pp:2", split=[2]) == ["0", "0", "0", "1", "1", "1"]
    found = staged(model(4), "pp:2", first=[], every=["embed"])
    assert found[0] == "replicate"


def test_buffers_outside_are_on_every_stage() -> None:
    tensors = [*model(2), Tensor("model/rotary", (4,), 4, "buffer", None, ())]
    assert staged(tensors, "pp:2")[-1] == "replicate"


def test_layers_of_several_kinds_follow_each_other() -> None:
    tensors = [*model(2, "encoder")[1:-1], *model(2, "decoder")[1:-1]]
    patterns = ["encoder\\.(\\d+)", "decoder\\.(\\d+)"]
    assert staged(tensors, "pp:4", layers=patterns) == ["0", "1", "2", "3"]
    assert staged(tensors, "pp:2", layers=patterns, split=[3]) == ["0", "0", "0", "1"]


@pytest.mark.parametrize(
    ("to", "pipeline", "message"),
    [
        ("pp:4", {}, "3 layers cannot be split into 4"),
        ("pp:2", {"layers": "blocks\\.(\\d+)"}, "0 layers cannot be split into 2"),
        ("pp:3", {"split": [1]}, "3 stages of 3 layers are split at 2"),
        ("pp:2", {"split": [3]}, "2 stages of 3 layers are split at 1"),
        ("pp:2", {"first": []}, "no rule says how pp cuts 1 tensor: model/embed"),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused(
    to: str, pipeline: dict[str, object], message: str
) -> None:
    with pytest.raises(RulesError, match=message):
        staged(model(3), to, **pipeline)
