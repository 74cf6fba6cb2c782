from __future__ import annotations

import pytest

from ckptkit.errors import UsageError
from ckptkit.format.names import check_used, inner_name, join, matches, pattern_list
from ckptkit.plan import cuts


@pytest.mark.parametrize(
    ("name", "role", "of", "inner"),
    [
        ("model/layers.0.w", "param", None, "layers.0.w"),
        ("model/tied", "param", None, "tied"),
        ("model/a/b", "buffer", None, "a/b"),
        (join("model", "a/b*"), "param", None, "a/b*"),
        ("optimizer/layers.0.w/exp_avg", "optimizer", "model/layers.0.w", "layers.0.w"),
        ("optimizer/layers.0.w/exp_avg", "optimizer", None, "layers.0.w"),
        ("optimizer/a/b/exp_avg", "optimizer", "model/a/b", "a/b"),
        ("optimizer/a/b/exp_avg", "optimizer", None, "a/b"),
        ("optimizer/step", "optimizer", None, "step"),
        ("ema/layers.0.w", "other", None, "layers.0.w"),
        ("alone", "param", None, "alone"),
    ],
)
def test_plans_and_patterns_have_one_name_inside_of_a_group(
    name: str, role: str, of: str | None, inner: str
) -> None:
    assert inner_name(name, role) == inner
    assert cuts.ruled_name(cuts.Tensor(name, (2,), 4, role, of, ())) == inner


def test_a_pattern_means_whole_names_and_those_inside_of_their_group() -> None:
    assert matches(["layers.0.*"], "model/layers.0.w", "layers.0.w")
    assert matches(["x", "model/*"], "model/layers.0.w", "layers.0.w")
    assert not matches(["layers"], "model/layers.0.w", "layers.0.w")
    assert not matches([], "model/layers.0.w", "layers.0.w")
    assert matches(["x[0]*"], join("model", "x[0].w"), "x[0].w")
    assert not matches(["x[0]"], "model/x0", "x0")


def test_what_means_nothing_is_refused() -> None:
    names = [("model/a", "a"), ("model/b", "b")]
    check_used(["a", "model/*"], names, "nothing")
    with pytest.raises(UsageError, match="no such name") as caught:
        check_used(["a", "c"], names, "no such name")
    assert caught.value.value == "'c'"


def test_one_text_is_not_read_letter_by_letter() -> None:
    assert pattern_list(["a", "b"], "include") == ("a", "b")
    with pytest.raises(UsageError, match="include takes a tuple") as caught:
        pattern_list("a*", "include")
    assert caught.value.hint == "write include=('a*',)"
