from __future__ import annotations

import io

import pytest
from ckptkit.cli import output
from ckptkit.cli.output import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _work(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    with Bar("verify", 10 << 20) as bar:
        for _ in range(3):
            bar(1 << 20)
    return stream.getvalue()


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert _work(monkeypatch, Terminal()) == ""


def test_long_work_shows_bytes_of_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(output, "PATIENCE", 0)
    text = _work(monkeypatch, Terminal())
    assert "verify" in text
    assert "MiB of 10.0 MiB, " in text
    # Transient: the last thing is to clear the line and to show the cursor again.
    assert text.rstrip().endswith("\x1b[2K")
    assert text.index("\x1b[?25h") > text.index("\x1b[?25l")


def test_without_a_terminal_there_is_never_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0)
    assert _work(monkeypatch, io.StringIO()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert _work(monkeypatch, Terminal()) == ""
