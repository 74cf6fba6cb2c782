"""The exit codes, and the one place that maps errors to them."""

from __future__ import annotations

import os
import sys
import traceback

import click
from ckptkit.cli.output import let_go, remark

from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    FormatError,
    NotFoundError,
    PeerError,
    StorageError,
    UsageError,
)

OK, NO, USAGE, CORRUPT, ABSENT, STORAGE, PEER = range(7)
BUG, INTERRUPTED, PIPE = 70, 130, 141

MEANING = {
    OK: "done",
    NO: "the answer is no",
    USAGE: "wrong usage, or something is in the way",
    CORRUPT: "corrupt, or no format that this version reads",
    ABSENT: "not found, or not committed",
    STORAGE: "the storage refused, or the output cannot be written",
    PEER: "another rank failed",
    BUG: "a bug in ckptkit",
    INTERRUPTED: "interrupted",
    PIPE: "the reader of the output went away",
}

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (click.ClickException, USAGE),
    (UsageError, USAGE),
    (AlreadyExistsError, USAGE),
    (FormatError, CORRUPT),
    (NotFoundError, ABSENT),
    (StorageError, STORAGE),
    (PeerError, PEER),
    (KeyboardInterrupt, INTERRUPTED),
    (click.Abort, INTERRUPTED),
    (BrokenPipeError, PIPE),
)


def code_of(error: BaseException) -> int:
    """The exit code that an error ends the program with."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


def report(error: BaseException) -> int:
    """Say on stderr what went wrong, as `error: …` and `hint: …`; returns the exit code."""
    if isinstance(error, SystemExit):
        raise error
    code = code_of(error)
    if code == PIPE:
        let_go(sys.stdout)
        return code
    if os.environ.get("CKPTKIT_DEBUG") == "1":
        traceback.print_exception(error)
    for line in _message(error, code):
        remark(line)
    return code


def _message(error: BaseException, code: int) -> list[str]:
    if code == INTERRUPTED:
        return ["interrupted"]
    if isinstance(error, CkptkitError):
        return f"error: {error}".splitlines()
    if isinstance(error, click.ClickException):
        said = error.format_message().rstrip(".")
        lines = [f"error: {said[:1].lower()}{said[1:]}"]
        context = getattr(error, "ctx", None)
        if context is not None:
            lines.append(f"hint: `{context.command_path} --help` shows the usage")
        return lines
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return [
        f"error: this is a bug in ckptkit: {text}",
        "hint: report it to the project's issue tracker, with what CKPTKIT_DEBUG=1 makes it print",
    ]
