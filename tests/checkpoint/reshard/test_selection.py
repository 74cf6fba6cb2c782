"""Part of a step, under other names, in another precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Selection, Writer
from ckptkit.errors import CkptkitError, InvalidNameError, UnsupportedTypeError, UsageError
from ckptkit.storage import MemoryStore
from tests.checkpoint.reshard.toy import RULES, TIED, reshard, saved, toy
from tests.checkpoint.saving import same


def names(store: Any) -> set[str]:
    with ckptkit.open(store) as checkpoint:
        return set(checkpoint.arrays)


def test_optimizer_state_is_left_out() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:3"), destination, "tp:2", selection=Selection(optimizer=False))
    assert names(destination) == {n for n in toy() if n.startswith("model/")} | {TIED[0]}


def test_patterns_match_whole_names_and_names_inside_of_groups() -> None:
    destination = MemoryStore()
    selection = Selection(include=("layers.1.*", "model/norm"), exclude=("*.none", "*/exp_avg_sq"))
    reshard(saved("fsdp:3"), destination, "tp:2", selection=selection)
    found = names(destination)
    assert "model/layers.1.qkv" in found
    assert "optimizer/layers.1.qkv/exp_avg" in found
    assert "optimizer/layers.1.qkv/exp_avg_sq" not in found
    assert not [n for n in found if "layers.2" in n or "none" in n or n == "optimizer/norm/exp_avg"]
    assert "model/norm" in found


def test_an_alias_stands_in_for_the_array_that_is_left_out() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:3"), destination, "fsdp:2", selection=Selection(exclude=("model/embed",)))
    with ckptkit.open(destination) as checkpoint:
        assert "model/embed" not in checkpoint
        assert checkpoint[TIED[0]].alias_of is None
        assert same(checkpoint.read(TIED[0]), toy()["model/embed"].values)


def test_names_change_inside_of_their_groups() -> None:
    destination = MemoryStore()
    selection = Selection(rename=((r"^layers\.(\d+)", r"model.layers.\1"),))
    reshard(saved("fsdp:3"), destination, "tp:2", selection=selection)
    with ckptkit.open(destination) as checkpoint:
        name = "optimizer/model.layers.1.up/exp_avg"
        assert same(checkpoint.read(name), toy()["optimizer/layers.1.up/exp_avg"].values)
        assert checkpoint[name].info.of == "model/model.layers.1.up"
        assert "model/layers.1.up" not in checkpoint


def test_a_tensor_that_is_made_of_others_goes_over_as_one_does() -> None:
    store, destination = MemoryStore(), MemoryStore()
    with Writer(store, step=3) as writer:
        for part in ("data%2Flow", "data%2Fhigh", "scale"):
            writer.add(f"model/a.w%2F{part}", np.ones(4, np.float32), role="param")
        writer.add("model/gone", np.ones(4, np.float32), role="buffer")
        # Of its parts one is made of others too.
        writer.add_object("wrapped/model/a.w", {"inner": ["data", "scale"]})
        writer.add_object("wrapped/model/a.w%2Fdata", {"inner": ["low", "high"]})
        writer.add_object("best", {"ckptkit.array": "model/a.w"})
        groups = [{"params": ["a.w"], "options": {}}]
        writer.add_object("optimizer", [{"kind": "SGD", "groups": groups, "values": {"a.w": 1}}])
    selection = Selection(exclude=("gone",), rename=((r"^a\.", "b."),))
    ckptkit.reshard(store, destination, to="single", selection=selection)
    assert names(destination) == {
        f"model/b.w%2F{n}" for n in ("data%2Flow", "data%2Fhigh", "scale")
    }
    groups = [{"params": ["b.w"], "options": {}}]
    with ckptkit.open(destination) as checkpoint:
        assert checkpoint.objects == {
            "wrapped/model/b.w": {"inner": ["data", "scale"]},
            "wrapped/model/b.w%2Fdata": {"inner": ["low", "high"]},
            "best": {"ckptkit.array": "model/b.w"},
            "optimizer": [{"kind": "SGD", "groups": groups, "values": {"b.w": 1}}],
        }


def test_rules_are_found_by_the_new_names() -> None:
    store, destination = MemoryStore(), MemoryStore()
    with Writer(store, step=3) as writer:
        for name in ("attn.q", "attn.k", "mlp.gate", "ln1"):
            shape = (8,) if name == "ln1" else (8, 8)
            writer.add(f"model/h.0.{name}.w", np.ones(shape, np.float32), role="param")
    rename = [
        (r"^h\.(\d+)\.", r"layers.\1."),
        (r"attn\.(\w)\.w", r"self_attn.\1_proj.weight"),
        (r"mlp\.gate\.w", "mlp.gate_proj.weight"),
        (r"ln1\.w", "input_layernorm.weight"),
    ]
    selection = Selection(rename=tuple(rename))
    ckptkit.reshard(store, destination, to="tp:2", sizes={"head_dim": 2}, selection=selection)
    with ckptkit.open(destination) as checkpoint:
        assert checkpoint["model/layers.0.self_attn.q_proj.weight"].part(1).shape == (4, 8)


def test_parameters_are_cast_and_nothing_else() -> None:
    store, destination = MemoryStore(), MemoryStore()
    values = np.linspace(-3, 3, 77, dtype=np.float32).reshape(7, 11)
    with Writer(store, step=3) as writer:
        writer.add("model/up", values, role="param")
        writer.add("model/mask", values, role="buffer")
        writer.add("optimizer/up/exp_avg", values, role="optimizer", of="model/up")
    ckptkit.reshard(store, destination, to="fsdp:2", selection=Selection(cast=(("", "bf16"),)))
    with ckptkit.open(destination) as checkpoint:
        found = checkpoint.read("model/up")
        assert same(found, values.astype(found.dtype))
        assert checkpoint["model/up"].dtype.name == "bfloat16"
        assert same(checkpoint.read("model/mask"), values)
        assert same(checkpoint.read("optimizer/up/exp_avg"), values)


def test_the_last_cast_that_matches_counts() -> None:
    store, destination = MemoryStore(), MemoryStore()
    values = np.arange(6, dtype=np.float32)
    with Writer(store, step=3) as writer:
        for name in ("a", "b"):
            writer.add(f"model/{name}", values, role="param")
    selection = Selection(cast=(("", "fp16"), ("b", "float64")))
    ckptkit.reshard(store, destination, to="single", selection=selection)
    with ckptkit.open(destination) as checkpoint:
        assert checkpoint.read("model/a").dtype == np.float16
        assert checkpoint.read("model/b").dtype == np.float64


def test_a_value_that_the_new_type_cannot_hold_is_an_error() -> None:
    store = MemoryStore()
    with Writer(store, step=3) as writer:
        writer.add("model/up", np.array([1.0, 1e6], np.float32), role="param")
    with pytest.raises(UsageError, match="model/up: 1 values of one chunk are beyond float16"):
        ckptkit.reshard(
            store, MemoryStore(), to="single", selection=Selection(cast=(("", "fp16"),))
        )


def test_an_infinity_that_the_new_type_lacks_is_an_error() -> None:
    store = MemoryStore()
    with Writer(store, step=3) as writer:
        writer.add("model/up", np.array([1.0, np.inf, np.nan], np.float32), role="param")
    selection = Selection(cast=(("", "float8_e4m3fn"),))
    with pytest.raises(UsageError, match="1 values of one chunk are beyond float8_e4m3fn"):
        ckptkit.reshard(store, MemoryStore(), to="single", selection=selection)


def test_what_belonged_to_the_name_that_is_left_out_goes_to_the_other() -> None:
    store, destination = MemoryStore(), MemoryStore()
    values = np.ones(4, np.float32)
    with Writer(store, step=3) as writer:
        writer.add("model/embed", values, role="param")
        writer.add_alias("model/head", "model/embed")
        writer.add("optimizer/embed/exp_avg", values, role="optimizer", of="model/embed")
        groups = [{"params": ["embed"], "options": {}}]
        writer.add_object("optimizer", [{"kind": "SGD", "groups": groups, "values": {}}])
        writer.add_object("best", {"ckptkit.array": "model/embed"})
    selection = Selection(exclude=("model/embed",), cast=(("model/head", "bf16"),))
    ckptkit.reshard(store, destination, to="single", selection=selection)
    with ckptkit.open(destination) as checkpoint:
        assert checkpoint["model/head"].dtype.name == "bfloat16"
        assert checkpoint["optimizer/embed/exp_avg"].info.of == "model/head"
        assert checkpoint.objects["optimizer"][0]["groups"][0]["params"] == ["head"]
        assert checkpoint.objects["best"] == {"ckptkit.array": "model/head"}


def test_what_an_optimizer_says_follows_names_and_omissions() -> None:
    store, destination = MemoryStore(), MemoryStore()
    values = np.ones(4, np.float32)
    with Writer(store, step=3) as writer:
        for name in ("a", "b", "c"):
            writer.add(f"model/{name}", values, role="param")
        groups = [{"params": ["a", "b"], "options": {"lr": 1}}, {"params": ["c"], "options": {}}]
        document = [{"kind": "SGD", "groups": groups, "values": {"a": {"n": 1}, "c": {"n": 2}}}]
        writer.add_object("optimizer", document)
        writer.add_object("ema", {"x": {"ckptkit.array": "model/a"}, "y": [1, {"z": None}]})
        writer.add_object("alike/model/b", 12)
    selection = Selection(exclude=("model/b",), rename=(("^a$", "first"),))
    ckptkit.reshard(store, destination, to="single", selection=selection)
    with ckptkit.open(destination) as checkpoint:
        (found,) = checkpoint.objects["optimizer"]
        assert [group["params"] for group in found["groups"]] == [["first"], ["c"]]
        assert found["values"] == {"first": {"n": 1}, "c": {"n": 2}}
        assert checkpoint.objects["ema"] == {
            "x": {"ckptkit.array": "model/first"},
            "y": [1, {"z": None}],
        }
        assert "alike/model/b" not in checkpoint.objects


def test_any_sequence_is_a_tuple() -> None:
    given: dict[str, Any] = {"include": ["a"], "exclude": ["b"], "cast": [["a", "bf16"]]}
    assert Selection(**given) == Selection(("a",), ("b",), cast=(("a", "bf16"),))
    hash(Selection(**given))


@pytest.mark.parametrize(
    "wrong",
    [
        {"include": "model/*"},
        {"exclude": "model/*"},
        {"cast": "bf16"},
        {"cast": ("", "bf16")},
        {"cast": (("a", "b", "bf16"),)},
        {"rename": "a=>b"},
        {"rename": ("ab",)},
    ],
)
def test_one_text_is_not_read_letter_by_letter(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"takes a tuple of") as caught:
        Selection(**wrong)
    assert caught.value.hint.startswith(f"write {next(iter(wrong))}=(")


def test_names_of_tied_optimizer_state_are_known_inside_of_their_group() -> None:
    store, destination = MemoryStore(), MemoryStore()
    with Writer(store, step=3) as writer:
        writer.add("model/a", np.ones(4, np.float32), role="param")
        writer.add("optimizer/a/m", np.ones(4, np.float32), role="optimizer", of="model/a")
        writer.add_alias("optimizer/b/m", "optimizer/a/m")
    ckptkit.reshard(store, destination, to="single", selection=Selection(exclude=("b",)))
    assert names(destination) == {"model/a", "optimizer/a/m"}


@pytest.mark.parametrize(
    ("selection", "kind", "message"),
    [
        ({"include": ("nothing.*",)}, UsageError, "no array has such a name"),
        ({"exclude": ("*",)}, UsageError, "nothing is left"),
        ({"exclude": ("nothing.*",)}, UsageError, "no array has such a name"),
        ({"cast": (("nothing", "bf16"),)}, UsageError, "no array has such a name"),
        ({"cast": (("mask", "bf16"),)}, UnsupportedTypeError, "only floating-point"),
        ({"cast": (("", "int8"),)}, UnsupportedTypeError, "a cast is to floating-point"),
        ({"cast": (("", "bf17"),)}, UnsupportedTypeError, "write bf16"),
        ({"cast": (("", np.float16),)}, UnsupportedTypeError, "write bf16"),
        ({"rename": (("(", "x"),)}, UsageError, "not a regular expression"),
        ({"rename": ((r"layers\.\d", "layer"),)}, InvalidNameError, "two arrays would have"),
        ({"rename": (("^norm$", ""),)}, InvalidNameError, "an empty name"),
        ({"rename": (("^nrom$", "x"),)}, UsageError, "no array has a name to rename so"),
        (
            {"rename": (("^norm$", "n"), ("^norm$", "x"))},
            UsageError,
            "no array has a name to rename",
        ),
    ],
)
def test_what_means_nothing_is_refused(
    selection: dict[str, Any], kind: type[CkptkitError], message: str
) -> None:
    destination = MemoryStore()
    with pytest.raises(kind, match=message):
        reshard(saved("fsdp:3"), destination, "tp:2", selection=Selection(**selection))
    assert not destination.list()


@pytest.mark.parametrize("name", TIED)
def test_names_that_are_left_out_are_listed_aliases_too(name: str) -> None:
    plan = ckptkit.plan_reshard(
        saved("fsdp:3"), MemoryStore(), to="fsdp:2", selection=Selection(exclude=(name,))
    )
    assert (plan.left_out, plan.aliases) == ((name,), ())


def test_the_plan_shows_all_of_it() -> None:
    selection = Selection(
        exclude=("mask",), cast=(("*.up", "fp32"),), rename=(("^norm$", "last.norm"),)
    )
    plan = ckptkit.plan_reshard(
        saved("fsdp:3"), MemoryStore(), to="fsdp:2", rules=RULES, selection=selection
    )
    assert plan.left_out == ("model/mask",)
    changed = {
        a.source.name: (a.name, a.info.dtype.name) for a in plan.arrays if a.name != a.source.name
    }
    assert changed["model/norm"] == ("model/last.norm", "bfloat16")
    casts = [a.name for a in plan.arrays if a.info.dtype != a.source.dtype]
    assert casts == [f"model/layers.{n}.up" for n in range(3)]
