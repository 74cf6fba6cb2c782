"""`ckpt demo`: everything once, on something small: a tiny transformer, of which 8 processes save a
part each. Those run this module as a program.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from ckptkit.cli.options import command
from ckptkit.cli.output import CORRUPT, INTERRUPTED, OK, PEER, PIPE, Reply, emit

import ckptkit
from ckptkit.errors import AlreadyExistsError, PeerError, UsageError

_ARRAY = "model/embed_tokens.weight"
_STRATEGY = "fsdp:8"
_STEPS = (100, 200)
_HEAD_DIM = 8
_WRITERS = 8
_DIM, _HIDDEN, _VOCABULARY, _LAYERS = 64, 172, 250, 2
_TIMEOUT = 60.0

# Named as Llama's are, so that the rules of that architecture know them.
_LAYER = {
    "input_layernorm": (_DIM,),
    "self_attn.q_proj": (_DIM, _DIM),
    "self_attn.k_proj": (_DIM // 2, _DIM),
    "self_attn.v_proj": (_DIM // 2, _DIM),
    "self_attn.o_proj": (_DIM, _DIM),
    "mlp.gate_proj": (_HIDDEN, _DIM),
    "mlp.up_proj": (_HIDDEN, _DIM),
    "mlp.down_proj": (_DIM, _HIDDEN),
}


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
        stage.say(f"# 8 processes save steps 100 and 200, each its own part ({_STRATEGY})")
        _save_as_a_job(place / "run", place / "meeting")
        shutil.rmtree(place / "meeting")
        ckpt("ls", run)
        ckpt("show", run, "model/*")
        ckpt("show", run, "model/layers.0.*", "--rank", "5")
        check("every byte is verified", ckpt("verify", run) == OK)

        stage.say(f"# the same as a zarr group: ckptkit.open({run!r}).zarr")
        with ckptkit.open(run) as checkpoint:
            group: Any = checkpoint.zarr
            same = [np.array_equal(group[name][...], whole) for name, whole in _state(_STEPS[-1])]
        check("zarr reads what the writers had", all(same))

        ckpt("unpack", run, plain)
        stage.say("# and without ckptkit")
        code = f"import zarr; print(zarr.open({plain!r}, mode='r')[{_ARRAY!r}][:2, :3])"
        stage.say(f'$ python -c "{code}"')
        command_line = [sys.executable, "-c", code]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)  # noqa: S603 - all of it is ours
        stage.say(done.stdout + done.stderr)
        expected = dict(_state(_STEPS[-1]))[_ARRAY][:2, :3]
        check("plain zarr reads the directory", done.stdout.strip() == str(expected))

        stage.say("# for 4 tensor-parallel ranks, without the model")
        to = ("--to", "tp:4", "--set", f"head_dim={_HEAD_DIM}")
        ckpt("reshard", "--from", _STRATEGY, *to, run, resharded)
        ckpt("show", resharded, "model/layers.0.*", "--rank", "1")
        check("it is the same state", ckpt("diff", run, resharded) == OK)

        step = place / "run" / f"step-{_STEPS[0]:010d}"
        pack = min(step.glob("data/*/rank-00003.zip"))
        stage.say(f"# one bit of {pack.name} of step {_STEPS[0]} flips")
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


@dataclass
class Performance:
    """Where the acts are played: what is said, and what came of the commands and checks."""

    program: click.Command
    quiet: bool
    commands: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str) -> None:
        if not self.quiet:
            emit(text.split("\n"))

    def ckpt(self, *arguments: str) -> int:
        """Show a command, and run it; returns its exit code."""
        line = shlex.join(["ckpt", *arguments])
        self.say(f"$ {line}")
        with contextlib.redirect_stdout(io.StringIO()) if self.quiet else contextlib.nullcontext():
            context = self.program.make_context("ckpt", list(arguments))
            code: int = self.program.invoke(context)
        if code in (INTERRUPTED, PIPE):  # it has said so: what ends a command ends the demo
            raise click.exceptions.Exit(code)
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
            with _uninterrupted():
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="ckpt-demo-")))
            yield folder
        return
    if folder.parts and folder.parts[0].endswith(":"):
        raise UsageError("not a local folder", value=str(folder), hint="name one, or none")
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


def _save_as_a_job(run: Path, meeting: Path) -> None:
    """Write all steps with 8 processes that meet at a folder."""
    ranks = []
    with contextlib.ExitStack() as stack:
        with _uninterrupted():
            for rank in range(_WRITERS):
                program = [sys.executable, "-m", __name__, str(run), str(meeting), str(rank)]
                # In a session of its own, since Ctrl-C is for the one process that answers for all.
                started = subprocess.Popen(  # noqa: S603 - all of it is ours
                    program, stderr=subprocess.PIPE, text=True, start_new_session=True
                )
                process = stack.enter_context(started)
                stack.callback(process.kill)
                ranks.append(process)
        for rank, process in enumerate(ranks):
            _, problem = process.communicate()
            if process.returncode:
                told = problem.strip().rpartition("\n")[2]
                what = f"rank {rank} ended with code {process.returncode}: {told}"
                raise PeerError(what, where=str(run))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C comes after the block: within, it would lose what has begun and nobody holds yet."""
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


def _save_as_rank(run: Path, meeting: Path, rank: int) -> None:
    """What each process of a job does, without torch."""
    barrier = ckptkit.FileBarrier(meeting, rank, _WRITERS, timeout=_TIMEOUT)
    for step in _STEPS:
        with ckptkit.Writer(
            run,
            step=step,
            strategy=_STRATEGY,
            rank=rank,
            barrier=barrier,
            details={"precision": "float32", "model": "a tiny transformer"},
        ) as writer:
            for name, whole in _state(step):
                rows = -(-len(whole) // _WRITERS)  # as torch.chunk cuts them: the last may be fewer
                group, _, parameter = name.partition("/")
                of = f"model/{parameter.rpartition('/')[0]}" if group == "optimizer" else None
                writer.add(
                    name,
                    whole[rank * rows : (rank + 1) * rows],
                    shape=whole.shape,
                    placements={"fsdp": "shard(0)"},
                    role="optimizer" if of else "param",
                    of=of,
                )
            writer.add_alias("model/lm_head.weight", "model/embed_tokens.weight")
            writer.add_object("learning_rate", 3e-4)
            writer.add_object("tokens", ckptkit.Sum(step * 1024))
            writer.add_object("dropout_seed", ckptkit.PerRank(1000 + rank))


def _state(step: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Name and whole value of every array at a step."""
    shapes = {"embed_tokens.weight": (_VOCABULARY, _DIM), "norm.weight": (_DIM,)}
    for layer in range(_LAYERS):
        for name, shape in _LAYER.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    random = np.random.default_rng(step)
    for name, shape in shapes.items():
        for kind in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
            yield kind, random.standard_normal(shape, dtype=np.float32)


if __name__ == "__main__":
    _save_as_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
