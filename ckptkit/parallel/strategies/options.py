"""What a caller of `as_distributed` gives: a strategy with all sizes, the other choices, and later
batches, whole or a rank's share of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import StrategyError, UsageError
from ckptkit.model import Strategy
from ckptkit.model.document import parse_size
from ckptkit.parallel.optimizers.methods import compression_of

MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""A class of optimizer, or a function of parameters."""
StageByHand: TypeAlias = Callable[[nn.Module, tuple[str, ...]], nn.Module]
Precision: TypeAlias = torch.dtype | MixedPrecisionPolicy

SHARDED = ("fsdp", "zero2", "zero3")
"""The kinds whose parameters `fully_shard` cuts."""

_BY_CLASS = "pass the class and optimizer_options=, or a function of parameters"
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


class Choices(TypedDict, total=False):
    """The keywords of `as_distributed`; each has a paragraph in docs/strategies.md."""

    optimizer: Optimizer | MakeOptimizer | None
    optimizer_options: Mapping[str, Any] | None
    rules: RulesLike | None
    sizes: Mapping[str, Any] | None
    mixed_precision: Precision | str | None
    offload: bool
    group_below: int | str
    microbatches: int | None
    schedule: str | None
    balance: str
    example: Any
    split: StageByHand | None
    compression: str | None
    overlap: bool
    device: torch.device | str | None


@dataclass(frozen=True, slots=True, eq=False)
class StrategyOptions:
    """The choices that are not the strategy's own, read and passed on as one."""

    optimizer: Optimizer | MakeOptimizer | None = None
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    rules: RulesLike = "auto"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision | None = None
    offload: bool = False
    group_below: int = 2**20
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    balance: str = "parameters"
    example: Any = None
    split: StageByHand | None = None
    compression: str | None = None
    overlap: bool = False
    device: torch.device | str | None = None

    @classmethod
    def of(cls, strategy: Strategy, choices: Choices) -> StrategyOptions:
        """What is chosen for a strategy; None counts as left out."""
        for unknown in choices.keys() - Choices.__optional_keys__:
            raise TypeError(f"as_distributed() got an unexpected keyword argument {unknown!r}")
        given: dict[str, Any] = {n: value for n, value in choices.items() if value is not None}
        schedule, stages_per_rank = schedule_of(given.pop("schedule", None))
        microbatches = microbatches_of(given.pop("microbatches", None), strategy, schedule)
        precision = given.pop("mixed_precision", None)
        if isinstance(precision, str):
            precision = _DTYPES.get(precision, precision)
        is_policy = isinstance(precision, MixedPrecisionPolicy)
        if precision is not None and not is_policy and precision not in _DTYPES.values():
            raise UsageError(
                "no precision",
                where="mixed_precision",
                value=precision,
                hint='write "bf16" or "fp16"',
            )
        if "group_below" in given:  # 0 gathers each module alone
            below = given["group_below"]
            given["group_below"] = 1 if below in (0, "0") else parse_size(below)
        for name in given.keys() & {"optimizer_options", "sizes"}:
            given[name] = dict(given[name])
        return cls(
            precision=precision,
            microbatches=microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            **given,
        )

    def compared(self) -> dict[str, str]:
        """By name and as text, what all ranks have to choose alike.

        An example and a function cannot be compared; optimizers are, by what they are made of; a
        device is each rank's own.
        """
        others = ("example", "split", "optimizer", "optimizer_options", "device")
        return {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name not in others}

    def check(self, strategy: Strategy) -> None:
        """Refuse what the strategy has no use for, rather than do nothing."""
        kinds, sharder = {axis.kind for axis in strategy.mesh.axes}, sharder_of(strategy)
        for is_chosen, what, fitting in (
            (self.offload, "offload", SHARDED),
            (self.overlap, "overlap", ("zero1",)),
            (isinstance(self.precision, MixedPrecisionPolicy), "a MixedPrecisionPolicy", SHARDED),
        ):
            if is_chosen and not kinds.intersection(fitting):
                raise UsageError(
                    f"{what} is for {', '.join(fitting)}",
                    value=str(strategy),
                    hint="leave it out here",
                )
        if self.balance not in ("parameters", "time"):
            raise UsageError(
                "no way to balance", where="balance", value=self.balance, hint="parameters or time"
            )
        if size_of(strategy, "pp") > 1 and isinstance(self.example, Mapping):
            raise UsageError(
                "a pipeline takes positional inputs", where="example", value=list(self.example)
            )
        if self.compression is None:
            return
        if not kinds & {"ddp", "zero1", *SHARDED}:
            # Ranks of tp and pp sum or hand on activations, which need all of their bits.
            raise UsageError(
                "compression of gradients is for ddp, zero1, zero2 and fsdp",
                value=str(strategy),
                hint="leave it out here",
            )
        remembers = compression_of(self.compression).remembers
        value = f"{self.compression}, {strategy}"
        if "ddp" in kinds and (sharder or size_of(strategy, "tp") > 1):
            raise UsageError(
                "replicas of what is cut take their mean by an all-reduce that torch lets nobody "
                "replace",
                value=value,
                hint="cut over all ranks instead of ddp: fsdp, or tp and fsdp",
            )
        if remembers and sharder:
            raise UsageError(
                "what is left unsent is as large as all gradients, on every rank, and "
                f"{sharder} keeps a part of them only",
                value=value,
                hint="fp16, bf16 and int8 leave nothing unsent; or use ddp or zero1",
            )
        if remembers and size_of(strategy, "pp") > 1:
            raise UsageError(
                "what stages have left unsent cannot be saved together",
                value=value,
                hint="fp16, bf16 and int8 leave nothing unsent",
            )
        if self.stages_per_rank > 1:
            raise UsageError(
                "compression is for one stage on each rank",
                value=f"{self.compression}, {self.schedule}:{self.stages_per_rank}",
                hint='schedule="1f1b"',
            )


