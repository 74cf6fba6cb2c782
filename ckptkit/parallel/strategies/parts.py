"""What a pipeline can cut a model between: its layers, and what comes before and after them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ckptkit.parallel.strategies.grouping import CONTAINERS, nbytes_of


@dataclass(frozen=True, slots=True)
class Part:
    """A module that lies on one stage as a whole."""

    name: str
    nbytes: int
    seconds: float = 0.0
    outputs: int = 0
    """How many values it returns in a tuple; 0 for one that is not in a tuple."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Those of a model, and the values that they had."""

    kept: Sequence[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, model: nn.Module) -> Buffers:
        """As they are now."""
        return cls(
            [
                (module, name, buffer, buffer.clone())
                for module in model.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ]
        )

    def put_back(self) -> None:
        """Into the same memory, also where the model has put other tensors in their place."""
        for module, name, buffer, value in self.kept:
            buffer.copy_(value)
            setattr(module, name, buffer)


def parts_of(model: nn.Module) -> list[Part]:
    """The parts in the order in which the model defines them."""
    return [Part(name, nbytes_of(module.parameters())) for name, module in _inside("", model)]


def parts_as_run(model: nn.Module, inputs: tuple[Any, ...], output: list[Any]) -> list[Part]:
    """The parts in the order in which the model runs them on an example; what never ran is left
    out, and what the model returns is appended to `output`.
    """
    order: dict[str, Part] = {}
    known = {part.name: part for part in parts_of(model)}
    started: dict[str, float] = {}

    def before(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            started[name] = _now(model)

        return note

    def after(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, result: Any) -> None:
            seconds = _now(model) - started[name] + (order[name].seconds if name in order else 0.0)
            outputs = len(result) if isinstance(result, tuple) else 0
            order[name] = replace(known[name], seconds=seconds, outputs=outputs)

        return note

    hooks = []
    for name in known:
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(before(name)))
        hooks.append(module.register_forward_hook(after(name)))
    try:
        output.append(run(model, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return list(order.values())


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What a model returns, without a trace in its buffers or in random numbers."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _untouched([model]):
        return model(*inputs)


def loose_parameters(model: nn.Module, parts: Sequence[Part]) -> list[str]:
    """The parameters that no part has, by all of their names."""
    prefixes = tuple(f"{part.name}." for part in parts)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if not name.startswith(prefixes)]


@contextmanager
def _untouched(models: Sequence[nn.Module]) -> Iterator[None]:
    """Run in evaluation mode, and put back what that changes."""
    modes = [(m, m.training) for model in models for m in model.modules()]
    buffers = [Buffers.of(model) for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for each in buffers:
            each.put_back()


def _inside(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, CONTAINERS)
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        holds_layers = any(isinstance(each, CONTAINERS) for each in child.modules())
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (holds_layers and not is_container):
            yield from _inside(f"{path}.", child)
        elif is_container or _changes_its_input(child):
            yield path, child


def _changes_its_input(module: nn.Module) -> bool:
    """Whether it is on the way of the data: others, which compute positions and masks and have no
    parameters, run on every stage.
    """
    has_parameters = any(True for _ in module.parameters())
    return has_parameters or type(module).__module__.startswith("torch.nn.")


def _now(model: nn.Module) -> float:
    if any(p.is_cuda for p in model.parameters()):
        torch.cuda.synchronize()
    return time.perf_counter()
