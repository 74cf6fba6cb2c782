"""The steps of a run: `ckpt ls` and `prune` list them and delete old ones; `verify`, `unpack`,
`export`, `rebuild`, `commit` and `diff` check one, take it apart, write it for other programs, make
it again, or compare it with another.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from shlex import quote
from typing import Any

import click
from ckptkit.cli.options import (
    Options,
    command,
    location,
    memory,
    option,
    patterns,
    seconds_of,
    selecting,
    size,
    source_storage,
    storage,
    threads,
)
from ckptkit.cli.output import (
    CORRUPT,
    NO,
    OK,
    STORAGE,
    Bar,
    Reply,
    aligned,
    counted,
    in_short,
    json_value,
)

import ckptkit
from ckptkit.errors import FormatError, NotFoundError, UsageError

_KINDS = {
    "step": "step",
    "orphan": "never committed, of step",
    "leftover": "unfinished file, of step",
}


@command("ckpt ls runs/7b", codes=[CORRUPT])
@location("run")
@storage
def ls(run: str, *, storage_options: Options | None) -> Reply:
    """List the steps of RUN, lowest number first.

    Says of each when it was saved, its size, its strategy, as old -> new where it changed, and
    whether it is committed; and the size of all. A step that
    is not committed was never finished, or is being written; its size is what is there. The newest
    step is the last one: numbers count, not times. A step whose folder is a symbolic link is shown
    as one: it is read, and never written or pruned. So are checkpoints of other programs in folders
    such as step_100 or checkpoint-100, with their format. Where several have one number, the names
    of their folders tell them apart.
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
            "folder": info.folder,
        }
        for info in sorted([*found.listing(), *found.foreign()], key=attrgetter("step"))
    ]
    rows = [("STEP", "SAVED", "SIZE", "STRATEGY", "STATE")]
    before, numbers = None, Counter(step["step"] for step in steps)
    for step in steps:
        state = step["format"] or ("committed" if step["committed"] else "not committed")
        state += f", in {step['folder']}" if numbers[step["step"]] > 1 else ""
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
    codes=[CORRUPT],
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
            hint=f"`ckpt show {quote(location)}` shows it; a run is the folder that it is in",
        )
    return run


@command(
    "ckpt verify runs/7b",
    "ckpt verify runs/7b --digest",
    "ckpt verify llama-hf/ --values",
    exits={OK: "every byte is as it was written", CORRUPT: "it is not: something was found"},
)
@location("step")
@threads
@option("--digest", "Also print the digest of the state.")
@option("--values", "Also look for NaNs and infinities.")
@storage
def verify(step: str, *, digest: bool, values: bool, **how: Any) -> Reply:
    """Compare every byte of STEP with checksums.

    Also checks that the packs, the manifest and the Zarr documents say the same. All that is wrong
    is listed, not only the first. The digest of the state is the same for every strategy; it is
    compared with the one that STEP has on record, if any. With --json it comes with those of all
    arrays and objects.

    What other programs wrote has no checksums: of that every tensor is looked for in the files, and
    no byte is compared. With --values all numbers of STEP are read, and those that are not finite
    are findings.
    """
    location, total, found, foreign = step, 0, None, None
    stores = how["storage_options"]
    # Of a format that is broken verify says what is wrong.
    with suppress(FormatError), ckptkit.open(step, storage_options=stores) as checkpoint:
        # The step itself, where a run was given.
        location, total = checkpoint.location, checkpoint.stored_bytes
        foreign = checkpoint.foreign
    times = (foreign is None) + digest + values
    with Bar("verify", total * times) as bar:
        findings = ckptkit.verify(location, values=values, progress=bar, **how)
        if digest and not findings:  # what is damaged has none
            found = ckptkit.digest(location, progress=bar, **how)
            with ckptkit.open(location, storage_options=stores) as checkpoint:
                findings = found.findings(checkpoint)
    document: dict[str, Any] = {
        "location": location,
        "ok": not findings,
        "compared": foreign is None,
        "findings": [
            {"kind": f.kind, "where": f.where, "what": f.what, "hint": f.hint or None}
            for f in findings
        ],
    }
    lines = []
    for finding in findings:
        lines += [str(finding), *([f"  hint: {finding.hint}"] if finding.hint else [])]
    if findings:
        is_whole = all(finding.kind == "values" for finding in findings)
        what = "has such numbers" if is_whole else "is not as it was written"
        lines.append(f"{counted(len(findings), 'finding')}: {location} {what}")
    elif foreign is None:
        lines.append(f"ok: every byte of {location} is as it was written")
    else:
        lines.append(f"ok: every tensor of {location} is in its files, whole")
    if foreign is not None:
        lines.append(f"{foreign.format} has no checksums: the bytes were compared with nothing")
        left_out = foreign.details.get("left_out", {})
        lines += [f"left out: {name}: {why}" for name, why in left_out.items()]
        if unsure := foreign.details.get("not_checked"):
            lines.append(f"not checked: {unsure}")
    if digest:
        document["digest"] = None
    if found is not None:
        parts = {"arrays": found.arrays, "objects": found.objects}
        document["digest"] = {"algorithm": found.algorithm, "step": found.step, **parts}
        lines.append(f"digest: {found.step}")
    # What could not be read may be whole.
    is_unread = all(finding.kind == "unreadable" for finding in findings)
    code = OK if not findings else STORAGE if is_unread else CORRUPT
    return Reply(document, lines, code=code)


