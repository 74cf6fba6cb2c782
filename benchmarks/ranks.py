"""The processes of a job: one per rank, started once, then asked to save and load together."""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import socket
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from benchmarks.contender import Contender
from benchmarks.measured import Taken
from benchmarks.state import Memory, Part, Tensor, clear, digest

P = ParamSpec("P")
R = TypeVar("R")

_SPAWN = mp.get_context("spawn")


class Ranks:
    """All ranks of one job: without torch, with it, or training under the strategy of the host."""

    def __init__(self, host: str, world_size: int, tensors: list[Tensor]) -> None:
        barrier = _SPAWN.Barrier(world_size)
        self._pipes: list[Connection] = []
        self._processes = []
        address = f"tcp://127.0.0.1:{_free_port()}"
        for rank in range(world_size):
            mine, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=_serve, args=(host, tensors, rank, world_size, address, barrier, theirs)
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.names: list[str] = self._answers()[0]

    def timed(self, name: str, action: str, folder: Path) -> Taken:
        """Let all ranks do what the contender's method of that name does."""
        starts, stops, cpu, results = zip(*self._ask((name, action, folder)), strict=True)
        return Taken(max(stops) - min(starts), sum(cpu), list(results))

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

    def __exit__(self, *_: object) -> None:
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
    address: str,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    try:
        held, contenders = _HOSTS[host](tensors, rank, world_size, address)
        saved = digest(held)
        pipe.send(list(contenders))
        while True:
            name, action, folder = pipe.recv()
            if action == "check":
                clear(held)
                contenders[name].load(folder)
                if digest(held) != saved:
                    raise RuntimeError(f"{name} did not load what was saved")  # noqa: TRY301
                pipe.send(None)
            else:
                pipe.send(_timed(getattr(contenders[name], action), folder, barrier))
    except EOFError:
        return
    except Exception:  # noqa: BLE001  # whatever it is, the parent has to hear of it
        barrier.abort()
        pipe.send(traceback.format_exc())


def _timed(
    work: Callable[[Path], Any], folder: Path, barrier: Barrier
) -> tuple[float, float, float, Any]:
    barrier.wait()
    cpu = _cpu_seconds()
    # One clock for all processes of a machine.
    start = time.monotonic()
    result = work(folder)
    return start, time.monotonic(), _cpu_seconds() - cpu, result


def _cpu_seconds() -> float:
    """Of this process and its children, in user and in system mode."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    over = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return over + sum(_running_seconds(child.pid) for child in mp.active_children())


def _running_seconds(process: int | None) -> float:
    """Of a child that has not ended yet."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    user, system = map(int, fields[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


_Hosted = tuple[Memory, dict[str, Contender]]


# Each imports what it needs, so that a job with torch does not have what one without it has, nor
# the other way round.


def _without_torch(tensors: list[Tensor], rank: int, world_size: int, address: str) -> _Hosted:  # noqa: ARG001
    from benchmarks.ours import Ckptkit  # noqa: PLC0415

    part = Part(tensors, rank, world_size)
    ours = {"ckptkit": Ckptkit(part), "ckptkit, unchecked": Ckptkit(part, verify=False)}
    return part, {**ours, **_floors(part, world_size)}


def _with_torch(tensors: list[Tensor], rank: int, world_size: int, address: str) -> _Hosted:
    from benchmarks import peers  # noqa: PLC0415

    peers.join(rank, world_size, address)
    part = Part(tensors, rank, world_size)
    local, sharded = peers.local_tensors(part), peers.sharded_tensors(part)
    return part, {
        "DCP": peers.Dcp(sharded),
        "DCP, thread_count=2": peers.Dcp(sharded, threads=2),
        "safetensors (no fsync)": peers.Safetensors(local, rank),
        "safetensors + fsync": peers.Safetensors(local, rank, sync=True),
        "torch.save (no fsync)": peers.TorchSave(local, rank),
        "torch.save + fsync": peers.TorchSave(local, rank, sync=True),
    }


# What is done, by how many threads, with how many MiB at a time.
_OBSTORE = (("put", 4, 16), ("put", 8, 16), ("get", 8, 8), ("get", 8, 16), ("get", 16, 16))


