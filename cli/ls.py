"""`ckpt ls`: the steps of a run."""

from __future__ import annotations

from typing import Any

from ckptkit.cli.command import command, location
from ckptkit.cli.output import aligned, emit, emit_json, moment
from ckptkit.cli.quantity import size_text
from ckptkit.cli.runs import open_run
from ckptkit.cli.storage import Options, storage


@command("ckpt ls runs/7b")
@location("run")
@storage
def ls(run: str, *, storage_options: Options | None, as_json: bool) -> None:
    """List the steps of RUN, lowest number first.

    Says of each when it was saved, its size, its strategy, and whether it is committed. A step that
    is not committed was never finished, or is being written; its size is what is there. The newest
    step is the last one: numbers count, not times. A step whose folder is a symbolic link is shown
    as one: it is read, and never written or pruned.
    """
    found = open_run(run, storage_options)
    steps = [
        {
            "step": info.step,
            "committed": info.committed,
            "time": moment(info.time),
            "bytes": info.nbytes,
            "strategy": info.strategy or None,
            "problem": info.problem or None,
            "link": info.link or None,
        }
        for info in found.listing()
    ]
    if as_json:
        emit_json({"run": found.location, "steps": steps})
    else:
        emit(
            aligned(
                [("STEP", "SAVED", "SIZE", "STRATEGY", "STATE"), *map(_row, steps)], right=[0, 2]
            )
        )


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    state = "committed" if step["committed"] else "not committed"
    if step["link"]:
        state += f", a link to {step['link']}"
    return (
        str(step["step"]),
        step["time"] or "-",
        size_text(step["bytes"]),
        step["strategy"] or "-",
        f"{state}, but: {step['problem']}" if step["problem"] else state,
    )
