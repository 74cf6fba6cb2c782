"""A model cut into the stages of a pipeline, each of which runs the model's own `forward`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ckptkit.checkpoint.ranks import Ranks, leaving
from ckptkit.errors import LayoutError, UsageError
from ckptkit.parallel.strategies.alike import check_alike, room
from ckptkit.parallel.strategies.grouping import CONTAINERS
from ckptkit.parallel.strategies.options import Options
from ckptkit.parallel.strategies.parts import (
    Part,
    loose_parameters,
    parts_as_run,
    parts_of,
    run,
)
from ckptkit.parallel.strategies.splitting import most_even

_HOW = "pass split=, a function of the model and the names of a stage's parts that returns the rest"


class PassedOn(nn.Module):
    """Stands where another stage has the part: what comes in goes on."""

    def __init__(self, outputs: int = 0) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first input; nothing to be added, for positions and other whole numbers."""
        hidden = next(v for v in (*args, *kwargs.values()) if torch.is_tensor(v))
        if not hidden.is_floating_point():
            hidden = torch.zeros((), device=hidden.device)
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden


@dataclass(frozen=True, slots=True)
class _Way:
    """How a stage goes without what others have."""

    drops: bool
    """Whether modules outside of lists are set to None rather than passed by."""
    loose: int
    """The stage that has parameters which no part has: the first or the last."""


def stages_of(
    model: nn.Module, count: int, mine: Sequence[int], options: Options
) -> list[nn.Module]:
    """Stages of a model by their numbers, of `count` in all, with the names of the whole model.

    The model given is left with what the stages have.
    """
    barrier = room("stages")
    with leaving(barrier):
        inputs, output = _example(model, options.example), list[Any]()
        if inputs is not None and options.split is None:
            if options.balance == "time":
                run(model, inputs)  # the first is slower than those to come
            parts = parts_as_run(model, inputs, output)
        else:
            parts = parts_of(model)

        def way_of(begins: Sequence[int]) -> _Way:
            """How a model goes that is cut where these stages begin."""
            return _way_of(model, parts, _cut(parts, begins), options, inputs, output)

        places = _places_to_cut(model, parts, count)
        begins, way = most_even(_weights(parts, options, barrier), count, places, way_of)
        split = _cut(parts, begins)
        said = [*(str(_names(stage)) for stage in split), str(way)]
        check_alike(barrier, {"split into stages": said})
    if options.split is not None:
        return _by_hand(model, split, mine, options.split)
    made = [_stage(model, parts, split, number, way) for number in mine]
    _forget(model, [part for n, stage in enumerate(split) if n not in mine for part in stage])
    return made


def _example(model: nn.Module, example: Any) -> tuple[Any, ...] | None:
    if example is None:
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = example if isinstance(example, (tuple, list)) else (example,)
    return tuple(value.to(device) if torch.is_tensor(value) else value for value in inputs)


def _places_to_cut(model: nn.Module, parts: Sequence[Part], count: int) -> list[int]:
    """Where another stage may begin: not between parts that share weights."""
    if len(parts) < count:
        raise LayoutError(
            f"the model has {len(parts)} parts, too few for {count} stages",
            value=_names(parts)[:20],
        )
    each = [[part] for part in parts]
    firsts = dict[int, int]()
    refused = set[int]()
    for name, number in _places(model, each):
        first = firsts.setdefault(id(model.get_parameter(name)), number)
        refused.update(range(first + 1, number + 1))
    places = [at for at in range(1, len(parts)) if at not in refused]
    if len(places) < count - 1:
        _check_tied(model, _places(model, each))
    return places


def _weights(parts: Sequence[Part], options: Options, barrier: Ranks) -> list[int]:
    """What is to be shared out evenly; of times those of rank 0, as clocks differ."""
    if options.balance != "time":
        return [part.nbytes for part in parts]
    if options.example is None:
        raise UsageError('balance="time" takes an example to measure', hint="pass example=")
    times = [round(part.seconds * 1e9) for part in parts]
    agreed: list[int] = barrier.share(lambda: times)
    return agreed


def _cut(parts: Sequence[Part], begins: Sequence[int]) -> list[Sequence[Part]]:
    """The parts of each stage."""
    return [parts[a:b] for a, b in pairwise([*begins, len(parts)])]


def _names(stage: Sequence[Part]) -> list[str]:
    return [part.name for part in stage]


def _way_of(
    model: nn.Module,
    parts: Sequence[Part],
    split: Sequence[Sequence[Part]],
    options: Options,
    inputs: tuple[Any, ...] | None,
    output: Sequence[Any],
) -> _Way:
    """How stages go without what others have; raises where they cannot."""
    way = _Way(drops=False, loose=0)
    if options.split is not None:
        return way
    if not isinstance(model, nn.Sequential):
        way = _found_way(model, parts, split, inputs, output)
    _check_tied(model, _places(model, split, way.loose))
    return way


