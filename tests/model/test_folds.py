from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptkit import fold_names, natural_order

names_of_layers = st.lists(
    st.from_regex(r"\A[ab]/[xy.]{1,2}\.(0|[1-9]|1[0-9])\.[xy](/([0-3]|[pq]))?\Z"), unique=True
)


def rows(*names: str, kinds: dict[str, int] | None = None) -> dict[str, int]:
    """Each row with how many names it has."""
    found = fold_names(names, [(kinds or {}).get(name, 0) for name in names])
    return {fold.name: len(fold.places) for fold in found}


def test_numbers_sort_by_value() -> None:
    names = ["m/l.10.w", "m/l.2.w", "m/l.2.b", "m/head", "m/l100", "m/l20", "m/l3"]
    assert natural_order(names) == [
        "m/head", "m/l.2.b", "m/l.2.w", "m/l.10.w", "m/l3", "m/l20", "m/l100"
    ]  # fmt: skip


def test_alike_layers_are_one_row_where_the_first_would_stand() -> None:
    layers = [f"model/layers.{layer}.mlp.up_proj.weight" for layer in range(32)]
    found = rows("model/norm", *layers, "model/embed", "model/layers.0.bias")
    assert found == {
        "model/embed": 1,
        "model/layers.0.bias": 1,
        "model/layers.{0..31}.mlp.up_proj.weight": 32,
        "model/norm": 1,
    }
    assert list(found)[1:3] == ["model/layers.0.bias", "model/layers.{0..31}.mlp.up_proj.weight"]


def test_only_what_is_of_one_kind_is_a_row() -> None:
    assert rows("l.0.w", "l.1.w", "l.2.w", "l.5.w", kinds={"l.1.w": 1}) == {
        "l.{0,2,5}.w": 3,
        "l.1.w": 1,
    }


def test_a_row_has_every_combination_that_it_shows() -> None:
    experts = [f"l.{layer}.e.{expert}" for layer, expert in product(range(12), range(3))]
    assert rows(*experts) == {"l.{0..11}.e.{0..2}": 36}
    assert rows(*experts[1:]) == {"l.0.e.{1..2}": 2, "l.{1..11}.e.{0..2}": 33}


def test_numbers_are_shown_as_they_are_spelled() -> None:
    assert rows("h.00", "h.01", "h.10") == {"h.{00..01,10}": 3}
    assert rows("h.9", "h.10", "h.08") == {"h.{08,9..10}": 3}
    assert rows("h1", "h2", "v0.1x", "v0.2x", "a%2F1", "a%2F2") == dict.fromkeys(
        ("a%2F1", "a%2F2", "h1", "h2", "v0.1x", "v0.2x"), 1
    )


def test_many_gaps_are_not_all_shown() -> None:
    assert rows(*(f"h.{number}" for number in range(0, 20, 2))) == {"h.{0,2,4,6,..,18}": 10}


@given(names_of_layers, st.randoms(use_true_random=False))
def test_every_name_is_in_one_row_and_groups_stay_together(
    names: list[str], random: object
) -> None:
    kinds = [random.choice("kl") for _ in names]  # type: ignore[attr-defined]
    folds = fold_names(names, kinds)
    assert sorted(place for fold in folds for place in fold.places) == list(range(len(names)))
    for fold in folds:
        assert len({kinds[place] for place in fold.places}) == 1
        own = [names[place] for place in fold.places]
        assert own == natural_order(own)
        assert len(own) > 1 or fold.name == own[0]
    for group in {fold.name.rpartition("/")[0] for fold in folds}:
        inside = [fold.name.startswith(f"{group}/") for fold in folds]
        assert "10" not in "".join(str(int(here)) for here in inside).strip("0")