def check_optimizer(model: nn.Module, options: StrategyOptions, strategy: Strategy) -> None:
    """Refuse an optimizer that could not step the spread model, before anything is spread."""
    optimizer, settings = options.optimizer, dict(options.optimizer_options)
    if optimizer is None:
        if settings:
            raise UsageError("optimizer_options without an optimizer", value=settings)
        return
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "nothing of the model is trained",
            value=type(model).__name__,
            hint="unfreeze some of it with requires_grad_(); or leave optimizer= out",
        )
    if isinstance(optimizer, Optimizer):
        check_step(type(optimizer))
        if settings:
            raise UsageError("optimizer_options are for a class", value=settings)
        known = set(model.parameters())
        if any(p not in known for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer has parameters that are not the model's",
                value=type(optimizer).__name__,
                hint=f"make it for this model; or {_BY_CLASS}",
            )
        is_replaced = sharder_of(strategy) or any(a.kind == "zero1" for a in strategy.mesh.axes)
        if is_replaced or size_of(strategy, "tp") > 1 or size_of(strategy, "pp") > 1:
            raise UsageError(
                "the optimizer was made before the model was spread, which changes its parameters",
                value=f"{type(optimizer).__name__}, {strategy}",
                hint=_BY_CLASS,
            )
        return
    if not callable(optimizer):
        raise UsageError("no optimizer", value=optimizer, hint=_BY_CLASS)
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        check_step(optimizer)
    try:
        signature = inspect.signature(optimizer)
    except ValueError:
        return  # written in C, and says nothing about itself
    try:
        signature.bind([], **settings)
    except TypeError as error:
        taken = [name for name in signature.parameters if name != "self"][1:]
        raise UsageError(
            f"the optimizer cannot be called with these: {error}",
            where="optimizer_options",
            value=settings,
            hint=f"it takes {', '.join(taken) or 'parameters only'}",
        ) from error


def optimizer_for(options: StrategyOptions, trained: Sequence[nn.Parameter]) -> Optimizer:
    """Call what makes the optimizer, also where nothing is trained (a frozen stage): optimizers
    refuse an empty list.
    """
    make: Any = options.optimizer
    nothing: Any = {"params": []} if isinstance(make, type) else nn.Parameter(torch.empty(0))
    made = make([*trained] or [nothing], **options.optimizer_options)
    if not isinstance(made, Optimizer):
        raise UsageError("not an optimizer", where="optimizer()", value=type(made).__name__)
    # A function's optimizer is seen only now; that of a class was looked at before.
    check_step(type(made))
    if not trained:
        for group in made.param_groups:
            group["params"] = []
    return made


def check_step(kind: type[Optimizer]) -> None:
    """Refuse one that asks for losses as it goes, which each rank has for its share alone."""
    wanted = inspect.signature(kind.step).parameters.get("closure")
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        raise UsageError(
            "an optimizer that cannot make a step without a closure",
            value=kind.__name__,
            hint="choose one that needs gradients only, such as torch.optim.AdamW",
        )


def schedule_of(what: str | None) -> tuple[str, int]:
    """The name of a schedule, and how many stages it gives to a rank."""
    name, colon, count = (what or "1f1b").lower().partition(":")
    is_known = name in ("gpipe", "1f1b", "interleaved")
    if not is_known or (colon and (name != "interleaved" or not count.isdecimal())):
        raise UsageError(
            "no schedule",
            where="schedule",
            value=what,
            hint="gpipe, 1f1b, interleaved, or interleaved:<stages of each rank>",
        )
    stages = int(count or 2) if name == "interleaved" else 1
    if name == "interleaved" and stages < 2:
        raise UsageError(
            "an interleaved schedule gives two stages or more to a rank", value=what, hint="1f1b"
        )
    return name, stages


