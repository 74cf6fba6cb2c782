"""Every error ckptkit raises on purpose.

CkptkitError
├── UsageError(ValueError)             what the caller passed cannot be right
│   ├── StrategyError                  a strategy string or mesh
│   ├── LayoutError                    a shape, placement or buffer that does not fit
│   ├── InvalidNameError               a tensor name the format cannot hold
│   ├── RulesError                     rules that mean nothing, or do not fit the tensors
│   └── UnsupportedTypeError(TypeError)  a value or dtype the format has no type for
├── FormatError                        bytes that are not a checkpoint this version reads
│   ├── VersionError                   written by a newer ckptkit
│   └── CorruptionError                bytes that differ from what was written
├── NotFoundError(FileNotFoundError)   nothing there, or no such array
│   └── NotCommittedError              a step without a manifest
├── AlreadyExistsError(FileExistsError)  something is there and may not be replaced
│   └── StepExistsError                the step is already committed
├── StorageError(OSError)              the disk or the object store refused
│   ├── AccessError(PermissionError)   not allowed
│   └── NoSpaceError                   full
└── PeerError(RuntimeError)            another rank failed, disagrees, or did not come
    └── GivenUpError                   rank 0 failed: nothing of the save will be committed
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_ABSENT: Any = object()


class CkptkitError(Exception):
    """Says what is wrong, where, with which value, and what to do about it."""

    def __init__(
        self, what: str, *, where: str = "", value: object = _ABSENT, hint: str = ""
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.has_value = value is not _ABSENT
        self.value = ""
        if self.has_value:
            # Bounded: a hostile file must not fill a terminal, and errors must stay picklable.
            try:
                text = repr(value)
            except (ValueError, RecursionError):  # an integer of thousands of digits, a deep tree
                text = f"a value of {type(value).__name__} that is too large to show"
            self.value = text
            if len(text) > 200:
                self.value = f"{text[:160]}… ({len(text)} characters)"
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.has_value:
            text += f" (got {self.value})"
        return f"{text}\nhint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (type(self), self.what, self.__dict__.copy()))


def nearest(value: str, known: Iterable[str], most: int = 1) -> str:
    """What a hint begins with where a name is unknown: `did you mean a or b? `, or nothing.

    Names that differ in numbers are alike: of 100,000 arrays only a few are really compared.
    """
    import difflib  # noqa: PLC0415 - costs time

    wanted, alike = value[:_LONGEST], dict[str, list[str]]()
    for name in known:
        alike.setdefault(_NUMBER.sub("0", name), []).append(name)
    template, numbers = _NUMBER.sub("0", wanted), _NUMBER.findall(wanted)
    close = [each for each in alike if each == template or each.endswith(f"/{template}")]
    if not close and len(alike) <= _COMPARED:
        close = difflib.get_close_matches(template, alike, most)

    def likeness(name: str) -> int:
        return sum(map(str.__eq__, _NUMBER.findall(name), numbers))

    found = [max(alike[each], key=likeness) for each in close[:most]]
    return f"did you mean {' or '.join(found)}? " if found else ""


_NUMBER = re.compile(r"[0-9]+")
_LONGEST, _COMPARED = 200, 2000


def _restore(kind: type[CkptkitError], what: str, state: dict[str, Any]) -> CkptkitError:
    error = kind.__new__(kind)
    Exception.__init__(error, what)
    error.__dict__.update(state)
    return error


class UsageError(CkptkitError, ValueError):
    """The call cannot be right, whatever the storage holds."""


class StrategyError(UsageError):
    """A strategy string or a mesh that means nothing."""


class LayoutError(UsageError):
    """A shape, a placement or a buffer that does not fit the others."""


class InvalidNameError(UsageError):
    """A tensor name that the format cannot hold."""


class RulesError(UsageError):
    """Rules that mean nothing, that lack a size, or that do not fit the tensors."""


class UnsupportedTypeError(UsageError, TypeError):
    """A value or a dtype that the format has no type for."""


class FormatError(CkptkitError):
    """Bytes that are not a checkpoint this version can read."""


class VersionError(FormatError):
    """A checkpoint written by a newer version of the format."""


class CorruptionError(FormatError):
    """Bytes that differ from what was written."""


class NotFoundError(CkptkitError, FileNotFoundError):
    """There is nothing at the location, or nothing of that name in it."""


class NotCommittedError(NotFoundError):
    """A step that has no manifest: it was never finished, or is being written."""


class AlreadyExistsError(CkptkitError, FileExistsError):
    """Something is there already and must not be replaced."""


class StepExistsError(AlreadyExistsError):
    """The step is committed already, and overwriting was not asked for."""


class StorageError(CkptkitError, OSError):
    """The disk or the object store refused."""


class AccessError(StorageError, PermissionError):
    """The storage does not allow it."""


class NoSpaceError(StorageError):
    """The storage is full."""


class PeerError(CkptkitError, RuntimeError):
    """Another rank failed, disagrees with this one, or did not come in time."""


class GivenUpError(PeerError):
    """Rank 0 has left: nothing of this save will ever be committed."""
