"""`ckpt verify`: is every byte of a step as it was written?"""

from __future__ import annotations

from typing import Any

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.description import stored_bytes
from ckptkit.cli.exits import CORRUPT, OK, STORAGE
from ckptkit.cli.output import counted, emit, emit_json
from ckptkit.cli.progress import Bar
from ckptkit.cli.storage import Options, storage

import ckptkit
from ckptkit.errors import FormatError


@command(
    "ckpt verify runs/7b",
    "ckpt verify runs/7b --digest",
    exits={OK: "every byte is as it was written", CORRUPT: "it is not: something was found"},
)
@location("step")
@click.option("--threads", type=click.IntRange(min=1), help="How many read; a few by default.")
@click.option("--digest", is_flag=True, help="Also print the digest of the state.")
@storage
def verify(
    step: str,
    threads: int | None,
    *,
    digest: bool,
    storage_options: Options | None,
    as_json: bool,
) -> int:
    """Compare every byte of STEP with checksums.

    Also checks that the packs, the manifest and the Zarr documents say the same. All that is wrong
    is listed, not only the first. The digest of the state is the same for every strategy; it is
    compared with the one that STEP has on record, if any. With --json it comes with those of all
    arrays and objects.
    """
    location, total = _located(step, storage_options)
    how: Any = {"threads": threads, "storage_options": storage_options}
    with Bar("verify", total * (2 if digest else 1)) as bar:
        findings = ckptkit.verify(location, progress=bar, **how)
        found = None
        if digest and not findings:  # what is damaged has none
            found = ckptkit.digest(location, progress=bar, **how)
            with ckptkit.open(location, storage_options=storage_options) as checkpoint:
                findings = found.findings(checkpoint)
    if as_json:
        document = {"location": location, "ok": not findings, "findings": _documents(findings)}
        emit_json({**document, "digest": _digest(found)} if digest else document)
        return _exit_code(findings)
    for finding in findings:
        emit([str(finding), *([f"  hint: {finding.hint}"] if finding.hint else [])])
    if findings:
        emit([f"{counted(len(findings), 'finding')}: {location} is not as it was written"])
    else:
        emit([f"ok: every byte of {location} is as it was written"])
    if found is not None:
        emit([f"digest: {found.step}"])
    return _exit_code(findings)


def _documents(findings: list[ckptkit.Finding]) -> list[dict[str, Any]]:
    return [
        {"kind": f.kind, "where": f.where, "what": f.what, "hint": f.hint or None} for f in findings
    ]


def _digest(found: ckptkit.Digest | None) -> dict[str, Any] | None:
    if found is None:
        return None
    parts = {"arrays": found.arrays, "objects": found.objects}
    return {"algorithm": found.algorithm, "step": found.step, **parts}


def _exit_code(findings: list[ckptkit.Finding]) -> int:
    if not findings:
        return OK
    # What could not be read may be whole.
    return STORAGE if all(f.kind == "unreadable" for f in findings) else CORRUPT


def _located(step: str, storage_options: Options | None) -> tuple[str, int]:
    """The step itself, where a run was given, and its size; verify says what is wrong with them."""
    try:
        with ckptkit.open(step, storage_options=storage_options) as checkpoint:
            return checkpoint.location, stored_bytes(checkpoint)
    except FormatError:
        return step, 0
