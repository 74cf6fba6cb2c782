"""A save of Megatron as a step. Megatron says which rank writes which box of which tensor: that is
a plan as those of DCP. What its own two small files say is in the step, too.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import _DistWrapper

from ckptkit.checkpoint.places import Place
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, failing_together
from ckptkit.checkpoint.workers import DEFAULT_THREADS
from ckptkit.errors import CkptkitError, UnsupportedTypeError, UsageError
from ckptkit.foreign.extents import Extent, ForeignArray
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.readers.megatron import (
    COMMON,
    CONFIG,
    HALF,
    OF_RANKS,
    optimizer_of,
    parameters_of,
    read_common,
)
from ckptkit.foreign.spread import by_places, placed_by_writers
from ckptkit.foreign.states import Path as Keys
from ckptkit.foreign.states import StateTensor, states_of
from ckptkit.format.names import split
from ckptkit.live.background import Background
from ckptkit.live.state.ranks import current_world, next_name, ranks_of
from ckptkit.live.state.tensors import dtype_name, dtype_of
from ckptkit.model import Box, Strategy
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.plugins.dcp.names import as_leaf
from ckptkit.plugins.dcp.writer import DcpWriter, ToldArray
from ckptkit.storage import Options, open_store

BACKEND = "ckptkit"
"""What `metadata.json` says of a folder whose tensors are in a run of ours."""

OBJECT = "megatron"
"""The object of a step that has Megatron's `common.pt`, and its keys of tensors and objects."""

FILE = "ckptkit.megatron.file"
"""The mark of a value that a step has no type for: a file of torch, as Megatron's own have it."""

_NUMBERED = re.compile(r"(?:.*[^0-9])?(?:iter|step)[-_]?([0-9]{1,19})", re.ASCII)


class SaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves into a run: `dist_checkpointing.save(state, folder, SaveStrategy("runs/gpt"))`.

    `location` is a run, a path or a URL. The number of the step is that in the name of the folder,
    such as `iter_0000500`; `folder(500)` is one of that name which nobody needs afterwards. Of
    older steps `keep_last` and `keep_every` are kept.
    """

    def __init__(
        self,
        location: Place,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        overwrite: bool = False,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        threads: int = DEFAULT_THREADS,
        timeout: float = DEFAULT_TIMEOUT,
        storage_options: Options | None = None,
    ) -> None:
        super().__init__(BACKEND, 1)
        self._writer = MegatronWriter(
            location,
            keep_last=keep_last,
            keep_every=keep_every,
            overwrite=overwrite,
            chunk_bytes=chunk_bytes,
            threads=threads,
            timeout=timeout,
            storage_options=storage_options,
        )
        self._timeout = timeout
        self._background = Background()
        self._folders = temporary(self)

    def folder(self, step: int) -> str:
        """A folder for what Megatron itself writes of a step."""
        for old in self._folders.glob("iter_*"):
            # Megatron writes this file last.
            if (old / CONFIG).exists():
                shutil.rmtree(old)
        made = self._folders / f"iter_{step:07d}"
        made.mkdir(exist_ok=True)
        return str(made)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Return when the step is committed."""
        self._begun(sharded_state_dict, checkpoint_dir, is_staged=False)()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Return when the state is copied; a thread writes it, which Megatron's request waits for.

        The process that Megatron starts to write, a copy of this one or a new one, could not meet
        those of the other ranks: all it does is to wait until a file is gone.
        """
        finish = self._begun(sharded_state_dict, checkpoint_dir, is_staged=True)
        mark = self._folders / f"writing-{time.monotonic_ns()}"
        mark.touch()

        def work() -> None:
            try:
                finish()
            finally:
                mark.unlink(missing_ok=True)

        self._background.run(work, f"saving {checkpoint_dir}")
        return AsyncRequest(wait_until_gone, (str(mark), os.getpid()), [self._background.wait])

    def _begun(self, state: Any, place: Any, *, is_staged: bool) -> Callable[[], None]:
        """Prepare a save, on all ranks; what is returned writes it."""
        self._background.wait()
        world, folder, planner = current_world(), Path(place), _Pieces()

        # Plan: rank 0 hears what each rank writes.
        self._writer.set_up_storage_writer(world.rank == 0, rank=world.rank)

        def local() -> SavePlan:
            self._writer.reset(str(number_in(folder)))
            planner.take(*leaves_of(state))
            return planner.create_local_plan()

        wrapper = _DistWrapper(None, use_dist=world.size > 1, coordinator_rank=0)
        try:
            plan = wrapper.reduce_scatter("plan", local, self._writer.prepare_global_plan)
        except CheckpointException as error:
            problems = [problem for problem, _ in error.failures.values()]
            raise next((p for p in problems if isinstance(p, CkptkitError)), error) from None

        # Fill this rank's pack; rank 0 adds what Megatron has written for all.
        ranks = ranks_of(world, next_name(world, "megatron"), self._timeout)
        writer = self._writer.prepared(plan, planner)
        with failing_together(ranks):
            if planner.values:
                writer.add_object(f"{OBJECT}/rank-{world.rank:05d}", {"values": planner.values})
            if world.rank == 0:
                common = (folder / COMMON).read_bytes()
                writer.add_object(OBJECT, {"common": common, **self._writer.heard})
                for key, value in _shown(folder, plan.storage_data.arrays.values()).items():
                    writer.add_object(key, value)
            if is_staged:
                writer.stage()
            ranks.wait()

        def finish() -> None:
            self._writer.commit(writer)
            with failing_together(ranks):
                if world.rank == 0:
                    self._writer.prune()
                ranks.wait()

        return finish


class _Told(NamedTuple):
    """What a rank tells the first one, beside its plan."""

    places: Mapping[str, tuple[int, int]]
    """Where the rank is along each axis, and how long that is."""
    keys: Mapping[str, Any]


class MegatronWriter(DcpWriter):
    """DCP's writer, to which ranks have said where they are in the layout of Megatron."""

    heard: Mapping[str, Any]
    """On rank 0: Megatron's keys of all tensors, and of all objects."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        told = [plan.storage_data for plan in plans]
        self.heard = {
            "tensors": {key: said for each in told for key, said in each.keys["tensors"].items()},
            "objects": [key for each in told for key in each.keys["objects"]],
        }
        return super().prepare_global_plan(plans)

    def _spread_over(
        self, arrays: list[ForeignArray], plans: Sequence[SavePlan]
    ) -> tuple[Strategy, list[ForeignArray]]:
        strategy = by_places([plan.storage_data.places for plan in plans])
        if strategy is None:
            return super()._spread_over(arrays, plans)
        return strategy, placed_by_writers(arrays, strategy, int)


def _places() -> dict[str, tuple[int, int]]:
    """Where this rank is along each axis of Megatron, and how long that is."""

    def place(group: str) -> tuple[int, int]:
        rank: int = getattr(parallel_state, f"get_{group}_rank")()
        return rank, getattr(parallel_state, f"get_{group}_world_size")()

    if not parallel_state.model_parallel_is_initialized():
        return {}
    found = {"pp": place("pipeline_model_parallel"), "tp": place("tensor_model_parallel")}
    experts = place("expert_model_parallel")
    if experts[1] == 1:
        return {**found, "ddp": place("data_parallel"), "cp": place("context_parallel")}
    if place("expert_tensor_parallel") != found["tp"]:
        return {}  # experts are on a mesh of their own
    return {**found, "ep": experts, "ddp": place("expert_data_parallel")}


def wait_until_gone(mark: str, writing: int) -> None:
    """Return when a file is gone, or else the process that writes."""
    while Path(mark).exists() and writing in (os.getpid(), os.getppid()):
        time.sleep(0.01)


def _shown(folder: Path, arrays: Iterable[ToldArray]) -> dict[str, Any]:
    """What Megatron has written for all ranks, as the objects that a step has where its folder was
    imported: for people, for `ckpt diff`, and for a job of torch that goes on with the step. To
    Megatron a load gives back the file itself.
    """
    store = open_store(folder)
    common = read_common(Folder(store, {item.key: item for item in store.list("")}), {})
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for array in arrays:
        tensor = StateTensor(array.kind.shape, array.kind.dtype, ())
        match split(array.name):
            case "model", name:
                model[name] = tensor
            case "optimizer", name, key:
                states.setdefault(name, {})[key] = tensor
    said = common.pop("optimizer", None)
    beside = {key: common.pop(key) for key in ("model",) if common.get(key)}
    optimizer = optimizer_of(states, [said])
    found = states_of({**common, "model": model, **optimizer}, str(folder))
    for key, value in {**beside, "optimizer": [said] if said else None}.items():
        if value:
            # All of it is loaded again, so it replaces what was left of it here.
            found.objects.pop(f"extra/{key}", None)
            found.keep(f"extra/{key}", value)
    return {name: item.value for name, item in found.objects.items()}


class _Pieces(DefaultSavePlanner):
    """What this rank writes, as DCP asks for it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.values: dict[str, Any] = {}
        """What is no tensor, by Megatron's keys."""
        self._items: list[WriteItem] = []
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._memory: dict[tuple[str, torch.Size], torch.Tensor] = {}
        self._keys: dict[str, Any] = {}

    def take(self, tensors: Sequence[Any], objects: Sequence[Any]) -> None:
        """Take what this rank is the one to write of."""
        for held in filter(lambda each: is_main_replica(each.replica_id), tensors):
            self._keys[held.key] = [dtype_name(held.data.dtype), list(held.global_shape)]
            for piece in pieces_of(held):
                offset = torch.Size(piece.box.offset)
                chunk = ChunkStorageMetadata(offset, torch.Size(piece.box.shape))
                like = TensorProperties(dtype=piece.memory.dtype)
                data = TensorWriteData(chunk, like, torch.Size(piece.shape))
                index = MetadataIndex(piece.fqn, offset)
                self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._paths[piece.fqn] = piece.keys
                self._memory[piece.fqn, offset] = piece.memory
        for held in filter(lambda each: is_main_replica(each.replica_id), objects):
            key = held.unique_key
            try:
                self.values[key] = as_leaf(key, held.data)
            except UnsupportedTypeError:  # as torch would save it
                file = io.BytesIO()
                torch.save(held.data, file)
                self.values[key] = {FILE: file.getvalue()}

    def create_local_plan(self) -> SavePlan:
        told = _Told(_places(), {"tensors": self._keys, "objects": sorted(self.values)})
        return SavePlan(self._items, storage_data=told, planner_data=self._paths)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        assert index.offset is not None  # noqa: S101 — asked of tensors only
        return self._memory[index.fqn, index.offset]


