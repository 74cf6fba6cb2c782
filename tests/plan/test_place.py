from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import RulesError
from ckptkit.model import Box, Placement, Strategy, layout_of, parse_placement
from ckptkit.model.rules import Rules
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import Placed, decide, place

SINGLE = Strategy.parse("single")
RULES = Rules.from_doc(
    {
        "rules": [
            {"match": "*.qkv", "tp": {"shard": 0, "blocks": [16, 4, 4], "unit": "head?"}},
            {"match": "*.up", "tp": "shard(0)"},
            {"match": "*.down", "tp": "shard(1)"},
            {"match": "*.experts", "tp": "shard(1)", "ep": "shard(0)"},
            {"match": "*.expert.*", "tp": "shard(0)", "ep": {"expert": "expert\\.(\\d+)"}},
            {"match": ["*norm", "embed", "mask"], "tp": "replicate"},
        ],
        "pipeline": {"layers": "layers\\.(\\d+)\\.", "first": ["embed"], "last": ["norm"]},
    },
    where="mine",
)


def parameter(
    inner: str, shape: tuple[int, ...], *, states: tuple[str, ...] = ("exp_avg",)
) -> list[Tensor]:
    """A parameter with its optimizer state, and a step."""
    name = f"model/{inner}"
    return [
        Tensor(name, shape, 2, "param", None, ()),
        *(Tensor(f"optimizer/{inner}/{s}", shape, 4, "optimizer", name, ()) for s in states),
        Tensor(f"optimizer/{inner}/step", (), 4, "optimizer", name, ()),
    ]


MODEL = [
    *parameter("embed", (13, 6)),
    *parameter("norm", (6,)),
    *(
        tensor
        for layer in range(4)
        for inner, shape in {"qkv": (24, 6), "up": (11, 6), "down": (6, 11), "norm": (6,)}.items()
        for tensor in parameter(f"layers.{layer}.{inner}", shape)
    ),
]


def placed(
    to: str, tensors: list[Tensor] = MODEL, *, rules: Rules | None = RULES, source: str = "single"
) -> dict[str, str]:
    """The placements of each tensor, as text."""
    found = place(
        tensors,
        source=Strategy.parse(source),
        target=Strategy.parse(to),
        rules=rules,
        allow_split_heads=True,
    )
    return {each.name: " ".join(map(str, each.placements)) for each in found}


def whole(to: str, tensors: list[Tensor], **options: Any) -> list[Placed]:
    options.setdefault("allow_split_heads", True)
    return place(tensors, source=SINGLE, target=Strategy.parse(to), **options)


def having(tensor: Tensor, *placements: str) -> Tensor:
    row: tuple[Placement, ...] = tuple(map(parse_placement, placements))
    return Tensor(tensor.name, tensor.shape, tensor.itemsize, tensor.role, tensor.of, row)


def test_ddp_replicates_and_fsdp_cuts_rows() -> None:
    found = placed("ddp:2,fsdp:2", rules=None)
    assert found["model/embed"] == "replicate shard(0)"
    assert found["optimizer/embed/exp_avg"] == "replicate shard(0)"
    assert found["optimizer/embed/step"] == "replicate replicate"


@pytest.mark.parametrize("kind", ["fsdp", "zero2", "zero3"])
def test_what_fsdp_does_not_cut(kind: str) -> None:
    tensors = [
        *parameter("w", (6, 4)),
        Tensor("optimizer/w/row", (6,), 4, "optimizer", "model/w", ()),
        Tensor("model/mask", (6, 4), 1, "buffer", None, ()),
        Tensor("model/scale", (), 4, "param", None, ()),
        Tensor("extra/table", (6, 4), 4, "other", None, ()),
        Tensor("ema/w", (6, 4), 4, "other", None, ()),
        Tensor("ema/v", (6, 4), 4, "other", None, ()),
    ]
    found = placed(f"{kind}:2", tensors, rules=None)
    cut = {name for name, placement in found.items() if placement == "shard(0)"}
    assert cut == {"model/w", "optimizer/w/exp_avg", "ema/w"}