def _bucket(tensors: list[Tensor], rank: int, world_size: int, address: str) -> _Hosted:  # noqa: ARG001
    from benchmarks.bucket import Bucket  # noqa: PLC0415
    from benchmarks.to_bucket import Raw, ToBucket  # noqa: PLC0415

    part, bucket = Part(tensors, rank, world_size), Bucket.told()
    raw = {
        f"obstore {what}: {at_once} x {mib} MiB": Raw(part, bucket, at_once, mib)
        for what, at_once, mib in _OBSTORE
    }
    return part, {"ckptkit": ToBucket(part, bucket), **raw}


def _bucket_with_torch(tensors: list[Tensor], rank: int, world_size: int, address: str) -> _Hosted:
    from benchmarks import peers  # noqa: PLC0415
    from benchmarks.bucket import Bucket  # noqa: PLC0415
    from benchmarks.to_bucket_torch import DcpToBucket  # noqa: PLC0415

    peers.join(rank, world_size, address)
    part, bucket = Part(tensors, rank, world_size), Bucket.told()
    sharded = peers.sharded_tensors(part)
    return part, {
        "DCP": DcpToBucket(sharded, bucket),
        "DCP, thread_count=2": DcpToBucket(sharded, bucket, threads=2),
    }


def _training(
    strategy: str, tensors: list[Tensor], rank: int, world_size: int, address: str
) -> _Hosted:
    from benchmarks import peers  # noqa: PLC0415
    from benchmarks.background import Asynchronous, Loop, savers  # noqa: PLC0415
    from benchmarks.floors import Floor  # noqa: PLC0415
    from benchmarks.loop import Live  # noqa: PLC0415
    from benchmarks.training import Training  # noqa: PLC0415

    peers.join(rank, world_size, address)
    training = Training(strategy, tensors, rank, world_size)
    floor = Floor(training, 4, 8 << 20, preallocate=True)
    return training, {
        "ckptkit": Live(training),
        "ckptkit, unchecked": Live(training, verify=False),
        "asynchronous": Loop(training, floor),
        **{f"asynchronous: {name}": Asynchronous(each) for name, each in savers(training).items()},
        "DCP": peers.Dcp(training.tensors),
        "DCP, thread_count=2": peers.Dcp(training.tensors, threads=2),
        "DCP on ckptkit": peers.UnderDcp(training.tensors),
        **_floors(training, world_size),
    }


def _model(
    strategy: str, tensors: list[Tensor], rank: int, world_size: int, address: str
) -> _Hosted:
    from benchmarks import peers  # noqa: PLC0415
    from benchmarks.hugging_face import ByDcp, Model  # noqa: PLC0415
    from benchmarks.training import Training  # noqa: PLC0415

    peers.join(rank, world_size, address)
    training = Training(strategy, tensors, rank, world_size)
    return training, {
        "hf: ckptkit": Model(training, tensors),
        "hf: DCP": ByDcp(training, tensors),
        "hf: DCP, thread_count=2": ByDcp(training, tensors, threads=2),
        **_floors(training, world_size),
    }


def _floors(held: Memory, world_size: int) -> dict[str, Contender]:
    from benchmarks.floors import Floor  # noqa: PLC0415

    readers = max(1, 2 // world_size)
    floors: dict[str, Contender] = {}
    for threads, mib, preallocate in ((2, 16, False), (4, 8, True), (4, 16, False)):
        name = f"write floor: {threads} x {mib} MiB{', preallocated' if preallocate else ''}"
        floors[name] = Floor(held, threads, mib << 20, preallocate)
    for mib in (1, 4, 16):
        floors[f"read floor: {readers} x {mib} MiB"] = Floor(held, readers, mib << 20)
    for threads, mib in ((2, 8), (4, 8)):
        floor = Floor(held, threads, mib << 20, is_direct=True)
        floors[f"read floor: {threads} x {mib} MiB, O_DIRECT"] = floor
    return floors


_HOSTS: dict[str, Callable[[list[Tensor], int, int, str], _Hosted]] = {
    "light": _without_torch,
    "torch": _with_torch,
    "bucket": _bucket,
    "bucket, torch": _bucket_with_torch,
    "fsdp": partial(_training, "fsdp"),
    "tp": partial(_training, "tp"),
    "fsdp, model": partial(_model, "fsdp"),
    "tp, model": partial(_model, "tp"),
}
