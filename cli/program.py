"""The group of all commands: each is imported when it is asked for, and every error ends here."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from types import FrameType
from typing import Any

import click
from ckptkit.cli.options import Command, epilog
from ckptkit.cli.output import MEANING, emit, report

import ckptkit
from ckptkit.errors import UsageError, nearest

_MOMENT = 0.01  # seconds
# Each with the module that it is in, imported when it is asked for; in the order of the help.
GROUPS = {
    "Look": {"ls": "steps", "show": "show", "view": "show", "diff": "steps", "rules": "reshard"},
    "Check": {"verify": "steps", "rebuild": "steps"},
    "Change": {
        "reshard": "reshard",
        "import": "reshard",
        "export": "steps",
        "unpack": "steps",
        "commit": "steps",
        "prune": "steps",
    },
    "Run": {"launch": "launch", "demo": "demo"},
}
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}


class Program(Command, click.Group):
    """The commands, every error of which ends here."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"ckptkit.cli.{COMMANDS[cmd_name]}")
        found: click.Command = getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names the nearest command where there is none of this name."""
        if args[0] not in COMMANDS and args[0][:1] != "-" and not ctx.resilient_parsing:
            guess = nearest(args[0], COMMANDS)
            raise UsageError(
                "no such command", value=args[0], hint=f"{guess}`ckpt --help` lists them"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands of each group, with what they do."""
        width = max(map(len, COMMANDS))
        left = formatter.width - width - 4
        for title, names in GROUPS.items():
            with formatter.section(title):
                found = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl(
                    [(f"{name:<{width}}", it.get_short_help_str(left)) for name, it in found if it]
                )

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the line; --help and --version print then."""
        try:
            return super().make_context(*args, **options)
        except OSError as error:  # of which click would end with an exit code of its own
            raise click.exceptions.Exit(report(error)) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what it raises becomes a message and an exit code."""
        try:
            with _interruptible():
                return super().invoke(ctx)
        except click.exceptions.Exit:
            raise
        except BaseException as error:  # noqa: BLE001 - the one place where errors end
            return report(error)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,  # noqa: ARG002 - what a file is called changes no message
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT001, FBT002 - as click has it
        **extra: Any,
    ) -> Any:
        """Run the program; without `standalone_mode` return the exit code instead of exiting."""
        for stream in (sys.stdout, sys.stderr):
            # A path may hold bytes, and a value letters, that the terminal's encoding lacks.
            getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
        try:
            code = super().main(args, "ckpt", complete_var, standalone_mode=False, **extra) or 0
        except Exception as error:  # noqa: BLE001 - what fails before a command runs
            code = report(error)
        return sys.exit(code) if standalone_mode else code


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt while a command runs, which may have to clean up; before and
    after that `ckptkit_command` ends at once.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    hook = sys.unraisablehook
    first = 0.0  # when Ctrl-C first met an import

    def interrupt(_: int, frame: FrameType | None) -> None:
        """Not within an import: extension modules, such as NumPy's, print what interrupts them, and
        fail with an ImportError. An import that hangs is interrupted all the same.
        """
        nonlocal first
        while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
            frame = frame.f_back
        if frame is not None and time.monotonic() - (first := first or time.monotonic()) < 1:
            come_again()
        else:
            raise KeyboardInterrupt

    def come_again() -> None:
        """As a signal, for the main thread may wait for a lock by then, out of which Python's own
        `interrupt_main` does not call it.
        """
        threading.Timer(_MOMENT, os.kill, (os.getpid(), signal.SIGINT)).start()

    def lose(lost: Any) -> None:
        """Python prints what a callback raises, and goes on: Ctrl-C comes again when it is over."""
        if lost.exc_type is KeyboardInterrupt:
            come_again()
        else:
            hook(lost)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = lose
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


@click.command(
    cls=Program,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND] [ARGS]...",  # which older click has without brackets
    epilog=epilog(["ckpt demo", "ckpt ls runs/7b"], MEANING),
)
@click.version_option(ckptkit.__version__, prog_name="ckpt")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Look at, check and move the checkpoints of distributed training runs.

    A RUN is a folder of steps, a STEP one checkpoint in it; where a STEP is asked for, a RUN means
    its newest committed step: the one with the highest number. Data goes to stdout, all else to
    stderr: errors as `error: ...` and `hint: ...`, with --json too.
    """
    if ctx.invoked_subcommand is None:
        emit(ctx.get_help().splitlines())
