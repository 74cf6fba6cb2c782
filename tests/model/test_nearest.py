from __future__ import annotations

import pytest

from ckptkit.errors import nearest

LAYERS = [f"model/layers.{n}.{w}.weight" for n in range(40) for w in ("up_proj", "norm")]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model/layers.17.up_porj.weight", "did you mean model/layers.17.up_proj.weight? "),
        ("layers.17.norm.weight", "did you mean model/layers.17.norm.weight? "),
        ("model/layers.99.norm.weight", "did you mean model/layers.0.norm.weight? "),
        ("nothing like it", ""),
        ("", ""),
        ("x" * 100_000, ""),
    ],
)
def test_the_nearest_name_has_the_same_numbers_if_any_has(name: str, found: str) -> None:
    assert nearest(name, LAYERS) == found


def test_several_are_named_where_that_is_asked_for() -> None:
    found = nearest("llama-met", ["llama", "llama-meta", "bert"], 3)
    assert found == "did you mean llama-meta or llama? "
    assert nearest("llam", []) == ""


def test_of_very_many_names_that_are_not_alike_only_ends_count() -> None:
    letters = "abcdefghijklmnop"
    names = [f"model/{a}{b}{c}{a}" for a in letters for b in letters for c in letters]
    assert nearest("abca", names) == "did you mean model/abca? "
    assert nearest("model/abcaa", names) == ""
