"""The page in a real browser, without a network: what it shows, by mouse and by keyboard."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckptkit
from ckptkit.model import Shard, layout_of, parse_placement
from ckptkit.page import page_of
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Tensor, add, random_values, save, save_by
from tests.cli.programs import ckpt, document
from tests.page.browser import Browser
from tests.page.facts import no_facts

LAYERS = 3


def llama(seed: int, dtype: str = "float32") -> dict[str, Tensor]:
    """A few layers with names that a preset knows, and the state of an optimizer."""
    rng = np.random.default_rng(seed)
    shapes = {"model/embed_tokens.weight": (40, 16), "model/norm.weight": (16,)}
    for layer in range(LAYERS):
        shapes[f"model/layers.{layer}.self_attn.q_proj.weight"] = (16, 16)
        shapes[f"model/layers.{layer}.mlp.down_proj.weight"] = (16, 44)
    shapes |= {
        f"optimizer/{name.removeprefix('model/')}/exp_avg": shape for name, shape in shapes.items()
    }
    return {
        name: Tensor(rng.standard_normal(shape).astype(dtype), {"fsdp": "shard(0)"})
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run; the second one differs from the first in one layer."""
    folder = tmp_path_factory.mktemp("runs") / "7b"
    state = llama(0)
    for step in (10, 20):

        def fill(writer: ckptkit.Writer) -> None:
            for name, tensor in state.items():
                role = name.partition("/")[0].replace("model", "param")
                of = f"model/{name.removeprefix('optimizer/').removesuffix('/exp_avg')}"
                add(writer, name, tensor, role=role, of=of if role == "optimizer" else None)
            writer.add_alias("model/lm_head.weight", "model/embed_tokens.weight")
            writer.add_object("rate", 0.5)

        save_by(folder, fill, strategy="ddp:2,fsdp:2", step=step)
        changed = state["model/layers.1.mlp.down_proj.weight"].whole.copy()
        changed[3, 5:7] += 2.0
        state["model/layers.1.mlp.down_proj.weight"] = Tensor(changed, {"fsdp": "shard(0)"})
    return folder


@pytest.fixture
def page(run: Path, tmp_path: Path) -> Path:
    """Everything that there is to show of it."""
    out = tmp_path / "page.html"
    first = run / "step-0000000010"
    how: tuple[object, ...] = ("--to", "tp:4", "--rules", "llama", "--set", "head_dim=4")
    done = ckpt("view", run, "--against", first, *how, "--stats", "-o", out)
    assert done.exit_code == 0, done.stderr
    return out


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)"
    )
    return found


def shades(png: bytes) -> int:
    """How many different bytes a picture is made of: an empty one has a few."""
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    return len(set(zlib.decompress(data)))


def test_every_view_is_reached_by_mouse_and_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page)
    shots = {}
    for number, name in enumerate(("overview", "tensors", "reshard", "compare"), 1):
        browser.click(f'nav a[data-view="{name}"]')
        assert browser.run("location.hash") == f"#{name}"
        by_mouse = texts(browser, "main")
        browser.run("go('tensor/0')")
        browser.key(str(number))
        assert texts(browser, "main") == by_mouse
        shots[name] = browser.screenshot()
    browser.key("2")
    browser.click("tr.leaf")
    assert texts(browser, "h2.big") == ["model/embed_tokens.weight"]
    shots["tensor"] = browser.screenshot()
    browser.prefer("dark")
    shots["dark"] = browser.screenshot()
    assert len(set(shots.values())) == len(shots)
    assert all(shades(shot) > 60 for shot in shots.values())


