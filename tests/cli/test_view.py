from __future__ import annotations

import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.cli.programs import ckpt, document, flip_a_bit


def test_the_page_is_one_file_that_names_no_other(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "7b.html"
    found = document("view", run, "-o", out)
    assert found == {"file": str(out), "bytes": out.stat().st_size}
    text = out.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")  # a name
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert not [word for word in ("http:", "https:", "src=", "@import", "url(") if word in text]
    assert [path.name for path in tmp_path.glob("*.html")] == [out.name]


def test_a_page_replaces_another_one_and_follows_no_link(run: Path, tmp_path: Path) -> None:
    kept, out = tmp_path / "kept", tmp_path / "7b.html"
    kept.write_text("kept")
    out.symlink_to(kept)
    assert ckpt("view", run, "-o", out).stdout == f"{out}\n"
    assert not out.is_symlink()
    assert kept.read_text() == "kept"
    assert ckpt("view", run, "-o", out).exit_code == 0


def test_a_browser_is_asked_to_show_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def show(url: str) -> bool:
        shown.append(url)
        return len(shown) == 1

    monkeypatch.setattr(webbrowser, "open", show)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    done = ckpt("view", run, "--open")
    assert (done.exit_code, done.stderr) == (0, "")
    page = Path(unquote(urlparse(shown[0]).path))
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert page.is_relative_to(tmp_path)
    assert "no browser could be started" in ckpt("view", run, "--open").stderr


def test_a_page_needs_a_place(run: Path, tmp_path: Path) -> None:
    nowhere = ckpt("view", run)
    assert nowhere.exit_code == 2
    assert "--open" in nowhere.stderr
    gone = ckpt("view", run, "-o", tmp_path / "no" / "7b.html")
    assert gone.exit_code == 5
    assert "cannot be written" in gone.stderr


def test_what_cannot_be_told_is_an_error_and_no_page(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "7b.html"
    assert ckpt("view", tmp_path / "nothing", "-o", out).exit_code == 4
    assert ckpt("view", run, "--to", "tp:2", "-o", out).exit_code == 2  # no rule knows these names
    flip_a_bit(run / "step-0000000020")
    assert ckpt("view", run, "--stats", "-o", out).exit_code == 3
    assert not out.exists()
    assert ckpt("view", run, "-o", out).exit_code == 0  # without, no value is read
