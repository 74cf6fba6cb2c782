"""Starting the ranks of a job, watching over them, and ending them: by torch's elastic agent, or by
mpirun.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ckptkit.errors import NotFoundError, PeerError, UsageError
from ckptkit.parallel.launch.output import Outcome, Output, Show, Streams
from ckptkit.parallel.ranks import BACKEND_VARIABLE, BACKENDS, mpirun

__all__ = ["LaunchJob", "Outcome", "launch"]

# Those that end a launcher, also an interrupt that a shell has its background jobs ignore.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

_GRACE = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
_GRACE_AT_INTERRUPT = 3.0
_LAST_CALL = 5  # seconds to wait for more machines once there are enough
_SIGN_OF_LIFE = 1  # seconds between two
_MISSED = 4  # signs of life of a machine, and it counts as lost
_INTERVAL = 0.1  # of a look at how the ranks do
_FOR_MPIRUN = {
    # More ranks than cores are what a laptop and a test want; containers are often root's.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "MASTER_ADDR": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """A program, and as how many ranks it runs."""

    program: tuple[str, ...]
    """The arguments of Python: a script or `-m` and a module, and then those of the program."""
    nproc_per_node: int = 1
    nodes: str = "1"
    """How many machines take part: a number, or the least and the most as `1:4`."""
    backend: str = "auto"
    max_restarts: int = 0
    endpoint: str = ""
    """Where the machines meet, as host:port; the same on all of them."""
    run_id: str = ""

    def __post_init__(self) -> None:
        if not self.program or self.program == ("-m",):
            raise UsageError("there is no program to launch", hint="name a script, or -m a module")
        if self.nproc_per_node < 1:
            raise UsageError("a machine runs one rank or more", value=self.nproc_per_node)
        if self.max_restarts < 0:
            raise UsageError("a job restarts never or some times", value=self.max_restarts)
        if self.backend not in BACKENDS:
            hint = f"there are {', '.join(BACKENDS)}"
            raise UsageError("no such backend", value=self.backend, hint=hint)
        _, most = self.node_range
        if most > 1 and self.backend == "mpi":
            raise UsageError(
                "ranks on several machines are for mpirun itself to start",
                value=self.nodes,
                hint="mpirun --hostfile HOSTS -n 8 python train.py; ckptkit.parallel.init('mpi') "
                "reads its environment",
            )
        if most > 1 and not self.endpoint:
            raise UsageError(
                "several machines need a place to meet",
                value=self.nodes,
                hint="--rdzv-endpoint HOST:PORT, the same on each of them",
            )
        try:
            parse_rendezvous_endpoint(self.endpoint, 0)
        except ValueError as error:
            hint = "--rdzv-endpoint HOST:PORT, with a port below 65536"
            raise UsageError("no place to meet", value=self.endpoint, hint=hint) from error

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most machines."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.nodes)
        if match is None or int(match[1]) < 1 or int(match[2] or match[1]) < int(match[1]):
            hint = "a number, or the least and the most: 1:4"
            raise UsageError("is no number of machines", value=self.nodes, hint=hint)
        return int(match[1]), int(match[2] or match[1])

    @property
    def command(self) -> tuple[str, ...]:
        """What each rank runs; unbuffered, so that lines come when they are printed."""
        return (sys.executable, "-u", *self.program)


def launch(job: LaunchJob, show: Show) -> Outcome:
    """Run a job to its end, over torch's elastic agent or mpirun; called in the main thread.

    `show` gets every line of the ranks, with "stdout" or "stderr" and the rank before it. When a
    rank fails the others are ended, and what it said last is shown before what they say. A
    signal that ends the launcher ends all ranks and their children, as a KeyboardInterrupt here.
    The agent hands a SIGTERM on, and waits half a minute for ranks that save before they leave.
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
        inherited[BACKEND_VARIABLE] = job.backend
    output = Output(show)
    with _given_back(list(inherited)):
        os.environ.update(inherited)
        if job.backend == "mpi":
            return _run_by_mpirun(job, output)
        try:
            return _run_by_agent(job, output)
        except RendezvousError as error:
            raise PeerError(
                f"the machines cannot meet: {error.__cause__ or error}".partition("\n")[0],
                where=job.endpoint,
                hint="run the same command on that machine, with a port that no other program "
                "has; and each job has an --rdzv-id of its own",
            ) from error


