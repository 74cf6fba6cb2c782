"""`ckpt reshard`, `import` and `rules`: a step for another strategy, without the model, of one of
ours or of what another program saved; and how that would cut every tensor.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from resource import RUSAGE_SELF, getrusage
from shlex import quote
from typing import Any

from ckptkit.cli.options import (
    command,
    location,
    memory,
    option,
    rules_options,
    selecting,
    source_storage,
    split_heads,
    storage,
    strategy,
)
from ckptkit.cli.output import CORRUPT, NO, OK, PEER, Bar, Reply, aligned, counted

import ckptkit
from ckptkit.errors import UsageError

_SHOWN = 12
_NAMED = 3
_OF_PLAN = (
    *("source", "destination", "step", "save_id", "aliases", "left_out"),
    *("bytes_read", "bytes_written", "read_amplification", "requests", "chunks", "files"),
    *("manifest_bytes", "bytes_by_rank", "imbalance", "memory", "workers", "seconds"),
)


@command(
    "ckpt reshard --from fsdp:8 --to tp:4 --config config.json runs/7b runs/tp4",
    "ckpt reshard --to tp:2,pp:2 --set head_dim=128 --dry-run runs/7b runs/2x2",
    "ckpt reshard --to fsdp:2 --no-optimizer --cast bf16 runs/7b runs/serving",
    exits={OK: "the step is there"},
    codes=[CORRUPT, PEER],
)
@location("src")
@location("dst")
@strategy(required=True)
@option("--from STRATEGY", "What SRC is expected to be.", into="expect")
@rules_options
@split_heads
@selecting("Take only these arrays.", optimizer=True)
@memory("1GiB")
@option("--chunk-size SIZE", "About, of new chunks.", into="chunk_bytes", default="4MiB")
@option("--workers N", "How many copy; a few by default.", least=1)
@option(
    "--engine ENGINE",
    "threads, processes, dask://HOST:PORT, ray, ray://HOST:PORT, slice:I/N.",
    default="threads",
)
@option("--digest", "Record the digest of the state (reads SRC twice).")
@option("--overwrite", "Replace the step at DST.")
@option("--dry-run", "Only say what would be done; a little is read and written.")
@storage
@source_storage("SRC")
def reshard(src: str, dst: str, *, dry_run: bool, **given: Any) -> Reply:
    """Write the step SRC for another strategy into the run DST.

    Parameters, optimizer state and all else go over; the new step has the number of the old one,
    and a pack for each rank with exactly what that rank needs. No model, no GPU, and never more
    memory than --memory. Every byte that is read is checked, SRC is only read, and the step exists
    at DST whole or not at all. After an interruption the same command goes on where it was.

    PATTERN, with * and ?, matches whole names (model/layers.0.*) or the names inside of groups
    (layers.0.*, which optimizer state has too). --include, --exclude, --cast, --rename and --set
    may be given more than once; renamings are applied in order, the last cast that fits counts.

    --names translates the names of a whole model into those of another program, after --rename, and
    makes one tensor of several, or several of one, where the table says so. llama-megatron has the
    names of transformers and of Megatron-Core; what SRC has is found out.

    --rules says which dims tensor parallelism cuts, and how pipelines are split (`ckpt rules`
    shows it); a SRC that was trained so has its own. They need the length of an attention head,
    from --config or as --set head_dim=N, where SRC was not cut at the same places before.
    """
    plan = ckptkit.plan_reshard(src, dst, probe=dry_run, **given)
    if dry_run:
        return Reply(_plan_document(plan), _plan_lines(plan))
    began = time.monotonic()
    with Bar("reshard", plan.bytes_written * (2 if given["digest"] else 1)) as bar:
        done = plan.run(bar)
    seconds = time.monotonic() - began
    found = {"save_id": done.save_id, "finished_packs": list(done.finished)}
    document = {**_plan_document(plan), **found, "committed": done.committed}
    if not done.committed:
        said = f"the packs of this slice are at {done.location}; `ckpt commit` closes the step"
    elif not done.is_new:
        said = f"{done.location} is there already, made of the same step in the same way"
    else:
        before = f", {len(done.finished)} of them from before" if done.finished else ""
        arrays = counted(len(plan.arrays) + len(plan.aliases), "array")
        what = f"{ckptkit.size_text(plan.bytes_written)} in {counted(done.packs, 'pack')}{before}"
        said = f"{done.location}: {plan.from_strategy} -> {plan.to_strategy}, {arrays}, {what}"
    lines = [*_plan_lines(plan, done, seconds), ""] if done.is_new else []
    return Reply(document, [*lines, said])


def _plan_document(plan: ckptkit.ReshardPlan) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in _OF_PLAN},
        "from": plan.from_strategy,
        "to": plan.to_strategy,
        "arrays": [
            {
                "name": a.name,
                "source": a.source.name,
                "shape": a.info.shape,
                "dtype": a.info.dtype.name,
                "source_dtype": a.source.dtype.name,
                "placements": list(map(str, a.info.placements)),
                "why": a.why,
                "bytes": a.info.nbytes,
                "chunks_kept": a.is_kept,
            }
            for a in plan.arrays
        ],
        "finished_packs": plan.finished,
    }


def _plan_lines(
    plan: ckptkit.ReshardPlan, done: ckptkit.Resharded | None = None, seconds: float = 0.0
) -> list[str]:
    """What a reshard takes, and where it is done what it took."""
    facts = plan.facts()
    if done is not None:
        written = sum(plan.bytes_by_rank[r] for r in plan.ranks if r not in done.finished)
        speed = ckptkit.size_text(written / max(seconds, 1e-3))
        most = getrusage(RUSAGE_SELF).ru_maxrss  # of memory; in KiB but on macOS
        held = ckptkit.size_text(most if sys.platform == "darwin" else most << 10)
        facts["took"] = f"{seconds:.1f} s, {speed}/s; the process had {held} at most"
        if done.finished:
            facts["there"] = f"{counted(len(done.finished), 'pack')} of an earlier run"
    changed = {}
    for array in plan.arrays:
        (old, before), (new, after) = ((a.name, a.dtype.name) for a in (array.source, array.info))
        if (old, before) != (new, after):
            name = new if old == new else f"{old} -> {new}"
            changed[name] = "" if before == after else f" {before} -> {after}"
    lines = aligned(list(facts.items()))
    if changed:
        lines += ["", "changed on the way:", *_some(changed)]
    if plan.left_out:
        lines += ["", "left out:", *_some(dict.fromkeys(plan.left_out, ""))]
    return lines


def _some(told: Mapping[str, str]) -> list[str]:
    """The first of names with what is told of each, alike ones on one line."""
    names, lines = list(told), []
    for name, places in ckptkit.fold_names(names, told.values()):
        count = f", {len(places)} x" if len(places) > 1 else ""
        lines.append(f"  {name}{count}{told[names[places[0]]]}")
    return [*lines[:_SHOWN], f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else lines


@command(
    "ckpt import llama-hf/ runs/7b",
    "ckpt import old-run/checkpoint-500 runs/7b --to fsdp:8 --step 500",
    exits={OK: "the step is there"},
    codes=[CORRUPT, PEER],
)
@location("src")
@location("run")
@option("--step N", "Its number in RUN.", least=0)
@strategy("Such as fsdp:8; as SRC has it, or single.")
@rules_options
@selecting()
@memory("1GiB")
@option("--overwrite", "Replace the step in RUN.")
@storage
@source_storage("SRC")
def import_(src: str, run: str, *, to: str | None, **given: Any) -> Reply:
    """Make a step of RUN of what another program saved.

    SRC is whatever `ckpt show` shows: it is read as it is, no pickle is run, and no other program
    is needed. The step has checksums of every chunk, and on record the digest of what was read: SRC
    is read twice for it. Its number is that of SRC, where that has one, or of --step.

    `ckpt diff SRC RUN` compares both at any time. For all else that can be chosen on the way there
    is `ckpt reshard`, which takes such a SRC too.
    """
    own = given["source_options"] or given["storage_options"]
    with ckptkit.open(src, storage_options=own) as checkpoint:
        found = checkpoint.foreign
        if found is None:
            raise UsageError(
                "a step of ckptkit already",
                where=checkpoint.location,
                hint="`ckpt reshard` makes one for another strategy of it",
            )
        wanted = checkpoint.strategy if to is None else to
        plan = ckptkit.plan_reshard(src, run, to=wanted, digest=True, **given)
    with Bar("import", 2 * plan.bytes_written) as bar:  # for the digest it is read before
        done = plan.run(bar)
    arrays = len(plan.arrays) + len(plan.aliases)
    document: dict[str, Any] = {
        "source": plan.source,
        "format": found.format,
        "location": done.location,
        "step": done.step,
        "save_id": done.save_id,
        "from": None if found.strategy is None else str(found.strategy),
        "to": plan.to_strategy,
        "arrays": arrays,
        "bytes": plan.bytes_written,
        "left_out": dict(found.details.get("left_out", {})),
    }
    what = f"{counted(arrays, 'array')}, {ckptkit.size_text(plan.bytes_written)}"
    line = f"{done.location}: {what} of {found.format}, as {plan.to_strategy}"
    if not done.is_new:
        line += ", is there already"
    remarks = []
    if left := list(document["left_out"]):
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        remarks.append(
            f"left out: {', '.join(left[:_NAMED])}{more};"
            f" `ckpt show {quote(plan.source)} --json` says why"
        )
    return Reply(document, [line], remarks)


@command(
    "ckpt rules runs/7b --to tp:4",
    "ckpt rules runs/7b --to tp:4,pp:2 --rules llama --config config.json",
    exits={OK: "every tensor is known", NO: "no rule knows some tensors"},
    codes=[CORRUPT],
)
@location("src")
@strategy(required=True)
@rules_options
@storage
def rules(src: str, *, to: str, **given: Any) -> Reply:
    """Show how a strategy would cut each tensor of the step SRC.

    Each tensor has a line: name, shape, how each axis cuts it, the shape of the part of rank 0, and
    which rule says so; layers that are alike share one. Without --rules a SRC that was trained with
    tensor or pipeline parallelism is cut as it was; else the preset that fits the names of the
    tensors is taken.
    """
    found = ckptkit.explain_rules(src, to=to, **given)
    unknown = [each.name for each in found if each.unknown]
    missing = sorted({size for each in found for size in each.unknown_sizes})
    tensors, rows = [], []
    for each in found:
        cuts = [f"{axis} {cut}" for axis, cut in each.placements if cut != "replicate"]
        cut = "; ".join(cuts) or "replicate"
        why = re.sub(r"\blayer \d+", "its layer", each.why)  # else no two layers were alike
        rows.append((str(each.shape), cut, str(each.part), why))
        tensors.append(
            {
                "name": each.name,
                "shape": each.shape,
                "placements": [{"axis": axis, "placement": cut} for axis, cut in each.placements],
                "part": each.part,
                "why": each.why,
                "unknown": each.unknown,
                "unknown_sizes": each.unknown_sizes,
            }
        )
    document = {"to": to, "tensors": tensors, "unknown": unknown, "unknown_sizes": missing}
    folds = ckptkit.fold_names([each.name for each in found], rows)
    lines = [("NAME", "", "SHAPE", "CUTS", "PART", "WHY")]
    for name, places in folds:
        count = f"{len(places)} x" if len(places) > 1 else ""
        lines.append((name, count, *rows[places[0]]))
    remarks = []
    if missing:
        remarks.append(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} unknown: attention heads"
            " may be cut in two, which `ckpt reshard` refuses; pass --config config.json"
        )
    if unknown:
        remarks.append(
            f"{counted(len(unknown), 'tensor')} of which no rule knows; give --rules, or"
            " --replicate-unknown"
        )
    table = aligned(lines, right=[1], spare=[5, 4], is_cut=True)
    return Reply(document, table, remarks, NO if unknown else OK)