def _check_tied(model: nn.Module, places: Iterable[tuple[str, int]]) -> None:
    """Refuse weights that two stages would have: nobody would keep them alike."""
    first: dict[int, tuple[int, str]] = {}
    for name, stage in places:
        known, other = first.setdefault(id(model.get_parameter(name)), (stage, name))
        if known != stage:
            raise LayoutError(
                "tied weights on two stages, which torch's pipelines do not keep alike",
                value=(other, name),
                hint="untie them, or use fsdp",
            )


def _places(
    model: nn.Module, split: Sequence[Sequence[Part]], loose: int | None = None
) -> Iterator[tuple[str, int]]:
    """The parameters of the parts by all of their names, and their stages; and those that no part
    has, where it is known on which stage these are.
    """
    for number, stage in enumerate(split):
        for part in stage:
            module = model.get_submodule(part.name)
            for name, _ in module.named_parameters(part.name, remove_duplicate=False):
                yield name, number
    if loose is not None:
        for name in loose_parameters(model, [part for stage in split for part in stage]):
            yield name, loose


def _found_way(
    model: nn.Module,
    parts: Sequence[Part],
    split: Sequence[Sequence[Part]],
    inputs: tuple[Any, ...] | None,
    output: Sequence[Any],
) -> _Way:
    """The way in which the stages, one after another, give what the whole model gives."""
    if inputs is None:
        raise UsageError(
            "a pipeline of a model that is no nn.Sequential is tried out before it is used",
            hint=f"pass example=, the inputs of a small batch; or {_HOW}",
        )
    if not torch.is_tensor(output[0]):
        raise UsageError(
            "the model of a pipeline returns one tensor",
            value=type(output[0]).__name__,
            hint="wrap it in a module that returns, say, the logits",
        )
    ways = [_Way(drops=True, loose=len(split) - 1), _Way(drops=True, loose=0)]
    if not loose_parameters(model, parts):
        ways = [_Way(drops=False, loose=0), ways[0]]
    problem: Exception | None = None
    try:
        for way in ways:
            try:
                given: Any = inputs
                for number in range(len(split)):
                    given = (run(_stage(model, parts, split, number, way), given),)
                if given[0].shape == output[0].shape and torch.allclose(given[0], output[0], 1e-4):
                    return way
            except Exception as error:  # noqa: BLE001 — the model's own, of any kind
                problem = error
        raise LayoutError(
            "the stages, one after another, do not give what the whole model gives",
            value=[_names(stage) for stage in split],
            hint=f"the model may do more to its hidden state than run its parts; {_HOW}",
        ) from problem
    finally:
        problem = None  # what it holds would live on, and with it the stages that were tried


def _by_hand(
    model: nn.Module,
    split: Sequence[Sequence[Part]],
    mine: Sequence[int],
    keep: Callable[[nn.Module, tuple[str, ...]], nn.Module],
) -> list[nn.Module]:
    models = [model, *(copy.deepcopy(model) for _ in mine[1:])]
    return [
        keep(each, tuple(_names(split[number]))) for each, number in zip(models, mine, strict=True)
    ]


def _stage(
    model: nn.Module,
    parts: Sequence[Part],
    split: Sequence[Sequence[Part]],
    number: int,
    way: _Way,
) -> nn.Module:
    """A copy of the model's frame around the very modules that the stage has."""
    kept = set(_names(split[number]))
    frame = _frame(model, "", set(_names(parts)))
    for part in parts:
        if part.name not in kept:
            _replace(frame, part, drops=way.drops)
    if way.loose != number:
        for name in loose_parameters(model, parts):
            path, _, own = name.rpartition(".")
            setattr(frame.get_submodule(path), own, None)
    return frame


def _frame(module: nn.Module, path: str, parts: set[str]) -> nn.Module:
    """A copy of a module down to its parts, which are shared with it.

    Also of modules without parts: what a stage does not have is taken from them.
    """
    if path in parts:
        return module
    clone = copy.copy(module)
    # Its tensors, modules and hooks, of which the copy has others from now on.
    own = {key: copy.copy(value) for key, value in vars(module).items() if isinstance(value, dict)}
    vars(clone).update(own)
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = _frame(child, f"{path}.{name}" if path else name, parts)
    return clone


def _replace(frame: nn.Module, part: Part, *, drops: bool) -> None:
    path, _, own = part.name.rpartition(".")
    parent = frame.get_submodule(path)
    is_listed = isinstance(parent, CONTAINERS)
    parent._modules[own] = None if drops and not is_listed else PassedOn(part.outputs)


def _forget(model: nn.Module, parts: Sequence[Part]) -> None:
    """Free what other stages have."""
    for part in parts:
        _replace(model, part, drops=False)
