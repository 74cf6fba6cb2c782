"""`ckpt verify`, `unpack`, `export`, `rebuild`, `commit` and `diff`: a step checked, taken apart,
written for other programs, made again, or compared with another.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from ckptkit.cli.options import (
    Options,
    command,
    location,
    memory,
    option,
    patterns,
    selecting,
    size,
    source_storage,
    storage,
    threads,
)
from ckptkit.cli.output import CORRUPT, NO, OK, STORAGE, Bar, Reply, counted, in_short, json_value

import ckptkit
from ckptkit.errors import FormatError, NotFoundError, UsageError


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
            "folder": str(Path(folder).absolute()),
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
def export(
    step: str,
    out: str,
    *,
    storage_options: Options | None,
    source_options: Options | None,
    **given: Any,
) -> Reply:
    """Write the model of STEP for other programs.

    OUT must not be there, and appears when it is complete and durable, or not at all; after an
    interruption the same command goes on with the files of a folder. The model is never in memory,
    nor is torch. What is no part of the model stays behind; with --optimizer dcp and torch have
    what torch's get_optimizer_state_dict gives, beside the model. One file is of safetensors, or of
    torch.save: torch.load(weights_only=True) reads that.

    A folder opens in transformers with from_pretrained, where --with gives it a config.json. The
    names are those of the step: --rename and --names change them where transformers has others.
    """
    with ckptkit.open(step, storage_options=source_options or storage_options) as checkpoint:
        place = checkpoint.location  # of a run, whose newest step may be another soon
        total = sum(
            array.nbytes
            for name, array in checkpoint.arrays.items()
            if name.startswith(("model/", "optimizer/") if given["optimizer"] else "model/")
            and array.alias_of is None
        )
    with Bar("export", total) as bar:
        done = ckptkit.export(
            place,
            out,
            progress=bar,
            storage_options=storage_options,
            source_options=source_options,
            **given,
        )
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
def diff(
    a: str,
    b: str,
    *,
    storage_options: Options | None,
    source_options: Options | None,
    **given: Any,
) -> Reply:
    """Compare the steps A and B: names, shapes, dtypes, values, objects.

    What differs most comes first. How they are sharded is no difference. Elements have to be the
    same to the bit, unless --atol or --rtol is given: then NaNs are alike, and numbers that are at
    most ATOL + RTOL * |b| apart.
    PATTERN, with * and ?, picks by the whole name or by the one inside of the group. Every byte is
    checked on the way.
    """
    total = 0
    for place, own in ((a, source_options or storage_options), (b, storage_options)):
        with ckptkit.open(place, storage_options=own) as checkpoint:
            total += checkpoint.stored_bytes
    stores: Any = {"storage_options": storage_options, "source_options": source_options}
    with Bar("diff", total) as bar:
        found = ckptkit.diff(a, b, progress=bar, **stores, **given)
    lines = [*found.lines(), *map(_object_line, found.objects), found.summary()]
    return Reply(_document(found), lines, code=OK if found.same else NO)


def _object_line(found: ckptkit.ObjectDifference) -> str:
    if found.kind.startswith("only_"):
        return f"object {found.name}: only in {found.kind[-1].upper()}"
    what = "semantics " if found.kind == "semantics" else ""
    return f"object {found.name}: {what}{in_short(found.a, 40)} != {in_short(found.b, 40)}"


def _document(found: ckptkit.Diff) -> dict[str, Any]:
    arrays = [asdict(each) for each in found.arrays]
    for each in arrays:
        if (values := each["values"]) is not None:
            values["max_abs"] = json_value(values["max_abs"])
    return {
        "same": found.same,
        "a": asdict(found.a),
        "b": asdict(found.b),
        "arrays": found.array_count,
        "objects": found.object_count,
        "bytes": found.nbytes,
        "array_differences": arrays,
        "object_differences": [
            {"name": each.name, "kind": each.kind, "a": json_value(each.a), "b": json_value(each.b)}
            for each in found.objects
        ],
    }
