"""`ckpt show`: what is in a step."""

from __future__ import annotations

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.description import describe
from ckptkit.cli.exits import CORRUPT
from ckptkit.cli.output import emit, emit_json
from ckptkit.cli.storage import Options, storage
from ckptkit.cli.tree import lines_of

import ckptkit


@command(
    "ckpt show runs/7b",
    "ckpt show runs/7b/step-0000001000 'model/*.wq.*' --rank 3",
    codes=[CORRUPT],
)
@location("step")
@click.argument("pattern", required=False)
@click.option("--rank", metavar="R", type=click.IntRange(min=0), help="Show what this rank holds.")
@storage
def show(
    step: str,
    pattern: str | None,
    rank: int | None,
    *,
    storage_options: Options | None,
    as_json: bool,
) -> None:
    """Show what is in STEP: strategy, arrays, objects.

    Each array has a line: name, dtype, shape, role, how many different parts it is cut into and the
    shape of the first, bytes. PATTERN, with * and ?, picks arrays by their whole name. With --rank
    the lines are of this rank alone: the shape of its part, and the boxes it is made of.
    """
    with ckptkit.open(step, storage_options=storage_options) as checkpoint:
        doc = describe(checkpoint, pattern, rank)
    if as_json:
        emit_json(doc)
    else:
        emit(lines_of(doc))
