"""Names as another program has them, and tensors whose rows are those of several."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ckptkit
from ckptkit import Selection, Writer
from ckptkit.errors import InvalidNameError, RulesError, UsageError
from tests.checkpoint.saving import Tensor, add, same, save_by
from tests.cli.programs import ckpt

Values = npt.NDArray[Any]

HEADS, GROUPS, LONG, HIDDEN, INNER, WORDS = 6, 2, 4, 10, 14, 11
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": WORDS}
LAYER = "model.layers.{}."
MEGATRON = "decoder.layers.{}."


def model() -> dict[str, Values]:
    """A small Llama of two layers, under transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}self_attn.q_proj.weight": (HEADS * LONG, HIDDEN),
            f"{layer}self_attn.k_proj.weight": (GROUPS * LONG, HIDDEN),
            f"{layer}self_attn.v_proj.weight": (GROUPS * LONG, HIDDEN),
            f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * LONG),
            f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    random = np.random.default_rng(5)
    return {name: random.random(shape, np.float32) for name, shape in shapes.items()}


def fused(named: dict[str, Values], layer: int) -> tuple[Values, Values]:
    """What Megatron makes of queries, keys and values, and of gates and what they let through, as
    its own converters do it.
    """
    at = LAYER.format(layer)
    parts = [
        named[f"{at}self_attn.{which}_proj.weight"].reshape(GROUPS, -1, HIDDEN) for which in "qkv"
    ]
    qkv = np.concatenate(parts, axis=1).reshape(-1, HIDDEN)
    halves = [named[f"{at}mlp.{which}_proj.weight"] for which in ("gate", "up")]
    return qkv, np.concatenate(halves)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of the model and its optimizer, cut over three ranks."""
    run = tmp_path_factory.mktemp("names") / "run"
    named = model()
    groups = [{"params": [*named], "lr": 0.1}]

    cut = {"fsdp": "shard(0)"}

    def fill(writer: Writer) -> None:
        for name, values in named.items():
            add(writer, f"model/{name}", Tensor(values, cut), role="param")
            for number, state in enumerate(("exp_avg", "exp_avg_sq"), 1):
                full, moment = f"optimizer/{name}/{state}", Tensor(values + number, cut)
                add(writer, full, moment, role="optimizer", of=f"model/{name}")
        counts = {name: {"step": 3} for name in named}
        writer.add_object("optimizer", [{"kind": "AdamW", "groups": groups, "values": counts}])

    save_by(run, fill, strategy="fsdp:3")
    return run


@pytest.mark.parametrize("to", ["single", "fsdp:2", "tp:2"])
def test_rows_of_several_become_one_and_apart_again(run: Path, to: str, tmp_path: Path) -> None:
    there, back = tmp_path / "megatron", tmp_path / "hf"
    selection = Selection(names="llama-megatron")
    done = ckptkit.reshard(
        run, there, to=to, selection=selection, sizes=SIZES, replicate_unknown=True, digest=True
    )
    assert not done.finished
    named = model()
    with ckptkit.open(there) as checkpoint:
        for layer in range(2):
            at = MEGATRON.format(layer)
            for state, number in (("", 0), ("exp_avg", 1), ("exp_avg_sq", 2)):
                whole = {name: values + number for name, values in named.items()}
                qkv, fc1 = fused(whole, layer)
                for inner, wanted in (("self_attention.linear_qkv", qkv), ("mlp.linear_fc1", fc1)):
                    name = f"model/{at}{inner}.weight"
                    if state:
                        name = f"optimizer/{at}{inner}.weight/{state}"
                        assert checkpoint[name].info.of == f"model/{at}{inner}.weight"
                    assert same(checkpoint.read(name), wanted), name
                    assert same(checkpoint[name][3:9, 1:5], wanted[3:9, 1:5])
        word = "model/embedding.word_embeddings.weight"
        assert same(checkpoint.read(word), named["model.embed_tokens.weight"])
        (said,) = checkpoint.objects["optimizer"]
        inside = {name.removeprefix("model/") for name in checkpoint.arrays if name.startswith("m")}
        assert len(inside) == 3 + 2 * 6
        assert set(said["groups"][0]["params"]) == inside
        assert said["values"] == {name: {"step": 3} for name in inside}
    # The digest on record is that of what is there.
    assert not ckptkit.verify(there)
    assert ckptkit.digest(there).step == ckptkit.open(there).details["digest"]["step"]
    ckptkit.reshard(there, back, to="fsdp:3", selection=selection, sizes=SIZES)
    difference = ckptkit.diff(run, back)
    assert difference.same
    with ckptkit.open(back) as checkpoint:
        for name in named:
            moment = checkpoint[f"optimizer/{name}/exp_avg"].info
            assert moment.of == f"model/{name}"
            assert moment.placements == checkpoint[f"model/{name}"].info.placements


def test_padding_is_cut_off(run: Path, tmp_path: Path) -> None:
    padded = {f"model/{'embedding.word_embeddings'}.weight": np.ones((WORDS + 5, HIDDEN), "f4")}

    def fill(writer: Writer) -> None:
        for name, values in padded.items():
            add(writer, name, Tensor(values))

    save_by(tmp_path / "run", fill)
    selection = Selection(names="llama-megatron")
    ckptkit.reshard(
        tmp_path / "run", tmp_path / "hf", to="fsdp:2", selection=selection, sizes=SIZES
    )
    with ckptkit.open(tmp_path / "hf") as checkpoint:
        assert checkpoint["model/model.embed_tokens.weight"].shape == (WORDS, HIDDEN)
    with pytest.raises(RulesError, match="vocab_size"):
        ckptkit.reshard(tmp_path / "run", tmp_path / "no", to="fsdp:2", selection=selection)


def refused(run: Path, names: Any, **options: Any) -> str:
    """Why a table cannot be applied; nothing was written."""
    out = run.parent / "refused"
    with pytest.raises(UsageError) as caught:
        ckptkit.reshard(
            run, out, to="fsdp:2", selection=Selection(names=names, **options), sizes=SIZES
        )
    assert not out.exists()
    return str(caught.value)


def test_what_a_table_does_not_fit_is_refused(run: Path) -> None:
    lines = [{"a": "model.norm.weight", "b": "norm"}]
    assert "does not say what" in refused(run, {"names": lines})
    assert "of neither side" in refused(run, {"names": [{"a": "x", "b": "y"}]})
    both = [{"a": "model.norm.weight", "b": "lm_head.weight"}]
    assert "as many names are of one side as of the other" in refused(run, {"names": both})
    without = ("*.k_proj.weight",)
    assert "k_proj.weight, which makes one with it" in refused(
        run, "llama-megatron", exclude=without
    )
    assert "nor a file" in refused(run, "lama-megatron")
    assert "did you mean llama-megatron?" in refused(run, "lama-megatron")
    heads = {"num_attention_heads": 5, "num_key_value_heads": 2, "vocab_size": WORDS}
    with pytest.raises(InvalidNameError, match="are not as"):
        ckptkit.plan_reshard(
            run, "no", to="fsdp:2", selection=Selection(names="llama-megatron"), sizes=heads
        )
    with pytest.raises(RulesError, match="needs to know vocab_size"):
        ckptkit.plan_reshard(run, "no", to="fsdp:2", selection=Selection(names="llama-megatron"))


def test_state_that_is_not_as_its_parameter_is_neither_merged_nor_cut(tmp_path: Path) -> None:
    """Adafactor has a state of the columns: rows of two would be put together, or cut."""
    table = {"names": [{"ours": ["gate", "up"], "theirs": "both"}]}
    for names in (("gate", "up"), ("both",)):
        run = tmp_path / names[0]
        with Writer(run, step=1, strategy="single") as writer:
            for name in names:
                writer.add(f"model/{name}", np.ones((4, 6), np.float32), role="param")
                state = np.ones(6, np.float32)
                writer.add(f"optimizer/{name}/exp_avg_sq_col", state, role="optimizer")
        with pytest.raises(InvalidNameError, match=r"state of the shape \(6,\), of a parameter"):
            ckptkit.reshard(run, tmp_path / "new", to="single", selection=Selection(names=table))
        selection = Selection(names=table, include=("model/*",))
        ckptkit.reshard(run, tmp_path / f"{names[0]}-new", to="single", selection=selection)


def test_norms_of_mixtral_have_the_names_of_both_kinds_of_layers(tmp_path: Path) -> None:
    """Megatron calls the norm before the experts otherwise with Transformer Engine than without."""
    layer, theirs = MEGATRON.format(0), "model.layers.0.post_attention_layernorm.weight"
    spellings = [f"{layer}pre_mlp_layernorm.weight", f"{layer}mlp.linear_fc1.layer_norm_weight"]
    values = dict(zip(spellings, np.arange(8, dtype=np.float32).reshape(2, 4), strict=True))
    values["decoder.final_layernorm.weight"] = np.ones(4, np.float32)

    def converted(names: list[str], out: Path, source: Path | None = None) -> Path:
        if source is None:
            source = tmp_path / f"from-{out.name}"
            with Writer(source, step=1, strategy="single") as writer:
                for name in names:
                    writer.add(f"model/{name}", values[name], role="param")
        selection = Selection(names="mixtral-megatron")
        ckptkit.reshard(source, out, to="single", selection=selection)
        return out

    for number, name in enumerate(spellings):
        there = converted([name, "decoder.final_layernorm.weight"], tmp_path / f"hf{number}")
        back = converted([], tmp_path / f"back{number}", there)
        with ckptkit.open(there) as hf, ckptkit.open(back) as again:
            assert np.array_equal(hf[f"model/{theirs}"][...], values[name])
            assert np.array_equal(again[f"model/{spellings[0]}"][...], values[name])
            assert len(again.arrays) == 2
    with pytest.raises(InvalidNameError, match=re.escape(theirs)):
        converted(spellings, tmp_path / "both")


def test_an_array_is_in_one_line_of_a_table(run: Path, tmp_path: Path) -> None:
    first = {"ours": "*.norm.weight", "theirs": "a.*"}
    table = {"names": [first, {"ours": "model.*.weight", "theirs": "b.*"}]}
    selection = Selection(names=table, include=("model/model.norm.weight",))
    with pytest.raises(InvalidNameError, match="two lines of the table"):
        ckptkit.reshard(run, tmp_path / "new", to="single", selection=selection)


def test_a_tensor_may_have_one_name_on_both_sides(run: Path, tmp_path: Path) -> None:
    lines = [("model.norm.weight",) * 2, ("model.embed_tokens.weight", "wte")]
    table = {"names": [{"ours": ours, "theirs": theirs} for ours, theirs in lines]}
    only = tuple(f"model/{ours}" for ours, _ in lines)
    selection = Selection(names=table, include=only)
    ckptkit.reshard(run, tmp_path / "new", to="single", selection=selection)
    with ckptkit.open(tmp_path / "new") as checkpoint:
        assert set(checkpoint.arrays) == {"model/model.norm.weight", "model/wte"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"a": ["x", "y"], "b": ["u", "v"]}, "one name on one side"),
        ({"a": ["x", "x"], "b": "y"}, "each name of a side once"),
        ({"a": "x.*", "b": "y"}, "as many \\*"),
        ({"a": ["x", "y"], "b": "z", "shares": [1]}, "2 shares"),
        ({"a": ["x", "y"], "b": "z", "groups": "a b"}, "arithmetic"),
        ({"a": "x", "b": "z", "rows": [1]}, "arithmetic"),
        ({"a": ["x", "y"], "b": "z", "rows": 3}, "one tensor only"),
        ({"a": "x"}, "two sides"),
        ({"a": "x", "b": "y", "c": "z"}, "two sides"),
        ("a", "a map"),
    ],
)
def test_what_is_no_table_is_refused(line: object, what: str) -> None:
    with pytest.raises(RulesError, match=what):
        Selection(names={"names": [line]})


def test_numbers_of_parameters_go_to_each_part_and_become_one_where_they_are_equal(
    tmp_path: Path,
) -> None:
    """As optimizers of torch count the steps, for each parameter."""
    table = {"names": [{"apart": ["gate", "up"], "fused": "both"}]}
    selection = Selection(names=table)
    whole = np.arange(24, dtype="f4").reshape(6, 4)

    def fill(writer: Writer) -> None:
        add(writer, "model/both", Tensor(whole), role="param")
        step = Tensor(np.array(7.0, "f4"))
        add(writer, "optimizer/both/step", step, role="optimizer", of="model/both")

    save_by(tmp_path / "fused", fill)
    ckptkit.reshard(tmp_path / "fused", tmp_path / "apart", to="fsdp:2", selection=selection)
    with ckptkit.open(tmp_path / "apart") as checkpoint:
        assert same(checkpoint.read("model/gate"), whole[:3])
        assert same(checkpoint.read("model/up"), whole[3:])
        for name in ("gate", "up"):
            assert checkpoint.read(f"optimizer/{name}/step") == 7
    ckptkit.reshard(tmp_path / "apart", tmp_path / "again", to="single", selection=selection)
    assert ckptkit.diff(tmp_path / "fused", tmp_path / "again").same


def test_numbers_that_differ_do_not_become_one(tmp_path: Path) -> None:
    table = {"names": [{"apart": ["gate", "up"], "fused": "both"}]}
    selection = Selection(names=table)

    def fill(writer: Writer) -> None:
        for name, step in (("gate", 7.0), ("up", 8.0)):
            add(writer, f"model/{name}", Tensor(np.ones((3, 4), "f4")), role="param")
            number = Tensor(np.array(step, "f4"))
            add(writer, f"optimizer/{name}/step", number, role="optimizer", of=f"model/{name}")

    save_by(tmp_path / "run", fill)
    for call in (
        lambda: ckptkit.reshard(
            tmp_path / "run", tmp_path / "no", to="fsdp:2", selection=selection
        ),
        lambda: ckptkit.plan_reshard(
            tmp_path / "run", tmp_path / "no", to="fsdp:2", selection=selection
        ),
    ):
        with pytest.raises(
            InvalidNameError, match="becomes one with optimizer/gate/step"
        ) as caught:
            call()
        assert "optimizer/up/step" in str(caught.value)
        assert not (tmp_path / "no").exists()
    leaving = Selection(names=table, exclude=("*/step",))
    ckptkit.reshard(tmp_path / "run", tmp_path / "new", to="single", selection=leaving)
    with ckptkit.open(tmp_path / "new") as checkpoint:
        assert checkpoint["model/both"].shape == (6, 4)


@pytest.mark.parametrize("to", ["single", "tp:2"])
def test_tensors_without_rows_are_merged_and_cut_too(to: str, tmp_path: Path) -> None:
    table = {
        "names": [
            {"apart": ["gate", "up"], "fused": "both", "groups": 2},
            {"apart": "rest", "fused": "others"},
            {"apart": "more", "fused": "others.more"},
        ]
    }
    selection = Selection(names=table)

    def fill(writer: Writer) -> None:
        for name in ("gate", "up", "rest", "more"):
            add(writer, f"model/{name}", Tensor(np.ones((0, 3), "f4")), role="param")

    save_by(tmp_path / "run", fill)
    given: Any = {"to": to, "selection": selection, "replicate_unknown": True}
    ckptkit.reshard(tmp_path / "run", tmp_path / "new", **given)
    with ckptkit.open(tmp_path / "new") as checkpoint:
        assert checkpoint.read("model/both").shape == (0, 3)
    ckptkit.reshard(tmp_path / "new", tmp_path / "back", **given)
    assert ckptkit.diff(tmp_path / "run", tmp_path / "back").same


def test_tied_names_are_translated_and_types_converted_on_the_way(tmp_path: Path) -> None:
    table = {
        "names": [
            {"a": "embed", "b": "words"},
            {"a": "head", "b": "out"},
            {"a": ["l.*.x", "l.*.y"], "b": "l.*.xy"},
        ]
    }

    def fill(writer: Writer) -> None:
        add(writer, "model/embed", Tensor(np.ones((4, 2), "f4")), role="param")
        writer.add_alias("model/head", "model/embed")
        for name in "xy":
            add(
                writer,
                f"model/l.0.{name}",
                Tensor(np.full((5, 3), float(ord(name)), "f4")),
                role="param",
            )

    save_by(tmp_path / "run", fill)
    selection = Selection(names=table, cast=(("", "bf16"),))
    ckptkit.reshard(
        tmp_path / "run", tmp_path / "new", to="fsdp:2", selection=selection, memory="96MiB"
    )
    with ckptkit.open(tmp_path / "new") as checkpoint:
        assert checkpoint["model/out"].alias_of == "model/words"
        found = checkpoint.read("model/l.0.xy")
        assert found.dtype.name == "bfloat16"
        assert found.astype("f4").tolist() == [[float(ord(c))] * 3 for c in "x" * 5 + "y" * 5]


def test_the_command_takes_a_table_from_a_file(run: Path, tmp_path: Path) -> None:
    sizes = [f"--set={name}={value}" for name, value in SIZES.items()]
    ckpt("reshard", "--to", "fsdp:2", "--names", "llama-megatron", *sizes, run, tmp_path / "there")
    table = tmp_path / "table.json"
    lines = [{"ours": "decoder.final_layernorm.weight", "theirs": "norm.scale"}]
    table.write_text(json.dumps({"names": lines}))
    out = tmp_path / "one.safetensors"
    ckpt(
        "export", tmp_path / "there", out, "--to-format", "safetensors", "--names", table,
        "--include", "*final_layernorm*",
    )  # fmt: skip
    with ckptkit.open(out) as checkpoint:
        assert same(checkpoint.read("model/norm.scale"), model()["model.norm.weight"])
