"""Workers come and go, and the training goes on: the same samples, the same losses."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit import Run
from ckptkit.live import Checkpointer
from ckptkit.parallel import ElasticTraining, GlobalSampler
from tests.live.pool import Pool
from tests.parallel.optimizers import warm
from tests.parallel.optimizers.elastic_job import BATCH, SIZE, STEPS, data
from tests.parallel.optimizers.problem import network
from tests.servers.process import free_port, until_listening
from tests.test_examples import FOLDER, TORCHRUN, losses, output_of

JOB = "tests.parallel.optimizers.elastic_job"
# Else torch 2.13 lets restarted workers meet in the store of those before, whose addresses they
# find there and cannot reach.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Who comes late joins later, and who is gone is missed after 4 s.
RENDEZVOUS = "last_call_timeout=2,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=10"


def uninterrupted() -> dict[int, float]:
    """The losses of one process that takes all samples."""
    model, sampler, (inputs, targets) = network(), GlobalSampler(SIZE), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = {}
    for step in range(1, STEPS + 1):
        samples = sampler.share(BATCH)
        sampler.advance(BATCH)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[samples]), targets[samples])
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    return losses


class Watched:
    """What the workers of a job have written down so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self) -> list[dict[str, Any]]:
        texts = [p.read_text() for p in self.folder.glob("*.jsonl")]
        whole = [line for text in texts for line in text.split("\n")[:-1]]
        return [json.loads(line) for line in whole]

    def pids(self) -> list[int]:
        """Of all workers there were."""
        return [int(path.stem) for path in self.folder.glob("*.jsonl")]

    def starts(self) -> list[dict[str, Any]]:
        return sorted((x for x in self.lines() if "from" in x), key=lambda x: x["began"])

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def let_go_on_to(self, step: int) -> None:
        """Until they have done that step, they do not stop."""
        new = self.folder / "limit.new"
        new.write_text(str(step))
        new.rename(self.folder / "limit")

    def wait_until(self, process: subprocess.Popen[bytes], come_true: Callable[[], bool]) -> None:
        """Look again and again."""
        deadline = time.monotonic() + 150
        while not come_true():
            assert process.poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        """Until all ranks of the job as it is now have done a step."""

        def done() -> bool:
            now = self.starts()[-1:]
            found = [x for x in self.steps() if now and x["began"] == now[0]["began"]]
            ranks = {x["rank"] for x in found if x["step"] == step}
            return bool(now) and len(ranks) == now[0]["ranks"]

        self.wait_until(process, done)

    def wait_for_ranks(self, process: subprocess.Popen[bytes], ranks: int) -> None:
        """Until the job has begun with so many ranks."""

        def begun() -> bool:
            now = self.starts()
            alike = [x for x in now if x["began"] == now[-1]["began"]]
            return len(alike) == ranks == (now[-1]["ranks"] if now else 0)

        self.wait_until(process, begun)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-20000:] for path in self.folder.glob("*.log"))

    def history(self) -> dict[int, list[dict[str, Any]]]:
        """By step, what each rank did when it was done for the last time."""
        found: dict[int, list[dict[str, Any]]] = {}
        for line in self.steps():
            known = found.get(line["step"], [])
            if not known or line["began"] > known[0]["began"]:
                found[line["step"]] = [line]
            elif line["began"] == known[0]["began"]:
                known.append(line)
        return found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What torchruns and workers need to begin at once: they would import for most of the time."""
    with warm.warm(JOB, tmp_path_factory.mktemp("warm"), ENVIRONMENT) as environment:
        yield environment


class Torchrun(subprocess.Popen[bytes]):
    """Asks for a torchrun, which writes down its number: its workers are not this one's."""

    place: Path

    @property
    def number(self) -> int:
        """Of the torchrun, once it has begun."""
        return int(self.place.read_text()) if self.place.exists() else self.pid


