"""The ranks of a job under mpirun, which starts and ends them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from ckptkit.errors import NotFoundError
from ckptkit.parallel.launch import tagging
from ckptkit.parallel.launch.groups import end_groups
from ckptkit.parallel.launch.job import Job, Outcome
from ckptkit.parallel.launch.output import Output
from ckptkit.parallel.launch.streams import Streams

_INTERVAL = 0.05
_GRACE = 3.0
# As the agent has it: also an interrupt that a shell has its background jobs ignore.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ALWAYS = {
    # More ranks than cores are what a laptop and a test want; containers are often root's.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "MASTER_ADDR": "127.0.0.1",
}


def run_by_mpirun(job: Job, output: Output) -> Outcome:
    """Run all ranks on this machine, again as often as the job allows."""
    mpirun = _mpirun()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    outcome = Outcome(ok=True)
    for restarts in range(job.max_restarts + 1):
        output.start_again()
        outcome = _Run(job, output, restarts).run(mpirun)
        if outcome.ok:
            break
    return outcome


class _Run:
    """One start of all ranks."""

    def __init__(self, job: Job, output: Output, restarts: int) -> None:
        self._job = job
        self._output = output
        self._restarts = restarts
        self._streams = Streams()
        self._of_mpirun: list[str] = []

    def run(self, mpirun: str) -> Outcome:
        """From the start to the end."""
        command = (sys.executable, str(Path(tagging.__file__)), *self._job.command)
        process = subprocess.Popen(  # noqa: S603 - what the user asked for
            [mpirun, "-n", str(self._job.nproc_per_node), *command],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the others
        )
        for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None  # noqa: S101 - asked for above
            self._streams.add(os.dup(pipe.fileno()), partial(self._take, stream))
            pipe.close()
        interrupted = True
        try:
            self._watch(process)
            interrupted = False
        finally:
            _end(process)
            try:
                self._streams.close()
            finally:
                self._output.tell()
                self._output.finish(interrupted=interrupted)
        return self._outcome(process.returncode)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            time.sleep(_INTERVAL)
            self._streams.check()
            self._output.tick()
            if self._output.has_failure():
                self._streams.drain()
                self._output.tell()

    def _take(self, stream: str, line: str) -> None:
        """A line: of a rank, about the end of a rank, or of mpirun itself."""
        mark, rank, rest = line[:1], *_parted(line[1:])
        if mark != tagging.MARK or not rank.isdecimal():
            self._of_mpirun.append(line)
        elif rest[:1] == tagging.MARK:
            self._output.ended(int(rank), int(rest[1:]))
        else:
            self._output.line(int(rank), stream, rest[1:])

    def _outcome(self, code: int) -> Outcome:
        if code == 0:
            return Outcome(ok=True, restarts=self._restarts)
        first = self._output.first_failure()
        if first is None:
            for line in self._of_mpirun:
                self._output.note(line)
            return Outcome(ok=False, restarts=self._restarts, exit_code=code)
        rank, exit_code = first
        return Outcome(ok=False, restarts=self._restarts, failed_rank=rank, exit_code=exit_code)

    def _environment(self) -> dict[str, str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        count = {"TORCHELASTIC_RESTART_COUNT": str(self._restarts), "MASTER_PORT": port}
        return {**os.environ, **_ALWAYS, **count}


def _parted(text: str) -> tuple[str, str]:
    """The digits at the start of a text, and what follows them."""
    rest = text.lstrip("0123456789")
    return text[: len(text) - len(rest)], rest


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, which ends the ranks; then whatever is left of it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    end_groups([process.pid], signal.SIGKILL)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _mpirun() -> str:
    """The mpirun next to this Python, as wheels bring it, or that of the system."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise NotFoundError(
            "there is no mpirun on this machine", hint="pip install 'ckptkit[mpi]' brings one"
        )
    return found