@contextmanager
def _given_back(names: list[str]) -> Iterator[None]:
    """What is the caller's, and taken over by a run: variables, signals, and how the agent logs.

    The agent logs to stderr what is told here, in order; LOGLEVEL brings that back.
    """
    variables = {name: os.environ.get(name) for name in names}
    known = [name for name in logging.root.manager.loggerDict if name.startswith("torch.dist")]
    levels = {n: logging.getLogger(n).level for n in known if "elastic" in n}
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS if is_main}
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


def _run_by_agent(job: LaunchJob, output: Output) -> Outcome:
    """Run the ranks of this machine under an agent that meets those of the other machines."""
    least, most = job.node_range
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=job.endpoint or "127.0.0.1:0",
        run_id=job.run_id or ("ckptkit" if job.endpoint else uuid.uuid4().hex),
        min_nodes=least,
        max_nodes=most,
        # Names of hosts can take seconds to look up, where nobody knows them.
        local_addr="127.0.0.1" if most == 1 else None,
        last_call_timeout=_LAST_CALL,
        keep_alive_interval=_SIGN_OF_LIFE,
        keep_alive_max_attempt=_MISSED,
    )
    rendezvous_handler = rendezvous.get_rendezvous_handler(meeting)
    spec = WorkerSpec(
        role="default",
        local_world_size=job.nproc_per_node,
        entrypoint=job.command[0],
        args=job.command[1:],
        rdzv_handler=rendezvous_handler,
        max_restarts=job.max_restarts,
        monitor_interval=_INTERVAL,
        local_addr=meeting.local_addr,
    )
    with tempfile.TemporaryDirectory(prefix="ckpt-launch-") as folder:
        streams = Streams()
        agent = _Agent(spec, _Pipes(Path(folder)), streams, output)
        interrupted = True
        try:
            result = agent.run()
            interrupted = False
        except SignalException as error:
            raise KeyboardInterrupt from error
        finally:
            agent.end(interrupted=interrupted)
            try:
                streams.close()
            finally:
                output.finish(interrupted=interrupted)
        rendezvous_handler.shutdown()
    restarts = int(spec.max_restarts - agent._remaining_restarts)
    if result is None or not result.is_failed():
        return Outcome(ok=True, restarts=restarts)
    rank, code = output.first_failure() or (min(result.failures, default=None), None)
    if code is None and rank in result.failures and result.failures[rank].exitcode > 0:
        code = result.failures[rank].exitcode
    return Outcome(ok=False, restarts=restarts, failed_rank=rank, exit_code=code)


class _Pipes(LogsSpecs):
    """Gives each rank named pipes to print to; torch opens them by their names."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._starts = 0
        self.opened: list[tuple[int, str, int]] = []
        """The rank, the stream and the end to read, of all that nobody reads yet."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """New pipes for each start of the ranks."""
        self._starts += 1
        paths: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}}
        for stream, of_ranks in paths.items():
            for local, env in envs.items():
                path = of_ranks[local] = str(self._folder / f"{self._starts}-{local}-{stream}")
                os.mkfifo(path, 0o600)
                # Who opens a pipe to write waits for a reader, so there has to be one.
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self.opened.append((int(env["RANK"]), stream, fd))
        errors = {n: str(self._folder / f"{self._starts}-{n}-error.json") for n in envs}
        nothing = dict.fromkeys(envs, "")
        return LogsDest(paths["stdout"], paths["stderr"], nothing, nothing, errors)

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


class _Agent(LocalElasticAgent):
    """torch's agent, whose ranks are read line by line and end quickly."""

    def __init__(self, spec: WorkerSpec, pipes: _Pipes, streams: Streams, output: Output) -> None:
        super().__init__(spec=spec, logs_specs=pipes)
        self._pipes = pipes
        self._streams = streams
        self._output = output
        self._pids: list[int] = []
        self._ending: threading.Timer | None = None

    def end(self, *, interrupted: bool) -> None:
        """Leave nothing running of ranks that failed or were interrupted."""
        if self._ending is not None:
            self._ending.cancel()
        if interrupted or self._output.first_failure() is not None:
            _kill_groups(self._pids)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._pids:
            self.end(interrupted=False)
            self._streams.drain()
            self._output.start_again()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            # When the agent looks several may have ended, and it matters which was the first.
            ended = partial(self._output.ended, worker.global_rank)
            if hasattr(os, "waitid"):
                watch = (pids[worker.local_rank], ended)
                threading.Thread(target=_tell_the_end, args=watch, daemon=True).start()
        self._pids, self._ending = list(pids.values()), None
        for rank, stream, fd in self._pipes.opened:
            self._streams.add(fd, partial(self._output.line, rank, stream))
        self._pipes.opened.clear()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if _told_of_failure(self._streams, self._output):
            self._end_within(_GRACE)
        looked = time.monotonic()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            # A rank may have failed since, or been reaped before its watcher could see it. It has
            # failed before those that the agent then asked to end, and is told of now, as a start
            # anew forgets it.
            for rank, failure in result.failures.items():
                was_asked = failure.exitcode == -signal.SIGTERM
                self._output.ended(rank, failure.exitcode, None if was_asked else looked)
            _told_of_failure(self._streams, self._output)
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, *rest: Any, **more: Any) -> None:
        # A SIGTERM to the launcher asks ranks to save and leave: torch gives them half a minute.
        if death_sig != signal.SIGTERM:
            self._end_within(_GRACE if death_sig is None else _GRACE_AT_INTERRUPT)
        super()._shutdown(death_sig or signal.SIGTERM, *rest, **more)

    def _end_within(self, seconds: float) -> None:
        """The agent asks the ranks to end, and would wait half a minute for it."""
        if self._ending is None and self._pids:
            self._ending = threading.Timer(seconds, _kill_groups, (self._pids,))
            self._ending.daemon = True
            self._ending.start()


