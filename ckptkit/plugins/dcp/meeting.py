"""Where a save or a load of DCP is, and how its ranks meet: over the store of the job, under a name
that the coordinator has put into the plan of each. So any process group does, in any thread.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import NamedTuple

from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.errors import UsageError
from ckptkit.live.state.ranks import StoreRanks, World, current_world
from ckptkit.storage import Options, Store

_STEP = re.compile(r"(?P<run>.*?)/?step[-_]?(?P<step>[0-9]{1,19})/*", re.ASCII | re.DOTALL)


class Meeting(NamedTuple):
    """A name that no other meeting of the job has, and how many ranks come."""

    name: str
    size: int

    @classmethod
    def of(cls, size: int) -> Meeting:
        """A new one."""
        return cls(f"dcp/{secrets.token_hex(12)}", size)

    def ranks(self, rank: int, timeout: float, failure: str) -> StoreRanks | OneRank:
        """The ranks, as one of them meets the others."""
        if self.size == 1:
            return OneRank()
        world = World(rank, self.size, current_world().rendezvous)
        return StoreRanks(world, self.name, timeout, failure)


class Target:
    """A run, and perhaps a step of it; `checkpoint_id` of a call may name another."""

    def __init__(self, location: Place, step: int | None, options: Options | None) -> None:
        self.location = location
        self.step = step
        self._options = options

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.store().location}{step}"

    def name(self, checkpoint_id: str | os.PathLike[str] | int) -> None:
        """Take the `checkpoint_id` of a call: the number of a step, or the path of a run or of a
        step in it.
        """
        text = str(checkpoint_id)
        if text.isdecimal():
            self.step = int(text)
        elif step := _STEP.fullmatch(text):
            self.location, self.step = step["run"] or ".", int(step["step"])
        else:
            self.location = text

    def store(self) -> Store:
        """The store of the run."""
        return store_at(self.location, self._options)

    def wanted_step(self) -> int:
        """The step that is to be saved."""
        if self.step is None:
            raise UsageError(
                "nothing says which step this is",
                where=str(self.store().location),
                hint="Writer(run, step=…), or checkpoint_id=… with the number of the step",
            )
        return self.step