def test_a_page_fits_a_phone_and_is_printed(browser: Browser, page: Path) -> None:
    browser.resize(360, 800)
    browser.open(page)
    for view in ("overview", "tensors", "tensor/0", "reshard", "compare"):
        browser.run(f"go('{view}')")
        wide = browser.run(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, view
        assert browser.printed().startswith(b"%PDF-")


def test_the_tree_folds_searches_and_sorts(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.key("/")
    assert "layers.{0..2}." in [text.strip("▾ \n") for text in texts(browser, "tr.group th")]
    for letter in "*down_proj.weight":
        browser.key(letter)
    leaves = texts(browser, "tr.leaf th")
    assert leaves == ["model/layers.{0..2}.mlp.down_proj.weight3 ×"]
    browser.key("ArrowDown")
    browser.key("Enter")
    assert texts(browser, "main h2.big") == ["model/layers.0.mlp.down_proj.weight"]
    browser.run("go('tensors')")
    browser.run(
        "(() => { tree.words = ''; const order = document.querySelector('#order');"
        " order.value = 'size'; order.dispatchEvent(new Event('change')); })()"
    )
    browser.run("(shown = '', go('tensors'))")
    sizes = browser.run("[...document.querySelectorAll('tr.leaf')].map((row) => row.line.size)")
    assert sizes == sorted(sizes, reverse=True)
    browser.click("#all")
    assert len(texts(browser, "tr.leaf")) == len(llama(0)) + 1


def test_what_is_shown_is_what_ckpt_show_says(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    shown = document("show", run, "--rank", 3)
    found = browser.run("""step.names.map((name, at) => {
        const kind = step.kinds[step.kind[at]];
        const layout = layoutOf(step, step.kind[at]);
        const part = layout.part(3);
        return [name, {
            shape: kind.shape, dtype: kind.dtype, role: kind.role, bytes: kind.bytes,
            chunks: product(kind.counts), parts: layout.parts,
            first: layout.part(layout.firstRank).shape,
            part: part.shape, held: part.size * kind.itemsize,
            boxes: boxesOf(part, 99).map((box) => box.map(([a, b]) => [a, b - a])),
            alias: step.alias[at] < 0 ? null : step.names[step.alias[at]],
            of: typeof step.of[at] === 'number' ? step.names[step.of[at]] ?? null : step.of[at],
        }];
    })""")
    assert sorted(name for name, _ in found) == [array["name"] for array in shown["arrays"]]
    here = dict(found)
    for array in shown["arrays"]:
        part = array["part"]
        boxes = [
            list(map(list, zip(box["offset"], box["shape"], strict=True))) for box in part["boxes"]
        ]
        assert here[array["name"]] == {
            **{key: array[key] for key in ("shape", "dtype", "role", "bytes", "chunks", "of")},
            "parts": array["parts"]["count"],
            "first": array["parts"]["shape"],
            "part": part["shape"],
            "held": part["bytes"],
            "boxes": boxes,
            "alias": array["alias_of"],
        }
    held = browser.run("[...heldBytes(step, step.kind)]")
    assert held == [document("show", run, "--rank", rank)["rank"]["bytes"] for rank in range(4)]
    assert browser.run("sum(step.packs)") == shown["stored_bytes"]
    assert browser.run("facts.run.map((info) => [info.step, info.bytes, info.here])") == [
        [step["step"], step["bytes"], step["step"] == 20] for step in document("ls", run)["steps"]
    ]


def test_the_pointer_shows_who_holds_what(browser: Browser, page: Path) -> None:
    browser.open(page)
    at = browser.run("step.names.indexOf('model/layers.0.mlp.down_proj.weight')")
    browser.run(f"go('tensor/{at}')")
    browser.point_at("canvas", 0.5, 0.75)
    (said,) = texts(browser, "#tip")
    assert "rank 1 · ddp 0 · fsdp 1 and 1 more" in said
    assert "part (8, 44), 1.4 KiB\n[8:16, 0:44]" in said
    browser.click("canvas", 0.5, 0.75)
    assert "[8:16, 0:44]" in texts(browser, ".boxes")[0]
    assert "cuts dim 0 (16) into 2" in texts(browser, "main")[0]
    # The same by keys: the first part, then the second.
    browser.run("document.querySelector('canvas').focus()")
    browser.key("ArrowLeft")
    assert "rank 0 · ddp 0 · fsdp 0" in texts(browser, ".said")[0]
    browser.key("ArrowDown")
    assert "[8:16, 0:44]" in texts(browser, ".said")[0]


def test_a_reshard_is_that_of_the_plan(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    told = ("--to", "tp:4", "--rules", "llama", "--set", "head_dim=4", "--dry-run")
    plan = document("reshard", run, page.parent / "out", *told)
    found = browser.run("facts.plan")
    for key in ("bytes_read", "bytes_written", "requests", "chunks", "bytes_by_rank", "imbalance"):
        assert found[key] == plan[key], key
    assert found["read_amplification"] == plan["read_amplification"]
    whys = {array["name"]: (array["why"], array["chunks_kept"]) for array in plan["arrays"]}
    assert whys == {
        name: (found["whys"][found["why"][at]], bool(found["kept"][at]))
        for at, name in enumerate(browser.run("step.names"))
        if name in whys
    }
    flows, elements = found["flows"], sum(array["bytes"] for array in plan["arrays"])
    assert sum(map(sum, flows["bytes"])) == elements
    assert len(flows["bytes"]) == len(flows["bytes"][0]) == 4
    assert 0 < flows["in_place"] < elements
    browser.run("go('reshard')")
    (shown,) = texts(browser, "main")
    assert "ddp:2,fsdp:2 → tp:4" in shown
    assert f"{plan['read_amplification']:.2f} times each byte" in shown
    browser.point_at("path.ribbon")
    assert "pack 0 to rank 0" in texts(browser, "#tip")[0]


def test_what_differs_is_what_diff_finds(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.key("4")
    (shown,) = texts(browser, "main")
    assert "1 array differs" in shown
    row = "model/layers.1.mlp.down_proj.weight\tvalues\tfloat32 (16, 44)\t2 of 704\t2\t[3, 5]"
    assert row in shown
    browser.click("main td a")
    assert texts(browser, "h2.big") == ["model/layers.1.mlp.down_proj.weight"]


def test_what_has_no_largest_difference_comes_first(browser: Browser, tmp_path: Path) -> None:
    names = ("model/layers.0.w", "model/layers.1.w", "model/layers.2.w")
    ones, page = np.ones(2), tmp_path / "page.html"
    save(tmp_path / "a", {name: Tensor(ones) for name in names})
    others = ([1.0, 2.0], [1.0, np.inf], [np.nan, np.nan])
    save(
        tmp_path / "b",
        {name: Tensor(np.array(each)) for name, each in zip(names, others, strict=True)},
    )
    page.write_text(ckptkit.view(tmp_path / "a", against=tmp_path / "b"), encoding="utf-8")
    browser.open(page)
    browser.run("go('compare')")
    assert texts(browser, "main td a") == list(reversed(names))
    browser.run("[...document.querySelectorAll('canvas')].at(-1).focus()")
    browser.key("ArrowLeft")
    assert "largest 1 " in texts(browser, ".said")[-1]
    browser.key("ArrowRight")
    assert "largest no finite number" in texts(browser, ".said")[-1]


def test_values_alone_may_differ(browser: Browser, tmp_path: Path) -> None:
    for name in ("a", "b"):
        with ckptkit.Writer(tmp_path / name, step=1) as writer:
            writer.add_object(f"only {name}", None)
    page = tmp_path / "page.html"
    page.write_text(ckptkit.view(tmp_path / "a", against=tmp_path / "b"), encoding="utf-8")
    browser.open(page)
    browser.run("go('compare')")
    (shown,) = texts(browser, "main")
    assert "2 values differ" in shown
    assert "only a\tonly here\tNone\t–\nonly b\tonly there\t–\tNone" in shown


def test_statistics_are_shown_where_they_were_asked_for(browser: Browser, page: Path) -> None:
    browser.open(page)
    whole = llama(0)["model/norm.weight"].whole
    browser.run("go(`tensor/${step.names.indexOf('model/norm.weight')}`)")
    (shown,) = texts(browser, "main")
    for name, value in (("min", whole.min()), ("max", whole.max()), ("mean", whole.mean())):
        assert f"{name}\n{float(f'{value:.5g}')}" in shown
    assert "NaN\n0\ninfinite\n0" in shown


def test_zeros_are_a_share_of_all_numbers_and_alone_no_picture(
    browser: Browser, tmp_path: Path
) -> None:
    state = {
        "model/half": Tensor(np.array([3, 4j], np.complex64)),
        "model/zero": Tensor(np.zeros((2, 2), np.float32)),
    }
    save(tmp_path / "run", state)
    page = tmp_path / "page.html"
    page.write_text(ckptkit.view(tmp_path / "run", stats=True), encoding="utf-8")
    browser.open(page)
    browser.run("go('tensor/0')")
    assert "zeros\n2\n50 %" in texts(browser, "main")[0]
    browser.run("go('tensor/1')")
    (shown,) = texts(browser, "main")
    assert "zeros\n4\n100 %" in shown
    assert "All that are finite are zero." in shown
    assert "power of two" not in shown


@pytest.mark.parametrize("address", ["nowhere", "constructor", "__proto__/x", "tensor/999"])
def test_an_address_of_nothing_is_no_error(browser: Browser, page: Path, address: str) -> None:
    browser.open(page)
    browser.run(f"go({address!r})")
    assert texts(browser, "main")[0]
    assert not browser.said


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "a&amp;b\"'`${1}",
    "</script><h1>no",
    "\u05d0\u05d1\u202egnp.exe\u202c",
    "{" * 30 + "x" * 140,
    "{a}" * 30,
    "\u4e2d" * 26,
    "new\u2028line\x07",
]


def test_hostile_names_and_values_are_text(browser: Browser, tmp_path: Path) -> None:
    # Ours are spelled so that no such letter is left; those of others come as they are.
    save_file({name: np.ones(3, np.float32) for name in HOSTILE}, tmp_path / "m.safetensors")
    page = tmp_path / "page.html"
    page.write_text(ckptkit.view(tmp_path / "m.safetensors", stats=True), encoding="utf-8")
    browser.open(page)
    shown = []
    for view in ("overview", "tensors", *(f"tensor/{at}" for at in range(len(HOSTILE)))):
        browser.run(f"go({view!r})")
        shown += texts(browser, ".name")
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.querySelectorAll('img, h1 + h1, main script').length") == 0
    assert browser.run("typeof window.hacked") == "undefined"
    assert HOSTILE[0] in shown
    assert HOSTILE[5] in shown
    assert "\u05d0\u05d1\\u{202e}gnp.exe\\u{202c}" in shown
    assert not any("\u202e" in name or "\u2028" in name for name in shown)
    assert not browser.said
    # Nor could a name ask for anything, if it became markup.
    browser.run(
        "document.body.insertAdjacentHTML('beforeend',"
        " '<img src=https://a.invalid/x onerror=window.hacked=1>')"
    )
    browser.hear(2)  # that the policy refused the picture, and the handler
    assert all("Content Security Policy" in said for said in browser.said)
    browser.said.clear()
    assert browser.run("typeof window.hacked") == "undefined"


def odd_states() -> dict[str, tuple[str, dict[str, Tensor]]]:
    five = "pp:2,ddp:2,fsdp:2,ep:3,tp:2"
    cuts = {"pp": "stage(1)", "fsdp": "strided(1)", "ep": "shard(0)", "tp": "shard(1)"}
    return {
        "nothing": ("single", {}),
        "scalars": ("ddp:2", {"model/s": Tensor(random_values((), "bool"))}),
        "empty": ("fsdp:2", {"model/none": Tensor(random_values((0, 4)), {"fsdp": "shard(0)"})}),
        "one rank": ("single", {"model/w": Tensor(random_values((5, 3)))}),
        "five axes": (five, {"model/experts.w": Tensor(random_values((6, 14, 5)), cuts)}),
        "uneven": ("fsdp:4", {"model/w": Tensor(random_values((5, 3)), {"fsdp": "shard(0)"})}),
    }  # fmt: skip


@pytest.mark.parametrize("name", odd_states())
def test_odd_steps_are_shown(browser: Browser, tmp_path: Path, name: str) -> None:
    strategy, state = odd_states()[name]
    save(tmp_path / "run", state, strategy=strategy)
    page = tmp_path / "page.html"
    how: Any = {"stats": True, "against": tmp_path / "run", "to": "fsdp:3"}
    page.write_text(ckptkit.view(tmp_path / "run", **how), encoding="utf-8")
    browser.open(page)
    views = [
        "overview",
        "tensors",
        "reshard",
        "compare",
        *(f"tensor/{i}" for i in range(len(state))),
    ]
    for view in views:
        browser.run(f"go({view!r})")
        assert shades(browser.screenshot()) > 20
    browser.run("go('compare')")
    assert "The same state" in texts(browser, "main")[0]


def test_shared_heads_are_said_to_overlap(browser: Browser, tmp_path: Path) -> None:
    cut = {"tp": "shard(0, blocks=[16,4,4], unit=4)"}
    save(tmp_path / "run", {"model/qkv": Tensor(random_values((24, 3)), cut)}, strategy="tp:4")
    page = tmp_path / "page.html"
    page.write_text(ckptkit.view(tmp_path / "run"), encoding="utf-8")
    browser.open(page)
    browser.run("go('tensor/0')")
    (shown,) = texts(browser, "main")
    assert "Parts overlap" in shown
    assert "[0:4, 0:3]\n[16:24, 0:3]" in shown
    assert "each of its blocks 16 + 4 + 4 for itself, in units of 4" in shown


def test_checkpoints_of_others_are_shown(browser: Browser, run: Path, tmp_path: Path) -> None:
    for kind in ("hf", "dcp"):
        assert ckpt("export", run, tmp_path / kind, "--to-format", kind).exit_code == 0
        page = tmp_path / f"{kind}.html"
        page.write_text(ckptkit.view(tmp_path / kind, to="fsdp:2", stats=True), encoding="utf-8")
        browser.open(page)
        shown = document("show", tmp_path / kind)
        assert sorted(browser.run("step.names")) == [array["name"] for array in shown["arrays"]]
        assert browser.run("sum(step.packs)") == shown["stored_bytes"]
        assert shown["format"] in texts(browser, "main")[0]
        browser.run("go('reshard')")
        assert "→ fsdp:2" in texts(browser, "main")[0]


def test_the_mesh_says_which_rank_is_where(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.settle()
    wide, tall = browser.run(
        "(() => { const canvas = document.querySelector('canvas');"
        " return [canvas.clientWidth, canvas.clientHeight]; })()"
    )
    for rank, (x, y) in enumerate(((10, 10), (44, 10), (10, 36), (44, 36))):
        browser.click("canvas", x / wide, y / tall)
        assert texts(browser, "#tip")[0].split("\n")[0] == f"rank {rank}"
        assert texts(browser, ".told")[0].split("\n")[1] == str(rank)


def test_thousands_of_ranks_are_a_page_and_a_picture(browser: Browser, tmp_path: Path) -> None:
    facts = no_facts()
    facts["step"] |= {
        "strategy": {"text": "fsdp:1024,tp:8", "axes": [["fsdp", "fsdp", 1024], ["tp", "tp", 8]]},
        "packs": [1 << 30] * 8192,
        "names": ["model/w"],
        "kind": [0],
        "alias": [-1],
        "of": [-1],
        "fold": [0],
        "folds": ["model/w"],
        "kinds": [
            {
                "shape": [53248, 16384],
                "dtype": "bfloat16",
                "itemsize": 2,
                "role": "param",
                "chunks": {"edges": None},
                "counts": [7712, 1],
                "placements": 0,
            }
        ],
        "placements": [
            [
                {"kind": "strided", "dim": 0, "text": "strided(0)"},
                {"kind": "shard", "dim": 0, "text": "shard(0)"},
            ]
        ],
    }
    page = tmp_path / "page.html"
    page.write_text(page_of(facts), encoding="utf-8")
    assert page.stat().st_size < 200_000
    browser.open(page)
    assert shades(browser.screenshot()) > 60
    assert browser.run("document.querySelector('canvas').clientHeight") < 600
    # Block after block, each rank is found where the one before it leaves off.
    browser.run("document.querySelector('canvas').focus()")
    for _ in range(2):
        browser.key("ArrowDown")
    assert texts(browser, ".said")[0].startswith("rank 8 · fsdp 1 · tp 0")
    browser.run("go('tensor/0')")
    assert shades(browser.screenshot()) > 60
    layout = layout_of((53248, 16384), "fsdp:1024,tp:8", [parse_placement("strided(0)"), Shard(0)])
    assert browser.run("layoutOf(step, 0).parts") == sum(1 for _ in layout.distinct_ranks())


def test_ten_thousand_tensors_are_a_small_page(browser: Browser, tmp_path: Path) -> None:
    store = MemoryStore()
    rng = np.random.default_rng(0)
    with ckptkit.Writer(store, step=1) as writer:
        for number, values in enumerate(rng.standard_normal((10_000, 4), np.float32)):
            writer.add(f"model/layers.{number // 40}.part{number % 40:x}.weight", values)
    page = tmp_path / "page.html"
    page.write_text(ckptkit.view(store, stats=True), encoding="utf-8")
    assert page.stat().st_size < 2_000_000
    browser.open(page)
    browser.key("2")
    assert "10,000 arrays in 40 rows" in texts(browser, "main")[0]
    browser.click("#all")
    assert browser.run("document.querySelectorAll('tr.leaf').length") < 1000
    browser.click("button.more")
    assert browser.run("document.querySelectorAll('tr.leaf').length") < 2000
