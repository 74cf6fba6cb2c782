"""Start train_and_resume.py, kill one of its ranks, and go on under another strategy.

Run: python examples/kill_and_resume.py
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TRAIN = os.path.relpath(Path(__file__).with_name("train_and_resume.py"))


def started(module: str, command: str) -> subprocess.Popen[str]:
    """A command of this environment; the module is the one that does what its first word says."""
    print(f"$ {command}", flush=True)
    return subprocess.Popen(
        [sys.executable, "-m", module, *shlex.split(command)[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """What it prints, shown as it comes."""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        yield line


def train(run: Path, strategy: str, steps: int) -> subprocess.Popen[str]:
    """A job of 4 ranks."""
    job = f"{TRAIN} --dir {shlex.quote(str(run))} --strategy {strategy} --steps {steps}"
    return started("torch.distributed.run", f"torchrun --standalone --nproc-per-node 4 {job}")


def main() -> None:
    """Train, kill, look, and train on."""
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as folder:
        run = Path(folder, "run")
        rank = None
        with train(run, "fsdp", steps=10_000) as job:
            for line in lines(job):
                if said := re.search(r"kill -9 (\d+)", line):
                    rank = int(said[1])
                if rank is not None and line.startswith("step 50:"):
                    print(f"$ kill -9 {rank}", flush=True)
                    os.kill(rank, signal.SIGKILL)
                    break
            else:
                sys.exit("the training ended before it could be killed")
            job.communicate()  # torchrun has much to say about it
        with started("ckptkit.cli", f"ckpt ls {shlex.quote(str(run))}") as ckpt:
            list(lines(ckpt))
        with train(run, "tp:2,fsdp:2", steps=70) as job:
            list(lines(job))
    sys.exit(job.returncode)


if __name__ == "__main__":
    main()
