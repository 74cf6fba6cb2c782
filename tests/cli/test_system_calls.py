"""Commands that are killed, or that a disk fails, at their system calls: nothing else is touched, a
step is whole or not there, and the same command once more leaves what one clean run leaves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import CkptkitError
from tests.checkpoint.saving import Tensor, files, random_values, save

# What makes, changes, moves or removes files; of `openat` only what may create.
CALLS = (
    *("openat", "write", "writev", "pwrite64", "pwritev", "pwritev2", "fsync", "fdatasync"),
    *("ftruncate", "fallocate", "rename", "renameat", "renameat2", "link", "linkat"),
    *("unlink", "unlinkat", "mkdir", "mkdirat", "rmdir"),
)
FAULTS = ("signal=KILL", "error=EIO", "error=ENOSPC")
MOST = 12
"""Cases of one command and fault, spread over all its calls, by default; CKPTKIT_ALL_CALLS=1 for
every one."""
STEP = "step-0000000001"
SAVE_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]+")
STRACE = shutil.which("strace")
LIVE = """
import sys, torch
from ckptkit.live import save
torch.manual_seed(1)
save(sys.argv[1], step=1, model=torch.nn.Linear(64, 64))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(STRACE is None, reason="no strace: install Debian's package of that name"),
]


def make_source(here: Path) -> None:
    w = Tensor(random_values((64, 32)), {"fsdp": "shard(0)"})
    save(here / "src", {"model/w": w, "model/b": Tensor(random_values((7,)))}, strategy="fsdp:2")


def make_slices(here: Path) -> None:
    make_source(here)
    for part in ("0/2", "1/2"):
        run_plainly(here, ["reshard", f"src/{STEP}", "dst", "--to", "fsdp:3", *slice_of(part)])


def make_two_steps(here: Path) -> None:
    make_source(here)
    for step in (1, 2):
        save(here / "dst", {"model/w": Tensor(random_values((64, 32)))}, step=step)


def lose_manifest(here: Path) -> None:
    make_source(here)
    shutil.copytree(here / "src", here / "dst")
    (here / "dst" / STEP / "manifest.msgpack").unlink()


def slice_of(part: str) -> list[str]:
    return ["--engine", f"slice:{part}"]


@dataclass(frozen=True)
class Scene:
    make: Callable[[Path], None]
    words: list[str]
    makes_step: bool = True


SCENES = {
    "reshard": Scene(
        make_source, ["reshard", f"src/{STEP}", "dst", "--to", "fsdp:3", "--workers", "1"]
    ),
    "slice": Scene(
        make_source,
        ["reshard", f"src/{STEP}", "dst", "--to", "fsdp:3", *slice_of("0/1")],
        makes_step=False,
    ),
    "commit": Scene(make_slices, ["commit", "dst"]),
    "unpack": Scene(make_source, ["unpack", f"src/{STEP}", "dst"], makes_step=False),
    "prune": Scene(make_two_steps, ["prune", "dst", "--keep-last", "1"], makes_step=False),
    "rebuild": Scene(lose_manifest, ["rebuild", f"dst/{STEP}"]),
    "live": Scene(make_source, ["live", "dst"]),
}


def command(words: list[str]) -> list[str]:
    if words[0] == "live":
        return [sys.executable, "-c", LIVE, *words[1:]]
    return [sys.executable, "-m", "ckptkit.cli", *words]


def run(here: Path, words: list[str], *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *command(words)],
        cwd=here,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_plainly(here: Path, words: list[str]) -> None:
    result = run(here, words)
    assert result.returncode == 0, result.stderr


def traced(*words: str) -> list[str]:
    assert STRACE is not None
    return [STRACE, "-f", "-qq", "--seccomp-bpf", "-e", f"trace={','.join(CALLS)}", *words]


def calls_of(here: Path, words: list[str]) -> list[tuple[str, int]]:
    """Each call in the folder of a clean run, and which of its thread's calls of that name it is:
    so strace counts them.
    """
    log = here.parent / "trace"
    result = run(here, words, *traced("-y", "-o", str(log)))
    assert result.returncode == 0, result.stderr
    counts: Counter[tuple[str, str]] = Counter()
    found = set()
    for line in log.read_text().splitlines():
        if not (match := re.match(r"(\d+) +(\w+)\(", line)):
            continue
        thread, name = match.groups()
        counts[thread, name] += 1
        creates = name != "openat" or "O_CREAT" in line
        if creates and str(here) in line:
            found.add((name, counts[thread, name]))
    return sorted(found)


def left(folder: Path) -> list[str]:
    """All names below a folder, save ids aside."""
    return sorted(SAVE_ID.sub("SAVE", str(it.relative_to(folder))) for it in folder.rglob("*"))


def is_whole(here: Path, scene: Scene) -> bool:
    """Whether the target step is there; it is whole then."""
    try:
        target = ckptkit.open(here / "dst" / STEP)
    except CkptkitError:
        return False
    target.close()
    assert ckptkit.verify(here / "dst" / STEP) == []
    if scene.words[0] != "live":
        assert ckptkit.digest(here / "dst" / STEP) == ckptkit.digest(here / "src" / STEP)
    return True


def clean_up(here: Path, scene: Scene) -> None:
    if scene.words[0] == "unpack":
        run(here, scene.words)  # says that the target is there, and removes what lies beside it
    else:
        run_plainly(here, ["prune", "dst", "--keep-last", "9", "--grace", "0"])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENES)
def test_a_fault_at_any_call_leaves_what_can_be_done_again(
    name: str, fault: str, tmp_path: Path
) -> None:
    scene = SCENES[name]
    start, clean, here = tmp_path / "start", tmp_path / "clean", tmp_path / "here"
    start.mkdir()
    scene.make(start)
    source = files(start / "src")
    shutil.copytree(start, clean)
    calls = calls_of(clean, scene.words)
    clean_up(clean, scene)
    assert calls
    if len(calls) > MOST and not os.environ.get("CKPTKIT_ALL_CALLS"):
        calls = calls[:: -(-len(calls) // MOST)]
    problems: list[str] = []
    for call, number in calls:
        shutil.copytree(start, here)
        injected = f"inject={call}:{fault}:when={number}"
        result = run(
            here, scene.words, *traced("-y", "-o", str(tmp_path / "trace"), "-e", injected)
        )
        if "Fatal Python error: error evaluating path" in result.stderr:
            # Threads count their calls from one: this number is also of Python's own start.
            shutil.rmtree(here)
            continue
        try:
            check(here, scene, result)
            assert files(here / "src") == source
            assert left(here) == left(clean)  # beside the target too
        except (AssertionError, CkptkitError) as error:
            problems.append(
                f"{injected}: exit {result.returncode}, {error}\n{result.stderr[-600:]}"
            )
        shutil.rmtree(here)
    assert not problems, f"{len(problems)} of {len(calls)}:\n" + "\n".join(problems)


def check(here: Path, scene: Scene, result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode != 70
    # Each thread has a call of that number: of the first one it may be a part of Python's start.
    said = re.sub("(?s)Error processing line.*Remainder of file ignored\n", "", result.stderr)
    assert "Traceback" not in said or scene.words[0] == "live"
    there = scene.makes_step and is_whole(here, scene)
    if result.returncode == 0:
        assert there or not scene.makes_step
    elif not there:
        again = run(here, scene.words)
        # A kill just after the end of it: all is there already.
        assert again.returncode == 0 or "already" in again.stderr, again.stderr
        assert not scene.makes_step or is_whole(here, scene)
    clean_up(here, scene)