@command("ckpt unpack runs/7b plain", "ckpt unpack runs/7b plain --memory 64MiB", codes=[CORRUPT])
@location("step")
@click.argument("folder", metavar="DIR", type=click.Path())
@memory(text="Hold at most about this much of chunks at once.")
@storage
def unpack(step: str, folder: str, memory: str, *, storage_options: Options | None) -> Reply:
    """Write STEP as a plain Zarr directory DIR.

    Any tool that knows Zarr v3 reads it. Every chunk is checked on the way. DIR must not
    exist, or be empty; it appears when it is complete and durable, and not at all if anything
    fails. What was left by an unpack to DIR that was killed is removed.
    """
    with ckptkit.open(step, storage_options=storage_options) as checkpoint:
        nbytes = sum(array.nbytes for array in checkpoint.arrays.values())
        with Bar("unpack", nbytes) as bar:
            files = ckptkit.unpack(checkpoint, folder, memory=memory, progress=bar)
        document = {
            "location": checkpoint.location,
            "folder": str(ckptkit.open_store(folder).location),
            "step": checkpoint.step,
            "arrays": len(checkpoint.arrays),
            "bytes": nbytes,
            "files": files,
        }
    what = f"{counted(len(checkpoint.arrays), 'array')}, {ckptkit.size_text(nbytes)} in"
    line = f"unpacked step {checkpoint.step} into {folder}: {what} {counted(files, 'file')}"
    return Reply(document, [line])


@command(
    "ckpt export runs/7b llama-hf --to-format hf --with llama-2-7b",
    "ckpt export runs/7b model.safetensors --to-format safetensors --cast bf16",
    "ckpt export runs/7b old-run --to-format dcp --optimizer",
    exits={OK: "it is there, whole"},
    codes=[CORRUPT],
)
@location("step")
@location("out")
@option(
    "--to-format",
    "The folder of a Hugging Face model or of DCP, or one file.",
    type=click.Choice(["hf", "safetensors", "torch", "dcp"]),
    required=True,
)
@option("--with FOLDER", "Copy config.json and the tokenizer from there.", into="beside")
@option("--max-file-size SIZE", "Of the tensors in each file of a folder.", default="5GB")
@option("--optimizer", "The state of the optimizer as well, for torch and dcp.")
@selecting("Write only these arrays.")
@size("A size that names refer to.")
@memory()
@storage
@source_storage("STEP and FOLDER")
def export(step: str, out: str, **given: Any) -> Reply:
    """Write the model of STEP for other programs.

    OUT must not be there, and appears when it is complete and durable, or not at all; after an
    interruption the same command goes on with the files of a folder. The model is never in memory,
    nor is torch. What is no part of the model stays behind; with --optimizer dcp and torch have
    what torch's get_optimizer_state_dict gives, beside the model. One file is of safetensors, or of
    torch.save: torch.load(weights_only=True) reads that.

    A folder opens in transformers with from_pretrained, where --with gives it a config.json. The
    names are those of the step: --rename and --names change them where transformers has others.
    """
    own = given["source_options"] or given["storage_options"]
    with ckptkit.open(step, storage_options=own) as checkpoint:
        place = checkpoint.location  # of a run, whose newest step may be another soon
        total = sum(
            array.nbytes
            for name, array in checkpoint.arrays.items()
            if name.startswith(("model/", "optimizer/") if given["optimizer"] else "model/")
            and array.alias_of is None
        )
    with Bar("export", total) as bar:
        done = ckptkit.export(place, out, progress=bar, **given)
    document = {
        "source": place,
        "location": done.location,
        "files": done.files,
        "finished_files": done.finished,
        "arrays": done.arrays,
        "bytes": done.nbytes,
        "left_out": done.left_out,
        "tied": [{"name": name, "written_as": other} for name, other in done.tied],
    }
    what = f"{counted(done.arrays, 'array')}, {ckptkit.size_text(done.nbytes)}"
    before = f", {len(done.finished)} of them from before" if done.finished else ""
    remarks = []
    if done.left_out:
        groups = sorted({name.partition("/")[0] for name in done.left_out})
        remarks.append(f"left out: {counted(len(done.left_out), 'array')} of {', '.join(groups)}")
    if given["to_format"] == "hf" and given["beside"] is None:
        remarks.append("no config.json is beside the model: --with FOLDER copies one")
    line = f"{done.location}: {what} in {counted(len(done.files), 'file')}{before}"
    return Reply(document, [line], remarks)


