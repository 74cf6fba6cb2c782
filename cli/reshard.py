"""`ckpt reshard`: a step for another strategy, without the model."""

from __future__ import annotations

from typing import Any

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.exits import CORRUPT, OK, PEER
from ckptkit.cli.output import counted, emit, emit_json
from ckptkit.cli.planned import document_of, lines_of
from ckptkit.cli.progress import Bar
from ckptkit.cli.quantity import size_text
from ckptkit.cli.sizes import sizes_from
from ckptkit.cli.storage import source_storage, storage

import ckptkit


@command(
    "ckpt reshard --from fsdp:8 --to tp:4 --config config.json runs/7b runs/tp4",
    "ckpt reshard --to tp:2,pp:2 --set head_dim=128 --dry-run runs/7b runs/2x2",
    "ckpt reshard --to fsdp:2 --no-optimizer --cast bf16 runs/7b runs/serving",
    exits={OK: "the step is there"},
    codes=[CORRUPT, PEER],
)
@location("src")
@location("dst")
@click.option("--to", metavar="STRATEGY", required=True, help="Such as tp:4 or pp:2,fsdp:4.")
@click.option("--from", "expect", metavar="STRATEGY", help="What SRC is expected to be.")
@click.option("--rules", metavar="RULES", help="A file, a preset, or auto (the default).")
@click.option("--config", metavar="FILE", help="A config.json with the sizes that rules refer to.")
@click.option("--set", "sizes", metavar="NAME=N", multiple=True, help="One such size.")
@click.option("--replicate-unknown", is_flag=True, help="Replicate what no rule knows.")
@click.option(
    "--allow-split-heads", is_flag=True, help="Cut where no size says whether a head ends there."
)
@click.option("--include", metavar="PATTERN", multiple=True, help="Take only these arrays.")
@click.option("--exclude", metavar="PATTERN", multiple=True, help="Leave these arrays out.")
@click.option("--no-optimizer", is_flag=True, help="Leave all optimizer state out.")
@click.option(
    "--cast", metavar="[PATTERN=]DTYPE", multiple=True, help="Convert parameters, or these arrays."
)
@click.option("--rename", metavar="REGEX=>NEW", multiple=True, help="Rename inside of the groups.")
@click.option(
    "--memory", metavar="SIZE", default="1GiB", show_default=True, help="Never use more than this."
)
@click.option(
    "--chunk-size", metavar="SIZE", default="4MiB", show_default=True, help="About, of new chunks."
)
@click.option(
    "--workers", metavar="N", type=click.IntRange(min=1), help="How many copy; a few by default."
)
@click.option(
    "--engine",
    metavar="ENGINE",
    default="threads",
    show_default=True,
    help="threads, processes, dask://HOST:PORT, ray, ray://HOST:PORT, slice:I/N.",
)
@click.option("--digest", is_flag=True, help="Record the digest of the state (reads SRC twice).")
@click.option("--overwrite", is_flag=True, help="Replace the step at DST.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would be done; a little is read and written.",
)
@storage
@source_storage("SRC")
def reshard(src: str, dst: str, *, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Write the step SRC for another strategy into the run DST.

    Parameters, optimizer state and all else go over; the new step has the number of the old one,
    and a pack for each rank with exactly what that rank needs. No model, no GPU, and never more
    memory than --memory. Every byte that is read is checked, SRC is only read, and the step exists
    at DST whole or not at all. After an interruption the same command goes on where it was.

    PATTERN, with * and ?, matches whole names (model/layers.0.*) or the names inside of groups
    (layers.0.*, which optimizer state has too). --include, --exclude, --cast, --rename and --set
    may be given more than once; renamings are applied in order, the last cast that fits counts.

    --rules says which dims tensor parallelism cuts, and how pipelines are split (`ckpt rules`
    shows it); a SRC that was trained so has its own. They need the length of an attention head,
    from --config or as --set head_dim=N, where SRC was not cut at the same places before.
    """
    options = _options(**given)
    plan = ckptkit.plan_reshard(src, dst, **options, probe=dry_run)
    if dry_run:
        if as_json:
            emit_json(document_of(plan))
        else:
            emit(lines_of(plan))
        return
    with Bar("reshard", plan.bytes_written) as bar:
        done = plan.run(bar)
    if as_json:
        found = {"save_id": done.save_id, "finished_packs": list(done.finished)}
        emit_json({**document_of(plan), **found, "committed": done.committed})
    else:
        emit([_said(plan, done)])


def _options(
    *,
    chunk_size: str,
    config: str | None,
    sizes: tuple[str, ...],
    no_optimizer: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    cast: tuple[str, ...],
    rename: tuple[str, ...],
    **same: Any,
) -> dict[str, Any]:
    """The arguments of the library's calls; most options are called as they are."""
    selection = ckptkit.Selection(
        include=include,
        exclude=exclude,
        optimizer=not no_optimizer,
        cast=tuple(map(_cast, cast)),
        rename=tuple(map(_rename, rename)),
    )
    known = {"sizes": sizes_from(config, sizes), "chunk_bytes": chunk_size}
    return {**same, **known, "selection": selection}


def _said(plan: ckptkit.ReshardPlan, done: ckptkit.Resharded) -> str:
    if not done.committed:
        return f"the packs of this slice are at {done.location}; `ckpt commit` closes the step"
    if len(done.finished) == done.packs:
        return f"{done.location} is there already, made of the same step in the same way"
    before = f", {len(done.finished)} of them from before" if done.finished else ""
    packs = f"{counted(done.packs, 'pack')}{before}"
    what = (
        f"{counted(len(plan.arrays) + len(plan.aliases), 'array')}, {size_text(plan.bytes_written)}"
    )
    return f"{done.location}: {plan.from_strategy} -> {plan.to_strategy}, {what} in {packs}"


def _cast(text: str) -> tuple[str, str]:
    pattern, _, dtype = text.rpartition("=")
    return pattern, dtype


def _rename(text: str) -> tuple[str, str]:
    pattern, arrow, new = text.partition("=>")
    if not arrow:
        raise click.BadParameter(f"{text!r} is no renaming: write 'old=>new'")
    return pattern, new
