"""Steps in the memory of a machine, which outlive the processes that a launcher restarts."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from ckptkit.checkpoint.ranks import leaving
from ckptkit.checkpoint.run.run import Run
from ckptkit.errors import CkptkitError
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.ranks import World, next_name, ranks_of

log = logging.getLogger("ckptkit.parallel")

_MEMORY = Path("/dev/shm")  # noqa: S108 — it is memory that is wanted
DOCUMENT = "elastic"


class Replicas:
    """A run of one step in a folder that all ranks see, written in the background."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._folder = folder
        self._run = Run(folder)
        self.checkpointer = Checkpointer(
            folder,
            keep_last=1,
            asynchronous=True,
            when_busy="skip",
            overwrite=True,
            timeout=timeout,
        )

    @classmethod
    def of(cls, folder: str | os.PathLike[str], world: World, timeout: float) -> Replicas | None:
        """Those in a folder; None where some rank does not see it, as on another machine."""
        path = Path(folder)
        token = path / f".seen-{os.getpid()}"
        room = ranks_of(world, next_name(world, "replicas"), timeout, "nothing was replicated")
        with leaving(room):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Where all users may write, somebody else may have made it, or a link to what is ours.
            is_own = path.lstat().st_uid == path.stat().st_uid == os.getuid()
            if world.rank == 0 and is_own:
                token.touch()
            is_seen = (path / room.share(lambda: token.name)).exists()
            all_see = room.agree(is_own and is_seen, all)
        if world.rank == 0:
            token.unlink(missing_ok=True)
        if all_see:
            return cls(path, timeout)
        if world.rank == 0:
            log.warning("%s is not seen by all ranks: only checkpoints are gone on from", folder)
        return None

    def clear(self, *, but: int = -1) -> None:
        """Free the memory of what killed ranks left, and of all steps but one."""
        self._run.delete(info.step for info in self._run.listing() if info.step != but)
        if but >= 0:
            self._run.prune(keep_last=1, grace=0)

    def close(self) -> None:
        """Wait for what is being written."""
        self.checkpointer.close()

    def remove(self) -> None:
        """Free all memory; the training has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)


def newest_of(run: Run, job: str = "") -> tuple[int, str]:
    """The newest step of a run that can be opened, and the job it is of; -1 where there is none.
    With `job`, the newest one of that.
    """
    for step in reversed(run.steps()):
        try:
            with run.open(step) as checkpoint:
                item = checkpoint.objects.get(f"extra/{DOCUMENT}")
        except CkptkitError as error:
            log.warning("step %d of %s is passed over: %s", step, run.location, error)
            continue
        found = str(item.get("job", "")) if isinstance(item, dict) else ""
        if not job or found == job:
            return step, found
    return -1, ""


def folder_in_memory(location: str) -> Path | None:
    """Where replicas of a run are by default: under torchrun, which restarts the ranks."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None or not _MEMORY.is_dir():
        return None
    name = f"{os.getuid()}-{job}-{location}".replace("/", "_")[-200:]
    return _MEMORY / f"ckptkit-{name}"
