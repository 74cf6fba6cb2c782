"""`ckpt launch` as users run it, with programs that do without torch, to be quick."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from ckptkit.cli.launch import _pass_on
from jsonschema import Draft202012Validator
from torch._C._distributed_c10d import TCPStore

from tests.cli.programs import COMMAND, ckpt, environment
from tests.parallel.optimizers import warm

ROOT = Path(__file__).parents[2]
LIMIT = 150
HAS_MPI = bool(
    shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
)
NEEDS_MPI = pytest.mark.skipif(not HAS_MPI, reason="there is no mpirun")
BACKENDS = ["gloo", pytest.param("mpi", marks=NEEDS_MPI)]

HELLO = """
import os, sys
print("out", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"],
      os.environ["CKPTKIT_BACKEND"], sys.argv[1:])
print("err", os.environ["RANK"], file=sys.stderr)
"""
FAIL = """
import os, sys, time
rank, meeting = os.environ["RANK"], sys.argv[1]
with open(f"{meeting}/{rank}.tmp", "w") as mine:
    mine.write(str(os.getpid()))
os.rename(mine.name, f"{meeting}/{rank}")
while not all(os.path.exists(f"{meeting}/{n}") for n in range(3)):
    time.sleep(0.01)
if rank == "1":
    raise ValueError("the reason")
first = open(f"{meeting}/1").read()

