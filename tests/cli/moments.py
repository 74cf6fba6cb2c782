"""`ckpt`, of which a copy meets Ctrl-C at each of many moments: every so many calls, and in some of
the callbacks of imports. Tells on stderr of each copy that ends otherwise than it should, and how
many there were.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from types import FrameType

CALLS, CALLBACKS = 1500, 40
CALLBACK = "_get_module_lock.<locals>.cb"  # what it raises Python prints and forgets


class Moments:
    """A profiler, which Python tells of each call."""

    def __init__(self) -> None:
        self.calls = self.callbacks = self.copies = 0
        self.is_copy = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        self.calls += 1
        due = self.calls % CALLS == 0
        if frame.f_code.co_qualname == CALLBACK:
            self.callbacks += 1
            due = self.callbacks % CALLBACKS == 0
        if due:
            self.interrupt_a_copy(frame.f_code.co_qualname)

    def interrupt_a_copy(self, where: str) -> None:
        with tempfile.TemporaryFile() as told:
            copy = os.fork()
            if copy == 0:
                sys.setprofile(None)
                self.is_copy = True
                os.dup2(told.fileno(), 2)
                signal.raise_signal(signal.SIGINT)
                return
            code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
            said = os.pread(told.fileno(), 10000, 0)
        self.copies += 1
        if (code, said) != (130, b"interrupted\n"):
            sys.stderr.write(f"in {where}: {code}, {said.decode()}\n")


def main() -> None:
    """Run the command line, and the copies meanwhile."""
    moments = Moments()
    import ckptkit_command  # noqa: PLC0415 - from its first line on

    sys.setprofile(moments)
    try:
        ckptkit_command.main()
    finally:
        sys.setprofile(None)
        if not moments.is_copy:
            sys.stderr.write(f"{moments.copies} copies\n")


if __name__ == "__main__":
    main()
