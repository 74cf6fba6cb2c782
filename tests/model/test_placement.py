from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import FormatError, LayoutError
from ckptkit.model import (
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strided,
    parse_placement,
    placement_from_doc,
    placement_to_doc,
)

small, positive = st.integers(0, 9), st.integers(1, 2**40)
placements = st.one_of(
    st.just(Replicate()),
    st.builds(
        Shard, small, st.none() | st.lists(positive, min_size=1, max_size=4).map(tuple), positive
    ),
    st.builds(Strided, small, positive),
    st.builds(Owner, small),
    st.builds(Stage, small),
)


@given(placements)
def test_text_and_document_give_the_placement_back(placement: Placement) -> None:
    assert parse_placement(str(placement)) == placement
    assert placement_from_doc(placement_to_doc(placement)) == placement


def test_the_texts_of_the_grammar() -> None:
    assert parse_placement(" shard( 1 , blocks = [4, 2] , unit = 2 ) ") == Shard(1, (4, 2), 2)
    assert str(Shard(0, (4096, 1024), 128)) == "shard(0, blocks=[4096,1024], unit=128)"
    assert [str(p) for p in (Replicate(), Shard(0), Strided(1), Owner(3), Stage(1))] == [
        *("replicate", "shard(0)", "strided(1)", "owner(3)", "stage(1)")
    ]


def test_defaults_are_left_out_of_documents() -> None:
    assert placement_to_doc(Shard(0)) == {"kind": "shard", "dim": 0}
    fused = {"kind": "shard", "dim": 0, "blocks": [2, 1], "unit": 4}
    assert placement_to_doc(Shard(0, (2, 1), 4)) == fused


@pytest.mark.parametrize(
    "text",
    [
        *("", "shard", "shard()", "shard(-1)", "shard(0, unit=0)", "shard(0, blocks=[])"),
        *("shard(0, blocks=[0])", "shard(0, blocks=[1,,2])", "owner(0, unit=2)", "Shard(0)"),
        *("strided(0, blocks=[1])", "stage(0, blocks=[1])", "shard(٣)", "shard(0, blocks=[1 2])"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        parse_placement(text)


@pytest.mark.parametrize(
    ("doc", "where"),
    [
        (None, "here"),
        ([], "here"),
        ({}, "here"),
        ({"kind": ["shard"]}, "here"),
        ({"kind": "slice", "dim": 0}, "here"),
        ({"kind": "replicate", "dim": 0}, "here"),
        ({"kind": "shard"}, "here.dim"),
        ({"kind": "shard", "dim": True}, "here.dim"),
        ({"kind": "shard", "dim": 0, "unit": 0}, "here.unit"),
        ({"kind": "shard", "dim": 0, "unit": 2**80}, "here.unit"),
        ({"kind": "shard", "dim": 0, "blocks": 3}, "here.blocks"),
        ({"kind": "shard", "dim": 0, "blocks": []}, "here"),
        ({"kind": "shard", "dim": 0, "blocks": [1, -1]}, "here.blocks.1"),
        ({"kind": "shard", "dim": 0, "blocks": [2**62, 2**62]}, "here"),
        ({"kind": "strided", "dim": 0, "blocks": [1]}, "here"),
        ({"kind": "owner", "coord": -1}, "here.coord"),
        ({"kind": "stage", "coord": 1.0}, "here.coord"),
    ],
)
def test_hostile_documents_are_refused_with_the_place(doc: Any, where: str) -> None:
    with pytest.raises(FormatError) as caught:
        placement_from_doc(doc, where="here")
    assert caught.value.where == where


def test_a_wrong_placement_cannot_be_made() -> None:
    for make in (lambda: Shard(-1), lambda: Strided(0, 0), lambda: Owner(-1), lambda: Shard(0, ())):
        with pytest.raises(LayoutError):
            make()