def test_fsdp_is_strided_where_tp_to_its_right_cuts_rows_too() -> None:
    found = placed("fsdp:2,tp:2")
    assert found["model/layers.0.up"] == "strided(0) shard(0)"
    assert found["model/layers.0.down"] == "shard(0) shard(1)"
    assert found["optimizer/layers.0.up/exp_avg"] == "strided(0) shard(0)"
    assert placed("tp:2,fsdp:2")["model/layers.0.up"] == "shard(0) shard(0)"


def test_tp_follows_the_rules_and_state_follows_its_parameter() -> None:
    tensors = [
        *MODEL,
        Tensor("optimizer/layers.0.down/row", (6,), 4, "optimizer", "model/layers.0.down", ()),
        Tensor("ema/layers.0.down", (6, 11), 4, "other", None, ()),
        Tensor("ema/layers.0.up", (3,), 4, "other", None, ()),
        Tensor("extra/anything", (3, 3), 4, "other", None, ()),
    ]
    found = placed("tp:2", [t for t in tensors if t.name != "ema/layers.0.up"])
    assert found["model/layers.0.qkv"] == "shard(0, blocks=[16,4,4])"
    assert found["optimizer/layers.0.down/exp_avg"] == "shard(1)"
    assert found["optimizer/layers.0.down/row"] == "replicate"
    assert found["optimizer/layers.0.down/step"] == "replicate"
    assert found["ema/layers.0.down"] == "shard(1)"
    assert found["extra/anything"] == "replicate"


def test_names_are_unescaped() -> None:
    rules = Rules.from_doc({"rules": [{"match": "a b/*.w", "tp": "shard(0)"}]})
    tensors = parameter("a%20b%2Fc.w", (4,))
    assert placed("tp:2", tensors, rules=rules)["optimizer/a%20b%2Fc.w/exp_avg"] == "shard(0)"


def test_state_of_a_parameter_that_is_left_out_follows_its_rule() -> None:
    states = [tensor for tensor in MODEL if tensor.role == "optimizer"]
    states.append(Tensor("optimizer/layers.0.up/row", (11,), 4, "optimizer", states[0].of, ()))
    found = placed("fsdp:2,tp:2", states)
    assert found["optimizer/layers.0.up/exp_avg"] == "strided(0) shard(0)"
    assert found["optimizer/layers.0.up/step"] == "replicate replicate"
    owners = placed("zero1:2", states)
    assert all(placement.startswith("owner") for placement in owners.values())


def test_zero1_gives_whole_parameters_to_ranks_largest_first() -> None:
    sizes = {"a": 3, "b": 9, "c": 5, "d": 5, "e": 2, "f": 0}
    tensors = [t for inner, n in sizes.items() for t in parameter(inner, (n,))]
    found = placed("zero1:2", tensors, rules=None)
    owners = {inner: found[f"optimizer/{inner}/exp_avg"] for inner in sizes}
    # b: 9 | 0; c: 9 | 5; d: 9 | 10; a: 12 | 10; e: 12 | 12; f: the first of equals
    assert owners == {
        "b": "owner(0)",
        "c": "owner(1)",
        "d": "owner(1)",
        "a": "owner(0)",
        "e": "owner(1)",
        "f": "owner(0)",
    }
    for inner in sizes:
        assert found[f"model/{inner}"] == "replicate"
        assert found[f"optimizer/{inner}/step"] == owners[inner]


def test_zero1_balances_every_stage_for_itself() -> None:
    found = placed("pp:2,zero1:2")
    loads: dict[str, int] = {}
    for tensor in MODEL:
        if tensor.name.endswith("exp_avg"):
            where = found[tensor.name]
            loads[where] = loads.get(where, 0) + tensor.elements
    assert set(loads) == {f"stage({s}) owner({o})" for s in range(2) for o in range(2)}
    for stage in range(2):
        first, second = (loads[f"stage({stage}) owner({owner})"] for owner in range(2))
        assert abs(first - second) <= 144  # the largest parameter


