"""Files that the system has nothing of in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ckptkit.storage.base.buffers import is_out_of_cache


def forget(path: Path) -> None:
    """Have the system forget the file. What somebody looks at just now stays for a moment, for all
    the advice.
    """
    deadline = time.monotonic() + 60
    with path.open("rb") as file:
        os.fsync(file.fileno())
        # What the system reads ahead for others is neither there nor forgotten before it has come:
        # this waits for it, and to the end, so that nothing more is read ahead.
        while file.read(1 << 20):
            pass
        while True:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if is_out_of_cache(file.fileno(), 0, file.tell()):
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)
