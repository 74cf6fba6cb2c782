"""`ckpt unpack`: a step as a plain Zarr directory."""

from __future__ import annotations

from pathlib import Path

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.exits import CORRUPT
from ckptkit.cli.output import counted, emit, emit_json
from ckptkit.cli.progress import Bar
from ckptkit.cli.quantity import size_text
from ckptkit.cli.storage import Options, storage

import ckptkit


@command("ckpt unpack runs/7b plain", "ckpt unpack runs/7b plain --memory 64MiB", codes=[CORRUPT])
@location("step")
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option(
    "--memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="Hold at most about this much of chunks at once.",
)
@storage
def unpack(
    step: str, folder: str, memory: str, *, storage_options: Options | None, as_json: bool
) -> None:
    """Write STEP as a plain Zarr directory DIR.

    Any tool that knows Zarr v3 reads it. Every chunk is checked on the way. DIR must not
    exist, or be empty; it appears when it is complete and durable, and not at all if anything
    fails. What was left by an unpack to DIR that was killed is removed.
    """
    with ckptkit.open(step, storage_options=storage_options) as checkpoint:
        nbytes = sum(array.nbytes for array in checkpoint.arrays.values())
        with Bar("unpack", nbytes) as bar:
            files = ckptkit.unpack(checkpoint, folder, memory=memory, progress=bar)
        names = len(checkpoint.arrays)
        doc = {
            "location": checkpoint.location,
            "folder": str(Path(folder).absolute()),
            "step": checkpoint.step,
            "arrays": names,
            "bytes": nbytes,
            "files": files,
        }
    if as_json:
        emit_json(doc)
    else:
        what = f"{counted(names, 'array')}, {size_text(nbytes)} in {counted(files, 'file')}"
        emit([f"unpacked step {doc['step']} into {folder}: {what}"])
