"""Of a GPU: saves beside a training, loads, and activations that wait on the host; beside DCP, what
torch has, and copies of the same bytes from and to pinned memory.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.functional import cross_entropy

from benchmarks.activation import Gpt
from benchmarks.floors import Floor
from benchmarks.job import in_turn
from benchmarks.state import MOMENTS, llama
from benchmarks.table import Bar, Section
from benchmarks.training import model_of
from ckptkit.activation import checkpoint_activations
from ckptkit.live import Checkpointer

_SEGMENT = 8 << 20
_THREADS = 8
_SIDE, _PRODUCTS = 8192, 16  # of a training step: some 25 ms of an H100
_QUIET_STEPS = 20
_FOUND = ("save() s", "save() / pinned copy", "step / without", "durable after s")
_NOTE = (
    "Each alone on the card, by turns; median (least to most). The pinned copy is of the same "
    "tensors, one after another, into pinned memory that has been used before. A step is a row of "
    "matrix products; its time is that while a save is written, beside that just before."
)


class Training:
    """A model of bf16 and what AdamW keeps of it, all on the device."""

    def __init__(self, gib: float) -> None:
        tensors = llama(gib)
        self.model = model_of(tensors).to_empty(device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            kept = {key: torch.empty_like(parameter, dtype=torch.float32) for key in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.ones((), device="cuda"), **kept}
            self.tensors |= {f"{name}.{key}": tensor.detach() for key, tensor in kept.items()}
            self.tensors[name] = parameter.detach()
        self.fill(0)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self._factors = torch.randn(2, _SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)

    def fill(self, seed: int) -> None:
        """Other values everywhere."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.normal_(generator=generator)

    def sums(self) -> list[float]:
        """Something of each tensor that its values decide."""
        return [float(tensor.double().sum()) for tensor in self.tensors.values()]

    def step(self) -> float:
        """The seconds of one."""
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(*self._factors)
        torch.cuda.synchronize()
        return time.perf_counter() - start


