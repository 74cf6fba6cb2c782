"""One step that leaves no trace, in which every block is measured."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ckptkit.activation.applied import Undo
from ckptkit.activation.buffers import restored
from ckptkit.activation.copies import version_of
from ckptkit.activation.meter import ActivationMeter, peak_bytes
from ckptkit.activation.recompute import Recomputed
from ckptkit.activation.solver import Around, BlockCost
from ckptkit.activation.state import versions_of
from ckptkit.errors import UsageError
from ckptkit.live.extra import rng_state, set_rng_state

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step was found to need."""

    blocks: tuple[BlockCost, ...]
    around: Around
    has_backward: bool = True
    """Whether the step went back through a block."""


def measure(modules: Sequence[nn.Module], blocks: Mapping[str, nn.Module], step: Step) -> Costs:
    """Run the step with every block recomputed, and each once more to see what it would keep:
    so there is never more than one block's activations at a time.
    """
    bytes_of, timed = _Probes(ActivationMeter()), _Probes(None)
    for probes in (bytes_of, timed):
        with traceless(modules), _probing(blocks, probes), probes.meter or nullcontext():
            step()
    costs = tuple(
        bytes_of.found[name].cost(name, timed.found[name].seconds)
        for name in blocks
        if name in bytes_of.found
    )
    return Costs(costs, Around(bytes_of.before, bytes_of.after), bytes_of.has_backward)


def measured_peak(modules: Sequence[nn.Module], step: Step) -> int:
    """The most bytes of activations in a step, as the model is now."""
    with traceless(modules):
        return peak_bytes(step)


@contextmanager
def traceless(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gradients, buffers and random numbers are afterwards what they were; what changes parameters
    is refused.
    """
    parameters = [each for module in modules for each in module.parameters()]
    versions = versions_of([each for module in modules for each in module.modules()])
    gradients = [each.grad for each in parameters]
    # Those of DDP lie in its buckets, which it goes on writing to.
    copies = [None if each is None else each.detach().clone() for each in gradients]
    random = rng_state()
    with restored(modules):
        for each in parameters:
            each.grad = None
        try:
            yield
        finally:
            set_rng_state(random)
            with torch.no_grad():
                for each, gradient, copy in zip(parameters, gradients, copies, strict=True):
                    each.grad = gradient
                    if gradient is not None and copy is not None:
                        gradient.copy_(copy)
    if any(version_of(weight) != version for weight, version in versions):
        raise UsageError(
            "the step that a budget measures has changed parameters",
            hint="pass a forward and a backward alone, and let no hook run the optimizer; load "
            "the parameters again",
        )


@dataclass(slots=True)
class _Found:
    """What the runs of one block gave."""

    kept: int = 0
    recomputed: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    waiting: int = 0
    at_once: int = 0

    def cost(self, name: str, seconds: Sequence[float]) -> BlockCost:
        """What a block costs that takes so long in each of its runs."""
        spent = min(seconds) * len(seconds)
        return BlockCost(name, self.kept, self.recomputed, self.peak, spent, self.at_once)

    def begin(self) -> _Waiting:
        """A forward begins, whose backward is to come until nobody holds what this gives."""
        self.waiting += 1
        self.at_once = max(self.at_once, self.waiting)
        waiting = _Waiting()
        weakref.finalize(waiting, self._end).atexit = False
        return waiting

    def _end(self) -> None:
        self.waiting -= 1


class _Waiting:
    """Lives as long as the graph of a forward."""


class _Probes:
    """What the blocks of one step tell."""

    def __init__(self, meter: ActivationMeter | None) -> None:
        self.meter = meter
        self.found: dict[str, _Found] = {}
        self.before = 0
        self.after = 0
        self.has_backward = False

    def run(self, name: str, run: Callable[[], Any], onwards: Callable[[_Waiting], Any]) -> Any:
        """Run a block to measure it, and then as the step does."""
        found = self.found.setdefault(name, _Found())
        start = self._now()
        if len(self.found) == 1 and not found.seconds:
            self.before = start
        with torch.random.fork_rng():
            began = _clock()
            result = run()
            found.seconds.append(_clock() - began)
        if self.meter is not None:
            found.kept = max(found.kept, self.meter.current - start)
            found.peak = max(found.peak, self.meter.marked_peak - start)
        del result
        start = self._now()
        result = onwards(found.begin())
        found.recomputed = max(found.recomputed, self._now() - start)
        return result

    def begin_backward(self) -> None:
        """A block is computed again: the first that is tells what lay after the last one."""
        if self.meter is not None and not self.has_backward:
            self.has_backward = True
            held = sum(found.waiting * found.recomputed for found in self.found.values())
            self.after = max(0, self.meter.marked_peak - self.before - held)

    def _now(self) -> int:
        return 0 if self.meter is None else self.meter.mark()


class _Probed:
    """The forward of a block while it is measured."""

    def __init__(
        self, name: str, block: nn.Module, plain: Callable[..., Any], probes: _Probes
    ) -> None:
        self.plain_forward = plain
        self._name = name
        self._probes = probes
        self._block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        return self._probes.run(
            self._name,
            lambda: self.plain_forward(*args, **kwargs),
            lambda waiting: self._recomputed(waiting)(*args, **kwargs),
        )

    def _recomputed(self, waiting: _Waiting) -> Recomputed:
        return Recomputed(self._block, partial(self._plainly, waiting))

    def _plainly(self, _: _Waiting, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            self._probes.begin_backward()
        return self.plain_forward(*args, **kwargs)


@contextmanager
def _probing(blocks: Mapping[str, nn.Module], probes: _Probes) -> Iterator[None]:
    undo = Undo()
    undo.put(blocks, lambda name, block, plain: _Probed(name, block, plain, probes))
    try:
        yield
    finally:
        undo()


def _clock() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
