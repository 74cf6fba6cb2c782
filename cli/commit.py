"""`ckpt commit`: make a step of the packs that slices have written."""

from __future__ import annotations

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.exits import CORRUPT, OK
from ckptkit.cli.output import counted, emit, emit_json
from ckptkit.cli.storage import Options, storage

import ckptkit


@command(
    "ckpt commit runs/7b-tp4",
    exits={OK: "the step is committed"},
    codes=[CORRUPT],
)
@location("run")
@click.option("--step", metavar="N", type=click.IntRange(min=0), help="Which step, of several.")
@click.option("--save-id", metavar="ID", help="Which save, where there are packs of several.")
@click.option("--overwrite", is_flag=True, help="Replace the step where it is committed already.")
@storage
def commit(
    run: str,
    step: int | None,
    save_id: str | None,
    *,
    overwrite: bool,
    storage_options: Options | None,
    as_json: bool,
) -> None:
    """Commit the step of RUN that `ckpt reshard --engine slice:i/n` has written.

    Every slice writes its share of the packs and no more; once all have, this makes the step. It is
    refused while packs are missing, and says which.
    """
    manifest = ckptkit.commit_packs(
        run, step=step, save_id=save_id, overwrite=overwrite, storage_options=storage_options
    )
    save = manifest.save
    packs = len(manifest.packs)
    doc = {
        "run": run,
        "step": save.step,
        "save_id": save.save_id,
        "strategy": str(save.strategy),
        "arrays": len(manifest.arrays) + len(manifest.aliases),
        "packs": packs,
        "bytes": sum(pack.size for pack in manifest.packs),
    }
    if as_json:
        emit_json(doc)
    else:
        emit([f"step {save.step} is committed: {save.strategy}, {counted(packs, 'pack')}"])
