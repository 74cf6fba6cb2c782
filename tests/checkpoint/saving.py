"""Saving in tests: the ranks are threads, and every rank gets its part of the whole tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit import Checkpoint, Ranks, Strategy, ThreadBarrier, Writer
from ckptkit.checkpoint.places import Place, step_name
from ckptkit.errors import PeerError
from ckptkit.model import (
    DTYPES,
    Box,
    DType,
    Layout,
    Part,
    Placement,
    layout_of,
    parse_placement,
)
from ckptkit.storage import LocalStore, MemoryStore, Store

Values = npt.NDArray[Any]
Fill = Callable[[Writer], None]

TIMEOUT = 20.0


@dataclass(frozen=True)
class Tensor:
    """A whole tensor, and how the axes of a strategy cut it."""

    whole: Values
    placements: Mapping[str, Placement | str] = field(default_factory=dict)

    def layout(self, strategy: Strategy) -> Layout:
        given = [self.placements.get(axis.name, "replicate") for axis in strategy.mesh.axes]
        row = [parse_placement(p) if isinstance(p, str) else p for p in given]
        return layout_of(self.whole.shape, strategy, row)


State = Mapping[str, Tensor]


def bits(values: Values) -> Values:
    """The elements without their meaning, so that NaNs compare too."""
    return values.view(DType.of(values.dtype).bits)


def same(actual: Values, expected: Values) -> bool:
    """Whether two arrays have the same shape, element type and bits."""
    return (
        actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and actual.tobytes() == expected.tobytes()
    )


def random_values(shape: Sequence[int], dtype: str = "float32", seed: int = 0) -> Values:
    """Any bits at all, NaNs and denormals included."""
    known = DTYPES[dtype]
    count = int(np.prod(shape, dtype=np.int64)) * known.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.view(known.numpy).reshape(tuple(shape))


def take(part: Part, whole: Values) -> Values:
    """What a rank holds, as the tensor in its memory."""
    out = np.zeros(part.shape, whole.dtype)  # a rank may hold nothing of a tensor without dims
    for box, place in zip(part.boxes, part.places, strict=True):
        inside: Any = (*place.within(Box.whole(part.shape)), ...)
        out[inside] = whole[box.within(Box.whole(whole.shape))]
    return out


def add(writer: Writer, name: str, tensor: Tensor, **options: Any) -> None:
    """Add the writer's part of a tensor."""
    local = take(tensor.layout(writer.strategy).part(writer.rank), tensor.whole)
    placements = tensor.placements
    writer.add(name, local, shape=tensor.whole.shape, placements=placements, **options)


def outcomes(
    location: Place,
    fill: Fill,
    *,
    strategy: str | Strategy = "single",
    step: int = 1,
    timeout: float = TIMEOUT,
    absent: Sequence[int] = (),
    **options: Any,
) -> list[BaseException | None]:
    """Save with one thread for each rank; what each rank raised, None where it did not."""
    size = Strategy.of(strategy).world_size
    errors: list[BaseException | None] = [None] * size

    def run(barrier: Ranks) -> None:
        try:
            rank = barrier.rank
            with Writer(
                location, step=step, strategy=strategy, rank=rank, barrier=barrier, **options
            ) as writer:
                fill(writer)
        except BaseException as error:  # noqa: BLE001 — every way to fail is an outcome
            errors[barrier.rank] = error

    threads = [
        threading.Thread(target=run, args=(barrier,))
        for barrier in ThreadBarrier.group(size, timeout)
        if barrier.rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def save_by(location: Place, fill: Fill, **options: Any) -> None:
    """Save, and raise what went wrong: the cause rather than what the other ranks made of it."""
    errors = [error for error in outcomes(location, fill, **options) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerError)), errors[0])


def save(location: Place, state: State, **options: Any) -> None:
    """Save whole tensors."""

    def fill(writer: Writer) -> None:
        for name, tensor in state.items():
            add(writer, name, tensor)

    save_by(location, fill, **options)


def small_state(seed: int = 0) -> dict[str, Tensor]:
    """A few small tensors for strategies with an axis `fsdp`: cut, replicated, empty, scalar."""
    return {
        "model/w": Tensor(random_values((6, 5), "bfloat16", seed), {"fsdp": "shard(0)"}),
        "model/b": Tensor(random_values((3,), "float32", seed + 1)),
        "model/none": Tensor(random_values((0, 2), "int8"), {"fsdp": "shard(0)"}),
        "optimizer/w/step": Tensor(random_values((), "float64", seed + 2)),
    }


def assert_holds(checkpoint: Checkpoint, state: State, *, verify: bool = True) -> None:
    """Every tensor is there, whole, bit for bit, and nothing else is."""
    assert sorted(checkpoint.arrays) == sorted(state)
    for name, tensor in state.items():
        assert same(checkpoint.read(name, verify=verify), tensor.whole), name


def contents(store: Store) -> dict[str, bytes]:
    """Every object of a store."""
    return {entry.key: store.read(entry.key) for entry in store.list()}


def memory_with(objects: Mapping[str, bytes]) -> MemoryStore:
    """A store with these objects."""
    store = MemoryStore()
    for key, data in objects.items():
        store.put(key, data)
    return store


def flipped(store: Store, data: bytes) -> Store:
    """A copy of a store with one bit flipped at the beginning of data that one pack holds."""
    objects = contents(store)
    (key,) = [key for key, pack in objects.items() if key.endswith(".zip") and data in pack]
    pack = bytearray(objects[key])
    pack[pack.index(data)] ^= 1
    return memory_with({**objects, key: bytes(pack)})


def at_step(store: Store, step: int) -> Store:
    """The store of one step of the run in a store."""
    location = store.location / step_name(step)
    return MemoryStore(location) if location.scheme == "memory" else LocalStore(location)


def files(root: Path) -> dict[str, bytes]:
    """Every file below a folder, temporary ones too, and every folder that is empty."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(root))] = path.read_bytes()
        elif path.is_dir() and not any(path.iterdir()):
            found[f"{path.relative_to(root)}/"] = b""
    return found


def inodes(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything at and below a folder that any change would show in; links are not followed."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        it = path.lstat()
        what: object = None
        if path.is_symlink():
            what = path.readlink()
        elif path.is_file():
            what = path.read_bytes()
        times = (it.st_mtime_ns, it.st_ctime_ns)
        found[str(path)] = (it.st_ino, it.st_mode, it.st_nlink, it.st_size, *times, what)
    return found