@contextmanager
def agent(
    *arguments: object, folder: Path, replicas: str, started: dict[str, str], timeout: int = 30
) -> Iterator[subprocess.Popen[bytes]]:
    """A torchrun of workers; it and they are gone at the end, whatever happens."""
    command = [sys.executable, warm.__file__, "-m", "torch.distributed.run"]
    command += ["--monitor-interval", "0.1", *map(str, arguments)]
    command += [warm.__file__, str(folder), replicas, str(timeout)]
    name = folder / f"agent-{time.time_ns()}"
    with name.with_suffix(".log").open("wb") as log:
        process = Torchrun(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | ENVIRONMENT | started | {"AGENT": f"{name}.pid"},
        )
        process.place = name.with_suffix(".pid")
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a torchrun with its workers, as a machine that fails does."""
    number = process.number if isinstance(process, Torchrun) else process.pid
    for pid in (*children(number), number, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def children(pid: int) -> list[int]:
    """What a torchrun has started; the workers end with it."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(each) for each in text.split()]


def check(watched: Watched) -> None:
    """Every sample was taken as often as without interruptions, and the losses are the same."""
    expected, history = uninterrupted(), watched.history()
    assert sorted(history) == list(range(1, STEPS + 1))
    taken: list[int] = []
    for step, lines in sorted(history.items()):
        ranks = lines[0]["ranks"]
        assert sorted(line["rank"] for line in lines) == list(range(ranks))
        taken += [at for line in sorted(lines, key=lambda x: x["rank"]) for at in line["samples"]]
        assert sum(line["loss"] for line in lines) == pytest.approx(expected[step], abs=1e-4)
    for epoch in range(len(taken) // SIZE):
        assert sorted(taken[epoch * SIZE : (epoch + 1) * SIZE]) == list(range(SIZE))


@pytest.mark.parametrize("memory", [True, False])
def test_a_killed_worker_comes_back_and_the_losses_go_on(
    tmp_path: Path, started: dict[str, str], memory: bool
) -> None:
    watched, replicas = Watched(tmp_path), str(tmp_path / "replicas") if memory else ""
    at = random.randrange(17, 25)
    watched.let_go_on_to(at)
    arguments = ("--standalone", "--nproc-per-node", 4, "--max-restarts", 2)
    with agent(*arguments, folder=tmp_path, replicas=replicas, started=started) as process:
        watched.wait_for_step(process, at)
        watched.wait_until(process, lambda: 15 in Run(tmp_path / "run").steps())
        while memory and (Run(replicas).latest() or 0) <= 15:  # all came while one was written
            at += 1
            watched.let_go_on_to(at)
            watched.wait_for_step(process, at)
            time.sleep(0.3)
        os.kill(random.choice(watched.pids()), signal.SIGKILL)
        watched.let_go_on_to(STEPS + 1)
        assert process.wait(150) == 0, watched.logs()
    starts = [line["from"] for line in watched.starts()]
    assert starts[:4] == [0] * 4
    assert len(starts) == 8
    # What is in memory is newer than the checkpoint.
    assert 15 < starts[-1] < at if memory else starts[-1] == 15
    check(watched)
    assert not (tmp_path / "replicas").exists()


def test_a_job_shrinks_and_grows_with_its_machines(tmp_path: Path, started: dict[str, str]) -> None:
    watched, port = Watched(tmp_path), free_port()
    arguments: tuple[object, ...] = ("--nnodes", "1:4", "--nproc-per-node", 1, "--max-restarts", 9)
    arguments += ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    arguments += ("--rdzv-id", tmp_path.name, "--rdzv-conf", RENDEZVOUS)

    def machine() -> AbstractContextManager[subprocess.Popen[bytes]]:
        replicas = str(tmp_path / "replicas")
        # The timeout is how long what a lost machine was to write is waited for.
        return agent(*arguments, folder=tmp_path, replicas=replicas, started=started, timeout=6)

    watched.let_go_on_to(3)
    with machine() as first:
        until_listening(port)  # whoever is first holds what the others meet by
        with machine(), machine(), machine() as last:
            watched.wait_for_ranks(first, 4)
            watched.let_go_on_to(12)
            watched.wait_for_step(first, 12)
            stop(last)
            watched.let_go_on_to(24)  # that one is gone is noticed in a step only
            watched.wait_for_ranks(first, 3)
            watched.wait_for_step(first, 24)
            with machine():
                watched.wait_for_ranks(first, 4)
                watched.let_go_on_to(STEPS + 1)
                assert first.wait(150) == 0, watched.logs()
    assert {line["ranks"] for line in watched.steps()} >= {3, 4}
    check(watched)


def alone(folder: str) -> list[int]:
    """A step is done, and its replica waits for a rank that does not come; then the loop fails."""
    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with (
        suppress(ZeroDivisionError),
        Checkpointer(Path(folder) / "run", asynchronous=True) as checkpointer,
        ElasticTraining(
            checkpointer,
            model=model,
            optimizer=optimizer,
            sampler=GlobalSampler(SIZE),
            batch=BATCH,
            replicas=Path(folder) / "replicas",
        ) as training,
    ):
        for step in training.steps(2):
            assert 1 // (step.number < 2 and dist.get_rank() == 0)
            given, wanted = inputs[step.samples], targets[step.samples]
            torch.nn.functional.mse_loss(model(given), wanted).backward()
            optimizer.step()
    return checkpointer.run.steps()


def test_a_rank_that_fails_does_not_wait_for_one_that_is_gone(gloo: Pool, tmp_path: Path) -> None:
    # The time-out of a save is ten minutes, that of the pool two.
    assert gloo.run(2, alone, str(tmp_path)) == [[0]] * 2


@pytest.mark.long
@pytest.mark.parametrize("gone", [0, 1])
def test_the_example_goes_on_when_a_machine_is_lost(tmp_path: Path, gone: int) -> None:
    """Two launchers as README has them, of which the second is killed with its rank."""
    port = free_port()
    job = ("--nnodes", "1:4", "--max-restarts", 9, "--rdzv-endpoint", f"127.0.0.1:{port}")
    command = [str(Path(sys.executable).parent / "ckpt"), "launch", *map(str, job)]
    command += [str(FOLDER / "elastic.py"), "--dir", str(tmp_path / "run"), "--steps", "100000"]

    def said(name: str) -> str:
        return (tmp_path / name).read_text()

    def until(name: str, pattern: str, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + 90
        while not (found := re.search(pattern, said(name))):
            assert process.poll() is None, said(name)
            assert time.monotonic() < deadline, said(name)
            time.sleep(0.1)
        return found[1]

    @contextmanager
    def machine(name: str, pause: int) -> Iterator[subprocess.Popen[bytes]]:
        # The pause is in a shell that becomes the launcher: the older process has the lower rank.
        line = ["sh", "-c", f'sleep {pause}; exec "$@"', "sh", *command]
        with (tmp_path / name).open("wb") as log:
            process = subprocess.Popen(
                line,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                yield process
            finally:
                stop(process)

    with ExitStack() as machines:
        order = [("second", 5), ("first", 0)] if gone == 0 else [("first", 0), ("second", 5)]
        started = {name: machines.enter_context(machine(name, n)) for name, n in order}
        first, second = started["first"], started["second"]
        assert until("second", r"rank (\d) of 2", second) == str(gone)
        until("second" if gone == 0 else "first", r"(step 20): 2 ranks", second)
        stop(second)
        until("first", r"(rank 0 of 1), process", first)
        until("first", r"(1 ranks, loss)", first)


def test_the_example_goes_on_where_it_was(tmp_path: Path, started: dict[str, str]) -> None:
    for steps, start in ((20, 0), (30, 20)):
        job = (FOLDER / "elastic.py", "--dir", tmp_path / "run", "--steps", steps)
        torchrun = (warm.__file__, *TORCHRUN, "--nproc-per-node", 2)
        out = output_of(*torchrun, warm.__file__, *job, **started)
        assert len(re.findall(rf"from step {start}(?!\d)", out)) == 2
        assert list(losses(out)) == list(range(start + 10, steps + 1, 10))
    mine = str(tmp_path).replace("/", "_")  # not what a run of these tests left that was killed
    assert not [path for path in Path("/dev/shm").glob("ckptkit-*") if mine in path.name]
