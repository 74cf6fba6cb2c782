"""Commands in a real terminal, and in a shell that completes what was begun."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ckptkit.cli import main
from click.shell_completion import BashComplete

from tests.checkpoint.saving import Tensor, save
from tests.cli.programs import COMMAND, environment


def in_terminal(columns: int, *arguments: object, **variables: str) -> str:
    """What appears in a terminal of so many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    line = [*COMMAND, *map(str, arguments)]
    with subprocess.Popen(line, stdout=slave, stderr=slave, env=environment(**variables)) as child:
        os.close(slave)
        shown = b""
        with suppress(OSError):  # as Linux says that the other end is closed
            while data := os.read(master, 1 << 16):
                shown += data
        assert child.wait(60) == 0, shown
    os.close(master)
    return shown.decode().replace("\r\n", "\n")


def table(shown: str) -> list[str]:
    """The lines of the arrays."""
    return shown.partition("\n\n")[2].splitlines()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_lines_fit_and_strategies_have_colours(run: Path, columns: int) -> None:
    shown = in_terminal(columns, "show", run)
    assert "\x1b[32mddp:2\x1b[0m,\x1b[36mfsdp:2\x1b[0m" in shown
    assert max(map(len, table(shown))) <= columns
    assert ("ROLE" in shown) == (columns > 60)
    assert ("█" in shown) == (columns > 60)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_colours_can_be_refused(run: Path, variables: dict[str, str]) -> None:
    assert "\x1b" not in in_terminal(80, "ls", run, **variables)


def test_a_terminal_with_few_letters_gets_others(run: Path) -> None:
    shown = in_terminal(40, "rules", run, "--to", "fsdp:2", PYTHONIOENCODING="ascii")
    assert shown.isascii()
    assert "~" in shown
    # Where lines are broken anyway, names are whole.
    assert "optimizer/w/exp_avg" in in_terminal(30, "rules", run, "--to", "fsdp:2")
    assert "#" in in_terminal(80, "show", run, PYTHONIOENCODING="ascii")


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with more arrays than anybody reads."""
    place = tmp_path_factory.mktemp("layers")
    names = [f"model/layers.{n}.{w}" for n in range(40) for w in ("q", "k", "v")]
    save(place / "7b", {name: Tensor(np.zeros(2)) for name in ("model/head", *names)}, step=120)
    (place / "7b" / "step-0000000090").mkdir()
    return place


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["show", "7b/"], ["7b/step-0000000120", "7b/step-0000000090"]),
        (["show", "7b/9"], ["7b/step-0000000090"]),
        (["show", "7"], ["7"]),
        (["view", "7b", "--against", "7b/9"], ["7b/step-0000000090"]),
        (["show", "7b", "model/layers.3."], [f"model/layers.3.{w}" for w in "kqv"]),
        (["show", "7b", "model/"], ["model/head", "model/layers."]),
        (["show", "7b", "model/layers."], [f"model/layers.{n}." for n in range(40)]),
        (["diff", "7b", "7b", "--include", "model/h"], ["model/head"]),
        (["reshard", "7b", "new", "--rules", "mix"], ["mixtral"]),
        (["reshard", "7b", "new", "--names", "mix"], ["mixtral-megatron"]),
        (["show", "~/7b/9"], ["~/7b/step-0000000090"]),
        (["show", "~/7b", "model/h"], ["model/head"]),
        (["show", "~nobody-of-this-name/7b/"], ["~nobody-of-this-name/7b/"]),
        (["show", "~nobody-of-this-name/7b", "model/"], []),
        (["show", "gone", "model/"], []),
        (["show", "s3://bucket/7b", "model/"], []),
        (["show", "s3://bucket/7b"], []),
        (["sh"], ["show"]),
    ],
    ids=lambda words: " ".join(words[:5]),
)
def test_steps_and_arrays_are_completed(
    layers: Path, monkeypatch: pytest.MonkeyPatch, words: Sequence[str], offered: Sequence[str]
) -> None:
    monkeypatch.chdir(layers)
    monkeypatch.setenv("HOME", str(layers))
    completion = BashComplete(main, {}, "ckpt", "_CKPT_COMPLETE")
    found = completion.get_completions(list(words[:-1]), words[-1])
    assert [item.value for item in found] == offered


def test_a_config_is_completed_as_a_file(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(layers)
    completion = BashComplete(main, {}, "ckpt", "_CKPT_COMPLETE")
    found = completion.get_completions(["rules", "7b", "--config"], "co")
    assert [(item.value, item.type) for item in found] == [("co", "file")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_understands_what_is_offered(layers: Path, shell: str) -> None:
    number = "model/" if shell == "fish" else "3"
    variables = {"COMP_WORDS": "ckpt show 7b model/", "COMP_CWORD": number}
    variables |= {"_CKPT_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(
        COMMAND,
        env=environment(**variables),
        cwd=layers,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    form = "plain\n{}\n_\n" if shell == "zsh" else "plain,{}\n"
    assert done.stdout == "".join(map(form.format, ("model/head", "model/layers.")))
