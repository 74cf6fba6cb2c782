"""`ckpt view`: a step as one HTML file to look at, and to send to others."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

import click
from ckptkit.cli.options import (
    Options,
    command,
    location,
    memory,
    option,
    rules_options,
    split_heads,
    steps,
    storage,
    strategy,
)
from ckptkit.cli.output import CORRUPT, Bar, Reply

import ckptkit
from ckptkit.errors import StorageError, UsageError


@command(
    "ckpt view runs/7b --open",
    "ckpt view runs/7b --to tp:4 --config config.json -o 7b.html",
    "ckpt view runs/7b --against runs/7b/step-0000001000 --stats -o 7b.html",
    codes=[CORRUPT],
)
@location("step")
@option("--against OTHER", "Show what differs from this step, too.", shell_complete=steps)
@strategy("Show what a reshard would move, too.")
@option("--stats", "Show what the numbers are like; reads all of them.")
@option("-o --out FILE", "Write the page there.", type=click.Path())
@option("--open", "Show the page in a browser.", into="to_open")
@rules_options
@split_heads
@memory()
@storage
def view(
    step: str,
    *,
    against: str | None,
    stats: bool,
    out: str | None,
    to_open: bool,
    storage_options: Options | None,
    **given: Any,
) -> Reply:
    """Show STEP as a page in a browser.

    The page is one file that needs no other, no server and no network: who holds what, as pictures
    of the mesh and of each array, sizes by layer, the packs, and the steps of the run. STEP may be
    what another program wrote.

    With --to it also shows what `ckpt reshard` would move, where --rules, --config and the others
    are as there; with --against what `ckpt diff` finds; with --stats smallest, largest and mean
    values, zeros, NaNs and a histogram of each array. --against and --stats read all values, and
    check them; else only the manifest is read.
    """
    if not out and not to_open:
        raise UsageError("nowhere to put the page", hint="say -o FILE.html, or --open")
    place = _place(out) if out else None
    total = 0
    if stats or against is not None:
        with ckptkit.open(step, storage_options=storage_options) as checkpoint:
            total = checkpoint.stored_bytes * (stats + (against is not None))
    with Bar("view", total) as bar:
        page = ckptkit.view(
            step,
            against=against,
            stats=stats,
            progress=bar,
            storage_options=storage_options,
            **given,
        )
    path = _written(page, place, step)
    remarks = []
    if to_open and not webbrowser.open(path.as_uri()):
        remarks.append(f"no browser could be started; open {path} in one")
    return Reply({"file": str(path), "bytes": path.stat().st_size}, [str(path)], remarks)


def _place(out: str) -> Path:
    """Where the page will be; what is in its way is told before all values are read."""
    path, what = Path(out).absolute(), None
    try:
        # What /dev/stdout leads to may be a plain file: to replace the link would harm the system.
        is_open = path.is_symlink() and path.readlink().is_relative_to("/proc")
        if not path.parent.is_dir():
            what = "there is no such folder"
        elif path.is_dir():
            what = "a folder has its name"
        elif is_open or (path.exists() and not path.is_file()):
            what = "what has its name is no plain file"
    except OSError as error:
        raise _refused(path, error.strerror) from error
    if what is not None:
        raise _refused(path, what)
    return path


def _written(page: str, place: Path | None, step: str) -> Path:
    """Where the page is. It replaces what has its name, and follows no link."""
    try:
        path = place or _to_look_at(step)
        # As short as a name may have to be, and of no other writer of this page.
        begun = path.with_name(f".{secrets.token_hex(8)}")
        with begun.open("x", encoding="utf-8") as file:
            try:
                file.write(page)
                file.close()
                begun.replace(path)
            except BaseException:
                begun.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise _refused(place or Path(tempfile.gettempdir()), error.strerror) from error
    return path


def _to_look_at(step: str) -> Path:
    """A file that the next look at the same step replaces: a browser may read it long after the
    command has ended, so nobody could delete it.
    """
    folder = Path(tempfile.gettempdir(), f"ckpt-view-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o22:
        folder = Path(tempfile.mkdtemp(prefix="ckpt-view-"))  # somebody else has the name
    name = step if "://" in step else os.path.abspath(step)  # noqa: PTH100 — a link stays one
    return folder / f"{hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:16]}.html"


def _refused(path: Path, why: str | None) -> StorageError:
    return StorageError(
        f"the page cannot be written: {why}",
        where=str(path),
        hint="name another file with -o",
    )
