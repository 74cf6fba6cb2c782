"""Megatron-Core with its steps in ckptkit: `SaveStrategy` and `LoadStrategy` are what its
`dist_checkpointing.save` and `load` take as `sharded_strategy`; `load` finds the newest step.

Each rank reads the boxes of tensors that it asks for, whatever layout the step was saved under.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from ckptkit.plugins import Framework

_GROUPS = (
    *("pipeline_model_parallel", "tensor_model_parallel", "data_parallel", "context_parallel"),
    *("expert_model_parallel", "expert_tensor_parallel", "expert_data_parallel"),
)
_CHECKPOINTS = "megatron.core.dist_checkpointing"
_SAVE, _LOAD = "TorchDistSaveShardedStrategy", "TorchDistLoadShardedStrategy"
Framework("megatron-core", "0.16", "megatron").check(
    {
        f"{_CHECKPOINTS}.dict_utils": ["dict_list_map_outplace", "nested_values"],
        f"{_CHECKPOINTS}.mapping": ["ShardedObject", "ShardedTensor", "is_main_replica"],
        f"{_CHECKPOINTS}.strategies.async_utils": ["AsyncRequest"],
        "megatron.core.parallel_state": [
            "model_parallel_is_initialized",
            *(f"get_{group}_{what}" for group in _GROUPS for what in ("rank", "world_size")),
        ],
        # What it calls otherwise would save and load without us, unnoticed.
        f"{_CHECKPOINTS}.strategies.torch": [
            *(
                f"{_SAVE}.{name}(sharded_state_dict, checkpoint_dir)"
                for name in ("save", "async_save")
            ),
            f"{_LOAD}.load(sharded_state_dict, checkpoint_dir)",
            f"{_LOAD}.load_tensors_metadata(checkpoint_dir, metadata)",
            f"{_LOAD}.load_sharded_metadata(checkpoint_dir)",
            f"{_LOAD}.check_backend_compatibility(loaded_version)",
        ],
    }
)

# Only what is known to be there is imported.
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from ckptkit.checkpoint.places import (
    Place,
    StepFolder,
    newest_first,
    step_name,
    step_number,
    store_at,
)
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.write.damage import Damage, mark_replaceable
from ckptkit.errors import FormatError, NotFoundError, UsageError
from ckptkit.foreign.readers.megatron import COMMON, CONFIG
from ckptkit.live.fill import fill_boxes
from ckptkit.live.restore import NOT_LOADED, attempts, open_together
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.live.state.ranks import current_world, meeting
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.model import Box, DType
from ckptkit.plugins.dcp.names import from_leaf
from ckptkit.plugins.dcp.reader import Keys
from ckptkit.plugins.megatron_save import (
    BACKEND,
    FILE,
    OBJECT,
    SaveStrategy,
    leaves_of,
    number_in,
    pieces_of,
    temporary,
)
from ckptkit.storage import Options

__all__ = ["LoadStrategy", "SaveStrategy", "load"]


def load(
    sharded_state_dict: Any,
    location: Place,
    *,
    step: int | None = None,
    fallback: bool = False,
    verify: bool = True,
    threads: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Options | None = None,
    **options: Any,
) -> Any:
    """What `dist_checkpointing.load` gives, of the newest step of a run or of the one asked for;
    None where there is none. `options` are Megatron's.

    With `fallback`, a step that turns out to be damaged is reported in the log, and the one before
    it is loaded; what this job saves under its number takes its place.
    """
    store = store_at(location, storage_options)

    def found() -> list[int] | list[None]:
        numbers = newest_first(Run(store).steps() if step is None or fallback else [], step)
        if numbers:
            return numbers if fallback else numbers[:1]
        try:  # one step, by its own location
            open_checkpoint(store).close()
        except NotFoundError:
            return []
        return [None]

    with meeting(current_world(), "steps", timeout, NOT_LOADED) as ranks:
        candidates = ranks.share(found)
    steps = [StepFolder(store, "" if it is None else step_name(it)) for it in candidates]
    is_first = current_world().rank == 0
    damaged: list[Damage] = []
    for folder, attempt in attempts(steps, damaged, is_first=is_first):
        with attempt:
            strategy = LoadStrategy(
                store,
                step=step_number(folder.name),
                verify=verify,
                threads=threads,
                timeout=timeout,
            )
            made = strategy.folder()
            loaded = dist_checkpointing.load(sharded_state_dict, made, strategy, **options)
            if is_first:
                mark_replaceable(damaged, folder)
            return loaded
    return None


class LoadStrategy(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads from a run: `dist_checkpointing.load(state, folder, LoadStrategy("runs/gpt"))`.

    The step is the one asked for, or that in the name of the folder. Where the folder that Megatron
    wrote is not at hand, `folder()` makes it again, of the step asked for or of the newest.
    """

    def __init__(
        self,
        location: Place,
        *,
        step: int | None = None,
        verify: bool = True,
        threads: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        storage_options: Options | None = None,
    ) -> None:
        super().__init__()
        self._store = store_at(location, storage_options)
        self._step = step
        self._verify = verify
        self._threads = threads
        self._timeout = timeout
        self._opened: Checkpoint | None = None
        self._folders = temporary(self)

    def folder(self) -> str:
        """A folder of what Megatron itself reads of a step. All ranks call it."""
        with meeting(current_world(), "folder", self._timeout, NOT_LOADED) as ranks:
            self._opened = opened = open_together(self._store, self._step, ranks)
            _refuse_foreign(opened)
            made = self._folders / f"iter_{opened.step:07d}"
            made.mkdir(exist_ok=True)
            said = opened.objects.get(OBJECT)
            if isinstance(said, dict) and isinstance(said.get("common"), bytes):
                (made / COMMON).write_bytes(said["common"])
            else:  # a step of another program has tensors only
                torch.save({}, made / COMMON)
            config = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
            (made / CONFIG).write_text(json.dumps(config))
            ranks.wait()
        return str(made)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Fill the tensors of a state dictionary; what it has comes back with values in it."""
        with meeting(current_world(), "load", self._timeout, NOT_LOADED) as ranks:
            opened, self._opened = self._opened, None
            if opened is None:
                opened = open_together(self._store, self._number(checkpoint_dir), ranks)
            with opened as checkpoint:
                _refuse_foreign(checkpoint)
                tensors, objects = leaves_of(sharded_state_dict)
                values = _values(checkpoint, objects)
                wanted = _wanted(Keys(checkpoint), tensors)
                fill_boxes(checkpoint, wanted, verify=self._verify, threads=self._threads)
            ranks.wait()

        def given(held: Any) -> Any:
            is_object = isinstance(held, ShardedObject)
            return values[held.unique_key] if is_object else held.data.detach()

        return dict_list_map_outplace(given, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:  # noqa: ARG002
        found = {}
        for key, (dtype, shape) in self._said(checkpoint_dir)["tensors"].items():
            empty = torch.empty(shape, dtype=torch_dtype(DType.of(dtype)), device="meta")
            found[key] = ShardedTensor.from_rank_offsets(key, empty).without_data()
        return found

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        found = self.load_tensors_metadata(checkpoint_dir)
        for key in self._said(checkpoint_dir)["objects"]:
            found[key] = ShardedObject.empty_from_unique_key(key)
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        raise UsageError("a step is not changed any more", where=checkpoint_dir, value=key_prefix)

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        if loaded_version != BACKEND:
            raise UsageError(
                "the tensors of this folder are in no run of ckptkit, Megatron has written them",
                value=loaded_version,
                hint="load it without sharded_strategy=, and save it with SaveStrategy",
            )

    def _number(self, folder: Any) -> int:
        return number_in(folder) if self._step is None else self._step

    def _said(self, folder: Any) -> dict[str, Any]:
        """What the step says of Megatron's keys."""
        opened = self._opened
        checkpoint = Run(self._store).open(self._number(folder)) if opened is None else opened
        said = checkpoint.objects.get(OBJECT)
        if not isinstance(said, dict):
            raise UsageError(
                "the step does not say which keys of Megatron it has: another program made it",
                where=checkpoint.location,
                hint="leave out strict=",
            )
        return said


