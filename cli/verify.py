"""`ckpt verify`: is every byte of a step as it was written?"""

from __future__ import annotations

import click
from ckptkit.cli.command import command, location
from ckptkit.cli.description import stored_bytes
from ckptkit.cli.exits import CORRUPT, OK, STORAGE
from ckptkit.cli.output import counted, emit, emit_json
from ckptkit.cli.progress import Bar

import ckptkit
from ckptkit.errors import FormatError


@command(
    "ckpt verify runs/7b",
    exits={OK: "every byte is as it was written", CORRUPT: "it is not: something was found"},
)
@location("step")
@click.option("--threads", type=click.IntRange(min=1), help="How many read; a few by default.")
def verify(step: str, threads: int | None, *, as_json: bool) -> int:
    """Compare every byte of STEP with checksums.

    Also checks that the packs, the manifest and the Zarr documents say the same. All that is wrong
    is listed, not only the first.
    """
    location, total = _located(step)
    with Bar("verify", total) as bar:
        findings = ckptkit.verify(location, threads=threads, progress=bar)
    if as_json:
        found = [
            {"kind": f.kind, "where": f.where, "what": f.what, "hint": f.hint or None}
            for f in findings
        ]
        emit_json({"location": location, "ok": not findings, "findings": found})
    elif findings:
        for finding in findings:
            emit([str(finding), *([f"  hint: {finding.hint}"] if finding.hint else [])])
        emit([f"{counted(len(findings), 'finding')}: {location} is not as it was written"])
    else:
        emit([f"ok: every byte of {location} is as it was written"])
    return _exit_code(findings)


def _exit_code(findings: list[ckptkit.Finding]) -> int:
    if not findings:
        return OK
    # What could not be read may be whole.
    return STORAGE if all(f.kind == "unreadable" for f in findings) else CORRUPT


def _located(step: str) -> tuple[str, int]:
    """The step itself, where a run was given, and its size; verify says what is wrong with them."""
    try:
        with ckptkit.open(step) as checkpoint:
            return checkpoint.location, stored_bytes(checkpoint)
    except FormatError:
        return step, 0
