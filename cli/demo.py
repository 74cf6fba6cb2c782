"""`ckpt demo`: everything once, on something small."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from ckptkit.cli.demo_job import (
    HEAD_DIM,
    STEPS,
    STRATEGY,
    save_as_a_job,
    state,
    uninterrupted,
)
from ckptkit.cli.options import command
from ckptkit.cli.output import CORRUPT, OK, PEER, Reply, emit

import ckptkit
from ckptkit.errors import AlreadyExistsError

_ARRAY = "model/embed_tokens.weight"


@command(
    "ckpt demo", "ckpt demo here", codes=[PEER], exits={CORRUPT: "something was not as it should"}
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.pass_context
def demo(ctx: click.Context, folder: Path | None) -> Reply:
    """Do everything once, on something small.

    Writes a sharded checkpoint as 8 writers would, shows it, verifies it, opens it with plain zarr,
    reshards it for 4 tensor-parallel ranks and compares, finds a flipped bit; every command is
    printed before it runs. All of it is removed at the end, unless DIR says where to leave it.
    """
    with _place(folder) as place:
        stage = Performance(ctx.find_root().command, quiet=ctx.params["as_json"])
        run, plain, resharded = (str(place / name) for name in ("run", "plain", "resharded"))
        ckpt, check = stage.ckpt, stage.check
        stage.say(f"# 8 processes save steps 100 and 200, each its own part ({STRATEGY})")
        save_as_a_job(place / "run", place / "meeting")
        shutil.rmtree(place / "meeting")
        ckpt("ls", run)
        ckpt("show", run, "model/*")
        ckpt("show", run, "model/layers.0.*", "--rank", "5")
        check("every byte is verified", ckpt("verify", run) == OK)

        stage.say(f"# the same as a zarr group: ckptkit.open({run!r}).zarr")
        with ckptkit.open(run) as checkpoint:
            group: Any = checkpoint.zarr
            same = [np.array_equal(group[name][...], whole) for name, whole in state(STEPS[-1])]
        check("zarr reads what the writers had", all(same))

        ckpt("unpack", run, plain)
        stage.say("# and without ckptkit")
        code = f"import zarr; print(zarr.open({plain!r}, mode='r')[{_ARRAY!r}][:2, :3])"
        stage.say(f'$ python -c "{code}"')
        command_line = [sys.executable, "-c", code]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)  # noqa: S603 - all of it is ours
        stage.say(done.stdout + done.stderr)
        expected = dict(state(STEPS[-1]))[_ARRAY][:2, :3]
        check("plain zarr reads the directory", done.stdout.strip() == str(expected))

        stage.say("# for 4 tensor-parallel ranks, without the model")
        to = ("--to", "tp:4", "--set", f"head_dim={HEAD_DIM}")
        ckpt("reshard", "--from", STRATEGY, *to, run, resharded)
        ckpt("show", resharded, "model/layers.0.*", "--rank", "1")
        check("it is the same state", ckpt("diff", run, resharded) == OK)

        step = place / "run" / f"step-{STEPS[0]:010d}"
        pack = min(step.glob("data/*/rank-00003.zip"))
        stage.say(f"# one bit of {pack.name} of step {STEPS[0]} flips")
        middle = pack.stat().st_size // 2
        _flip(pack, middle)
        # Back in any case: DIR may stay, and its steps are there to be played with.
        try:
            found = ckpt("verify", str(step)) == CORRUPT
        finally:
            _flip(pack, middle)
        check("the flipped bit is found", found)
        ckpt("prune", run, "--keep-last", "1", "--dry-run")
    ok = all(each["ok"] for each in stage.checks)
    where = str(folder.absolute()) if folder else None
    document = {"folder": where, "ok": ok, "commands": stage.commands, "checks": stage.checks}
    return Reply(document, code=OK if ok else CORRUPT)


class Performance:
    """Where the acts are played: what is said, and what came of the commands and checks."""

    def __init__(self, program: click.Command, *, quiet: bool) -> None:
        self.commands: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self._program = program
        self._quiet = quiet

    def say(self, text: str) -> None:
        if not self._quiet:
            emit(text.split("\n"))

    def ckpt(self, *arguments: str) -> int:
        """Show a command, and run it; returns its exit code."""
        line = shlex.join(["ckpt", *arguments])
        self.say(f"$ {line}")
        with contextlib.redirect_stdout(io.StringIO()) if self._quiet else contextlib.nullcontext():
            code: int = self._program.main(list(arguments), standalone_mode=False)
        self.say("")
        self.commands.append({"command": line, "exit": code})
        return code

    def check(self, name: str, ok: bool) -> None:  # noqa: FBT001 - reads as a sentence
        self.checks.append({"name": name, "ok": ok})
        self.say(f"{'ok' if ok else 'FAILED'}: {name}\n")


@contextlib.contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """A folder to work in: a temporary one, or a new one that stays if all went well."""
    if folder is None:
        with contextlib.ExitStack() as stack:
            with uninterrupted():
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="ckpt-demo-")))
            yield folder
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AlreadyExistsError(
            "there is something already", where=str(folder), hint="name a folder that is not there"
        )
    try:
        yield folder.absolute()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