def _refuse_foreign(checkpoint: Checkpoint) -> None:
    if checkpoint.foreign is not None:
        raise UsageError(
            f"this is no step of ckptkit, but a checkpoint of {checkpoint.foreign.format}",
            where=checkpoint.location,
            hint="load what Megatron wrote by its own dist_checkpointing.load alone, and save it "
            "with SaveStrategy",
        )


def _values(checkpoint: Checkpoint, objects: Sequence[Any]) -> dict[str, Any]:
    """What the step has besides tensors of what is asked for, by Megatron's keys."""
    stored: dict[str, Any] = {}
    for name, said in checkpoint.objects.items():
        if name.startswith(f"{OBJECT}/"):
            if not isinstance(said, dict) or not isinstance(said.get("values"), dict):
                raise FormatError("not what a save writes", where=f"objects.{name}", value=said)
            stored |= said["values"]
    found: dict[str, Any] = {}
    for key in (held.unique_key for held in objects):
        if key not in stored:
            raise StateMismatchError(
                "the step has no such object, or of another number of ranks",
                where=checkpoint.location,
                value=key,
                hint="under another layout leave it out of the state dictionary, as rng_state",
            )
        found[key] = value = from_leaf(key, stored[key])
        if isinstance(value, dict) and value.keys() == {FILE}:
            found[key] = torch.load(io.BytesIO(value[FILE]), weights_only=True)
    return found


def _wanted(keys: Keys, tensors: Sequence[Any]) -> list[tuple[str, Box, torch.Tensor]]:
    """Which boxes of which arrays fill what a rank holds of some tensors."""
    wanted: list[tuple[str, Box, torch.Tensor]] = []
    lacking: list[str] = []
    for held in tensors:
        held.init_data("cpu")
        if held.allow_shape_mismatch:
            held.data.detach().zero_()
        for piece in pieces_of(held):
            name = keys.array(piece.fqn)
            if name is None:
                lacking.append(f"{piece.fqn} is not there")
                continue
            there, box, memory = keys.checkpoint.info(name).shape, piece.box, piece.memory
            if there != piece.shape:
                if not held.allow_shape_mismatch or len(there) != len(piece.shape):
                    lacking.append(f"{piece.fqn} is {there}, not {piece.shape}")
                    continue
                # Vocabularies are padded for as many ranks as there were: the rest stays zero.
                common = box.intersect(Box.whole(there))
                if common is None:
                    continue
                box, memory = common, memory[common.within(box)]
            wanted.append((name, box, memory))
    if lacking:
        raise StateMismatchError(
            f"the step is of another model: {'; '.join(lacking[:4])}"
            + (f"; and {len(lacking) - 4} more" if len(lacking) > 4 else ""),
            where=keys.checkpoint.location,
            hint="`ckpt show` lists what the step has; --names and --rename of `ckpt reshard` give "
            "it other names",
        )
    return wanted
