from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import RulesError
from ckptkit.model.rules import Expression

SIZES = {"heads": 8, "keys": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("128", 128),
        ("head_dim", 16),
        ("heads*head_dim", 128),
        ("(heads//keys + 2) * head_dim", 96),
        ("heads - keys - 1", 5),
        ("heads - (keys - 1)", 7),
        ("7 // 2 * 2", 6),
        ("2 + 3 * 4", 14),
        ("  head_dim? ", 16),
        ("3*other?", 1),
        ("other? + head_dim", 1),
    ],
)
def test_arithmetic_is_that_of_python(text: str, value: int) -> None:
    assert Expression(text).value(SIZES) == value


@given(
    st.recursive(
        st.integers(1, 50).map(str) | st.sampled_from(["heads", "keys", "head_dim"]),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        max_leaves=12,
    )
)
def test_any_arithmetic_is_that_of_python(text: str) -> None:
    expected = eval(text, {}, SIZES)
    if 1 <= expected <= 2**62 and len(text) <= 200:
        assert Expression(text).value(SIZES) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "heads *",
        "heads keys",
        "(heads",
        "heads)",
        "()",
        "heads / 2",
        "-3",
        "1.5",
        "heads.real",
        "__import__('os')",
        "heads[0]",
        "5?",
        "heads ?",
        "+" * 201,
        "(" * 100 + "1",
        "٣",
        "num_attention_heads + head_dim / 2",
        "a" * 190 + "%",
    ],
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(RulesError):
        Expression(text)


@pytest.mark.parametrize("text", ["keys - keys", "keys - heads", "heads // (keys - 2)", "9" * 19])
def test_what_comes_to_no_size_is_refused(text: str) -> None:
    with pytest.raises(RulesError, match=r"no size|by zero"):
        Expression(text).value(SIZES)


def test_a_size_that_is_missing_is_named_with_how_to_give_it() -> None:
    with pytest.raises(RulesError, match="needs to know layers, width") as caught:
        Expression("layers * width + head_dim").value(SIZES)
    assert "--config config.json" in caught.value.hint
    assert "--set layers=N" in caught.value.hint


def test_sizes_that_may_be_unknown_are_told() -> None:
    assert Expression("3*head_dim?").unknown({}) == ["head_dim"]
    assert Expression("3*head_dim?").unknown(SIZES) == []
    assert Expression("3*head_dim?").missing({}) == []
