"""Files that the system has nothing of in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STRIDE = 1 << 20


def forget(path: Path) -> None:
    """Have the system forget the file. What somebody just looked at stays for a moment, for all the
    advice, and the system reads ahead of each look.
    """
    deadline = time.monotonic() + 60
    places = range(0, path.stat().st_size, _STRIDE)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while True:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not any(is_cached(file.fileno(), at) for at in places):
                time.sleep(0.05)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)


def is_cached(file: int, offset: int) -> bool:
    """Whether the system has the byte there in memory; it reads it soon where it has not."""
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
