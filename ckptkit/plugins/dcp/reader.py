"""A load of DCP from a step, or from what another program saved. DCP plans which box of which
tensor goes where on each rank: each reads just those boxes, and compares what it reads with its
checksums.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptkit.checkpoint.places import Place, StepFolder, newest_first, read_manifest, step_name
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, failing_together
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.write.damage import Damage, mark_replaceable, stamp
from ckptkit.errors import (
    FormatError,
    LayoutError,
    NotFoundError,
    PeerError,
)
from ckptkit.foreign.states import MODEL_KEYS, OPTIMIZER_KEYS, Path
from ckptkit.format.names import MODEL, OPTIMIZER
from ckptkit.live.fill import fill_boxes
from ckptkit.live.restore import NOT_LOADED, attempts, raise_alike
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.live.state_dict import nested_state
from ckptkit.model import Box
from ckptkit.plugins.dcp.names import (
    OBJECT,
    Meeting,
    Names,
    Target,
    from_leaf,
    told_by,
    value_in,
)
from ckptkit.storage import Options

log = logging.getLogger("ckptkit.plugins")


class DcpReader(StorageReader):
    """DCP's storage reader: `dcp.load(state, storage_reader=Reader(run))`.

    `location` is a run (its newest step, or the one of a number, is read), a step, or what another
    program saved, in any format that `ckptkit.open` opens. What DCP did not save may be asked for
    under any of the usual keys: `model.`, `module.` or none at all for the model's tensors,
    `optim.state.` or `optimizer.state.` for those of the optimizer.

    With `fallback`, a step that turns out to be damaged is reported in the log, and all ranks load
    the one before it; what this job saves under its number takes its place.
    """

    def __init__(
        self,
        location: Place,
        *,
        step: int | None = None,
        fallback: bool = False,
        verify: bool = True,
        threads: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        storage_options: Options | None = None,
    ) -> None:
        self._target = Target(location, step, storage_options)
        self._fallback = fallback
        self._verify = verify
        self._threads = threads
        self._timeout = timeout
        self._rank = 0
        self._keys: Keys | None = None
        self._damaged: list[Damage] = []
        self._older: list[StepFolder] = []
        """What there is to go back to."""

    @property
    def step(self) -> int | None:
        """The step that was read; None before that."""
        return None if self._keys is None else self._keys.checkpoint.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._target.name(checkpoint_id)
        self._keys, self._damaged, self._older = None, [], []

    def read_metadata(self) -> Metadata:
        self._keys = self._found()
        return self._keys.metadata()

    def set_up_storage_reader(
        self,
        metadata: Metadata,  # noqa: ARG002
        is_coordinator: bool,  # noqa: ARG002, FBT001 — DCP's
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        self._rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._opened().checkpoint.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        mine = plans[0].storage_data
        if any(plan.storage_data != mine for plan in plans):
            # Each has looked for itself, while another save was committed.
            raise PeerError(
                "not all ranks have opened the same step",
                where=str(self._target),
                value=sorted({str(plan.storage_data) for plan in plans}),
                hint="load again, or say which: Reader(run, step=…)",
            )
        meeting = Meeting.of(len(plans))
        return [replace(plan, storage_data=meeting) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        keys = self._opened()
        if self._fallback:
            self._keys = self._read_any(plan, planner)
        else:
            with keys.checkpoint:
                keys.read(plan.items, planner, verify=self._verify, threads=self._threads)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def _opened(self) -> Keys:
        if self._keys is None:
            self._keys = self._found()
        return self._keys

    def _found(self) -> Keys:
        """The step to load: with `fallback` the newest that can be opened."""
        store, step = self._target.store(), self._target.step
        numbers: list[int] = []
        if self._fallback:
            numbers = newest_first(n for n in Run(store).steps() if step is None or n <= step)
        folders = [StepFolder(store, step_name(number)) for number in numbers]
        damaged: list[Damage] = []
        for folder, attempt in attempts(folders, damaged):
            with attempt:
                keys = Keys(Checkpoint(folder, read_manifest(folder)))
                # Which saves are damaged is said now: one that is made from here on stays.
                self._damaged = [(at, stamp(at), error) for at, _, error in damaged]
                self._older = folders[len(damaged) + 1 :]
                return keys
        try:
            return Keys(Run(store).open(step) if step is not None else open_checkpoint(store))
        except NotFoundError:
            if former := self._target.former():
                store, step = former
                with suppress(NotFoundError):
                    return Keys(Run(store).open(step))
            raise

    def _read_any(self, plan: LoadPlan, planner: LoadPlanner) -> Keys:
        """Read the first step that is whole, on all ranks alike."""
        meeting = told_by(plan, Meeting, planner, str(self._target))
        keys = planned = self._opened()
        damaged, self._damaged = self._damaged, []
        ranks = meeting.ranks(self._rank, self._timeout, NOT_LOADED)
        with failing_together(ranks):
            steps = [planned.checkpoint.folder]
            older = ranks.share(lambda: [folder.name for folder in self._older])
            steps += [StepFolder(steps[0].store, name) for name in older]
            for folder, attempt in attempts(steps, damaged, is_first=ranks.rank == 0):
                problem: FormatError | None = None
                with attempt:
                    try:
                        if folder is not steps[0]:
                            keys = Keys(Checkpoint(folder, read_manifest(folder)))
                            keys.check_alike(plan.items, planned)
                        with keys.checkpoint:
                            keys.read(
                                plan.items, planner, verify=self._verify, threads=self._threads
                            )
                    except FormatError as error:
                        problem = error
                    raise_alike(ranks, problem)
                    break
            if ranks.rank == 0:
                mark_replaceable(damaged, keys.checkpoint.folder)
        ranks.end()
        return keys


class _Entries(dict[str, Any]):
    """What DCP's planners look names up in: also by the usual spellings of those that are there."""

    def __init__(self, keys: Keys, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self._keys = keys
        self._has_told = False

    def __contains__(self, fqn: object) -> bool:
        if super().__contains__(fqn) or (isinstance(fqn, str) and self._keys.find(fqn)):
            return True
        if not self._has_told:
            # DCP only names the key: what the step has instead says why.
            self._has_told = True
            shown = ", ".join([*self][:4]) or "nothing"
            place = self._keys.checkpoint.location
            log.warning(
                "%s has no %s; it has %s, …: `ckpt show %s` lists all", place, fqn, shown, place
            )
        return False

    def __missing__(self, fqn: str) -> Any:
        found = self._keys.find(fqn)
        if found is None:
            raise KeyError(fqn)
        return self._keys.described(found)


class Keys:
    """What is in a step by the keys of DCP, which are those that it was saved with; of what was not
    saved by DCP, the usual ones.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._arrays: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._usual: dict[str, str] = {}
        """How a key is spelled here, where DCP did not save it."""
        objects = dict(checkpoint.objects)
        if OBJECT in objects:
            self._take_own(objects)
        else:
            self._take_usual()

    def metadata(self) -> Metadata:
        """As DCP asks for it."""
        known = {fqn: self.described(fqn) for fqn in (*self._arrays, *self._values)}
        return Metadata(
            state_dict_metadata=_Entries(self, known),
            planner_data=dict(self._paths),
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint.location),
        )

    def find(self, fqn: str) -> str | None:
        """The key that a key stands for; None where there is nothing of it."""
        if fqn in self._arrays or fqn in self._values:
            return fqn
        if not self._usual:
            return None
        head, _, rest = fqn.partition(".")
        tried = [fqn, f"{MODEL}.{fqn}"]
        tried += [f"{MODEL}.{rest}"] if head in MODEL_KEYS else []
        tried += [f"{OPTIMIZER}.{rest}"] if head in OPTIMIZER_KEYS else []
        return next((self._usual[key] for key in tried if key in self._usual), None)

    def array(self, fqn: str) -> str | None:
        """The array that a key stands for; None where there is none."""
        found = self.find(fqn)
        return None if found is None else self._arrays.get(found)

    def check_alike(self, items: Sequence[ReadItem], planned: Keys) -> None:
        """Refuse a plan that was made for another step, where that has tensors of other shapes: of
        those here it would fill a part, or nothing.
        """
        for fqn in dict.fromkeys(item.storage_index.fqn for item in items):
            shapes = [
                None if (array := keys.array(fqn)) is None else keys.checkpoint.info(array).shape
                for keys in (planned, self)
            ]
            if shapes[0] != shapes[1]:
                raise LayoutError(
                    f"Size mismatch: {shapes[1]} in this step, {shapes[0]} in the damaged one",
                    where=f"{self.checkpoint.location}: {fqn}",
                    hint="load it into objects that are made for it: Reader(run, step=…)",
                )

    def described(self, fqn: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """What DCP wants to know of a key: a tensor is told as one chunk, of which any box is
        read.
        """
        if fqn in self._values:
            return BytesStorageMetadata()
        info = self.checkpoint.info(self._arrays[fqn])
        shape = torch.Size(info.shape)
        whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
        return TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(info.dtype)), shape, [whole]
        )

    def read(
        self, items: Sequence[ReadItem], planner: LoadPlanner, *, verify: bool, threads: int | None
    ) -> None:
        """Fill what a plan asks for: all at once, unless the planner does something in between."""
        commit = getattr(planner.commit_tensor, "__func__", None)
        if len(items) > 1 and commit is not DefaultLoadPlanner.commit_tensor:
            # Torch promises pairs of `resolve_tensor` and `commit_tensor`: a planner may lend one
            # buffer for all tensors, or remember which of them it is lent for.
            for item in items:
                self.read([item], planner, verify=verify, threads=threads)
            return
        where = self.checkpoint.location
        wanted: list[tuple[str, Box, torch.Tensor]] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            fqn = item.storage_index.fqn
            key = self.find(fqn)
            if key is None or (key in self._values) != (item.type == LoadItemType.BYTE_IO):
                raise NotFoundError("the step has no such value", where=where, value=fqn)
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self._values[key], data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            target = planner.resolve_tensor(item).detach()
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            if tuple(target.shape) != box.shape:
                raise NotFoundError(
                    f"the planner gives {tuple(target.shape)} for {box.shape}",
                    where=where,
                    value=fqn,
                )
            wanted.append((self._arrays[key], box, target))
            filled.append((item, target))
        fill_boxes(self.checkpoint, wanted, verify=verify, threads=threads)
        for item, target in filled:
            planner.commit_tensor(item, target)

    def _take_own(self, objects: Mapping[str, Any]) -> None:
        """The keys of a step that DCP saved."""
        where = f"objects.{OBJECT}"
        own = objects[OBJECT]
        if not isinstance(own, dict) or own.keys() != {"names", "values"}:
            raise FormatError("not what a save writes", where=where, value=own)
        names = Names.from_doc(own["names"], where)
        for name in self.checkpoint.names:
            path = names.path(name)
            fqn = ".".join(map(str, path))
            self._arrays[fqn], self._paths[fqn] = name, path
        for key, said in objects.items():
            if key != OBJECT and not key.startswith(f"{OBJECT}/"):
                continue
            values = said.get("values") if isinstance(said, dict) else None
            if not isinstance(values, dict):
                raise FormatError("not what a save writes", where=f"objects.{key}", value=said)
            for fqn, each in values.items():
                path, value = value_in(names, objects, each, f"objects.{key}")
                self._paths[fqn] = path
                self._values[fqn] = from_leaf(fqn, value)

    def _take_usual(self) -> None:
        """The keys that DCP would have for a step, and those that another program had."""
        foreign = self.checkpoint.foreign
        theirs = {} if foreign is None else foreign.theirs
        tensors: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for name in self.checkpoint.names:
            info = self.checkpoint.info(name)
            tensors[name] = torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")
            names[id(tensors[name])] = name
        tree = nested_state(self.checkpoint, tensors)
        extra = tree.pop("extra", {})
        tree |= {key: value for key, value in extra.items() if key not in tree}
        for path, leaf in _leaves(tree, ()):
            usual = fqn = ".".join(map(str, path))
            if isinstance(leaf, torch.Tensor):
                name = names[id(leaf)]
                fqn = theirs.get(name, fqn)
                self._arrays[fqn] = name
            else:
                self._values[fqn] = leaf
            self._paths[fqn] = path if fqn == usual else (fqn,)
            self._usual[usual] = fqn
            self._usual.setdefault(fqn, fqn)
        # The options of groups, by parameter, as flat state of optimizers has them.
        optimizer = tree.get(OPTIMIZER)
        groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
        for number, group in enumerate(groups or ()):
            for parameter in group["params"]:
                for key in group.keys() - {"params"}:
                    flat = f"{OPTIMIZER}.param_groups.{parameter}.{key}"
                    self._usual.setdefault(flat, f"{OPTIMIZER}.param_groups.{number}.{key}")


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """What DCP makes of nested dictionaries: a key for each value, lists of plain values whole."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list) and any(isinstance(v, Mapping | list | torch.Tensor) for v in tree):
        for number, value in enumerate(tree):
            yield from _leaves(value, (*path, number))
    else:
        yield path, tree
