"""How commands are made: all have `--json`, and a help that ends with examples and exit codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from ckptkit.cli.exits import ABSENT, INTERRUPTED, MEANING, OK, STORAGE, USAGE
from ckptkit.cli.output import printing
from click.shell_completion import CompletionItem

ALWAYS = (OK, USAGE, ABSENT, STORAGE, INTERRUPTED)


def location(name: str) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """An argument that is a path or URL; the engine says what is wrong with one."""
    return click.argument(name, shell_complete=_folders)


def command(
    *examples: str, exits: Mapping[int, str] | None = None, codes: Sequence[int] = ()
) -> Callable[[Callable[..., int | None]], click.Command]:
    """A command named as its function, which gets `as_json` and may return an exit code.

    `codes` adds exit codes to those that every command has, `exits` says what some mean here.
    """
    told = {code: MEANING[code] for code in (*ALWAYS, *codes)} | dict(exits or {})

    def make(function: Callable[..., int | None]) -> click.Command:
        name = function.__name__
        option = click.option(
            "--json",
            "as_json",
            is_flag=True,
            help=f"Print one JSON document, as schemas/cli/{name}.schema.json describes it.",
        )
        return click.command(name, cls=Command, epilog=epilog(examples, told))(option(function))

    return make


class Command(click.Command):
    """A command whose --help, which is printed while the line is read, may meet a full stdout."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the line."""
        with printing():
            return super().make_context(*args, **options)


def epilog(examples: Sequence[str], told: Mapping[int, str]) -> str:
    """The end of a help."""
    shown = "\n".join(f"  {example}" for example in examples)
    codes = "\n".join(f"  {code:<4} {told[code]}" for code in sorted(told))
    return f"\b\nExample:\n{shown}\n\n\b\nExit codes:\n{codes}"


def _folders(
    ctx: click.Context,  # noqa: ARG001
    param: click.Parameter,  # noqa: ARG001
    incomplete: str,
) -> list[CompletionItem]:
    if "://" in incomplete:
        return []  # a shell knows folders only, and would take the URL for one
    return [CompletionItem(incomplete, type="dir")]
