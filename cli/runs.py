"""`ckpt ls` and `ckpt prune`: the steps of a run, and those that may go."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ckptkit.cli.options import Options, command, location, option, seconds_of, storage
from ckptkit.cli.output import Reply, aligned, counted

import ckptkit
from ckptkit.errors import UsageError

_KINDS = {
    "step": "step",
    "orphan": "never committed, of step",
    "leftover": "unfinished file, of step",
}


@command("ckpt ls runs/7b")
@location("run")
@storage
def ls(run: str, *, storage_options: Options | None) -> Reply:
    """List the steps of RUN, lowest number first.

    Says of each when it was saved, its size, its strategy, as old -> new where it changed, and
    whether it is committed; and the size of all. A step that
    is not committed was never finished, or is being written; its size is what is there. The newest
    step is the last one: numbers count, not times. A step whose folder is a symbolic link is shown
    as one: it is read, and never written or pruned. So are checkpoints of other programs in folders
    such as step_100 or checkpoint-100, with their format.
    """
    found = _open(run, storage_options)
    steps: list[dict[str, Any]] = [
        {
            "step": info.step,
            "committed": info.committed,
            "time": ckptkit.time_text(info.time),
            "bytes": info.nbytes,
            "strategy": info.strategy or None,
            "problem": info.problem or None,
            "link": info.link or None,
            "format": info.format or None,
        }
        for info in sorted([*found.listing(), *found.foreign()], key=attrgetter("step"))
    ]
    rows = [("STEP", "SAVED", "SIZE", "STRATEGY", "STATE")]
    before = None
    for step in steps:
        state = step["format"] or ("committed" if step["committed"] else "not committed")
        state += f", a link to {step['link']}" if step["link"] else ""
        state += f", but: {step['problem']}" if step["problem"] else ""
        strategy = step["strategy"] or "-"
        if step["strategy"]:
            if before not in (None, strategy):
                strategy = f"{before} -> {strategy}"
            before = step["strategy"]
        size = ckptkit.size_text(step["bytes"])
        rows.append((str(step["step"]), step["time"] or "-", size, strategy, state))
    if len(steps) > 1:
        total = ckptkit.size_text(sum(step["bytes"] for step in steps))
        rows.append(("total", counted(len(steps), "step"), total, "", ""))
    document = {"run": found.location, "steps": steps}
    return Reply(document, aligned(rows, right=[0, 2], spare=[1]))


@command(
    "ckpt prune runs/7b --keep-last 3 --keep-every 10000 --dry-run",
    "ckpt prune runs/7b --keep-last 3 --keep-every 10000",
)
@location("run")
@option(
    "--keep-last N",
    "Keep the newest N committed steps: those with the highest numbers.",
    least=1,
)
@option("--keep-every K", "Keep the multiples of K.", least=1)
@option(
    "--grace TIME",
    "Leave what no manifest names alone until this old: it may be a save under way.",
    type=seconds_of,
    default="1h",
)
@option("--dry-run", "Only say what would be deleted.")
@storage
def prune(
    run: str, grace: float, *, dry_run: bool, storage_options: Options | None, **kept: Any
) -> Reply:
    """Delete old steps of RUN, and leftovers.

    Leftovers are what saves that were never committed left: their data, an empty manifest, files
    that were not finished. A step stays if it is among the newest N or a multiple of K, and the
    newest always does; without --keep-last and --keep-every all committed steps stay. Newest means
    the highest step number, whenever it was saved. A step's manifest goes first, so that a crash
    leaves no half of one. Nothing is deleted through a symbolic link: steps that are links stay,
    are listed, and do not count; of a link inside a step only the name goes.
    """
    found = ckptkit.Run(run, storage_options=storage_options)
    work = found.plan_prune if dry_run else found.prune
    removals = work(grace=grace, **kept)
    # Where nothing goes: whether that is because of --grace, or because nothing is there.
    young = [] if removals or not grace else found.plan_prune(grace=0)
    if not removals and not young:
        _open(run, storage_options)  # which says what is wrong with a place that is no run
        if not found.listing():
            raise UsageError(
                "the checkpoints of another program, and no step of ckptkit",
                where=found.location,
                hint="only steps that ckptkit wrote are deleted; `ckpt import` makes some of these",
            )
    links = found.links()
    gone = {removal.step for removal in removals if removal.kind == "step"}
    kept_steps = [step for step in found.steps() if step not in gone and step not in links]
    nbytes = sum(removal.nbytes for removal in removals)
    document = {
        "run": found.location,
        "dry_run": dry_run,
        "removed": [
            {
                "kind": removal.kind,
                "step": removal.step,
                "name": removal.name,
                "bytes": removal.nbytes,
                "files": len(removal.keys),
            }
            for removal in removals
        ],
        "bytes": nbytes,
        "young": len(young),
        "kept": kept_steps,
        "links": [{"step": step, "target": target} for step, target in links.items()],
    }
    rows = []
    for removal in removals:
        what = ("unfinished file, of the run", "")
        if removal.step is not None:
            what = (_KINDS[removal.kind], str(removal.step))
        rows.append((*what, ckptkit.size_text(removal.nbytes), removal.name))
    freed = f"{'would free' if dry_run else 'freed'} {ckptkit.size_text(nbytes)}"
    lines = [*aligned(rows, right=[1, 2]), f"{freed}; kept: {counted(len(kept_steps), 'step')}"]
    if young:
        lines.append(f"left alone, as younger than --grace: {counted(len(young), 'leftover')}")
    for step, target in links.items():
        lines.append(f"left alone, as a symbolic link: step {step} -> {target}")
    return Reply(document, lines)


def _open(location: str, storage_options: Options | None) -> ckptkit.Run:
    """A run that has at least one step, committed or not."""
    run = ckptkit.Run(location, storage_options=storage_options)
    if run.latest() is None and not run.listing() and not run.foreign():
        # Raises what is right for an empty place, and for a step that is not committed.
        ckptkit.open(location, storage_options=storage_options).close()
        raise UsageError(
            "a step, not a run",
            where=run.location,
            hint=f"`ckpt show {location}` shows it; a run is the folder that it is in",
        )
    return run