def test_experts_are_cut_or_given_away() -> None:
    tensors = [
        *parameter("layers.0.experts", (4, 6, 2)),
        *(t for e in range(5) for t in parameter(f"layers.0.expert.{e}.w", (4, 2))),
    ]
    found = placed("ep:2,tp:2", tensors)
    assert found["model/layers.0.experts"] == "shard(0) shard(1)"
    owners = [found[f"model/layers.0.expert.{e}.w"] for e in range(5)]
    assert owners == [f"owner({e // 3}) shard(0)" for e in range(5)]
    assert found["optimizer/layers.0.expert.4.w/step"] == "owner(1) replicate"
    assert placed("ep:2")["model/layers.0.up"] == "replicate"


def test_why_names_the_pattern() -> None:
    found = {each.name: each for each in whole("pp:2,tp:2,fsdp:2", MODEL, rules=RULES)}
    assert found["model/layers.1.up"].why == "mine: layer 1; mine: *.up"
    assert found["model/norm"].why == "mine: norm; mine: *norm"
    assert found["optimizer/norm/step"].why == "mine: norm; 0-d"
    assert found["model/layers.0.qkv"].unknown_sizes == ("head",)
    assert whole("fsdp:2", MODEL)[0].why == "parameter"


def test_a_source_cut_by_tp_is_cut_as_it_is() -> None:
    tensors = [
        having(MODEL[0], "shard(0)", "shard(1, unit=2)"),
        having(MODEL[1], "shard(0)", "shard(1, unit=2)"),
        having(MODEL[2], "replicate", "replicate"),
    ]
    found = placed("tp:3,fsdp:2", tensors, rules=None, source="fsdp:2,tp:2")
    assert list(found.values()) == [
        "shard(1, unit=2) shard(0)",
        "shard(1, unit=2) shard(0)",
        "replicate replicate",
    ]
    source, target = Strategy.parse("fsdp:2,tp:2"), Strategy.parse("tp:3")
    assert place(tensors, source=source, target=target)[0].why == "as in the source"


def test_strided_pieces_become_plain_ones() -> None:
    tensors = [having(MODEL[0], "strided(0)", "replicate")]
    found = placed("tp:4", tensors, rules=None, source="tp:2,ddp:2")
    assert found["model/embed"] == "shard(0)"


def test_rules_win_over_the_source_and_it_fills_their_gaps() -> None:
    tensors = [
        having(parameter("layers.0.up", (4, 4))[0], "shard(1)"),
        having(parameter("other", (4, 4))[0], "shard(1)"),
    ]
    found = placed("tp:2", tensors, source="tp:4")
    assert list(found.values()) == ["shard(0)", "shard(1)"]


def test_stages_of_as_many_are_those_of_the_source() -> None:
    tensors = [having(tensor, f"stage({i % 2})") for i, tensor in enumerate(MODEL)]
    found = placed("ddp:2,pp:2", tensors, rules=None, source="pp:2")
    assert [placement.split()[1] for placement in found.values()] == [
        f"stage({i % 2})" for i in range(len(MODEL))
    ]
    with pytest.raises(RulesError, match="nothing says how layers are split into 4 stages"):
        placed("pp:4", tensors, rules=None, source="pp:2")


def test_what_no_rule_knows_is_listed_with_its_number() -> None:
    names = [f"strange.{i}" for i in range(12)] + [f"odd_{c}" for c in "abcdefgh"]
    tensors = [t for name in names for t in parameter(name, (4, 4), states=())]
    with pytest.raises(RulesError) as caught:
        place(tensors, source=SINGLE, target=Strategy.parse("tp:2"), rules=RULES)
    assert "mine: no rule says how tp cuts 20 tensors: model/odd_a, " in str(caught.value)
    assert "model/odd_h and 12 more" in str(caught.value)
    with pytest.raises(RulesError, match=r"how tp cuts 12 tensors: model/strange\.\{0\.\.11\}"):
        place(tensors[:24], source=SINGLE, target=Strategy.parse("tp:2"), rules=RULES)
    assert "--replicate-unknown" in caught.value.hint
    found = whole("tp:2", tensors, rules=RULES, replicate_unknown=True)
    assert {str(each.placements[0]) for each in found} == {"replicate"}
    assert found[0].unknown == ("tp",)


