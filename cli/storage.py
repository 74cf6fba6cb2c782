"""`--storage-option`: how to reach the store of a location, on every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., int | None])
Options = dict[str, object]


def storage(function: Command) -> Command:
    """Options for the store, which the command gets as `storage_options`."""
    return _option(
        "--storage-option",
        "How to reach an object store, such as endpoint=URL; given again for each. AWS_*, GOOGLE_*"
        " and CKPTKIT_STORAGE_ENGINE say what is left out.",
    )(function)


def source_storage(what: str) -> Callable[[Command], Command]:
    """Options for the store of one of two locations, which the command gets as
    `source_options`.
    """
    return _option("--source-option", f"The same for {what} alone, where that needs others.")


def _option(name: str, text: str) -> Callable[[Command], Command]:
    kept = "source_options" if name == "--source-option" else "storage_options"
    return click.option(name, kept, metavar="KEY=VALUE", multiple=True, callback=_parsed, help=text)


def _parsed(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Options | None:
    """The pairs; None where there are none. What is wrong is never shown: it may be a secret."""
    found: Options = {}
    for number, pair in enumerate(given, 1):
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise click.BadParameter(
                f"number {number} is no KEY=VALUE, such as endpoint=http://127.0.0.1:9000",
                ctx=ctx,
                param=param,
            )
        found[key] = value
    return found or None