def microbatches_of(given: int | None, strategy: Strategy, schedule: str = "1f1b") -> int:
    """How many micro-batches a batch is cut into; by default twice as many as there are ranks in
    a pipeline, and one elsewhere.
    """
    ranks = size_of(strategy, "pp")
    # The more there are, the less ranks wait for each other at both ends of a batch.
    count = (2 * ranks if ranks > 1 else 1) if given is None else given
    if type(count) is not int or count < 1:
        raise UsageError("no number of micro-batches", value=given)
    if ranks > 1 and schedule == "1f1b" and count < ranks:
        raise UsageError(
            f"1f1b takes as many micro-batches as there are stages, {ranks}", value=count
        )
    if ranks > 1 and schedule == "interleaved" and count % ranks:
        raise UsageError(
            f"an interleaved schedule takes a multiple of {ranks} micro-batches", value=count
        )
    return count


def resolved(spec: str | Strategy, world_size: int) -> Strategy:
    """The strategy on this many ranks; one axis may leave its size out, and gets what is left."""
    strategy = Strategy.of(_filled(spec, world_size) if isinstance(spec, str) else spec)
    if strategy.world_size != world_size:
        raise StrategyError(
            f"the strategy is of {strategy.world_size} ranks, the job has {world_size}",
            value=str(strategy),
            hint="leave one size out to use all ranks, such as tp:2,fsdp",
        )
    kinds, sharder = [axis.kind for axis in strategy.mesh.axes], sharder_of(strategy)
    repeated = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    # Products of axes that no engine of torch runs.
    for is_refused, what, hint in (
        (repeated is not None, f"more than one {repeated} axis", "give it one axis"),
        (
            "ep" in kinds,
            "expert parallelism has no engine here",
            "cut experts along tp or fsdp",
        ),
        (
            "zero1" in kinds and "ddp" in kinds,
            "zero1 repeats parameters itself",
            "write zero1 with all of these ranks, or ddp with fsdp",
        ),
        (
            "zero1" in kinds and size_of(strategy, "tp") > 1,
            "DistributedDataParallel, which zero1 stands on, takes no DTensors",
            "write fsdp or zero2 in its place",
        ),
        (
            sharder and "ddp" in kinds[kinds.index(sharder) :],
            "replicas lie outside of shards",
            f"write ddp before {sharder}",
        ),
    ):
        if is_refused:
            raise StrategyError(what, value=str(strategy), hint=hint)
    return strategy


def size_of(strategy: Strategy, kind: str) -> int:
    """How many ranks lie along the axis of a kind; 1 where there is none."""
    return next((axis.size for axis in strategy.mesh.axes if axis.kind == kind), 1)


def sharder_of(strategy: Strategy) -> str | None:
    """The kind of the axis that `fully_shard` cuts along."""
    return next((axis.kind for axis in strategy.mesh.axes if axis.kind in SHARDED), None)


def _filled(spec: str, world_size: int) -> str:
    items = [item.strip() for item in spec.split(",")]
    sized = [":" in item or item in ("", "single", "hsdp") for item in items]
    if all(sized):
        return spec
    if sized.count(False) > 1:
        raise StrategyError(
            "more than one axis leaves its size out",
            value=spec,
            hint="only one of them can get the ranks that are left",
        )
    at = sized.index(False)
    known = Strategy.parse(",".join([*items[:at], f"{items[at]}:1", *items[at + 1 :]]))
    left, over = divmod(world_size, known.world_size)
    if over or not left:
        raise StrategyError(
            f"{world_size} ranks cannot be divided by the {known.world_size} of the other axes",
            value=spec,
        )
    return ",".join([*items[:at], f"{items[at]}:{left}", *items[at + 1 :]])


def opened(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The positional and the named inputs of a batch, and its targets."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(
            "a batch is a pair of inputs and targets",
            value=type(batch).__name__,
            hint="inputs are a tensor, a tuple for several, or a dictionary for named ones",
        )
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs), targets
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, targets


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with other tensors in place of its own."""
    if torch.is_tensor(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [mapped(value, change) for value in batch]
        # A named tuple takes its values one by one.
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    if torch.is_tensor(batch):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch
    is_nested = isinstance(batch, (Mapping, tuple, list))
    return [tensor for value in values for tensor in tensors_of(value)] if is_nested else []


def share(batch: Any, number: int, count: int) -> Any:
    """One of `count` equal shares along the first dim of every tensor; other values go whole."""

    def chunk(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] % count:
            raise UsageError(
                f"{count} replicas cannot share this evenly",
                value=tuple(tensor.shape),
                hint="losses are means over a replica's share, which therefore have to be equal",
            )
        return tensor.chunk(count)[number]

    if count == 1:
        return batch
    _check_cut(batch, {tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim})
    return mapped(batch, chunk)


def _check_cut(batch: Any, sizes: Collection[int]) -> None:
    """Refuse arrays and lists that go with the entries of tensors, and would not be cut."""
    if isinstance(batch, np.ndarray):
        size = batch.shape[:1]
    else:
        size = (len(batch),) if isinstance(batch, list) and not tensors_of(batch) else ()
    if size and size[0] in sizes:
        raise UsageError(
            "only tensors are cut, and this has an entry for each of theirs",
            value=f"{type(batch).__name__} of {size[0]}",
            hint="make it a tensor, or share it yourself; a tuple goes to all replicas whole",
        )
    if isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            _check_cut(value, sizes)
