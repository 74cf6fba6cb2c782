"""Every command where its output cannot be written, where Ctrl-C meets it early, and where it may
not read: an error of its kind in a line or two, never a bug.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from ckptkit.cli import main
from ckptkit.cli.program import COMMANDS, _interruptible

from tests.cli.programs import COMMAND, ckpt, environment, process, wait_for

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "ckptkit_command")
FULL = "error: stdout: the output cannot be written: No space left on device\n"
CLOSED = "error: stdout: the output cannot be written: Bad file descriptor\n"
LINES = {
    "ls": ["{run}"],
    "show": ["{run}"],
    "view": ["{run}", "--out", "{new}"],
    "verify": ["{run}"],
    "diff": ["{run}", "{run}"],
    "reshard": ["{run}", "{new}", "--to", "fsdp:3"],
    "rules": ["{run}", "--to", "fsdp:3"],
    "commit": ["{sliced}"],
    "import": ["{exported}", "{new}"],
    "export": ["{run}", "{new}", "--to-format", "safetensors"],
    "unpack": ["{run}", "{new}"],
    "prune": ["{run}"],
    "rebuild": ["{lost}"],
}


@pytest.fixture
def places(run: Path, tmp_path: Path) -> dict[str, Path]:
    """A run, a place for another, packs without a manifest, a step that has lost its own, and what
    another program reads.
    """
    sliced = tmp_path / "sliced"
    assert ckpt("reshard", run, sliced, "--to", "fsdp:2", "--engine", "slice:0/1").exit_code == 0
    lost = Path(shutil.copytree(run / "step-0000000010", tmp_path / "step-0000000010"))
    (lost / "manifest.msgpack").unlink()
    exported = tmp_path / "model.safetensors"
    assert ckpt("export", run, exported, "--to-format", "safetensors").exit_code == 0
    new = tmp_path / "new"
    return {"run": run, "new": new, "sliced": sliced, "lost": lost, "exported": exported}


def line_of(name: str, places: dict[str, Path]) -> list[str]:
    """A command that has something to print."""
    return [name, *(word.format(**places) for word in LINES[name])]


def run_with(
    line: Sequence[str], redirected: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A process behind a redirection of the shell."""
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirected}', "sh", *PROGRAM, *line],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("name", LINES)
def test_a_full_stdout_is_told(
    name: str,
    options: list[str],
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a file that cannot be closed well
        monkeypatch.setattr(sys, "stdout", full)
        code = main([*line_of(name, places), *options], standalone_mode=False)
    assert (code, capsys.readouterr().err) == (5, FULL)


@pytest.mark.parametrize(
    ("line", "redirected", "told"),
    [
        (["--help"], ">/dev/full", FULL),
        (["--version"], ">&-", CLOSED),
        (["show", "--help"], ">/dev/full", FULL),
        (["show", "{run}"], "<&- >&-", CLOSED),
        (["show", "{run}"], ">/dev/full 2>/dev/full", ""),
    ],
)
def test_a_stdout_that_cannot_be_written_reaches_the_shell(
    run: Path, line: list[str], redirected: str, told: str
) -> None:
    done = run_with([word.format(run=run) for word in line], redirected)
    assert (done.returncode, done.stdout, done.stderr) == (5, "", told)


def test_a_file_that_is_written_never_stands_in_for_a_closed_stdout(
    run: Path, tmp_path: Path
) -> None:
    done = run_with(["unpack", str(run), str(tmp_path / "plain")], "<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "")
    assert ckpt("unpack", run, tmp_path / "other").exit_code == 0
    for path in (tmp_path / "other").rglob("*"):
        if path.is_file():
            twin = tmp_path / "plain" / path.relative_to(tmp_path / "other")
            assert twin.read_bytes() == path.read_bytes()


# Python hears a signal between two of its lines: one just before a long sleep, only after that.
STOPS = """\
from importlib import import_module
from pathlib import Path
import time
Path({there!r}).touch()
for _ in range(6000):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("module", "moment"),
    [
        ("numpy", "ckptkit is imported"),
        ("click", "the commands are imported"),
        ("sitecustomize", "Python ends"),
    ],
)
@pytest.mark.parametrize("program_line", [PROGRAM, COMMAND], ids=["ckpt", "python -m"])
def test_ctrl_c_is_one_line_at_any_moment(
    program_line: tuple[str, ...], module: str, moment: str, run: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    code = STOPS.format(there=str(there))
    if module == "sitecustomize":
        code = f"import atexit; atexit.register(lambda: exec({code!r}))"
    (tmp_path / f"{module}.py").write_text(code)
    with subprocess.Popen(
        [*program_line, "ls", str(run)],
        cwd=ROOT,
        env=environment(PYTHONPATH=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        wait_for(there.exists)
        program.send_signal(signal.SIGINT)
        _, told = program.communicate(timeout=300)
    assert (program.returncode, told) == (130, "interrupted\n"), moment


def test_an_import_is_interrupted_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NumPy's, which fails otherwise."""
    (tmp_path / "interrupted.py").write_text(
        "import signal\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError from None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), _interruptible():  # noqa: PT012 - it comes in one of them
        import_module("interrupted")
        time.sleep(60)
    assert "interrupted" in sys.modules


def test_ctrl_c_is_one_line_at_many_moments(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("moments.py"), "ls", run],
        cwd=ROOT,
        env=environment(OPENBLAS_NUM_THREADS="1"),  # a copy of a process has none of its threads
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told, *wrong = reversed(done.stderr.splitlines())
    assert (done.returncode, wrong) == (0, [])
    assert int(told.removesuffix(" copies")) > 20


def test_workers_hear_no_ctrl_c_from_their_first_moment(run: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv: os.kill(os.getpid(), signal.SIGINT)"
    )
    line = ("reshard", run, tmp_path / "new", "--to", "fsdp:2", "--engine", "processes")
    done = process(*line, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_imported_before_ctrl_c_is_taken_care_of() -> None:
    code = "import sys; had = {*sys.modules}; import ckptkit_command; print({*sys.modules} - had)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'ckptkit_command'}\n"


def test_ctrl_c_is_ignored_where_the_shell_ignores_it() -> None:
    """As behind nohup, or `&` in a script."""
    code = "import ckptkit_command as c; c.main()"
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {code}"
    check = "; import os; os.kill(os.getpid(), signal.SIGINT)"
    told = subprocess.run(
        [sys.executable, "-c", ignoring.replace("; c.main()", f"{check}; c.main()"), "--version"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (told.returncode, told.stderr) == (0, "")


@pytest.fixture
def powerless() -> Iterator[None]:
    """A user who may read nothing of what others keep to themselves."""
    if os.geteuid() != 0:
        yield
        return
    # What is imported later may lie where nobody may read.
    for name in COMMANDS:
        ckpt(name, "--help")
    ckpt("reshard", "nowhere", "new", "--to", "fsdp:3")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", [name for name in LINES if name != "commit"])
@pytest.mark.parametrize("what", ["folder", "manifest"])
def test_what_may_not_be_read_is_the_storages_fault(
    name: str, what: str, tmp_path: Path, run: Path, request: pytest.FixtureRequest
) -> None:
    places = dict.fromkeys(("run", "new", "lost", "sliced", "exported"), run)
    for path in [run, *run.rglob("*")]:
        path.chmod(0 if what == "folder" or path.suffix == ".msgpack" else 0o755)
    tmp_path.chmod(0o755)
    request.getfixturevalue("powerless")
    result = ckpt(*line_of(name, places))
    assert (result.exit_code, result.stdout) == (5, ""), result.stderr
    assert result.stderr.startswith("error: ")


@pytest.mark.long
@pytest.mark.parametrize("redirected", [">/dev/full", ">&-", "| true"])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_whole_matrix(
    name: str, redirected: str, places: dict[str, Path], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('a line')")
    others = {"launch": ["launch", str(program)], "demo": ["demo"]}
    line = others.get(name) or line_of(name, places)
    for words in (line, [name, "--help"]):
        if redirected == "| true":
            reading, writing = os.pipe()
            os.close(reading)  # a reader that has gone
            done = subprocess.run(
                [*PROGRAM, *words],
                cwd=ROOT,
                env=environment(),
                stdout=writing,
                stderr=subprocess.PIPE,
                text=True,
                timeout=300,
                check=False,
            )
            os.close(writing)
            assert (done.returncode, done.stderr) == (141, "")
        else:
            done = run_with(words, redirected)
            assert (done.returncode, done.stdout) == (5, "")
            assert done.stderr.startswith("error: stdout: ")
            assert done.stderr.count("\n") == 1 or name == "launch"
        shutil.rmtree(places["new"], ignore_errors=True)
