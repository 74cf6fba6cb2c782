"""torch's elastic agent, whose ranks are read line by line and end quickly."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from ckptkit.parallel.launch.exits import watch
from ckptkit.parallel.launch.groups import end_groups, end_later
from ckptkit.parallel.launch.job import Job, Outcome
from ckptkit.parallel.launch.output import Output
from ckptkit.parallel.launch.streams import Streams

_GRACE = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
_GRACE_AT_INTERRUPT = 3.0
_LAST_CALL = 5  # seconds to wait for more machines once there are enough
_SIGN_OF_LIFE = 1  # seconds between two
_MISSED = 4  # signs of life of a machine, and it counts as lost
_INTERVAL = 0.1


def run_by_agent(job: Job, output: Output) -> Outcome:
    """Run the ranks of this machine under an agent that meets those of the other machines."""
    least, most = job.node_range
    alone = most == 1
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=job.endpoint or "127.0.0.1:0",
        run_id=job.run_id or ("ckptkit" if job.endpoint else uuid.uuid4().hex),
        min_nodes=least,
        max_nodes=most,
        # Names of hosts can take seconds to look up, where nobody knows them.
        local_addr="127.0.0.1" if alone else None,
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
        agent = Agent(spec, Pipes(Path(folder)), streams, output)
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
    return agent.outcome(result)


class Pipes(LogsSpecs):
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
        paths = {
            stream: {
                local: self._pipe(f"{self._starts}-{local}-{stream}", int(env["RANK"]), stream)
                for local, env in envs.items()
            }
            for stream in ("stdout", "stderr")
        }
        errors = {n: str(self._folder / f"{self._starts}-{n}-error.json") for n in envs}
        nothing = dict.fromkeys(envs, "")
        return LogsDest(paths["stdout"], paths["stderr"], nothing, nothing, errors)

    @property
    def root_log_dir(self) -> str:
        """The folder of the pipes."""
        return str(self._folder)

    def _pipe(self, name: str, rank: int, stream: str) -> str:
        path = self._folder / name
        os.mkfifo(path, 0o600)
        # Who opens a pipe to write waits for a reader, so there has to be one.
        self.opened.append((rank, stream, os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
        return str(path)


class Agent(LocalElasticAgent):
    """Tells the output who failed first, and bounds the time that ending takes."""

    def __init__(self, spec: WorkerSpec, pipes: Pipes, streams: Streams, output: Output) -> None:
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
        if interrupted or self._output.has_failure():
            end_groups(self._pids, signal.SIGKILL)

    def outcome(self, result: RunResult | None) -> Outcome:
        """How it all ended."""
        restarts = self._worker_group.spec.max_restarts - self._remaining_restarts
        if result is None or not result.is_failed():
            return Outcome(ok=True, restarts=restarts)
        rank, code = self._output.first_failure() or (min(result.failures, default=None), None)
        if code is None and rank in result.failures and result.failures[rank].exitcode > 0:
            code = result.failures[rank].exitcode
        return Outcome(ok=False, restarts=restarts, failed_rank=rank, exit_code=code)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._pids:
            self.end(interrupted=False)
            self._streams.drain()
            self._output.start_again()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for worker in worker_group.workers:
            watch(pids[worker.local_rank], partial(self._output.ended, worker.global_rank))
        self._pids, self._ending = list(pids.values()), None
        for rank, stream, fd in self._pipes.opened:
            self._streams.add(fd, partial(self._output.line, rank, stream))
        self._pipes.opened.clear()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._streams.check()
        self._output.tick()
        if self._output.has_failure():
            self._streams.drain()
            self._output.tell()
            self._end_within(_GRACE)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, *rest: Any, **more: Any
    ) -> None:
        self._end_within(_GRACE if death_sig == signal.SIGTERM else _GRACE_AT_INTERRUPT)
        super()._shutdown(death_sig, *rest, **more)

    def _end_within(self, seconds: float) -> None:
        """The agent asks the ranks to end, and would wait half a minute for it."""
        if self._ending is None and self._pids:
            self._ending = end_later(self._pids, seconds)