def test_nothing_is_unknown_where_no_axis_needs_a_rule() -> None:
    tensors = parameter("strange", (4, 4))
    for to in ("ddp:2", "fsdp:2", "zero1:2", "zero3:2", "tp:1", "pp:1", "single"):
        assert not [each for each in whole(to, tensors) if each.unknown]


def test_one_stage_needs_no_layers() -> None:
    rules = replace(RULES, default="replicate")
    (placed, *_) = whole("pp:1", parameter("encoder.weight", (4, 4)), rules=rules)
    assert str(placed.placements[0]) == "stage(0)"


def test_without_any_rules_all_are_unknown() -> None:
    with pytest.raises(RulesError, match="no rule says how tp cuts 12 tensors"):
        whole("tp:2", [t for t in MODEL if t.role == "param" and "layers" not in t.name] * 6)


def test_a_default_replicates_what_no_rule_knows() -> None:
    rules = replace(RULES, default="replicate")
    found = whole("pp:2,tp:2", [*MODEL, *parameter("strange", (4, 4))], rules=rules)
    strange = {each.name: each for each in found}["model/strange"]
    assert (list(map(str, strange.placements)), strange.why) == (["replicate"] * 2, "mine: default")


def test_rules_that_do_not_fit_are_told_with_tensor_shape_and_rule() -> None:
    tensors = [
        *parameter("a.down", (6,)),
        *parameter("b.qkv", (23, 6)),
        *parameter("c.up", (6, 6), states=()),
    ]
    with pytest.raises(RulesError) as caught:
        whole("tp:2", tensors, rules=RULES)
    text = str(caught.value)
    assert "rules do not fit 4 tensors" in text
    assert "model/a.down of shape [6]" in text
    assert "mine: *.down: there is no dim 1" in text
    assert "model/b.qkv of shape [23, 6], cut as shard(0, blocks=[16,4,4]) (mine: *.qkv)" in text
    assert "the blocks must add up to 23" in text


def test_a_size_that_is_missing_is_told_once_it_matters() -> None:
    rules = Rules.from_doc({"rules": [{"match": "*", "tp": {"shard": 0, "unit": "head"}}]})
    tensors = parameter("w", (4, 4))
    with pytest.raises(RulesError, match="needs to know head") as caught:
        whole("tp:2", tensors, rules=rules)
    assert "--config config.json, or --set head=N" in caught.value.hint
    assert whole("fsdp:2", tensors, rules=rules)
    assert whole("tp:2", tensors, rules=rules.with_sizes({"head": 2}))


HEADS = Rules.from_doc(
    {
        "rules": [
            {"match": "q", "tp": {"shard": 0, "unit": "head?"}},
            {"match": "*", "tp": "shard(0)"},
        ]
    }
)
GUESSED = replace(HEADS, is_guess=True)


def between(source: str, to: str, rules: Rules, *placements: str) -> list[str]:
    """How `to` cuts a projection of 8 heads, of 4 rows each, and another tensor of its shape."""
    tensors = [having(t, *placements) for n in "qw" for t in parameter(n, (32, 4), states=())[:1]]
    found = place(tensors, source=Strategy.parse(source), target=Strategy.parse(to), rules=rules)
    return [str(placement) for each in found for placement in each.placements]


def test_cuts_that_may_go_through_heads_are_refused_unless_that_is_allowed() -> None:
    tensors = [*parameter("q", (32, 4)), *parameter("w", (32, 4))]
    with pytest.raises(RulesError) as caught:
        whole("tp:2", tensors, rules=HEADS, allow_split_heads=False)
    assert str(caught.value).startswith(
        "rules: without head nobody knows whether attention heads are cut in two, of 2 tensors:"
        " model/q, optimizer/q/exp_avg\nhint: pass --config config.json, or --set head=N "
    )
    assert "--allow-split-heads" in caught.value.hint
    assert whole("tp:2", tensors, rules=HEADS)[0].unknown_sizes == ("head",)
    known = HEADS.with_sizes({"head": 4})
    assert not whole("tp:2", tensors, rules=known, allow_split_heads=False)[0].unknown_sizes


