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
from ckptkit.cli.command import command
from ckptkit.cli.demo_job import (
    HEAD_DIM,
    STEPS,
    STRATEGY,
    save_as_a_job,
    state,
    uninterrupted,
)
from ckptkit.cli.exits import CORRUPT, OK, PEER
from ckptkit.cli.output import emit, emit_json

import ckptkit
from ckptkit.errors import AlreadyExistsError

_ARRAY = "model/embed_tokens.weight"


@command(
    "ckpt demo", "ckpt demo here", codes=[PEER], exits={CORRUPT: "something was not as it should"}
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.pass_context
def demo(ctx: click.Context, folder: Path | None, *, as_json: bool) -> int:
    """Do everything once, on something small.

    Writes a sharded checkpoint as 8 writers would, shows it, verifies it, opens it with plain zarr,
    reshards it for 4 tensor-parallel ranks and compares, finds a flipped bit; every command is
    printed before it runs. All of it is removed at the end, unless DIR says where to leave it.
    """
    with _place(folder) as place:
        told = Demo(place, ctx.find_root().command, quiet=as_json)
        told.play()
    if as_json:
        where = str(folder.absolute()) if folder else None
        emit_json(
            {"folder": where, "ok": told.ok, "commands": told.commands, "checks": told.checks}
        )
    return OK if told.ok else CORRUPT


class Demo:
    """The acts, and what came of them."""

    def __init__(self, place: Path, program: click.Command, *, quiet: bool) -> None:
        self.commands: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self._program = program
        self._quiet = quiet
        self._run = place / "run"
        self._plain = place / "plain"
        self._resharded = place / "resharded"
        self._meeting = place / "meeting"

    @property
    def ok(self) -> bool:
        """Whether all was as it should."""
        return all(check["ok"] for check in self.checks)

    def play(self) -> None:
        """Everything, in order."""
        run = str(self._run)
        self._say(f"8 processes save steps 100 and 200, each its own part ({STRATEGY})")
        save_as_a_job(self._run, self._meeting)
        shutil.rmtree(self._meeting)
        self._ckpt("ls", run)
        self._ckpt("show", run, "model/*")
        self._ckpt("show", run, "model/layers.0.*", "--rank", "5")
        self._check("every byte is verified", self._ckpt("verify", run) == OK)
        self._read_as_zarr()
        self._ckpt("unpack", run, str(self._plain))
        self._read_without_ckptkit()
        self._reshard()
        self._damage()
        self._ckpt("prune", run, "--keep-last", "1", "--dry-run")

    def _read_as_zarr(self) -> None:
        self._say(f"the same as a zarr group: ckptkit.open({str(self._run)!r}).zarr")
        with ckptkit.open(self._run) as checkpoint:
            group: Any = checkpoint.zarr
            same = [np.array_equal(group[name][...], whole) for name, whole in state(STEPS[-1])]
        self._check("zarr reads what the writers had", all(same))

    def _read_without_ckptkit(self) -> None:
        code = f"import zarr; print(zarr.open({str(self._plain)!r}, mode='r')[{_ARRAY!r}][:2, :3])"
        self._say("and without ckptkit")
        self._print(f'$ python -c "{code}"')
        command_line = [sys.executable, "-c", code]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)  # noqa: S603 - all of it is ours
        self._print(done.stdout + done.stderr)
        expected = dict(state(STEPS[-1]))[_ARRAY][:2, :3]
        self._check("plain zarr reads the directory", done.stdout.strip() == str(expected))

    def _reshard(self) -> None:
        run, resharded = str(self._run), str(self._resharded)
        self._say("for 4 tensor-parallel ranks, without the model")
        to = ("--to", "tp:4", "--set", f"head_dim={HEAD_DIM}")
        self._ckpt("reshard", "--from", STRATEGY, *to, run, resharded)
        self._ckpt("show", resharded, "model/layers.0.*", "--rank", "1")
        self._check("it is the same state", self._ckpt("diff", run, resharded) == OK)

    def _damage(self) -> None:
        step = self._run / f"step-{STEPS[0]:010d}"
        pack = min(step.glob("data/*/rank-00003.zip"))
        self._say(f"one bit of {pack.name} of step {STEPS[0]} flips")
        middle = pack.stat().st_size // 2
        _flip(pack, middle)
        try:
            found = self._ckpt("verify", str(step)) == CORRUPT
        finally:
            _flip(pack, middle)
        self._check("the flipped bit is found", found)

    def _ckpt(self, *arguments: str) -> int:
        line = shlex.join(["ckpt", *arguments])
        self._print(f"$ {line}")
        with contextlib.redirect_stdout(io.StringIO()) if self._quiet else contextlib.nullcontext():
            code: int = self._program.main(list(arguments), standalone_mode=False)
        self._print("")
        self.commands.append({"command": line, "exit": code})
        return code

    def _check(self, name: str, ok: bool) -> None:  # noqa: FBT001 - reads as a sentence
        self.checks.append({"name": name, "ok": ok})
        self._print(f"{'ok' if ok else 'FAILED'}: {name}\n")

    def _say(self, text: str) -> None:
        self._print(f"# {text}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            emit(text.split("\n"))


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