def _run_by_mpirun(job: LaunchJob, output: Output) -> Outcome:
    """Run all ranks on this machine, again as often as the job allows."""
    # The mpirun next to this Python, as wheels bring it, or that of the system.
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise NotFoundError(
            "there is no mpirun on this machine", hint="pip install 'ckptkit[mpi]' brings one"
        )
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    each = (sys.executable, str(Path(mpirun.__file__)), *job.command)
    command = [found, "-n", str(job.nproc_per_node), *each]
    outcome = Outcome(ok=True)
    for restarts in range(job.max_restarts + 1):
        output.start_again()
        outcome = _run_once(command, output, restarts)
        if outcome.ok:
            break
    return outcome


def _run_once(command: list[str], output: Output, restarts: int) -> Outcome:
    of_mpirun: list[str] = []

    def take(stream: str, line: str) -> None:
        """A line: of a rank, about the end of a rank, or of mpirun itself."""
        text = line[1:].lstrip("0123456789")
        rank = line[1 : len(line) - len(text)]
        if line[:1] != mpirun.MARK or not rank:
            of_mpirun.append(line)
        elif text[:1] == mpirun.MARK:
            output.ended(int(rank), int(text[1:]))
        else:
            output.line(int(rank), stream, text[1:])

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"TORCHELASTIC_RESTART_COUNT": str(restarts), "MASTER_PORT": port}
    process = subprocess.Popen(  # noqa: S603 - what the user asked for
        command,
        env={**os.environ, **_FOR_MPIRUN, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the others
    )
    streams = Streams()
    for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
        assert pipe is not None  # noqa: S101 - asked for above
        streams.add(os.dup(pipe.fileno()), partial(take, stream))
        pipe.close()
    interrupted = True
    try:
        while process.poll() is None:
            time.sleep(_INTERVAL)
            _told_of_failure(streams, output)
        interrupted = False
    finally:
        _end(process)
        try:
            streams.close()
        finally:
            output.tell()
            output.finish(interrupted=interrupted)
    if process.returncode == 0:
        return Outcome(ok=True, restarts=restarts)
    first = output.first_failure()
    if first is None:
        for line in of_mpirun:
            output.note(line)
    rank, code = first or (None, process.returncode)
    return Outcome(ok=False, restarts=restarts, failed_rank=rank, exit_code=code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun, which ends the ranks; then whatever is left of it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_AT_INTERRUPT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _kill_groups([process.pid])


def _told_of_failure(streams: Streams, output: Output) -> bool:
    """Whether a rank has failed; then what it said last has been shown."""
    streams.check()
    output.tick()
    if output.first_failure() is None:
        return False
    streams.drain()
    output.tell()
    return True


def _tell_the_end(pid: int, told: Callable[[int], None]) -> None:
    """Call back with the exit code of a child when it ends, without reaping it."""
    with suppress(ChildProcessError):  # reaped already: who did that knows the code
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if found is not None:
            told(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def _kill_groups(leaders: Iterable[int]) -> None:
    """Kill the process groups of these leaders, as far as there still are such."""
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