@pytest.mark.parametrize("to", ["tp:1", "fsdp:3", "ddp:2", "zero1:2", "single"])
def test_what_cuts_no_heads_needs_not_know_them(to: str) -> None:
    assert whole(to, parameter("q", (32, 4)), rules=HEADS, allow_split_heads=False)


def test_where_the_source_is_cut_heads_end() -> None:
    for rules in (HEADS, GUESSED):
        assert between("tp:4", "tp:2", rules, "shard(0)") == ["shard(0)"] * 2
        assert between("tp:4", "tp:4", rules, "shard(0)") == ["shard(0)"] * 2
        with pytest.raises(RulesError, match="cut in two, of 1 tensor: model/q"):
            between("tp:4", "tp:3", rules, "shard(0)")
        with pytest.raises(RulesError, match="cut in two, of 1 tensor: model/q"):
            between("tp:2", "tp:4", rules, "shard(0)")
    # Pieces of fsdp end anywhere.
    with pytest.raises(RulesError, match="cut in two"):
        between("fsdp:4", "tp:2", HEADS, "shard(0)")


def test_tensors_that_do_not_tell_their_heads_get_them_from_the_rules() -> None:
    known = GUESSED.with_sizes({"head": 4})
    assert between("tp:2", "tp:16", known, "shard(0)") == ["shard(0, unit=4)", "shard(0)"]
    assert between("tp:2", "tp:16", GUESSED, "shard(0, unit=8)") == ["shard(0, unit=8)"] * 2
    assert between("tp:2", "tp:16", GUESSED, "replicate") == ["replicate"] * 2


def test_a_guess_never_overrules_the_source() -> None:
    assert between("tp:2", "tp:4", GUESSED, "shard(1)") == ["shard(1)"] * 2
    assert between("tp:2", "tp:4", HEADS.with_sizes({"head": 4}), "shard(1)")[0] != "shard(1)"


def test_pipelines_of_pipelines_are_one() -> None:
    found = placed("outer=pp:2,tp:2,pp:2")
    assert [found[f"model/layers.{layer}.up"] for layer in range(4)] == [
        f"stage({layer // 2}) shard(0) stage({layer % 2})" for layer in range(4)
    ]
    tensors = [having(tensor, f"stage({i % 4})") for i, tensor in enumerate(MODEL)]
    again = list(placed("a=pp:2,b=pp:2", tensors, rules=None, source="pp:4").values())
    assert again[:4] == [f"stage({i // 2}) stage({i % 2})" for i in range(4)]


KINDS = ["ddp:2", "fsdp:2", "fsdp:3", "zero1:2", "tp:2", "tp:3", "pp:2", "ep:2"]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), st.sampled_from([2, 4]))
def test_any_target_holds_every_element_once(kinds: list[str], head: int) -> None:
    axes: dict[str, str] = {}
    for kind in kinds:
        name, size = kind.split(":")
        sharder = "sharder" if name in ("fsdp", "zero1") else name
        axes[sharder] = f"{name}:{size}"
    target = Strategy.parse(",".join(axes.values()))
    is_odd = "tp:3" in axes.values()
    rules = RULES.with_sizes({} if is_odd else {"head": head})
    tensors = [*MODEL, *parameter("layers.3.experts", (4, 6, 2))]
    for tensor, each in zip(
        tensors, decide(tensors, source=SINGLE, target=target, rules=rules), strict=True
    ):
        assert not each.unknown
        count = np.zeros(tensor.shape, np.int64)
        layout = layout_of(tensor.shape, target, each.placements)
        shares = [s for rank in range(target.world_size) for s in layout.shares(rank)]
        for box in [box for share in shares if share.replicas.index == 0 for box in share.boxes]:
            count[box.within(Box.whole(tensor.shape)) if tensor.shape else ...] += 1
        assert (count == 1).all(), (each.name, str(target))