# What Megatron's sharded tensors are of the parameters of a model: of each layer and expert, by
# the names that steps have; and its folders, in which its own small files are.


class HeldPiece(NamedTuple):
    """What a rank holds of one array."""

    keys: Keys
    """The keys that lead to it in the state dictionary of a job of torch."""
    shape: tuple[int, ...]
    """The shape of the whole array."""
    box: Box
    memory: torch.Tensor

    @property
    def fqn(self) -> str:
        """What DCP calls it."""
        return ".".join(map(str, self.keys))


def pieces_of(held: Any) -> Iterator[HeldPiece]:
    """The pieces that one of Megatron's sharded tensors is, as views of its memory."""
    data: torch.Tensor = held.data.detach()
    above = held.prepend_axis_num
    box = Box(tuple(held.global_offset), (1,) * above + tuple(data.shape))
    strides = (0,) * above + data.stride()
    dtype = dtype_of(held.key, data)
    whole = StateTensor(tuple(held.global_shape), dtype, (Extent(box, "", 0, strides),))
    if OF_RANKS.fullmatch(held.key):
        yield HeldPiece((held.key,), whole.shape, box, data)
        return
    for state, name, _, one in parameters_of(held.key, whole):
        for part in one.extents:
            assert part.strides is not None  # noqa: S101 — they were given
            start = data.storage_offset() + part.offset // dtype.itemsize
            memory = data.as_strided(part.box.shape, part.strides, start)
            parameter, shape, place = name, one.shape, part.box
            # The halves of a gated layer may have a key each: a parameter has both.
            if half := HALF.fullmatch(name):
                parameter, rows = half[1], shape[0]
                below = rows if half[2] == "v" else 0
                place = Box((place.offset[0] + below, *place.offset[1:]), place.shape)
                shape = (2 * rows, *shape[1:])
            keys: Keys = ("model", parameter)
            if state is not None:
                keys = ("optimizer", "state", parameter, state)
            yield HeldPiece(keys, shape, place, memory)


def leaves_of(state: Any) -> tuple[list[Any], list[Any]]:
    """The sharded tensors of a state dictionary, and its sharded objects."""
    leaves = list(nested_values(state))
    for leaf in leaves:
        if not isinstance(leaf, ShardedTensor | ShardedObject):
            raise UsageError("not of a sharded state dictionary", value=type(leaf).__name__)
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    return tensors, [leaf for leaf in leaves if isinstance(leaf, ShardedObject)]


def number_in(folder: Any) -> int:
    """The step that a folder is named after."""
    found = _NUMBERED.fullmatch(Path(folder).name)
    if found is None:
        raise UsageError(
            "the folder does not say which step this is",
            where=str(folder),
            hint="name it as Megatron does, such as iter_0000500, or take that of strategy.folder",
        )
    return int(found[1])


def temporary(owner: object) -> Path:
    """A folder that goes with its owner."""
    made = tempfile.mkdtemp(prefix="ckptkit-")
    weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)
    return Path(made)