@command(
    "ckpt rebuild runs/7b/step-0000001000",
    exits={OK: "the step is committed again", CORRUPT: "no save in it is complete and whole"},
)
@location("step")
@option("--save-id ID", "Which save, where the packs of several are complete.")
@storage
def rebuild(step: str, save_id: str | None, *, storage_options: Options | None) -> Reply:
    """Make the lost manifest of STEP again.

    All it needs are the packs; a damaged manifest is replaced. STEP must be the folder of the step
    itself: a run cannot say which step has lost its manifest. Refused where a manifest that can be
    read exists, and where the packs are not complete.
    """
    try:
        ckptkit.rebuild(step, save_id=save_id, storage_options=storage_options)
    except NotFoundError as error:
        run = ckptkit.Run(step, storage_options=storage_options)
        without = [str(info.step) for info in run.listing() if not info.committed]
        if without:
            raise UsageError(
                "a run, not a step",
                where=step,
                hint=f"pass the folder of a step; without a manifest: {', '.join(without)}",
            ) from error
        raise
    with ckptkit.open(step, storage_options=storage_options) as checkpoint:
        arrays, packs = len(checkpoint.arrays), len(checkpoint.manifest.packs)
        document = {
            "location": checkpoint.location,
            "step": checkpoint.step,
            "save_id": checkpoint.save_id,
            "strategy": str(checkpoint.strategy),
            "arrays": arrays,
            "packs": packs,
            "bytes": checkpoint.stored_bytes,
        }
    what = f"{counted(arrays, 'array')} in {counted(packs, 'pack')}"
    line = f"step {checkpoint.step} is committed again: {what}, saved as {checkpoint.save_id}"
    return Reply(document, [line])


@command("ckpt commit runs/7b-tp4", exits={OK: "the step is committed"}, codes=[CORRUPT])
@location("run")
@option("--step N", "Which step, of several.", least=0)
@option("--save-id ID", "Which save, where there are packs of several.")
@option("--overwrite", "Replace the step where it is committed already.")
@storage
def commit(run: str, **given: Any) -> Reply:
    """Commit the step of RUN that slices of a reshard have written.

    These are calls of `ckpt reshard --engine slice:I/N`, each of which writes its share of the
    packs and no more; once all have, this makes the step. It is refused while packs are missing,
    and says which.
    """
    manifest = ckptkit.commit_packs(run, **given)
    save, packs = manifest.save, len(manifest.packs)
    document = {
        "run": run,
        "step": save.step,
        "save_id": save.save_id,
        "strategy": str(save.strategy),
        "arrays": len(manifest.arrays) + len(manifest.aliases),
        "packs": packs,
        "bytes": sum(pack.size for pack in manifest.packs),
    }
    line = f"step {save.step} is committed: {save.strategy}, {counted(packs, 'pack')}"
    return Reply(document, [line])


@command(
    "ckpt diff runs/7b runs/7b-tp4",
    "ckpt diff runs/7b runs/7b-bf16 --include 'model/*' --rtol 1e-3",
    exits={OK: "the same state", NO: "something differs"},
    codes=[CORRUPT],
)
@location("a")
@location("b")
@patterns("Compare only these arrays.")
@option("--atol", "Numbers may be this far apart.", type=float, default=0.0, show_default=False)
@option(
    "--rtol", "Or this many times the size of B's.", type=float, default=0.0, show_default=False
)
@memory()
@threads
@storage
@source_storage("A")
def diff(a: str, b: str, **given: Any) -> Reply:
    """Compare the steps A and B: names, shapes, dtypes, values, objects.

    What differs most comes first. How they are sharded is no difference. Elements have to be the
    same to the bit, unless --atol or --rtol is given: then NaNs are alike, and numbers that are at
    most ATOL + RTOL * |b| apart.
    PATTERN, with * and ?, picks by the whole name or by the one inside of the group. Every byte is
    checked on the way.
    """
    total, options = 0, given["storage_options"]
    for place, own in ((a, given["source_options"] or options), (b, options)):
        with ckptkit.open(place, storage_options=own) as checkpoint:
            total += checkpoint.stored_bytes
    with Bar("diff", total) as bar:
        found = ckptkit.diff(a, b, progress=bar, **given)
    lines, objects = found.lines(), []
    for each in found.objects:
        if each.kind.startswith("only_"):
            lines.append(f"object {each.name}: only in {each.kind[-1].upper()}")
        else:
            what = "semantics " if each.kind == "semantics" else ""
            both = f"{in_short(each.a, 40)} != {in_short(each.b, 40)}"
            lines.append(f"object {each.name}: {what}{both}")
        values = {"a": json_value(each.a), "b": json_value(each.b)}
        objects.append({"name": each.name, "kind": each.kind, **values})
    arrays = [asdict(array) for array in found.arrays]
    for array in arrays:
        if (numbers := array["values"]) is not None:
            numbers["max_abs"] = json_value(numbers["max_abs"])
    document = {
        "same": found.same,
        "a": asdict(found.a),
        "b": asdict(found.b),
        "arrays": found.array_count,
        "objects": found.object_count,
        "bytes": found.nbytes,
        "array_differences": arrays,
        "object_differences": objects,
    }
    return Reply(document, [*lines, found.summary()], code=OK if found.same else NO)
