"""How commands are made: all have `--json`, and a help that ends with examples and exit codes; and
the options that several of them have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import click
from ckptkit.cli.exits import ABSENT, INTERRUPTED, MEANING, OK, STORAGE, USAGE
from ckptkit.cli.output import printing
from click.shell_completion import CompletionItem

import ckptkit
from ckptkit.errors import CkptkitError

Function = TypeVar("Function", bound=Callable[..., int | None])
Options = dict[str, object]
"""How to reach a store, as the library takes it."""

ALWAYS = (OK, USAGE, ABSENT, STORAGE, INTERRUPTED)

_NAMED = 60  # arrays that are offered by their whole names

# Spans of time are written as the library's sizes are, whose reader is no public API.
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)


def command(
    *examples: str, exits: Mapping[int, str] | None = None, codes: Sequence[int] = ()
) -> Callable[[Callable[..., int | None]], click.Command]:
    """A command named as its function, which gets `as_json` and may return an exit code.

    `codes` adds exit codes to those that every command has, `exits` says what some mean here.
    """
    told = {code: MEANING[code] for code in (*ALWAYS, *codes)} | dict(exits or {})

    def make(function: Callable[..., int | None]) -> click.Command:
        name = function.__name__.rstrip("_")  # `import` is a word of Python's own
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

    def make_context(
        self, info_name: str | None, args: list[str], *parent: Any, **extra: Any
    ) -> click.Context:
        if extra.get("resilient_parsing") and args and args[-1].startswith("-"):
            # Its value is being completed; click would forget the arguments before it.
            args = args[:-1]
        with printing():
            return super().make_context(info_name, args, *parent, **extra)


def epilog(examples: Sequence[str], told: Mapping[int, str]) -> str:
    """The end of a help."""
    shown = "\n".join(f"  {example}" for example in examples)
    codes = "\n".join(f"  {code:<4} {told[code]}" for code in sorted(told))
    # Behind a line with nothing but \b click keeps lines as they are.
    return f"\b\nExample:\n{shown}\n\n\b\nExit codes:\n{codes}"


def location(name: str) -> Callable[[Function], Function]:
    """An argument that is a path or URL; the engine says what is wrong with one."""
    return click.argument(name, shell_complete=steps)


def steps(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:  # noqa: ARG001
    """The steps of a run, newest first, by their folders or their numbers; else any folder."""
    if "://" in begun:
        return []  # a shell would take it for a folder
    run, slash, last = begun.rpartition("/")
    found = []
    with suppress(OSError):
        names = [each.name for each in Path(run + slash or ".").expanduser().iterdir()]
        for name in sorted(names, reverse=True):
            number = name.removeprefix("step-").lstrip("0")
            is_meant = name.startswith(last) or (last.isdecimal() and number.startswith(last))
            if name.startswith("step-") and is_meant:
                found.append(CompletionItem(f"{run}{slash}{name}"))
    # Shells take what they are given apart at spaces, and quote folders that they find themselves.
    return found if found and " " not in run else [CompletionItem(begun, type="dir")]


def array_names(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:  # noqa: ARG001
    """The arrays of the step that is the first argument; of many the next part of their names."""
    first = next(each for each in ctx.command.params if isinstance(each, click.Argument))
    place, found = ctx.params.get(first.name or ""), list[str]()
    # Nobody waits for a server to be asked at every key.
    if place and "://" not in place:
        with suppress(CkptkitError), ckptkit.open(Path(place).expanduser()) as checkpoint:
            found = [name for name in checkpoint.names if name.startswith(begun)]
    if len(found) > _NAMED:
        same = next(i for i in count() if found[0][: i + 1] != found[-1][: i + 1])  # is sorted
        ends = (re.compile("[^./]*[./]?").match(name, same) for name in found)
        found = list({end.string[: end.end()]: None for end in ends if end})
    return [CompletionItem(name) for name in ckptkit.natural_order(found)]


def documents(folder: str) -> Callable[..., list[CompletionItem]]:
    """Completes the names of documents that come with ckptkit, or of a file."""

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:  # noqa: ARG001
        known = sorted(p.stem for p in (Path(ckptkit.__file__).parent / folder).iterdir())
        found = [CompletionItem(name) for name in known if name.startswith(begun)]
        return found or [CompletionItem(begun, type="file")]

    return complete


def patterns(what: str) -> Callable[[Function], Function]:
    """The options that choose arrays."""

    def add(function: Function) -> Function:
        for name, text in (("--exclude", "Leave these arrays out."), ("--include", what)):
            function = click.option(
                name, metavar="PATTERN", multiple=True, help=text, shell_complete=array_names
            )(function)
        return function

    return add


def storage(function: Function) -> Function:
    """Options for the store of a location, which the command gets as `storage_options`."""
    return click.option(
        "--storage-option",
        "storage_options",
        metavar="KEY=VALUE",
        multiple=True,
        callback=_pairs,
        help="How to reach an object store, such as endpoint=URL; given again for each. AWS_*,"
        " GOOGLE_* and CKPTKIT_STORAGE_ENGINE say what is left out.",
    )(function)


def source_storage(what: str) -> Callable[[Function], Function]:
    """An option as in `storage`, for the one of two locations whose store may need others; the
    command gets it as `source_options`.
    """
    return click.option(
        "--source-option",
        "source_options",
        metavar="KEY=VALUE",
        multiple=True,
        callback=_pairs,
        help=f"The same for {what} alone, where that needs others.",
    )


def _pairs(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> Options | None:
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


def names(function: Function) -> Function:
    """The options that say what arrays are called in the result."""
    text = "Translate names by a table: a file, llama-megatron, or mixtral-megatron."
    function = click.option(
        "--names", "table", metavar="TABLE", help=text, shell_complete=documents("translations")
    )(function)
    return click.option(
        "--rename", metavar="REGEX=>NEW", multiple=True, help="Rename inside of the groups."
    )(function)


def rules_options(function: Function) -> Function:
    """The options that say what is cut where."""
    text = "A config.json with the sizes that rules refer to."
    # As decorators are written, from the inside: the help has them in the opposite order.
    for add in (
        click.option("--replicate-unknown", is_flag=True, help="Replicate what no rule knows."),
        click.option("--set", "sizes", metavar="NAME=N", multiple=True, help="One such size."),
        click.option("--config", metavar="FILE", type=click.Path(), help=text),
        click.option(
            "--rules",
            metavar="RULES",
            help="A file, a preset, or auto (the default).",
            shell_complete=documents("presets"),
        ),
    ):
        function = add(function)
    return function


def memory(
    default: str = "256MiB", text: str = "Never use more than this."
) -> Callable[[Function], Function]:
    """The option that says how much may be held."""
    return click.option("--memory", metavar="SIZE", default=default, show_default=True, help=text)


def sizes_from(config: str | None, given: tuple[str, ...]) -> dict[str, Any]:
    """The sizes that rules refer to: what --config and --set say; --set wins."""
    found: dict[str, Any] = {}
    if config is not None:
        try:
            doc: Any = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            what = f"{config}: {error.strerror}"
            raise click.BadParameter(what, param_hint="--config") from error
        except (ValueError, RecursionError) as error:
            what = f"{config} is no JSON: {error}"
            raise click.BadParameter(what, param_hint="--config") from error
        if not isinstance(doc, dict):
            what = f"{config} is no config.json: it holds a {type(doc).__name__}"
            raise click.BadParameter(what, param_hint="--config")
        found = doc
    for pair in given:
        match = re.fullmatch(r"\s*([A-Za-z_]\w{0,99})\s*=\s*([0-9]{1,18})\s*", pair, re.ASCII)
        if match is None:
            raise click.BadParameter(
                f"{pair!r} is no size: write NAME=N, such as head_dim=128", param_hint="--set"
            )
        found[match[1]] = int(match[2])
    return found


def selected(
    rename: Sequence[str], table: str | None, cast: Sequence[str] = (), **given: Any
) -> ckptkit.Selection:
    """What --rename, --names, --cast and the like select."""
    renamed = []
    for text in rename:
        old, arrow, new = text.partition("=>")
        if not arrow:
            raise click.BadParameter(f"{text!r} is no renaming: write 'old=>new'")
        renamed.append((old, new))
    # The last = of a cast, as a pattern may have others.
    casts = [text.rpartition("=") for text in cast]
    pairs = tuple((pattern, dtype) for pattern, _, dtype in casts)
    return ckptkit.Selection(cast=pairs, rename=tuple(renamed), names=table, **given)


def seconds_of(text: str) -> float:
    """The seconds of a text such as 90s, 30m, 1h or 2d; only 0 needs no unit."""
    match = _QUANTITY.fullmatch(text.strip())
    unit = _SPANS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        if text.strip() == "0":
            return 0.0
        raise click.BadParameter(f"{text!r} is no span of time: write 90s, 30m, 1h or 2d")
    return float(match[1]) * unit
