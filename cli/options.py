"""How commands are made: all have `--json`, and a help that ends with examples and exit codes; and
the options that several of them have. What they are given is worked out here: a command gets it as
the library takes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import click
from ckptkit.cli.output import ABSENT, INTERRUPTED, MEANING, OK, STORAGE, USAGE, Reply, printing
from click.shell_completion import CompletionItem

import ckptkit
from ckptkit.errors import CkptkitError

Function: TypeAlias = Callable[..., Reply]
Decorator: TypeAlias = Callable[[Function], Function]
Options = dict[str, object]
"""How to reach a store, as the library takes it."""

ALWAYS = (OK, USAGE, ABSENT, STORAGE, INTERRUPTED)

_LATER = "later"  # the attribute of a command's function with what `_all` was given so
_NAMED = 60  # arrays that are offered by their whole names

# Spans of time are written as the library's sizes are, whose reader is no public API.
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)


def command(
    *examples: str, exits: Mapping[int, str] | None = None, codes: Sequence[int] = ()
) -> Callable[[Function], click.Command]:
    """A command named as its function, whose reply it prints.

    `codes` adds exit codes to those that every command has, `exits` says what some mean here.
    """
    told = {code: MEANING[code] for code in (*ALWAYS, *codes)} | dict(exits or {})

    def make(function: Function) -> click.Command:
        name = function.__name__.rstrip("_")  # `import` is a word of Python's own

        @option(
            "--json",
            f"Print one JSON document, as schemas/cli/{name}.schema.json describes it.",
            into="as_json",
        )
        @wraps(function)
        def run(*, as_json: bool, **given: Any) -> int:
            for put_together in getattr(function, _LATER, ()):
                given = put_together(**given)
            reply = function(**given)
            reply.show(as_json=as_json)
            return reply.code

        return click.command(name, cls=Command, epilog=epilog(examples, told))(run)

    return make


def option(
    spelled: str, text: str, *, into: str = "", least: int | None = None, **more: Any
) -> Callable[[Any], Any]:
    """An option, spelled as its help has it: `--overwrite` takes no value, `--to STRATEGY` one, and
    `--include PATTERN...` may be given again. The command gets it as `into`, if that is another
    name. A default is shown.
    """
    words = spelled.split()
    if not words[-1].startswith("-"):
        metavar = words.pop()
        more |= {"metavar": metavar.removesuffix("..."), "multiple": metavar.endswith("...")}
    elif least is None and "type" not in more:
        more["is_flag"] = True
    if least is not None:
        more["type"] = click.IntRange(min=least)
    more.setdefault("show_default", "default" in more)
    return click.option(*words, *([into] if into else []), help=text, **more)


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


def location(name: str) -> Callable[[Any], Any]:
    """An argument that is a path or URL; the engine says what is wrong with one."""
    return click.argument(name, shell_complete=steps)


def steps(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:  # noqa: ARG001
    """The steps of a run, newest first, by their folders or their numbers; else any folder."""
    if "://" in begun:
        return []  # a shell would take it for a folder
    run, slash, last = begun.rpartition("/")
    found = []
    with suppress(OSError, RuntimeError):  # that `~` leads nowhere
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
        with suppress(CkptkitError), ckptkit.open(place) as checkpoint:
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


def patterns(what: str) -> Decorator:
    """The options that choose arrays."""
    return _all(
        option("--include PATTERN...", what, shell_complete=array_names),
        option("--exclude PATTERN...", "Leave these arrays out.", shell_complete=array_names),
    )


def selecting(what: str = "", *, optimizer: bool = False) -> Decorator:
    """The options that choose arrays, where `what` says what for, and what becomes of them; the
    command gets them as one `selection`.
    """
    table = "Translate names by a table: a file, llama-megatron, or mixtral-megatron."
    cast = "Convert parameters, or these arrays."
    tables = documents("translations")
    options = [
        *([patterns(what)] if what else []),
        *([option("--no-optimizer", "Leave all optimizer state out.")] if optimizer else []),
        *([option("--cast [PATTERN=]DTYPE...", cast)] if what else []),
        option("--rename REGEX=>NEW...", "Rename inside of the groups."),
        option("--names TABLE", table, into="table", shell_complete=tables),
    ]
    chosen = ("include", "exclude") if what else ()

    def select(
        *,
        rename: tuple[str, ...],
        table: str | None,
        cast: tuple[str, ...] = (),
        no_optimizer: bool = False,
        **given: Any,
    ) -> dict[str, Any]:
        renamed = []
        for text in rename:
            old, arrow, new = text.partition("=>")
            if not arrow:
                raise click.BadParameter(f"{text!r} is no renaming: write 'old=>new'")
            renamed.append((old, new))
        # The last = of a cast, as a pattern may have others.
        casts = [text.rpartition("=") for text in cast]
        selection = ckptkit.Selection(
            **{name: given.pop(name) for name in chosen},
            cast=tuple((pattern, dtype) for pattern, _, dtype in casts),
            rename=tuple(renamed),
            names=table,
            optimizer=not no_optimizer,
        )
        return {"selection": selection, **given}

    return _all(*options, later=select)


def _all(*options: Decorator, later: Callable[..., dict[str, Any]] | None = None) -> Decorator:
    """Some options, in the order in which the help has them. Once all are read, `later` makes of
    what they are what the command gets.
    """

    def add(function: Function) -> Function:
        for each in reversed(options):
            function = each(function)
        if later is not None:
            vars(function).setdefault(_LATER, []).append(later)
        return function

    return add


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


# For the store of a location, which the command gets as `storage_options`.
storage = option(
    "--storage-option KEY=VALUE...",
    "How to reach an object store, such as endpoint=URL; given again for each. AWS_*,"
    " GOOGLE_* and CKPTKIT_STORAGE_ENGINE say what is left out.",
    into="storage_options",
    callback=_pairs,
)


def source_storage(what: str) -> Callable[[Any], Any]:
    """An option as `storage`, for the one of two locations whose store may need others; the
    command gets it as `source_options`.
    """
    text = f"The same for {what} alone, where that needs others."
    return option("--source-option KEY=VALUE...", text, into="source_options", callback=_pairs)


def _config(ctx: click.Context, param: click.Parameter, path: str | None) -> dict[str, Any]:  # noqa: ARG001
    """What a config.json says."""
    if path is None:
        return {}
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{path}: {error.strerror}"
        raise click.BadParameter(what, param_hint="--config") from error
    except (ValueError, RecursionError) as error:
        what = f"{path} is no JSON: {error}"
        raise click.BadParameter(what, param_hint="--config") from error
    if not isinstance(found, dict):
        what = f"{path} is no config.json: it holds a {type(found).__name__}"
        raise click.BadParameter(what, param_hint="--config")
    return found


def _sizes(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:  # noqa: ARG001
    found = {}
    for pair in given:
        match = re.fullmatch(r"\s*([A-Za-z_]\w{0,99})\s*=\s*([0-9]{1,18})\s*", pair, re.ASCII)
        if match is None:
            raise click.BadParameter(
                f"{pair!r} is no size: write NAME=N, such as head_dim=128", param_hint="--set"
            )
        found[match[1]] = int(match[2])
    return found


def size(text: str) -> Callable[[Any], Any]:
    """An option for sizes that rules refer to, which the command gets as `sizes`."""
    return option("--set NAME=N...", text, into="sizes", callback=_sizes)


# What says what is cut where, as the library takes it: `rules`, `sizes` and `replicate_unknown`.
rules_options = _all(
    option(
        "--rules RULES",
        "A file, a preset, or auto (the default).",
        shell_complete=documents("presets"),
    ),
    option(
        "--config FILE",
        "A config.json with the sizes that rules refer to.",
        type=click.Path(),
        callback=_config,
    ),
    size("One such size."),
    option("--replicate-unknown", "Replicate what no rule knows."),
    # What is set by itself wins.
    later=lambda *, config, sizes, **given: {"sizes": config | sizes, **given},
)


split_heads = option("--allow-split-heads", "Cut where no size says whether a head ends there.")
threads = option("--threads", "How many read; a few by default.", least=1)


def strategy(text: str = "Such as tp:4 or pp:2,fsdp:4.", **more: Any) -> Callable[[Any], Any]:
    """The strategy of what is to be made."""
    return option("--to STRATEGY", text, **more)


def memory(
    default: str = "256MiB", text: str = "Never use more than this."
) -> Callable[[Any], Any]:
    """The option that says how much may be held."""
    return option("--memory SIZE", text, default=default)


def seconds_of(text: str) -> float:
    """The seconds of a text such as 90s, 30m, 1h or 2d; only 0 needs no unit."""
    match = _QUANTITY.fullmatch(text.strip())
    unit = _SPANS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        if text.strip() == "0":
            return 0.0
        raise click.BadParameter(f"{text!r} is no span of time: write 90s, 30m, 1h or 2d")
    return float(match[1]) * unit
