"""A run: the steps below one location, and what may be deleted of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.locate import (
    committed_steps,
    newest_step,
    read_head,
    read_manifest,
    step_folders,
)
from ckptkit.checkpoint.pace import ask_all
from ckptkit.checkpoint.places import DATA, Place, described, step_name, store_at, under
from ckptkit.checkpoint.prune import Removal, clock_of, keys_of, plan_prune, remove
from ckptkit.errors import FormatError, NotFoundError
from ckptkit.storage import Options


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step as a listing shows it; `problem` is why a committed one cannot be read."""

    step: int
    committed: bool
    nbytes: int
    time: float | None = None
    strategy: str = ""
    problem: str = ""
    link: str = ""
    """What the step's folder leads to, where it is a symbolic link: it is read, and left alone."""


class Run:
    """The steps of one training run."""

    def __init__(self, location: Place, *, storage_options: Options | None = None) -> None:
        self._store = store_at(location, storage_options)

    @property
    def location(self) -> str:
        """Where the run is."""
        return str(self._store.location)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return list(committed_steps(self._store))

    def latest(self) -> int | None:
        """The newest committed step, or None: the one with the highest number, whenever it was
        saved.
        """
        return newest_step(self._store)

    def open(self, step: int | None = None) -> Checkpoint:
        """Open a step, the newest committed one by default."""
        if step is None:
            step = self.latest()
        if step is None:
            raise NotFoundError(
                "a run without a committed step",
                where=self.location,
                hint=f"`ckpt ls {self.location}` shows what was begun",
            )
        prefix = step_name(step)
        return Checkpoint(self._store, prefix, read_manifest(self._store, prefix))

    def listing(self) -> list[StepInfo]:
        """All steps, committed or not, ascending."""
        folders = step_folders(self._store).items()
        found = ask_all(self._store, lambda folder: self._info(*folder), folders)
        links = self.links()
        return [replace(info, link=links.get(info.step, "")) for info in found]

    def links(self) -> dict[int, str]:
        """The steps whose folder is a symbolic link, and what it leads to: they are read, and
        neither written nor pruned.
        """
        links = self._store.links()
        return {
            step: links[name] for step, name in step_folders(self._store).items() if name in links
        }

    def plan_prune(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        grace: float = 3600.0,
        up_to: int | None = None,
    ) -> list[Removal]:
        """What `prune` would delete.

        Of the committed steps the newest `keep_last` (one at least) and the multiples of
        `keep_every` stay; without either all do. The newest are those with the highest numbers,
        whenever they were saved. What aborted saves and writes left, and no manifest names, is
        deleted once it is older than `grace` seconds: what is younger may be a save under way.
        Committed steps above `up_to` are left alone and do not count: a job that went back to an
        earlier step must not lose the steps it saves then. Nor do steps whose folder is a symbolic
        link; of a link in a step that goes only the name is deleted.
        """
        return plan_prune(
            self._store, keep_last=keep_last, keep_every=keep_every, grace=grace, up_to=up_to
        )

    def prune(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        grace: float = 3600.0,
        up_to: int | None = None,
    ) -> list[Removal]:
        """Delete what `plan_prune` lists; returns it."""
        wanted: dict[str, Any] = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "grace": grace,
            "up_to": up_to,
        }
        plan = plan_prune(self._store, **wanted)
        by_age = grace > 0 and any(removal.kind != "step" for removal in plan)
        if by_age and not self._store.abilities.is_file_system:
            # By a clock that is late, a save under way would look old.
            plan = plan_prune(self._store, **wanted, now=clock_of(self._store))
        remove(self._store, plan)
        return plan

    def delete(self, steps: Iterable[int]) -> None:
        """Delete steps, committed or not: the manifest first, so that no crash leaves half a
        step that looks whole. Of a step whose folder is a symbolic link only that goes.
        """
        for step in steps:
            prefix = step_name(step)
            if prefix in self._store.links():
                self._store.delete([prefix])
                continue
            entries, keys = keys_of(self._store, prefix)
            if not entries and len(keys) == 1:
                keys = []
            if not self._store.abilities.is_file_system:
                keys += [entry.key for entry in self._store.leftovers(prefix)]
            if not keys:
                raise NotFoundError(
                    "no such step",
                    where=described(self._store, prefix),
                    hint=f"`ckpt ls {self.location}` lists the steps that are there",
                )
            self._store.delete(keys)

    def _info(self, step: int, name: str) -> StepInfo:
        try:
            save, nbytes = read_head(self._store, name)
        except NotFoundError:
            nbytes = sum(entry.size for entry in self._store.list(under(name, DATA)))
            return StepInfo(step, committed=False, nbytes=nbytes)
        except FormatError as error:
            nbytes = sum(entry.size for entry in self._store.list(name))
            return StepInfo(step, committed=True, nbytes=nbytes, problem=error.what)
        return StepInfo(
            step, committed=True, nbytes=nbytes, time=save.time, strategy=str(save.strategy)
        )