class Pinned:
    """The floor: copies to and from pinned memory, and a file of it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.rank, self.nbytes = 0, training.nbytes
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        self._pieces = []
        at = 0
        for tensor in training.tensors.values():
            piece = self._memory[at : at + tensor.nbytes]
            self._pieces.append((at, piece, tensor))
            at += tensor.nbytes

    def flat(self) -> list[npt.NDArray[np.uint8]]:
        """All of it."""
        return [self._memory.numpy()]

    def copy(self) -> None:
        """From the device."""
        for _, piece, tensor in self._pieces:
            piece.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def save(self, folder: Path) -> None:
        """From the device, and then onto the disk."""
        self.copy()
        Floor(self, _THREADS, _SEGMENT, preallocate=True).save(folder)

    def write(self, folder: Path) -> None:
        """A file for `load`."""
        self.copy()
        self._memory.numpy().tofile(folder / "flat")

    def load(self, folder: Path) -> None:
        """From the page cache, and each tensor on to the device as soon as it is there."""
        descriptor = os.open(folder / "flat", os.O_RDONLY)
        memory = self._memory.numpy().data

        def read(at: int, size: int) -> None:
            done = 0
            while done < size:
                done += os.preadv(descriptor, [memory[at + done : at + size]], at + done)

        with ThreadPoolExecutor(_THREADS) as executor:
            reads = [
                [
                    executor.submit(read, at + n, min(_SEGMENT, piece.nbytes - n))
                    for n in range(0, piece.nbytes, _SEGMENT)
                ]
                for at, piece, _ in self._pieces
            ]
            for (_, piece, tensor), those in zip(self._pieces, reads, strict=True):
                for each in those:
                    each.result()
                there = piece.view(tensor.dtype).view(tensor.shape)
                tensor.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        os.close(descriptor)


class Ours:
    """A Checkpointer that is asynchronous or not."""

    def __init__(self, training: Training, *, asynchronous: bool, verify: bool = True) -> None:
        self._training, self._verify = training, verify
        self._asynchronous = asynchronous
        self._checkpointer: Checkpointer | None = None

    def save(self, folder: Path) -> None:
        """What the training waits for."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(folder / "run", asynchronous=self._asynchronous)
        training = self._training
        self._checkpointer.save(1, model=training.model, optimizer=training.optimizer)

    def wait(self) -> None:
        """The background."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def load(self, folder: Path) -> None:
        """In place."""
        training = self._training
        with Checkpointer(folder / "run") as checkpointer:
            checkpointer.restore(
                model=training.model, optimizer=training.optimizer, verify=self._verify
            )
        torch.cuda.synchronize()


@dataclass(slots=True)
class DcpAsync:
    """`async_save` by a thread."""

    tensors: dict[str, torch.Tensor]
    stager: BlockingAsyncStager | None = None
    _saved: Future[Any] | None = field(default=None, init=False)

    def save(self, folder: Path) -> None:
        """What the training waits for."""
        answer: Any = async_save(
            dict(self.tensors),
            storage_writer=FileSystemWriter(folder / "dcp"),
            async_stager=self.stager,
        )
        self._saved = answer

    def wait(self) -> None:
        """Its future."""
        if self._saved is not None:
            self._saved.result()
        self._saved = None


@dataclass(slots=True)
class Found:
    """What each turn found out of one saver."""

    blocked: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)


def benches(folder: Path, gib: float, repeat: int) -> Iterator[Callable[[], Section]]:
    """All of them, where there is a GPU."""
    if not torch.cuda.is_available():
        return
    yield partial(copies, repeat)
    yield partial(beside, folder, gib, repeat)
    yield partial(saves, folder, gib, repeat)
    yield partial(loads, folder, gib, repeat)
    yield partial(offloading, repeat)


def copies(repeat: int, size: int = 1 << 30) -> Section:
    """What the way between host and device carries."""
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    rows = []
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        spans: dict[str, list[float]] = {"to the host": [], "to the device": []}
        for _ in range(repeat + 1):
            for way, (into, of) in zip(spans, ((host, device), (device, host)), strict=True):
                spans[way].append(_timed(partial(into.copy_, of, non_blocking=True)))
        for way, each in spans.items():
            rows.append([f"{name}, {way}", f"{size / median(each[1:]) / 1e9:.1f}"])
    title = f"CUDA: copies of 1 GiB, {torch.cuda.get_device_name()}"
    return Section(title, ["", "GB/s"], rows)


def beside(folder: Path, gib: float, repeat: int) -> Section:
    """What asynchronous saves ask of a training."""
    training = Training(gib)
    floor = Pinned(training)
    savers: Mapping[str, Ours | DcpAsync] = {
        "ckptkit": Ours(training, asynchronous=True),
        "DCP": DcpAsync(training.tensors),
        # The stager that torch has for pinned memory that is used again.
        "DCP, pinned memory": DcpAsync(
            training.tensors, BlockingAsyncStager(cache_staged_state_dict=True)
        ),
    }
    found = {name: Found() for name in savers}
    first: dict[str, float] = {}
    for turn in range(repeat + 1):
        for name in in_turn(list(savers), turn):
            _clear(folder)
            training.fill(turn)
            one = Found() if turn == 0 else found[name]
            one.copies.append(_timed(floor.copy))
            quiet = [training.step() for _ in range(_QUIET_STEPS)]
            saver, start = savers[name], time.perf_counter()
            saver.save(folder)
            one.blocked.append(time.perf_counter() - start)
            done = ThreadPoolExecutor(1).submit(_ended, saver)
            steps = [training.step()]
            while not done.done():
                steps.append(training.step())
            one.durable.append(done.result() - start)
            one.steps.append(median(steps) / median(quiet))
            first.setdefault(name, one.blocked[0])
    for saver in savers.values():
        saver.wait()
    rows = []
    for name, one in found.items():
        ratios = [a / b for a, b in zip(one.blocked, one.copies, strict=True)]
        shown = (one.blocked, ratios, one.steps, one.durable)
        rows.append([name, *map(_spread, shown), f"{first[name]:.2f}"])
    ours = found["ckptkit"]
    wait = median(a / b for a, b in zip(ours.blocked, ours.copies, strict=True))
    what = "CUDA, asynchronous save"
    bars = [
        Bar(f"{what}: time in save() / pinned copy", wait, 1.15, at_least=False),
        Bar(f"{what}: steps during the write / without", median(ours.steps), 1.1, at_least=False),
    ]
    copied = _spread([copy for one in found.values() for copy in one.copies])
    _clear(folder)
    return Section(
        f"CUDA: asynchronous save, {training.nbytes / 1e9:.2f} GB",
        ["", *_FOUND, "first save() s"],
        rows,
        bars,
        [f"The pinned copy takes {copied} s.", _NOTE],
    )


def saves(folder: Path, gib: float, repeat: int) -> Section:
    """Saves that return when the step is durable."""
    training = Training(gib)
    ways: dict[str, Callable[[Path], object]] = {
        "ckptkit": Ours(training, asynchronous=False).save,
        "DCP": lambda where: dcp_save(
            dict(training.tensors), storage_writer=FileSystemWriter(where / "dcp")
        ),
        "floor: pinned copy, then O_DIRECT pwrite": Pinned(training).save,
    }
    return _compared("save", folder, training, ways, repeat, clears=True)


def loads(folder: Path, gib: float, repeat: int) -> Section:
    """Loads in place, from the page cache."""
    training = Training(gib)
    floor = Pinned(training)
    _clear(folder)
    floor.write(folder)
    Ours(training, asynchronous=False).save(folder)
    dcp_save(dict(training.tensors), storage_writer=FileSystemWriter(folder / "dcp"))
    wanted = training.sums()
    ways: dict[str, Callable[[Path], object]] = {
        "ckptkit": Ours(training, asynchronous=False).load,
        "ckptkit, unchecked": Ours(training, asynchronous=False, verify=False).load,
        "DCP": lambda where: dcp_load(
            training.tensors, storage_reader=FileSystemReader(where / "dcp")
        ),
        "floor: preadv, and pinned copies": floor.load,
    }
    for name, way in ways.items():
        training.fill(1)
        way(folder)
        if training.sums() != wanted:
            raise RuntimeError(f"{name} has loaded something else")
    section = _compared("load", folder, training, ways, repeat, clears=False)
    _clear(folder)
    return section


def offloading(repeat: int, *, width: int = 4096, layers: int = 6, batch: int = 8) -> Section:
    """Steps of a GPT whose activations wait on the host."""
    inputs = torch.randint(0, 512, (batch, 1025), device="cuda")
    took: dict[str, float] = {}
    peaks: dict[str, int] = {}
    spans: dict[str, list[float]] = {}
    for name in ("none", "full", "offload", "torch save_on_cpu"):
        torch.manual_seed(0)
        model = Gpt(width, layers).to("cuda", torch.bfloat16)
        if name in ("full", "offload"):
            checkpoint_activations(model, name)
        step = partial(_train, model, inputs, on_cpu=name.startswith("torch"))
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        spans[name] = [_timed(step) for _ in range(repeat)]
        peaks[name] = torch.cuda.max_memory_allocated() - before
        took[name] = median(spans[name])
        del model, step
        gc.collect()
        torch.cuda.empty_cache()
    rows = [
        [
            name,
            _spread([1e3 * seconds for seconds in each]),
            f"{took[name] / took['none']:.2f}",
            f"{peaks[name] / 2**30:.2f}",
        ]
        for name, each in spans.items()
    ]
    return Section(
        f"CUDA: activations, {layers} blocks of width {width}, {batch * 1024} words",
        ["", "step ms", "step / none", "peak GiB"],
        rows,
        [
            Bar(
                "CUDA, offload: step / torch's save_on_cpu",
                took["offload"] / took["torch save_on_cpu"],
                0.9,
                at_least=False,
            )
        ],
        ["bf16 throughout. The peak is what torch allocates above parameters and gradients."],
    )


def _train(model: nn.Module, inputs: torch.Tensor, *, on_cpu: bool) -> None:
    def loss() -> torch.Tensor:
        scores = model(inputs[:, :-1]).float()
        return cross_entropy(scores.flatten(0, 1), inputs[:, 1:].flatten())

    model.zero_grad(set_to_none=False)
    if on_cpu:
        with save_on_cpu(pin_memory=True):
            found = loss()
    else:
        found = loss()
    found.backward()


def _compared(
    what: str,
    folder: Path,
    training: Training,
    ways: Mapping[str, Callable[[Path], object]],
    repeat: int,
    *,
    clears: bool,
) -> Section:
    spans: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name in in_turn(list(ways), turn):
            if clears:
                _clear(folder)
            seconds = _timed(partial(ways[name], folder))
            if turn:
                spans[name].append(seconds)
    size, took = training.nbytes, {name: median(each) for name, each in spans.items()}
    floor = next(name for name in ways if name.startswith("floor"))
    rows = [
        [
            name,
            _spread(spans[name]),
            f"{size / took[name] / 1e9:.2f}",
            f"{took[floor] / took[name]:.2f}",
        ]
        for name in sorted(ways, key=took.__getitem__)
    ]
    bars = [
        Bar(f"CUDA {what}: speed / floor", took[floor] / took["ckptkit"], 0.8),
        Bar(f"CUDA {what}: speed / DCP", took["DCP"] / took["ckptkit"], 1.5),
    ]
    title = f"CUDA: {what}, {size / 1e9:.2f} GB"
    return Section(title, ["", "s", "GB/s", "speed / floor"], rows, bars, samples=spans)


def _ended(saver: Ours | DcpAsync) -> float:
    saver.wait()
    return time.perf_counter()


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _clear(folder: Path) -> None:
    for name in ("run", "dcp", "rank-0.bin", "flat"):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
