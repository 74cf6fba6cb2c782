"""What only a real process shows: signals, pipes, terminals, the shell."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path
from select import select

import pytest

from tests.cli.programs import COMMAND, IMPATIENT, environment, flip_a_bit, process, wait_for

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["verify", "{run}"], 0),
        (["verify", "{run}", "--bogus"], 2),
        (["verify", "{run}/step-0000000010"], 3),
    ],
)
def test_the_exit_code_reaches_the_shell(run: Path, arguments: list[str], code: int) -> None:
    flip_a_bit(run / "step-0000000010")
    done = process(*(argument.format(run=run) for argument in arguments))
    assert done.returncode == code
    assert ("error: " in done.stderr) == (code not in (0, 3))
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_nothing_to_talk_about(run: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "show", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as program:
        assert program.stdout
        assert program.stderr
        program.stdout.close()
        assert program.stderr.read() == b""
        assert program.wait(20) == 141


def test_ctrl_c_leaves_nothing_half_written_and_a_pipe_gets_no_bar(
    slow: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [COMMAND[0], "-c", IMPATIENT, "unpack", slow, tmp_path / "plain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as program:
        wait_for(lambda: any(tmp_path.iterdir()))
        time.sleep(0.3)  # longer than the bar of a terminal would wait
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=300)
    assert (program.returncode, out, err) == (130, b"", b"interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_a_bar(slow: Path, tmp_path: Path, no_color: bool) -> None:
    master, slave = pty.openpty()
    variables = {"NO_COLOR": "1"} if no_color else {}
    with subprocess.Popen(
        [COMMAND[0], "-c", IMPATIENT, "unpack", slow, tmp_path / "plain"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment(COLUMNS="100", **variables),
    ) as program:
        os.close(slave)
        shown = _read_until(master, "MiB")
        program.send_signal(signal.SIGINT)
        shown += _read_until(master, "interrupted")
        assert program.wait(20) == 130
    os.close(master)
    assert "unpack" in shown
    assert "/s" in shown
    assert bool(COLOUR.search(shown)) != no_color
    assert list(tmp_path.iterdir()) == []


def test_the_shell_completes_commands_and_folders() -> None:
    for shell in ("bash", "zsh", "fish"):
        if shell == "bash" and not Path("/bin/bash").exists():
            continue
        script = process(_CKPT_COMPLETE=f"{shell}_source")
        assert script.returncode == 0
        assert "_ckpt_completion" in script.stdout
    asked = {"_CKPT_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    assert process(**asked, COMP_WORDS="ckpt sh").stdout == "plain,show\n"
    asked["COMP_CWORD"] = "2"
    assert process(**asked, COMP_WORDS="ckpt show runs/").stdout == "dir,runs/\n"


def test_commands_import_nothing_slow_that_they_do_not_need(run: Path, tmp_path: Path) -> None:
    code = """if True:
        import sys, ckptkit_command
        from ckptkit.cli import main
        run, out = sys.argv[1:]
        for line in (
            *(["ls", run], ["show", run], ["verify", run], ["diff", run, run]),
            ["export", run, f"{out}/exported", "--to-format", "dcp"],
            ["reshard", "--to", "fsdp:2", run, f"{out}/resharded"],
        ):
            main(line, standalone_mode=False)
        slow = ("rich", "torch", "zarr", "fsspec", "multiprocessing.pool")
        print([name for name in slow if name in sys.modules])
    """
    done = subprocess.run(
        [COMMAND[0], "-c", code, run, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def _read_until(descriptor: int, text: str) -> str:
    found = ""
    while text not in found:
        ready, _, _ = select([descriptor], [], [], 20)
        assert ready, f"nothing more after {found!r}"
        found += os.read(descriptor, 65536).decode()
    return found
