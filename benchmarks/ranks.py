"""The processes of a job: one per rank, started once, then asked to save and load together."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from benchmarks.contender import Contender
from benchmarks.state import Part, Tensor

P = ParamSpec("P")
R = TypeVar("R")

_SPAWN = mp.get_context("spawn")


class Ranks:
    """All ranks of one job, with or without torch in their processes."""

    def __init__(self, host: str, world_size: int, tensors: list[Tensor], folder: Path) -> None:
        barrier = _SPAWN.Barrier(world_size)
        self._pipes: list[Connection] = []
        self._processes = []
        meeting = folder / f"meeting-{host}-{world_size}-{time.time_ns()}"
        for rank in range(world_size):
            mine, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=_serve, args=(host, tensors, rank, world_size, meeting, barrier, theirs)
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.names: list[str] = self._answers()[0]

    def timed(self, name: str, action: str, folder: Path) -> float:
        """Seconds from the moment all ranks begin to the moment the last one is done."""
        spans = self._ask((name, action, folder))
        return float(max(stop for _, stop in spans) - min(start for start, _ in spans))

    def check(self, name: str, folder: Path) -> None:
        """Clear all parts, load them, and compare them with what they were at the start."""
        self._ask((name, "check", folder))

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def _ask(self, question: tuple[str, str, Path]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"a rank failed:\n{answer}")  # noqa: TRY004  # not our types
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def isolated(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=_SPAWN) as pool:
        return pool.submit(work, *args, **kwargs).result()


def _serve(
    host: str,
    tensors: list[Tensor],
    rank: int,
    world_size: int,
    meeting: Path,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    try:
        part = Part(tensors, rank, world_size)
        contenders = _with_torch(part, meeting) if host == "torch" else _without_torch(part)
        digest = part.digest()
        pipe.send(list(contenders))
        while True:
            name, action, folder = pipe.recv()
            if action == "check":
                part.clear()
                contenders[name].load(folder)
                if part.digest() != digest:
                    raise RuntimeError(f"{name} did not load what it saved")  # noqa: TRY301
                pipe.send((0.0, 0.0))
            else:
                pipe.send(_timed(contenders[name], action, folder, barrier))
    except EOFError:
        return
    except Exception:  # noqa: BLE001  # whatever it is, the parent has to hear of it
        barrier.abort()
        pipe.send(traceback.format_exc())


def _timed(
    contender: Contender, action: str, folder: Path, barrier: Barrier
) -> tuple[float, float]:
    work = contender.save if action == "save" else contender.load
    barrier.wait()
    # One clock for all processes of a machine.
    start = time.monotonic()
    work(folder)
    return start, time.monotonic()


def _without_torch(part: Part) -> dict[str, Contender]:
    # Here, so that a job with torch does not have what one without it has, nor the other way round.
    from benchmarks.floors import Floor  # noqa: PLC0415
    from benchmarks.ours import Ckptkit  # noqa: PLC0415

    readers = max(1, 2 // part.world_size)
    contenders: dict[str, Contender] = {
        "ckptkit": Ckptkit(part),
        "ckptkit, unchecked": Ckptkit(part, verify=False),
    }
    for threads, mib, preallocate in ((2, 16, False), (4, 8, True), (4, 16, False)):
        name = f"write floor: {threads} x {mib} MiB{', preallocated' if preallocate else ''}"
        contenders[name] = Floor(part, threads, mib << 20, preallocate)
    for mib in (1, 4, 16):
        contenders[f"read floor: {readers} x {mib} MiB"] = Floor(part, readers, mib << 20)
    return contenders


def _with_torch(part: Part, meeting: Path) -> dict[str, Contender]:
    from benchmarks import peers  # noqa: PLC0415  # torch takes seconds to import

    peers.join(part.rank, part.world_size, meeting)
    local, sharded = peers.local_tensors(part), peers.sharded_tensors(part)
    rank = part.rank
    return {
        "DCP": peers.Dcp(sharded),
        "DCP, thread_count=2": peers.Dcp(sharded, threads=2),
        "safetensors (no fsync)": peers.Safetensors(local, rank),
        "safetensors + fsync": peers.Safetensors(local, rank, sync=True),
        "torch.save (no fsync)": peers.TorchSave(local, rank),
        "torch.save + fsync": peers.TorchSave(local, rank, sync=True),
    }
