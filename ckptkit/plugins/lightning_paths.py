"""The checkpoints of a run by the paths that Lightning gives them.

Lightning thinks in paths such as `runs/a/epoch=1-step=300.ckpt`. The folder is the run, and what is
saved is its step 300. At the path lies a small file which says so: Lightning finds, lists, links
and compares it as it would a file of its own. Each of these has a step to itself, so that removing
or replacing it takes exactly that. Where the run has a step of this number already (for another
file, or of another attempt) it goes to the first of the runs `v1`, `v2` … below that has none.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ckptkit.checkpoint.places import StepFolder, manifest_size, step_name, store_at
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.write.damage import Damage
from ckptkit.errors import FormatError, NotFoundError, UnsupportedTypeError, UsageError
from ckptkit.format.names import OPTIMIZER
from ckptkit.format.objects import Replicated
from ckptkit.live import Checkpointer, Restored, load, load_state
from ckptkit.live.background import Background
from ckptkit.live.restore import NOT_LOADED, attempts, check_whole
from ckptkit.live.resume import saved_documents
from ckptkit.live.save import LastSave, SaveOptions, prepare
from ckptkit.live.state.extra import SEEN_BY_ALL
from ckptkit.live.state.ranks import World, current_world, meeting
from ckptkit.live.wrappers import Training
from ckptkit.storage import Options, Store

log = logging.getLogger("ckptkit.plugins")

_GROUP = "lightning"
_LARGEST = 4096
_SAVING = ("asynchronous", "chunk_bytes", "differing", "rules", "storage_options", "threads")
_LOADING = ("cast", "fallback", "partial", "read_once", "skip", "verify")


class PathTarget(NamedTuple):
    """What a path leads to."""

    location: str
    steps: list[tuple[str, int]]
    """The run and the number of the step, and of those to go back to; none where it is no run of
    ours."""
    groups: list[str]
    """What the step has besides tensors."""


@dataclass(eq=False)
class Content:
    """What a Lightning checkpoint has besides the model, its optimizers and the loaders."""

    content: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return self.content

    def load_state_dict(self, content: Mapping[str, Any]) -> None:
        """Take it over."""
        self.content = dict(content)


@dataclass(eq=False)
class Loaders:
    """The positions of the data loaders that have one, of this rank's share of the data."""

    states: list[Any] = field(default_factory=list)
    is_resized: bool = False

    def state_dict(self) -> dict[str, Any]:
        """What Lightning was told, and in a job of how many ranks."""
        return {"states": self.states, "ranks": current_world().size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What Lightning is to tell the loaders."""
        self.states = list(state["states"])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The same in a job of another size, where the loaders count the samples of all ranks."""
        first, *others = (state["states"] for state in states)
        if any(SEEN_BY_ALL not in each for each in first) or any(it != first for it in others):
            raise UsageError(
                "a job of another size cannot go on where these data loaders were",
                where="dataloader",
                hint="ckptkit.plugins.torchdata.ElasticDataLoader goes on at any size; "
                'restore={"skip": ["dataloader"]} begins the epoch again',
            )
        self.states, self.is_resized = list(first), True


class PathRuns:
    """The checkpoints of one trainer, by the paths that Lightning gives them."""

    def __init__(
        self, checkpointer: Mapping[str, Any] | None, restore: Mapping[str, Any] | None
    ) -> None:
        self._saving = _checked("checkpointer", checkpointer or {}, _SAVING)
        self._loading = _checked("restore", restore or {}, _LOADING)
        self._stores: dict[str, Store] = {}
        # By location. One saves at a time, so that all of them share the memory of one.
        self._open: dict[str, Checkpointer] = {}
        self._last = LastSave()
        # What follows a commit on rank 0: the small file, and what that replaces.
        self._later = Background()
        self._unnamed = ""

    def save(
        self, path: Any, content: dict[str, Any], model: object, optimizers: Sequence[Optimizer]
    ) -> None:
        """Save what Lightning has put together, with what the live objects have: all ranks."""
        step, objects = int(content["global_step"]), _objects(content, model, optimizers)
        for each in self._open.values():
            each.wait()
        with meeting(current_world(), "lightning-save") as ranks:
            place, location = ranks.share(lambda: (os.fspath(path), self._free(path, step)))
        checkpointer = self._at(location)
        with _naming_keys():
            checkpointer.save(step, **objects)
        with meeting(current_world(), "lightning-name") as ranks:
            if ranks.rank == 0:
                # Given the checkpointer itself: by then this trainer may have let go of it.
                name = partial(self._name, place, location, step, checkpointer)
                self._after(name, f"naming {place}")
            ranks.wait()

    def save_alone(
        self, path: Any, content: dict[str, Any], model: object, optimizers: Sequence[Optimizer]
    ) -> None:
        """Save on one rank of a job whose ranks all have the whole state."""
        step, objects = int(content["global_step"]), _objects(content, model, optimizers)
        location = self._free(path, step)
        store, training = self._store(location), Training.of(**objects)
        options = SaveOptions()
        with _naming_keys():
            saved = prepare(
                store, step, training, None, options, self._last, world=World(), ranks=OneRank()
            )
            saved.writer.commit()
        self._last.keep(saved)
        self._name(os.fspath(path), location, step)

    def load(
        self,
        path: Any,
        model: object,
        optimizers: Sequence[Optimizer] | None,
        loaders: Loaders,
        *,
        strict: bool,
    ) -> dict[str, Any]:
        """Fill the live objects, and return the rest as Lightning expects it: all ranks. Without
        optimizers only the model is wanted.
        """
        rest = Content()
        with meeting(current_world(), "lightning-load", failure=NOT_LOADED) as ranks:
            target = PathTarget(*ranks.share(lambda: tuple(self._found(path))))
            objects: dict[str, Any] = {"model": model}
            if _GROUP in target.groups:
                objects["state"] = {_GROUP: rest}
            if optimizers is not None:
                if _GROUP not in target.groups:
                    raise _not_lightnings(target)
                if OPTIMIZER in target.groups:
                    objects["optimizer"] = list(optimizers)
                if "dataloader" in target.groups:
                    objects["dataloader"] = loaders
        options = self._loading if strict else {**self._loading, "partial": True}
        options = {key: value for key, value in options.items() if key != "fallback"}

        restored: Restored | None = None
        steps = {StepFolder(self._store(run), step_name(it)): (run, it) for run, it in target.steps}
        damaged: list[Damage] = []
        for at, attempt in attempts([*steps], damaged):
            run, step = steps[at]
            with attempt:
                restored = self._at(run).restore(step=step, **options, **objects)
                break
        if not steps:
            restored = load(self._store(target.location), **options, **objects)
        if restored:
            check_whole(restored, damaged)
        if restored and not restored.report.is_exact and current_world().rank == 0:
            log.warning("%s is not all that it was loaded into: %s", path, restored.report)
        return _as_lightning_has_it(rest.content, {}, loaders.states)

    def load_whole(self, path: Any) -> tuple[dict[str, Any], int]:
        """All of a checkpoint as Lightning's own files have it, on any one rank, and how many ranks
        the job had.
        """
        target = self._found(path)
        if _GROUP not in target.groups:
            raise _not_lightnings(target)
        store = self._store(target.location)
        state = load_state(store, nested=True)
        with open_checkpoint(store) as checkpoint:
            documents = saved_documents({it.name: it for it in checkpoint.manifest.objects})
        loaders = state["dataloader"][0]
        found = _as_lightning_has_it(state[_GROUP], state["model"], loaders["states"])
        if "optimizer_states" in found:
            # By the numbers of parameters, as `Optimizer.load_state_dict` wants it.
            kept, numbered = state[OPTIMIZER]["state"], []
            for document in documents:
                numbers: dict[str, int] = {}
                groups = []
                for group in document["groups"]:
                    params = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
                    groups.append({**group["options"], "params": params})
                mine = {number: kept[name] for name, number in numbers.items() if name in kept}
                numbered.append({"state": mine, "param_groups": groups})
            found["optimizer_states"] = numbered
        return found, loaders["ranks"]

    def remove(self, path: Any) -> None:
        """Take the file at the path, and the step that it stands for: one rank."""
        self._after(partial(self._remove, os.fspath(path)), f"removing {path}")

    def close(self) -> None:
        """Wait for what is being written, and free the memory that saves use."""
        opened, self._open = list(self._open.values()), {}
        try:
            for each in opened:
                each.close()
        finally:
            self._last = LastSave()
            self._later.wait()
            self._stores.clear()
            self._unnamed = ""

    def _store(self, location: str) -> Store:
        if location not in self._stores:
            self._stores[location] = store_at(location, self._saving.get("storage_options"))
        return self._stores[location]

    def _at(self, location: str) -> Checkpointer:
        made = self._open.get(location)
        if made is None:
            options = {k: v for k, v in self._saving.items() if k != "storage_options"}
            made = self._open[location] = Checkpointer(self._store(location), **options)
            made._last = self._last
        return made

    def _after(self, work: Callable[[], None], what: str) -> None:
        """Do something once what is being saved is committed, in its turn."""
        self._later.run(work, what)
        if not self._saving.get("asynchronous"):
            self._later.wait()

    def _free(self, path: Any, step: int) -> str:
        """The run for a step that is to lie at a path: the first that has none of this number."""
        self._later.wait()
        folder = self._folder(os.fspath(path))[0].location
        runs = chain([folder], (folder / f"v{number}" for number in count(1)))
        return next(str(run) for run in runs if not self._has(str(run), step))

    def _has(self, location: str, step: int) -> bool:
        return manifest_size(StepFolder(self._store(location), step_name(step))) is not None

    def _name(self, path: str, location: str, step: int, saver: Checkpointer | None = None) -> None:
        """Let the path stand for a step that is committed, and delete what it stood for."""
        if saver is not None:
            saver._background.settle()
        if not self._has(location, step):
            self._unnamed = path  # why, its save says
            return
        store, name = self._folder(path)
        before = self._owned(store, name)
        if name in store.links():
            store.delete([name])
        run = location.removeprefix(str(store.location)).strip("/")
        store.put(name, json.dumps({"ckptkit": _GROUP, "run": run, "step": step}).encode())
        self._delete(before)
        self._unnamed = ""

    def _remove(self, path: str) -> None:
        store, name = self._folder(path)
        owned = self._owned(store, name)
        if self._unnamed:
            log.warning("%s stays: %s, which follows it, was not saved", path, self._unnamed)
        elif owned is None and name not in store.links():
            log.warning("%s stays: ckptkit did not write it", path)
        else:
            store.delete([name])
            self._delete(owned)

    def _delete(self, owned: tuple[str, int] | None) -> None:
        if owned is not None and self._has(*owned):
            location, step = owned
            Run(self._store(location)).delete([step])

    def _owned(self, store: Store, name: str) -> tuple[str, int] | None:
        """The step that is only there for the file of this name: not for a link to another's."""
        is_file = name in store.children("") and name not in store.links()
        return _pointed(store, name) if is_file else None

    def _found(self, path: Any) -> PathTarget:
        """What is at a path: a file of ours, or a run or step, of whatever program."""
        self._later.wait()
        place = os.fspath(path)
        below = self._store(place)
        folder, name = self._folder(place)
        runs, step = [place], None
        if below.children(""):
            step = Run(below).latest()
        elif pointed := _pointed(folder, name):
            runs, step = [pointed[0], str(folder.location)], pointed[1]
        steps = [] if step is None else [(runs[0], step)]
        if step is not None and self._loading.get("fallback"):
            older = (
                (each, run) for run in dict.fromkeys(runs) for each in Run(self._store(run)).steps()
            )
            steps += [(run, each) for each, run in sorted(older, reverse=True) if each <= step]
            steps = list(dict.fromkeys(steps))
        locations = [f"{run}/{step_name(each)}" for run, each in steps] or [place]
        folders = [StepFolder(self._store(run), step_name(each)) for run, each in steps]
        groups, damaged = list[str](), list[Damage]()
        for _, attempt in attempts(folders or [StepFolder(below)], damaged):
            with attempt, open_checkpoint(self._store(locations[len(damaged)])) as checkpoint:
                groups = sorted({it.name.partition("/")[0] for it in checkpoint.manifest.objects})
                break
        return PathTarget(locations[len(damaged)], steps[len(damaged) :], groups)

    def _folder(self, path: str) -> tuple[Store, str]:
        """The store of the folder that a path is in, and the name there."""
        folder, separator, name = path.rstrip("/").rpartition("/")
        return self._store(folder or separator or "."), name


def _checked(what: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    if unknown := sorted(given.keys() - set(known)):
        raise UsageError(
            f"not an option of {what}= here",
            value=unknown[0],
            hint=f"these are: {', '.join(known)}; which checkpoints stay, and when they are saved, "
            "is said to ModelCheckpoint",
        )
    return dict(given)


def _objects(
    content: dict[str, Any], model: object, optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """What is to be saved, as `Checkpointer.save` takes it."""
    content = dict(content)
    loops = content.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    loaders = Loaders(list(loops.pop("combined_loader", ())))
    found: dict[str, Any] = {"model": model, "dataloader": loaders}
    if "optimizer_states" in content:
        content["optimizer_states"] = []
        found["optimizer"] = list(optimizers) or None
    # Lightning saves what rank 0 has: metrics that nobody reduces differ from rank to rank.
    return found | {"state": {_GROUP: Replicated(Content(content))}}


@contextmanager
def _naming_keys() -> Iterator[None]:
    """Say what to do about a value that has no form in a step."""
    try:
        yield
    except UnsupportedTypeError as error:
        if error.where and error.where.startswith(_GROUP):
            error.hint = (
                "it is a key of Lightning's checkpoint: save_hyperparameters(ignore=[…]) leaves a "
                "hyper parameter out, and state_dict() of callbacks and data modules has to give "
                f"plain values and tensors; {error.hint}"
            )
        raise


def _pointed(store: Store, name: str) -> tuple[str, int] | None:
    """The run and the step that a small file of ours names; None for a file of another kind."""
    where = str(store.location / name)
    try:
        data = store.read_whole(name, _LARGEST)
    except NotFoundError as error:
        raise NotFoundError(
            "no checkpoint is there", where=where, hint="`ckpt ls` lists the steps of its folder"
        ) from error
    except FormatError:
        return None
    if not data.startswith(b'{"ckptkit"'):
        return None
    try:
        found = json.loads(data)
        kind, run, step = (found[key] for key in ("ckptkit", "run", "step"))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("not a file that says which step it is", where=where) from error
    is_below = isinstance(run, str) and re.fullmatch("(v[0-9]+)?", run)
    if kind != _GROUP or not is_below or type(step) is not int or step < 0:
        raise FormatError("not a file that says which step it is", where=where, value=found)
    return str(store.location / run if run else store.location), step


def step_at(path: str | os.PathLike[str], *, storage_options: Options | None = None) -> str:
    """Where the step is that a path stands for, as `ckptkit.open` and `ckptkit.live.load` take
    it.
    """
    runs = PathRuns({"storage_options": storage_options}, None)
    return runs._found(path).location


def _as_lightning_has_it(
    rest: dict[str, Any], model: Mapping[str, Any], loaders: Sequence[Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {"state_dict": model, **rest}  # unless a hook had put others there
    if loaders:
        found["loops"]["fit_loop"]["state_dict"]["combined_loader"] = list(loaders)
    return found


def _not_lightnings(target: PathTarget) -> UsageError:
    return UsageError(
        "not saved through ckptkit.plugins.lightning: no loops, callbacks and schedulers are there",
        where=target.location,
        hint="ckptkit.live.load(path, model=model) before fit() takes over the weights; "
        "validate(ckpt_path=…) works as it is",
    )
