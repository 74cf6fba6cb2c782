"""`ckpt diff`: are two steps the same state?"""

from __future__ import annotations

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.description import stored_bytes
from ckptkit.cli.differences import document_of, lines_of
from ckptkit.cli.exits import CORRUPT, NO, OK
from ckptkit.cli.output import emit, emit_json
from ckptkit.cli.progress import Bar
from ckptkit.cli.storage import Options, source_storage, storage

import ckptkit


@command(
    "ckpt diff runs/7b runs/7b-tp4",
    "ckpt diff runs/7b runs/7b-bf16 --include 'model/*' --rtol 1e-3",
    exits={OK: "the same state", NO: "something differs"},
    codes=[CORRUPT],
)
@location("a")
@location("b")
@click.option("--include", metavar="PATTERN", multiple=True, help="Compare only these.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="Leave these out.")
@click.option("--atol", type=float, default=0.0, help="Numbers may be this far apart.")
@click.option("--rtol", type=float, default=0.0, help="Or this many times the size of B's.")
@click.option(
    "--memory",
    metavar="SIZE",
    default="256MiB",
    show_default=True,
    help="At most this is in use.",
)
@click.option("--threads", type=click.IntRange(min=1), help="How many read; a few by default.")
@storage
@source_storage("A")
def diff(  # noqa: PLR0913 — an option each
    a: str,
    b: str,
    *,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    atol: float,
    rtol: float,
    memory: str,
    threads: int | None,
    storage_options: Options | None,
    source_options: Options | None,
    as_json: bool,
) -> int:
    """Compare the steps A and B: names, shapes, dtypes, values, objects.

    How they are sharded is no difference. Elements have to be the same to the bit, unless --atol or
    --rtol is given: then NaNs are alike, and numbers that are at most ATOL + RTOL * |b| apart.
    PATTERN, with * and ?, picks by the whole name or by the one inside of the group. Every byte is
    checked on the way.
    """
    own = storage_options if source_options is None else source_options
    with Bar("diff", _stored_bytes(a, own) + _stored_bytes(b, storage_options)) as bar:
        found = ckptkit.diff(
            a,
            b,
            include=include,
            exclude=exclude,
            atol=atol,
            rtol=rtol,
            memory=memory,
            threads=threads,
            progress=bar,
            storage_options=storage_options,
            source_options=source_options,
        )
    if as_json:
        emit_json(document_of(found))
    else:
        emit(lines_of(found))
    return OK if found.same else NO


def _stored_bytes(location: str, storage_options: Options | None) -> int:
    with ckptkit.open(location, storage_options=storage_options) as checkpoint:
        return stored_bytes(checkpoint)
