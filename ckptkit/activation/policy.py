"""The one-liner: what is done with the activations of a model's blocks, as people write it. And
budgets, which recompute just as many as they make necessary: measure what each block costs, solve
which, and measure whether that is so.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import astuple, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.activation.memory import ActivationMeter, peak_bytes
from ckptkit.activation.offload import HostMemory, Offloaded
from ckptkit.activation.parallelism import Partition
from ckptkit.activation.recompute import BufferCopies, Recomputed, Undo, selective, traceless
from ckptkit.errors import UsageError
from ckptkit.live.state.entries import canonical_names, every_module
from ckptkit.live.state.ranks import current_world, meeting
from ckptkit.live.wrappers import Model
from ckptkit.live.wrappers.modules import CONTAINERS
from ckptkit.model.document import parse_size

_LOG = logging.getLogger("ckptkit.activation")
_LOOKS, _ROUNDS, _MOST_STATES = 3, 8, 4096
Step = Callable[[], object]
Blocks = Mapping[str, nn.Module]
_PLAIN = ("full", "selective", "offload", "partition")
_EVERY = re.compile(r"[1-9]\d{0,5}", re.ASCII)
_OPTIONS = {
    "step": ("budget", "what a budget measures"),
    "group": ("partition", "who shares a partition"),
    "pin_memory": ("offload", "about the host memory of offload"),
}
BlockChoice = type[nn.Module] | Sequence[type[nn.Module] | str]


def checkpoint_activations(
    model: Any,
    policy: str = "full",
    *,
    blocks: BlockChoice | None = None,
    step: Step | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    pin_memory: bool | None = None,
) -> Checkpointed:
    """Hold fewer activations between forward and backward; gives the model, and `undo`.

    "full" recomputes every block, "every:n" the first of n, "selective" what is cheap in each,
    "budget:2GiB" those that save enough at the least time, as measured in some runs of `step` (a
    forward and a backward, which leaves no trace), "offload" moves activations to host memory, and
    "partition" recomputes every block from an input of which each tensor-parallel rank of `group`
    keeps a piece. Where there are ranks, a budget is for each of them, and all call this together.
    The model is a module, what a pipeline has on this rank, or what `as_distributed` gives.
    """
    kind, number = _parsed(policy)
    for name, value in (("step", step), ("group", group), ("pin_memory", pin_memory)):
        wanted, what = _OPTIONS[name]
        if value is not None and kind != wanted:
            raise UsageError(f"{name}= is {what}", value=policy)
    whole = Model(model)
    found: dict[str, nn.Module] = {}
    for stage, module in enumerate(whole.modules):
        for name, block in _blocks_of(module, blocks).items():
            if not any(block is each for each in found.values()):  # one may have several names
                # Stages of one rank may have blocks of equal names.
                found[f"stage {stage}: {name}" if name in found else name] = block
    if not found and not whole.is_staged:  # a stage may have none
        raise UsageError(
            "the model has no such blocks",
            where=type(whole.modules[0]).__name__,
            value=blocks,
            hint="blocks= takes their class, or patterns of names such as ['layers.*']",
        )
    undo = Undo()
    if kind == "budget":
        if not callable(step):
            raise UsageError(
                "a budget needs a step to measure",
                value=step,
                hint="pass step=lambda: loss_of(model(inputs), targets).backward()",
            )
        fit(whole.modules, found, number, step, undo)
    elif kind == "offload":
        memory = HostMemory(pin=pin_memory)
        undo.put(found, lambda _, block, plain: Offloaded(block, plain, memory))
    else:
        contexts, copies = selective if kind == "selective" else None, BufferCopies()
        partition = Partition.of(whole.modules[0], group) if kind == "partition" else None

        def recomputed(name: str, block: nn.Module, plain: Callable[..., Any]) -> Recomputed:
            around = nullcontext if partition is None else partial(partition.around, name)
            return Recomputed(block, plain, contexts=contexts, around=around, copies=copies)

        undo.put(dict(list(found.items())[::number]), recomputed)
    return Checkpointed(model, undo)


class Checkpointed(NamedTuple):
    """`model, undo = checkpoint_activations(...)`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> model, undo = checkpoint_activations(model, "full", blocks=nn.Linear)
    >>> undo()
    """

    model: Any
    undo: Undo


def _parsed(policy: str) -> tuple[str, int]:
    """The kind of a policy; of how many blocks one is meant, of "budget:2GiB" the bytes."""
    kind, colon, amount = str(policy).partition(":")
    if kind in _PLAIN and not colon:
        return kind, 1
    if kind == "every" and _EVERY.fullmatch(amount):
        return kind, int(amount)
    if kind == "budget" and colon:
        return kind, parse_size(amount)
    hint = f"there are {', '.join(_PLAIN)}, every:2 and budget:2GiB"
    raise UsageError("no policy for activations", value=policy, hint=hint)


def _blocks_of(model: nn.Module, wanted: BlockChoice | None) -> dict[str, nn.Module]:
    """The blocks of a model by name, in their order.

    They are what lies in its outermost lists; or the outermost modules of a class, or whose names
    match a pattern. One of several names may come with each.
    """
    canonical = canonical_names(every_module(model))
    found = _listed(model, "") if wanted is None else _matching(model, wanted, canonical)
    blocks: dict[str, nn.Module] = {}
    for name, outer in found:
        block = outer
        # What is recomputed lies within FSDP1, whose own hooks are to run once.
        while isinstance(block, FullyShardedDataParallel):
            block = block.module
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts))]
        is_checkpointed = hasattr(vars(block).get("forward"), "plain_forward")
        if is_checkpointed or any(isinstance(each, CheckpointWrapper) for each in (*around, block)):
            raise UsageError(
                "a block is checkpointed already",
                where=canonical(name),
                hint="undo that, or leave it so",
            )
        blocks[canonical(name)] = block
    return blocks


def _listed(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, CONTAINERS)
    for name, child in module.named_children():
        where = f"{prefix}{name}"
        if is_list and not isinstance(child, CONTAINERS):
            # A single norm or projection in a list is no block.
            if next(child.children(), None) is not None:
                yield where, child
        else:
            yield from _listed(child, f"{where}.")


def _matching(
    model: nn.Module, wanted: BlockChoice, canonical: Callable[[str], str]
) -> Iterator[tuple[str, nn.Module]]:
    given: Any = (wanted,) if isinstance(wanted, (type, str)) else wanted
    each = tuple(given) if isinstance(given, Iterable) else ()
    if not each or not all(isinstance(one, (type, str)) for one in each):
        raise UsageError(
            "blocks= takes a class, or a list of classes and of patterns of names", value=wanted
        )
    kinds = tuple(kind for kind in each if isinstance(kind, type))
    patterns = [pattern.split(".") for pattern in each if isinstance(pattern, str)]
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in taken) or not name:
            continue
        parts = canonical(name).split(".")
        # A star stands within one part of a name.
        if isinstance(module, kinds) or any(
            len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
            for pattern in patterns
        ):
            taken.append(name)
            yield name, module


def fit(modules: Sequence[nn.Module], blocks: Blocks, budget: int, step: Step, undo: Undo) -> None:
    """Recompute the blocks that make the step stay within the budget, as measured; every rank
    takes part. Ranks that have the same blocks choose the same ones: recomputing may be collective.
    """

    def recompute(chosen: Collection[int]) -> None:
        undo()
        names = [costs.blocks[number].name for number in sorted(chosen)]
        found = {name: blocks[name] for name in names}
        undo.put(found, lambda _, block, plain: Recomputed(block, plain))

    with meeting(current_world(), "budget", failure="no blocks were chosen") as ranks:
        costs = measure(modules, blocks, step)
        heard = ranks.agree((bool(blocks), bool(costs.blocks) and costs.has_backward), list)
        # On some rank, that is: a stage of a pipeline may have no blocks.
        if any(has_blocks for has_blocks, _ in heard) and not any(ran for _, ran in heard):
            raise UsageError(
                "the step that a budget measures has no forward and backward of these blocks",
                hint="pass step=lambda: loss_of(model(inputs), targets).backward(), with this "
                "model",
            )
        names = [cost.name for cost in costs.blocks]
        heard = ranks.agree((names, *astuple(costs)), list)
        # Of each number the highest that a rank has measured. A name is the same on all of them,
        # so its own highest; the first stands twice, as `max` of one argument would look into it.
        alike = [said for theirs, *said in heard if theirs == names]
        each_block, before, after, _ = zip(*alike, strict=True)
        highest = [BlockCost(*map(max, same[0], *same)) for same in zip(*each_block, strict=True)]
        costs = Costs(tuple(highest), max(before), max(after))
        search = Search(costs, budget)
        with ExitStack() as failed:
            failed.callback(undo)
            for _ in range(_ROUNDS):
                # A rank that is done goes on too: in the others' steps they may wait for it.
                recompute(search.chosen)
                peak = sys.maxsize
                for _ in range(_LOOKS):
                    with traceless(modules):
                        peak = min(peak, peak_bytes(step))
                    heard = ranks.agree((names, peak), list)
                    # Threads of gloo let go of what they have sent a moment later.
                    if all(theirs <= budget for _, theirs in heard):
                        break
                search.learn(max(theirs for their_names, theirs in heard if their_names == names))
                if all(ranks.agree(search.is_done, list)):
                    break
            fits_all = all(ranks.agree(search.best is not None, list))
            if search.best is None or not fits_all:
                raise UsageError(
                    "the activations do not fit, even when every block is recomputed",
                    value=budget,
                    hint=f"on this rank they need {min(search.tried.values())} bytes: use smaller "
                    "batches, or cut the loss",
                )
            recompute(search.best)
            failed.pop_all()
    _LOG.info("%d of %d blocks are recomputed", len(undo.blocks), len(blocks))


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What was measured of a block, in bytes and seconds.

    >>> cost = BlockCost("layers.0", kept=4096, recomputed=512, peak=8192, seconds=0.01, at_once=4)
    >>> cost.held(again=False), cost.held(again=True)
    (16384, 2048)
    """

    name: str
    kept: int
    """What a forward leaves, when everything is kept; its result is part of that."""
    recomputed: int
    """What a forward leaves, when only its inputs are kept."""
    peak: int
    """The most that it needs while it runs, all kept."""
    seconds: float
    """Its forwards in a step."""
    at_once: int = 1
    """How many forwards wait for their backward at most: micro-batches in flight."""

    def held(self, *, again: bool) -> int:
        """What all its forwards leave, recomputed or kept."""
        return self.at_once * (self.recomputed if again else self.kept)

    def while_running(self, *, again: bool) -> int:
        """The most that it needs while it runs, with what its other forwards leave."""
        # What follows from the block is still there when it runs again.
        return self.peak + self.held(again=again) - (0 if again else self.kept)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step was found to need."""

    blocks: tuple[BlockCost, ...]
    before: int = 0
    """What it holds before the first block."""
    after: int = 0
    """What it holds at most after the last one, beside the blocks."""
    has_backward: bool = True
    """Whether it went back through a block."""


class Search:
    """Tries the cheapest choice that should fit, corrects the limit by how far the estimate was
    off, and chooses again; it is done when a choice comes that was tried before.
    """

    def __init__(self, costs: Costs, budget: int) -> None:
        self._costs = costs
        self._budget = budget
        self._every = frozenset(range(len(costs.blocks)))
        chosen = choose(costs, budget)
        self.chosen = self._every if chosen is None else chosen
        self.tried: dict[frozenset[int], int] = {}
        """The peak that each choice was measured to have."""
        self.best: frozenset[int] | None = None
        """The cheapest choice that fits."""
        self._seconds = math.inf
        self.is_done = False

    def learn(self, peak: int) -> None:
        """Go on from what the step was measured to need with what is chosen."""
        if self.is_done:
            return
        self.tried[self.chosen] = peak
        seconds = sum(self._costs.blocks[number].seconds for number in self.chosen)
        if peak <= self._budget and seconds < self._seconds:
            self.best, self._seconds = self.chosen, seconds
        mistake = peak_of(self._costs, self.chosen) - peak
        following = choose(self._costs, self._budget + mistake)
        # With one round left: nobody may say that nothing fits before this was tried.
        is_last = self.best is None and len(self.tried) == _ROUNDS - 1
        if following is None or is_last:
            following = self._every
        self.is_done = following in self.tried
        self.chosen = following if self.best is None or not self.is_done else self.best


def peak_of(costs: Costs, chosen: Collection[int]) -> int:
    """The most bytes at one moment of a step that recomputes the chosen blocks.

    When a block runs, forward or again in backward, what the blocks before it keep is there; those
    after it are not there yet, or no longer.
    """
    held = peak = costs.before
    for number, cost in enumerate(costs.blocks):
        peak = max(peak, held + cost.while_running(again=number in chosen))
        held += cost.held(again=number in chosen)
    return max(peak, held + costs.after)


def choose(costs: Costs, budget: int) -> frozenset[int] | None:
    """The blocks whose recomputing takes the least time of all that keep the peak within a
    budget; None when nothing does.

    Exact for blocks of few kinds, however many they are; where more than some thousand ways to go
    on would have to be remembered, sizes are rounded up.
    """
    # A way to treat the first blocks: the bytes it holds after them, the seconds that it will
    # recompute, and which blocks, the last one first: (number, (number before, ...)).
    ways: list[tuple[int, float, Any]] = [(costs.before, 0.0, None)]
    for number, cost in enumerate(costs.blocks):
        following = [
            (
                held + cost.held(again=again),
                seconds + (cost.seconds if again else 0.0),
                (number, chosen) if again else chosen,
            )
            for held, seconds, chosen in ways
            for again in (False, True)
            if held + cost.while_running(again=again) <= budget
        ]
        ways = []
        for way in sorted(following, key=itemgetter(0, 1)):
            if not ways or way[1] < ways[-1][1]:  # no other beats it in both bytes and seconds
                ways.append(way)
        if len(ways) > _MOST_STATES:
            # Of neighbours the smaller stays, so that what is chosen fits for certain.
            ways = [*ways[: -1 : -(-len(ways) // _MOST_STATES)], ways[-1]]
    fitting = [chosen for held, _, chosen in ways if held + costs.after <= budget]
    if not fitting:
        return None
    chosen, numbers = fitting[-1], []  # the more bytes a way holds, the fewer seconds it takes
    while chosen is not None:
        number, chosen = chosen
        numbers.append(number)
    return frozenset(numbers)


def measure(modules: Sequence[nn.Module], blocks: Blocks, step: Step) -> Costs:
    """Run the step with every block recomputed, and each once more to see what it would keep:
    so there is never more than one block's activations at a time.
    """
    metered, timed = _BlockProbe(), _BlockProbe()
    for probe in (metered, timed):
        undo = Undo()
        undo.put(blocks, probe.forward_of)
        try:
            # Metering takes time: where that is measured the meter stays out, and counts nothing.
            with traceless(modules), probe.meter if probe is metered else nullcontext():
                step()
        finally:
            undo()
    costs = []
    for name in blocks:
        if (found := metered.found.get(name)) is not None:
            seconds = timed.found[name].seconds
            # The fastest counts for all: what has slowed others down was not the block.
            spent = min(seconds) * len(seconds)
            sizes = found.kept, found.recomputed, found.peak
            costs.append(BlockCost(name, *sizes, seconds=spent, at_once=found.at_once))
    return Costs(tuple(costs), metered.before, metered.after, metered.has_backward)


@dataclass(slots=True)
class _Runs:
    """What the forwards of one block gave."""

    kept: int = 0
    recomputed: int = 0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)
    waiting: WeakSet[Callable[..., Any]] = field(default_factory=WeakSet)
    """What the forwards that wait for their backward now will run again."""
    at_once: int = 0


@dataclass(slots=True)
class _BlockProbe:
    """What the blocks of one step tell, to a meter and to a clock."""

    meter: ActivationMeter = field(default_factory=ActivationMeter)
    found: dict[str, _Runs] = field(default_factory=dict)
    before: int = 0
    after: int = 0
    has_backward: bool = False

    def forward_of(self, name: str, block: nn.Module, plain: Callable[..., Any]) -> Any:
        """A forward of a block that runs it to measure it, and then as the step does."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            found = self.found.setdefault(name, _Runs())
            start = self.meter.mark()
            if len(self.found) == 1 and not found.seconds:
                self.before = start
            with torch.random.fork_rng():
                began = _clock()
                result = plain(*args, **kwargs)
                found.seconds.append(_clock() - began)
            found.kept = max(found.kept, self.meter.current - start)
            found.peak = max(found.peak, self.meter.marked_peak - start)
            del result
            start = self.meter.mark()
            again = partial(self._run_again, plain)
            # The graph of this forward holds `again` until its backward has ended: no hook would
            # say so for a graph that is thrown away.
            found.waiting.add(again)
            found.at_once = max(found.at_once, len(found.waiting))
            result = Recomputed(block, again)(*args, **kwargs)
            found.recomputed = max(found.recomputed, self.meter.mark() - start)
            return result

        return forward

    def _run_again(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_backward and not self.has_backward:
            # The first block that is computed again tells what lay after the last one.
            self.has_backward = True
            held = sum(len(found.waiting) * found.recomputed for found in self.found.values())
            self.after = max(0, self.meter.marked_peak - self.before - held)
        return plain(*args, **kwargs)


def _clock() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
