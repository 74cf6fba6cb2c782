"""`ckpt launch`: the ranks of a training, started, watched and ended together."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import Any

import click
from ckptkit.cli.options import command, option
from ckptkit.cli.output import OK, PEER, Reply, printing

from ckptkit.errors import PeerError, UsageError


@command(
    "ckpt launch --nproc-per-node 4 train.py --lr 3e-4",
    "ckpt launch --nproc-per-node 4 --backend mpi -m recipes.train",
    "ckpt launch --nnodes 1:4 --rdzv-endpoint n0:29400 --max-restarts 3 train.py",
    exits={OK: "all ranks ended well", PEER: "a rank failed"},
    codes=[PEER],
)
@click.argument("program", metavar="[--] PROGRAM [ARGS]...", nargs=-1, type=click.UNPROCESSED)
@option("-m", "PROGRAM is a module, as for python -m.", into="is_module")
@option("--nproc-per-node N", "Ranks on this machine.", least=1, default=1)
@option("--nnodes N[:M]", "Machines: how many, or from N to M.", into="nodes", default="1")
@option(
    "--rdzv-endpoint HOST:PORT",
    "Where machines meet.",
    into="endpoint",
    default="",
    show_default=False,
)
@option(
    "--rdzv-id ID",
    "Tells jobs with one endpoint apart.",
    into="run_id",
    default="",
    show_default=False,
)
@option(
    "--backend",
    "What ckptkit.parallel.init() takes; mpi starts the ranks by mpirun.",
    type=click.Choice(["auto", "gloo", "nccl", "mpi"]),
    default="auto",
)
@option(
    "--max-restarts N",
    "How often all ranks start again after a failure.",
    least=0,
    default=0,
)
@click.pass_context
def launch(
    ctx: click.Context, /, program: tuple[str, ...], *, is_module: bool, **given: Any
) -> Reply:
    """Run a training as the ranks of a job.

    Each line that a rank prints has its number before it, [rank 3], and stays on its stream. When
    a rank fails, the others are ended, and what the first one to fail said last is shown before
    what the others say about that. Ctrl-C ends all ranks and what they have started.

    The ranks find each other by the environment, as torchrun sets it; ckptkit.parallel.init() reads
    it. With --nnodes the same command runs on every machine, and machines may come and go between
    N and M. With --json all lines of the ranks go to stderr.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("launching needs torch", hint="pip install 'ckptkit[torch]'")
    from ckptkit.parallel.launch import LaunchJob  # noqa: PLC0415 - torch takes seconds to import
    from ckptkit.parallel.launch import launch as run  # noqa: PLC0415

    job = LaunchJob(("-m", *program) if is_module else program, **given)
    as_json = bool(ctx.params["as_json"])
    outcome = run(job, partial(_pass_on, all_to_stderr=as_json))
    if not outcome.ok and not as_json:
        raise PeerError(outcome.reason, where=" ".join(program[:1]))
    document = {
        "ok": outcome.ok,
        "restarts": outcome.restarts,
        "failed_rank": outcome.failed_rank,
        "exit_code": outcome.exit_code,
    }
    return Reply(document, code=OK if outcome.ok else PEER)


# What follows the program is the program's, also where it looks like an option of this command.
launch.allow_interspersed_args = False


def _pass_on(stream: str, line: str, *, all_to_stderr: bool) -> None:
    """Print a line of a rank as it is: it is the user's own."""
    to = sys.stderr if all_to_stderr or stream == "stderr" else sys.stdout
    # What the terminal has no letters for must not end a training.
    told = line.encode(to.encoding, "backslashreplace").decode(to.encoding)
    with printing(to):
        to.write(f"{told}\n")
        to.flush()
