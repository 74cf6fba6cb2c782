"""The command `ckpt`, from its first moment.

It stands outside of the package, since importing that is most of what a short command does: Ctrl-C
has to end the import as quietly as anything else.
"""

from __future__ import annotations

import sys

try:
    import os
    import signal
    from contextlib import suppress
except KeyboardInterrupt:  # what comes before this is Python's own start
    sys.exit(130)


def main() -> None:
    """Run the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    _open_what_is_closed()
    from ckptkit.cli import main as program  # noqa: PLC0415 - it takes long

    program()


def _end(*_: object) -> None:
    """End at once: there is nothing to clean up before a command runs, nor after it."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


def _open_what_is_closed() -> None:
    """Give standard streams that are closed a descriptor, which else the next file would get: what
    is printed would be written into that. To stdout nothing can be written then, which is told.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    main()
