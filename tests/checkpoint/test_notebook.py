"""What notebooks, and interpreters, show of what they are given."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import ProgressBar, Strategy, Writer
from ckptkit.checkpoint import workers
from ckptkit.format.names import join
from ckptkit.model import layout_of, parse_placement
from ckptkit.model.display import cut_picture, mesh_picture
from tests.checkpoint.saving import Tensor, random_values, save

EVIL = "<script>alert(1)</script>"


class Elements(HTMLParser):
    """The elements of some HTML, each of which has to be closed, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.open.append(tag)
        self.texts += [value for _, value in attrs if value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    layers = {
        f"model/layers.{n}.w": Tensor(random_values((8, 6)), {"fsdp": "shard(0)"})
        for n in range(12)
    }
    save(tmp_path / "7b", layers, strategy="ddp:2,fsdp:2", step=7)
    return tmp_path / "7b"


@pytest.fixture
def shown(run: Path, tmp_path: Path) -> dict[str, Any]:
    """One of each class, and what a line about it has to say."""
    checkpoint = ckptkit.open(run)
    other = tmp_path / "other"
    ckptkit.reshard(
        run, other, to="fsdp:3", selection=ckptkit.Selection(cast=(("*.1?.w", "bf16"),))
    )
    plan = ckptkit.plan_reshard(run, tmp_path / "new", to="tp:2", replicate_unknown=True)
    return {
        "7b": ckptkit.Run(run),
        "step 7, ddp:2,fsdp:2, 12 arrays": checkpoint,
        "(8, 6) float32": checkpoint["model/layers.3.w"],
        "ddp:2,fsdp:2 -> tp:2": plan,
        "2 of 12 arrays differ": ckptkit.diff(run, other),
    }


def test_a_repr_is_a_line_with_what_matters(shown: dict[str, Any]) -> None:
    more = {
        "'fsdp:2'": Strategy.parse("fsdp:2"),
        "of 12 arrays": ckptkit.digest(shown["7b"].location),
        "7b', step 9, rank 0": Writer(shown["7b"].location, step=9),
        "rank 1 of 2": ckptkit.ThreadBarrier.group(2)[1],
    }
    for what, thing in {**shown, **more}.items():
        assert what in repr(thing)
        assert len(repr(thing).splitlines()) == 1
        assert len(repr(thing)) < 250


def test_cards_are_html_and_small(shown: dict[str, Any]) -> None:
    for thing in shown.values():
        text = thing._repr_html_()
        found = Elements(text)
        assert "table" in found.found
        assert len(text) < 20_000
    assert "svg" in Elements(shown["(8, 6) float32"]._repr_html_()).found
    assert "model/layers.{0..11}.w" in shown["step 7, ddp:2,fsdp:2, 12 arrays"]._repr_html_()
    assert "model/layers.{10..11}.w, 2 x" in shown["2 of 12 arrays differ"]._repr_html_()


def test_names_from_files_are_text(tmp_path: Path) -> None:
    def save_it(run: Path, value: float) -> None:
        with Writer(run, step=1) as writer:
            writer.add(join("model", EVIL), np.full(3, value))
            writer.add_object(EVIL, EVIL)

    save_it(tmp_path / "a", 1.0)
    save_it(tmp_path / EVIL, 2.0)
    checkpoint = ckptkit.open(tmp_path / EVIL)
    found = ckptkit.diff(tmp_path / "a", tmp_path / EVIL)
    array = checkpoint[checkpoint.names[0]]
    cards = [thing._repr_html_() for thing in (checkpoint, found, ckptkit.Run(tmp_path / EVIL))]
    for text in cards:
        assert any(EVIL in each for each in Elements(text).texts)
    for text in (*cards, array._repr_html_(), checkpoint.show()._repr_html_()):
        assert "script" not in Elements(text).found


def test_marks_of_direction_and_control_characters_are_shown(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", step=1) as writer:
        writer.add_object("rtl\u202egnp.exe\x1b", 1)
    card = ckptkit.open(tmp_path / "run")._repr_html_()
    assert "rtl\\u202egnp.exe\\x1b" in card
    assert "\u202e" not in card
    assert "\x1b" not in card


def test_names_complete_in_natural_order(run: Path) -> None:
    keys = ckptkit.open(run)._ipython_key_completions_()
    assert keys == [f"model/layers.{layer}.w" for layer in range(12)]


def test_a_page_is_shown_in_a_frame(run: Path) -> None:
    for thing in (ckptkit.Run(run), ckptkit.open(run), ckptkit.open(run / "step-0000000007")):
        shown = thing.show(to="fsdp:4")
        assert "<html" in shown.page
        (frame,) = Elements(shown._repr_html_()).found
        assert frame == "iframe"
        assert shown.page in Elements(shown._repr_html_()).texts
        assert len(repr(shown)) < 100


def test_pictures_of_large_jobs_are_small() -> None:
    strategy = Strategy.parse("pp:16,ddp:8,fsdp:64")
    cuts = [parse_placement(text) for text in ("stage(3)", "replicate", "shard(1)")]
    for picture in (
        mesh_picture(strategy),
        cut_picture(layout_of((4096, 16384, 3), strategy, cuts)),
        mesh_picture(Strategy.parse("single")),
    ):
        assert "svg" in Elements(picture).found
        assert len(picture) < 40_000
    assert cut_picture(layout_of((0, 3), "single", ())) == ""
    assert cut_picture(layout_of((), "single", ())) == ""
    huge = layout_of((1 << 24,), "fsdp:16777216", [parse_placement("shard(0)")])
    assert cut_picture(huge) == ""


class Handle:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, thing: Any) -> None:
        Elements(thing._repr_html_())
        self.shown.append(repr(thing))


def test_a_bar_of_a_notebook_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()

    def display(thing: Any, *, display_id: bool) -> Handle:
        assert display_id
        handle.update(thing)
        return handle

    shell = SimpleNamespace(kernel=None)
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(workers, "_BETWEEN", 0.0)
    checkpoint = ckptkit.open(run)
    with ProgressBar("verify", checkpoint.stored_bytes) as bar:
        assert ckptkit.verify(run, progress=bar) == []
    assert len(handle.shown) > 2
    assert handle.shown[0].startswith("verify: ")
    assert " left" in handle.shown[0]
    assert bar.done == checkpoint.stored_bytes


def test_a_bar_shows_nothing_outside_of_notebooks(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("verify") as bar:
        bar(10)
    assert repr(bar).startswith("verify: 10 B, ")
    assert capfd.readouterr() == ("", "")
