"""The command `ckpt`, from its first moment.

It stands outside of the package, since importing that is most of what a short command does: Ctrl-C
has to end the import as quietly as anything else. What comes before this file, Python's own start,
is out of its reach.
"""
# ruff: noqa: I002 - nothing is imported here that Python does not have already

import _signal as signal  # type: ignore[import-not-found] # `signal` itself imports more
import os
import sys


def _end(*_: object) -> None:
    """End at once: there is nothing to clean up before a command runs, nor after it."""
    try:  # noqa: SIM105 - importing `suppress` takes longer than all of this
        os.write(2, b"interrupted\n")
    except OSError:
        pass
    os._exit(130)


try:
    # Where the shell has it ignored, as behind nohup, it stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
except KeyboardInterrupt:  # it came before
    _end()


def main() -> None:
    """Run the program."""
    _open_what_is_closed()
    import gc  # noqa: PLC0415

    from ckptkit.cli import main as program  # noqa: PLC0415 - it takes long

    try:
        program()
    finally:
        # Python looks for garbage once more at its end: of many arrays that takes long.
        gc.disable()


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