def is_running():
    try:
        return open(f"/proc/{first}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):  # it ends while it is looked at
        return False

while is_running():
    time.sleep(0.01)
time.sleep(0.3)
if rank == "0":
    raise RuntimeError("connection closed by peer")
time.sleep(100)
"""
AGAIN = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(4)
print("well", os.environ["RANK"])
"""
WAIT = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"])
print("pids", os.getpid(), child.pid)
try:
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(100)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


class Launcher:
    """`ckpt`, whose processes are forked from one that has torch imported."""

    command = (sys.executable, warm.__file__)

    def __init__(self, place: dict[str, str]) -> None:
        self.environment = environment(PYTHONPATH=str(ROOT), **place)

    def __call__(
        self,
        *arguments: str,
        stdout: int | IO[str] = subprocess.PIPE,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, "launch", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT,
            cwd=cwd,
            check=False,
        )


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    folder = tmp_path_factory.mktemp("launcher")
    with warm.warm("tests.cli.launcher", folder, {}) as place:
        yield Launcher(place)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_line_has_its_rank_and_its_stream(
    launch: Launcher, backend: str, tmp_path: Path
) -> None:
    program = script(tmp_path, HELLO)
    options = ("--nproc-per-node", "2", "--backend", backend, "--")
    done = launch(*options, program, "--lr", "3", "--json")
    assert done.returncode == 0, done.stderr
    told = [f"[rank {n}] out {n} 2 {n} {backend} ['--lr', '3', '--json']" for n in range(2)]
    assert sorted(done.stdout.splitlines()) == told
    assert sorted(done.stderr.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


LONG = """
import sys
print("10%\\r100%")
sys.stdout.write("x" * 3_000_000 + "\\n")
print("end", repr(sys.stdin.read()))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_lines_may_be_long_and_drawn_over(launch: Launcher, backend: str, tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--backend", backend, "--")
    done = launch(*options, script(tmp_path, LONG))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        mark = f"[rank {rank}] "
        mine = [x.removeprefix(mark) for x in done.stdout.splitlines() if x.startswith(mark)]
        assert (mine[0], mine[-1]) == ("100%", "end ''")
        assert "".join(mine[1:-1]) == "x" * 3_000_000


def test_a_module_runs_as_python_m_runs_it(launch: Launcher, tmp_path: Path) -> None:
    script(tmp_path, HELLO)
    done = launch("--backend", "gloo", "-m", "train", "x", cwd=tmp_path)
    assert done.stdout == "[rank 0] out 0 1 0 gloo ['x']\n", done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_failure_is_shown_first_and_ends_the_others(
    launch: Launcher, backend: str, tmp_path: Path
) -> None:
    program, meeting = script(tmp_path, FAIL), tmp_path / "meeting"
    meeting.mkdir()
    started = time.monotonic()
    done = launch("--nproc-per-node", "3", "--backend", backend, program, str(meeting))
    assert time.monotonic() - started < 90  # a rank sleeps longer
    assert (done.returncode, done.stdout) == (6, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "rank 1 ended with exit code 1, before any other rank failed:", done.stderr
    assert lines[1] == "[rank 1] Traceback (most recent call last):"
    first = [line for line in lines if line.startswith("[rank")]
    assert "[rank 1] ValueError: the reason" in first
    of_others = [n for n, line in enumerate(first) if not line.startswith("[rank 1]")]
    assert not of_others or min(of_others) > first.index("[rank 1] ValueError: the reason")
    assert lines[-1] == f"error: {program}: rank 1 ended with exit code 1"


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_start_again_as_often_as_they_may(
    launch: Launcher, backend: str, tmp_path: Path
) -> None:
    options = ("--nproc-per-node", "2", "--backend", backend, "--max-restarts", "1", "--json")
    done = launch(*options, script(tmp_path, AGAIN))
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    schema = json.loads((ROOT / "schemas" / "cli" / "launch.schema.json").read_text())
    Draft202012Validator(schema).validate(outcome)
    assert outcome == {"ok": True, "restarts": 1, "failed_rank": None, "exit_code": None}
    lines = done.stderr.splitlines()
    assert "rank 1 ended with exit code 4, before any other rank failed:" in lines
    assert {"[rank 0] well 0", "[rank 1] well 1"} <= set(lines)


def test_ranks_that_start_again_meet_again(launch: Launcher) -> None:
    options = ("--nproc-per-node", "2", "--backend", "gloo", "--max-restarts", "1")
    done = launch(*options, warm.__file__, "meet")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] met 0", "[rank 1] met 1"]


def test_a_script_that_is_not_there_is_missed_once(launch: Launcher) -> None:
    done = launch("--nproc-per-node", "2", "nowhere.py")
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        "error: nowhere.py: there is no such script",
        "hint: check the path; a module is named with -m",
    ]


def test_a_failure_is_a_document_too(launch: Launcher, tmp_path: Path) -> None:
    program = script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    done = launch("--json", program)
    outcome = {"ok": False, "restarts": 0, "failed_rank": 0, "exit_code": -9}
    assert (done.returncode, json.loads(done.stdout)) == (6, outcome)


# A shell has what runs with an & ignore it.
IGNORING = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


@pytest.mark.parametrize(
    ("backend", "before"),
    [
        ("gloo", ()),
        pytest.param("mpi", (), marks=NEEDS_MPI),
        pytest.param("mpi", IGNORING, marks=NEEDS_MPI),
    ],
)
def test_ctrl_c_ends_all_ranks_and_their_children(
    launch: Launcher, backend: str, before: tuple[str, ...], tmp_path: Path
) -> None:
    command = (*before, *COMMAND) if before else launch.command  # one as users start it
    options = ("--nproc-per-node", "2", "--backend", backend)
    process = subprocess.Popen(
        [*command, "launch", *options, script(tmp_path, WAIT)],
        env=launch.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[3:]]
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)  # the ranks would sleep longer
    assert (process.returncode, stderr) == (130, "interrupted\n")
    assert len(pids) == 4
    for pid in pids:
        assert _has_ended(pid)


TALK = """
import time
while True:
    print("still here")
    time.sleep(0.01)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_ends_the_job_and_is_named(
    launch: Launcher, backend: str, tmp_path: Path
) -> None:
    with Path("/dev/full").open("w") as full:
        done = launch("--backend", backend, script(tmp_path, TALK), stdout=full)
    assert done.returncode == 5
    told = "error: stdout: the output cannot be written: No space left on device\n"
    assert done.stderr == told


def test_a_reader_that_goes_away_ends_the_job(launch: Launcher, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*launch.command, "launch", script(tmp_path, TALK)],
        env=launch.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"[rank 0] still here\n"
    process.stdout.close()
    assert (process.wait(LIMIT), process.stderr.read()) == (141, b"")
    process.stderr.close()


def test_a_letter_that_the_terminal_does_not_know_is_shown_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    _pass_on("stdout", "[rank 0] é", all_to_stderr=False)
    assert shown.getvalue() == b"[rank 0] \\xe9\n"


def _has_ended(pid: int) -> bool:
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # of which nobody has taken notice yet
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "there is no program to launch"),
        (("--nnodes", "2", "x.py"), "several machines need a place to meet"),
        (("--nproc-per-node", "0", "x.py"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_launched_is_wrong_usage(
    launch: Launcher, arguments: tuple[str, ...], problem: str
) -> None:
    done = launch(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr


def test_machines_that_cannot_meet_are_told_so(launch: Launcher, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = script(tmp_path, "print('well')")
    job = ("--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "7", program)
    assert launch(*job).returncode == 0
    late = launch(*job)  # to a job that has ended
    assert late.returncode == 6
    assert f"127.0.0.1:{store.port}: the machines cannot meet: " in late.stderr
    assert "hint: run the same command on that machine" in late.stderr


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = ckpt("launch", "train.py")
    assert result.exit_code == 2
    assert result.stderr == ("error: launching needs torch\nhint: pip install 'ckptkit[torch]'\n")
