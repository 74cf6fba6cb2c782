"""Running a job from its start to its end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.errors import NotFoundError
from ckptkit.parallel.launch.agent import run_by_agent
from ckptkit.parallel.launch.job import Job, Outcome
from ckptkit.parallel.launch.mpirun import run_by_mpirun
from ckptkit.parallel.launch.output import Output, Show

# Else ranks that start again over gloo find the addresses of those before them.
_NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def launch(job: Job, show: Show) -> Outcome:
    """Run a job to its end, over torch's elastic agent or mpirun; called in the main thread.

    `show` gets every line of the ranks, with "stdout" or "stderr" and the rank before it. When a
    rank fails the others are ended, and what it said last is shown before what they say. A
    signal that ends the launcher ends all ranks and their children, as a KeyboardInterrupt here.
    Under mpirun ranks have nothing to read on stdin; under the agent they share the launcher's.
    """
    script = job.program[0]
    if not script.startswith("-") and not Path(script).exists():
        hint = "check the path; a module is named with -m"
        raise NotFoundError("there is no such script", where=script, hint=hint)
    output = Output(show)
    with _environment(job), _quiet_agent(), _own_signals():
        return run_by_mpirun(job, output) if job.backend == "mpi" else run_by_agent(job, output)


@contextmanager
def _environment(job: Job) -> Iterator[None]:
    """What the ranks inherit."""
    wanted = {}
    if job.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks share the cores of a machine
    if job.backend != "mpi" and _NEW_STORE not in os.environ:
        wanted[_NEW_STORE] = "1"
    if job.backend != "auto":
        wanted["CKPTKIT_BACKEND"] = job.backend
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs to stderr what is told here, in order; LOGLEVEL brings that back."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.dist")]
    found = {name: logging.getLogger(name) for name in names if "elastic" in name}
    before = {name: logger.level for name, logger in found.items()}
    try:
        for logger in found.values() if "LOGLEVEL" not in os.environ else ():
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in before.items():
            found[name].setLevel(level)


@contextmanager
def _own_signals() -> Iterator[None]:
    """The agent and the runner of mpirun take over signals: they are given back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
