"""Starting the ranks of a job, watching over them, and ending them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.errors import NotFoundError
from ckptkit.parallel.launch.job import LaunchJob, Outcome, Output, Show
from ckptkit.parallel.launch.runners import SIGNALS, run_by_agent, run_by_mpirun

__all__ = ["LaunchJob", "Outcome", "launch"]


def launch(job: LaunchJob, show: Show) -> Outcome:
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
    inherited = {}
    if job.nproc_per_node > 1:
        inherited["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks share the cores of a machine
    if job.backend != "mpi":
        # Else ranks that start again over gloo find the addresses of those before them.
        inherited["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    inherited = {name: value for name, value in inherited.items() if name not in os.environ}
    if job.backend != "auto":
        inherited["CKPTKIT_BACKEND"] = job.backend
    output = Output(show)
    with _given_back(list(inherited)):
        os.environ.update(inherited)
        return run_by_mpirun(job, output) if job.backend == "mpi" else run_by_agent(job, output)


@contextmanager
def _given_back(names: list[str]) -> Iterator[None]:
    """What is the caller's, and taken over by a run: variables, signals, and how the agent logs.

    The agent logs to stderr what is told here, in order; LOGLEVEL brings that back.
    """
    variables = {name: os.environ.get(name) for name in names}
    known = [name for name in logging.root.manager.loggerDict if name.startswith("torch.dist")]
    levels = {n: logging.getLogger(n).level for n in known if "elastic" in n}
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    try:
        for name in levels if "LOGLEVEL" not in os.environ else ():
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
