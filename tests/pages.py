"""The pages that are shown to people, and what runs the lines of a shell in them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.cli.programs import ckpt

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md"))}


def run_session(text: str) -> None:
    """Each line with its command, and, where the block shows it, what that prints."""
    if "$ " not in text:
        for line in text.splitlines():
            run_line(line)
        return
    for line, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        assert_shows(run_line(line), shown)


def run_line(line: str) -> str:
    """What a command prints that ends well."""
    words = shlex.split(line, comments=True)
    match words:
        case ["make", target]:  # to run these from here would be to run the tests within a test
            assert f"\n{target}: ## " in (ROOT / "Makefile").read_text()
        case ["pip", "install", what]:  # nothing is installed by a test
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            name = re.fullmatch(r"ckptkit\[(\w+)\]", what)
            assert name
            assert name[1] in known["optional-dependencies"]
        case ["export", *settings]:  # the test has its own
            assert all(f"`{each.partition('=')[0]}`" in PAGES["storage.md"] for each in settings)
        case ["torchrun", "--nproc-per-node", "4", program, "--strategy", strategy]:
            # tests/test_examples.py runs the program that does just that.
            assert (ROOT / program).exists()
            example = (ROOT / "examples" / "kill_and_resume.py").read_text()
            assert f'train(run, "{strategy}", ' in example
        case ["ckpt", "launch", *_] | ["mpirun", *_] | ["unzip", *_]:
            return by_bash(line)
        case ["ckpt", *arguments]:
            done = ckpt(*arguments)
            assert done.exit_code == 0, done.output
            return done.stdout
        case ["rm", path]:
            Path(path).unlink()
        case _:
            raise AssertionError(f"nothing runs {line!r}")
    return ""


def by_bash(line: str) -> str:
    """As it stands there, with the programs beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    allowed = {  # Open MPI wants to be asked
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, **allowed, "PATH": path},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_shows(printed: str, shown: str) -> None:
    """The lines of a block, in their order; `...` stands for any, and what a day, a folder or an
    id looks like does not matter.
    """
    varying = {
        re.escape(f"{Path.cwd()}/"): "/data/",
        r"\d{4}-\d\d-\d\dT[\d:]{8}Z": "<time>",
        r"\d{8}T\d{6}Z-[0-9a-f]{12}": "<save id>",
        r"at most [\d.]+ \w+, \d+ workers": "<memory>",
        r"about [\d.]+ \w+, by a short probe": "<seconds>",
        " +": " ",  # columns are as wide as their rows ask for
    }
    for pattern, name in varying.items():
        printed, shown = re.sub(pattern, name, printed), re.sub(pattern, name, shown)
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in shown.splitlines()
    )
    assert re.fullmatch(pattern, printed), f"{shown}\nis not what is printed:\n{printed}"
