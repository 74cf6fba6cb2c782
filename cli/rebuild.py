"""`ckpt rebuild`: make a lost manifest again."""

from __future__ import annotations

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.description import stored_bytes
from ckptkit.cli.exits import CORRUPT, OK
from ckptkit.cli.output import counted, emit, emit_json
from ckptkit.cli.storage import Options, storage

import ckptkit
from ckptkit.errors import NotFoundError, UsageError


@command(
    "ckpt rebuild runs/7b/step-0000001000",
    exits={OK: "the step is committed again", CORRUPT: "no save in it is complete and whole"},
)
@location("step")
@click.option(
    "--save-id", metavar="ID", help="Which save, where the packs of several are complete."
)
@storage
def rebuild(
    step: str, save_id: str | None, *, storage_options: Options | None, as_json: bool
) -> None:
    """Make the lost manifest of STEP again.

    All it needs are the packs; a damaged manifest is replaced. STEP must be the folder of the step
    itself: a run cannot say which step has lost its manifest. Refused where a manifest that can be
    read exists, and where the packs are not complete.
    """
    try:
        ckptkit.rebuild(step, save_id=save_id, storage_options=storage_options)
    except NotFoundError:
        _refuse_run(step, storage_options)
        raise
    with ckptkit.open(step, storage_options=storage_options) as checkpoint:
        arrays, packs = len(checkpoint.arrays), len(checkpoint.manifest.packs)
        save_id = checkpoint.save_id
        doc = {
            "location": checkpoint.location,
            "step": checkpoint.step,
            "save_id": save_id,
            "strategy": str(checkpoint.strategy),
            "arrays": arrays,
            "packs": packs,
            "bytes": stored_bytes(checkpoint),
        }
    if as_json:
        emit_json(doc)
    else:
        what = f"{counted(arrays, 'array')} in {counted(packs, 'pack')}"
        emit([f"step {doc['step']} is committed again: {what}, saved as {save_id}"])


def _refuse_run(location: str, storage_options: Options | None) -> None:
    run = ckptkit.Run(location, storage_options=storage_options)
    without = [str(info.step) for info in run.listing() if not info.committed]
    if without:
        raise UsageError(
            "a run, not a step",
            where=location,
            hint=f"pass the folder of a step; without a manifest: {', '.join(without)}",
        )
