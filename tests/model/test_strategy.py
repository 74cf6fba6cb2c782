from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import FormatError, StrategyError
from ckptkit.model import KINDS, Axis, Mesh, Strategy

axes = st.builds(
    Axis, st.sampled_from((*KINDS, "dp_shard")), st.sampled_from(KINDS), st.integers(1, 9)
)


@given(st.lists(axes, max_size=4))
def test_text_and_document_give_the_strategy_back(chosen: list[Axis]) -> None:
    try:
        strategy = Strategy(Mesh(tuple(chosen)))
    except StrategyError:
        return
    assert Strategy.parse(str(strategy)) == strategy
    assert Strategy.from_doc(strategy.to_doc()) == strategy


@pytest.mark.parametrize(
    ("text", "written", "world_size"),
    [
        ("fsdp:8", "fsdp:8", 8),
        (" pp:2, tp :2 ,fsdp: 2", "pp:2,tp:2,fsdp:2", 8),
        ("hsdp:2x4", "ddp:2,fsdp:4", 8),
        ("single", "single", 1),
        ("dp_shard=fsdp:4", "dp_shard=fsdp:4", 4),
    ],
)
def test_strategies_are_written(text: str, written: str, world_size: int) -> None:
    strategy = Strategy.of(text)
    assert (str(strategy), strategy.world_size) == (written, world_size)
    assert Strategy.of(strategy) is strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "single"),
        ("fdsp:8", "did you mean fsdp"),
        ("dp:8", "did you mean ddp"),
        ("zzz:8", "accepted are ddp, fsdp"),
        ("FSDP:8", "write 'fsdp:8'"),
        ("fsdp", "no size"),
        ("fsdp:", "no size"),
        ("fsdp:0", "from 1"),
        ("fsdp:-2", "not a size"),
        ("fsdp:2.5", "not a size"),
        ("fsdp:٣", "not a size"),
        ("fsdp:99999999", "from 1"),
        ("fsdp:" + "9" * 5000, "not a size"),
        ("ddp:8192,tp:8192", r"2\*\*24"),
        ("tp:2,tp:2", "twice"),
        ("tp:2,,fsdp:2", "missing between"),
        ("tp:2,", "missing between"),
        ("fsdp:2,zero1:2", "at most one"),
        ("tp:2,single", "stands alone"),
        ("hsdp:8", "two sizes"),
        ("fsdp=8", "no size"),
    ],
)
def test_a_wrong_text_is_refused_with_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message) as caught:
        Strategy.parse(text)
    assert len(str(caught.value)) < 1000
    assert caught.value.hint
    assert "strategy '" in caught.value.where or caught.value.has_value


def test_a_size_of_zero_says_what_to_write() -> None:
    with pytest.raises(StrategyError) as caught:
        Strategy.parse("ddp:2,tp:0")
    assert caught.value.where == "strategy 'ddp:2,tp:0'"
    assert caught.value.hint == "leave the axis out, or say how many ranks lie along it: tp:2"


def test_only_texts_and_strategies_are_strategies() -> None:
    with pytest.raises(StrategyError):
        Strategy.of(8)  # type: ignore[arg-type]


def document(**changes: object) -> dict[str, Any]:
    axis = {"name": "tp", "kind": "tp", "size": 2}
    return {"axes": [axis | changes], "rank_order": "row-major"}


def axis_of_size(size: int, name: str = "a") -> dict[str, Any]:
    return {"name": name, "kind": "ddp", "size": size}


@pytest.mark.parametrize(
    ("doc", "where"),
    [
        ("fsdp:8", "here"),
        ({"axes": []}, "here.rank_order"),
        ({"axes": [], "rank_order": "row-major", "more": 1}, "here"),
        ({"axes": [], "rank_order": "column-major"}, "here.rank_order"),
        ({"axes": {}, "rank_order": "row-major"}, "here.axes"),
        ({"axes": [{}] * 33, "rank_order": "row-major"}, "here.axes"),
        ({"axes": [3], "rank_order": "row-major"}, "here.axes.0"),
        (document(more=1), "here.axes.0"),
        (document(name=3), "here.axes.0.name"),
        (document(name="../x"), "here.axes.0"),
        (document(kind="xp"), "here.axes.0"),
        (document(size=0), "here.axes.0.size"),
        (document(size=True), "here.axes.0.size"),
        (document(size=2**70), "here.axes.0.size"),
        ({"axes": [axis_of_size(2), axis_of_size(2)], "rank_order": "row-major"}, "here"),
        ({"axes": [axis_of_size(2**20, n) for n in "ab"], "rank_order": "row-major"}, "here"),
    ],
)
def test_hostile_documents_are_refused_with_the_place(doc: Any, where: str) -> None:
    with pytest.raises(FormatError) as caught:
        Strategy.from_doc(doc, where="here")
    assert caught.value.where == where
