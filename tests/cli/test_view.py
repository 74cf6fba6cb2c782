from __future__ import annotations

import os
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
    # The next look at it leaves nothing more behind.
    assert shown[1] == shown[0]
    assert [*page.parent.iterdir()] == [page]


def test_a_page_is_put_into_no_folder_of_somebody_else(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "other").mkdir()
    (tmp_path / f"ckpt-view-{os.getuid()}").symlink_to("other")
    assert ckpt("view", run, "--open").exit_code == 0
    assert not [*(tmp_path / "other").iterdir()]
    assert Path(unquote(urlparse(shown[0]).path)).is_relative_to(tmp_path)


def test_a_page_needs_a_place(run: Path, tmp_path: Path) -> None:
    nowhere = ckpt("view", run)
    assert nowhere.exit_code == 2
    assert "--open" in nowhere.stderr
    gone = ckpt("view", run, "-o", tmp_path / "no" / "7b.html")
    assert gone.exit_code == 5
    assert "cannot be written" in gone.stderr


def test_a_place_for_no_page_is_told_before_values_are_read(run: Path, tmp_path: Path) -> None:
    flip_a_bit(run / "step-0000000020")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "file").open("rb") as file:
        # As /dev/stdout is one, which root could replace.
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        for name in ("file/7b.html", "folder", "pipe", "stdout", "x" * 300):
            done = ckpt("view", run, "--stats", "-o", tmp_path / name)
            assert (done.exit_code, done.stderr.count("cannot be written")) == (5, 1), name
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "stdout").is_symlink()
    assert ckpt("view", run, "-o", "").exit_code == 2


def test_a_page_may_have_the_longest_name(run: Path, tmp_path: Path) -> None:
    assert ckpt("view", run, "-o", tmp_path / ("x" * 255)).exit_code == 0


def test_an_interrupted_page_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "7b.html").write_text("before")
    monkeypatch.setattr(Path, "replace", interrupt)
    assert ckpt("view", run, "-o", folder / "7b.html").exit_code == 130
    assert [path.name for path in folder.iterdir()] == ["7b.html"]
    assert (folder / "7b.html").read_text() == "before"


def test_what_cannot_be_told_is_an_error_and_no_page(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "7b.html"
    assert ckpt("view", tmp_path / "nothing", "-o", out).exit_code == 4
    assert ckpt("view", run, "--to", "tp:2", "-o", out).exit_code == 2  # no rule knows these names
    for unused in (["--rules", "lama"], ["--set", "heads=4"], ["--replicate-unknown"]):
        done = ckpt("view", run, *unused, "-o", out)
        assert done.exit_code == 2
        assert "--to" in done.stderr
    flip_a_bit(run / "step-0000000020")
    assert ckpt("view", run, "--stats", "-o", out).exit_code == 3
    assert not out.exists()
    assert ckpt("view", run, "-o", out).exit_code == 0  # without, no value is read
