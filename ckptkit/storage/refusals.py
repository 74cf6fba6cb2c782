"""From what the operating system says to an error that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    InvalidNameError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)

_KINDS: dict[int, tuple[type[CkptkitError], str]] = {
    errno.EACCES: (AccessError, "check the owner and the permissions of the path"),
    errno.EPERM: (AccessError, "check the owner, the permissions and the attributes (lsattr)"),
    errno.EROFS: (AccessError, "the file system is mounted read-only; choose another place"),
    errno.ENOSPC: (NoSpaceError, "free some space or choose another place; df shows what is left"),
    errno.EDQUOT: (NoSpaceError, "the quota is used up; free some space or ask for more"),
    errno.ENOENT: (NotFoundError, "check the path, or whether it was deleted meanwhile"),
    errno.EEXIST: (AlreadyExistsError, "delete it first or choose another name"),
    errno.ENAMETOOLONG: (InvalidNameError, "choose a shorter name"),
    errno.ENOTDIR: (StorageError, "part of the path is a file where a folder is needed"),
    errno.ELOOP: (StorageError, "a symbolic link is in the way, or leads to itself; remove it"),
    errno.EISDIR: (StorageError, "a folder is in the way; choose another name"),
    errno.EFBIG: (StorageError, "a limit on file sizes (ulimit -f, file system) is in the way"),
    errno.EMFILE: (StorageError, "raise the limit on open files (ulimit -n)"),
    errno.EIO: (StorageError, "the disk reports a fault; see dmesg and do not trust this disk"),
    errno.ESTALE: (StorageError, "the network file system was remounted; try again"),
}


def refusal(error: OSError, where: str) -> CkptkitError:
    """The error to raise for what the operating system refused."""
    default = (StorageError, "see what the system says about this path (dmesg, mount, df)")
    kind, hint = _KINDS.get(error.errno or 0, default)
    return kind(error.strerror or str(error), where=where, hint=hint)


def link_in_the_way(path: object) -> StorageError:
    """The error of what would change something behind a symbolic link."""
    return StorageError(
        "a symbolic link: nothing is written or deleted through one",
        where=str(path),
        hint="remove the link (what it leads to stays), "
        "or name the run that the folder itself is in",
    )


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Translate every OSError inside; our own errors are OSErrors too and pass unchanged."""
    try:
        yield
    except CkptkitError:
        raise
    except OSError as error:
        raise refusal(error, where) from error
