"""What the caller of `as_distributed` decides, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.model.quantity import parse_size
from ckptkit.parallel.strategies.spec import SHARDED, sharder_of, size_of

Split: TypeAlias = Callable[[nn.Module, tuple[str, ...]], nn.Module]
Precision: TypeAlias = torch.dtype | MixedPrecisionPolicy

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
_SCHEDULES = ("gpipe", "1f1b", "interleaved")
_BALANCES = ("parameters", "time")


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The choices that are not the strategy's."""

    group_below: int
    precision: Precision | None = None
    offload: bool = False
    compression: str | None = None
    rules: RulesLike = "auto"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    balance: str = "parameters"
    example: Any = None
    split: Split | None = None

    def check(self, strategy: Strategy) -> None:
        """Refuse what the strategy has no use for, rather than do nothing."""
        kinds = {axis.kind for axis in strategy.mesh.axes}
        if self.offload and not sharder_of(strategy):
            raise _needs("offload", ", ".join(SHARDED), strategy)
        if self.compression is not None and (
            not kinds & {"ddp", "zero1"} or sharder_of(strategy) or size_of(strategy, "tp") > 1
        ):
            raise _needs("compression", "ddp or zero1 (without fsdp and tp)", strategy)
        if isinstance(self.precision, MixedPrecisionPolicy) and not sharder_of(strategy):
            raise _needs("a MixedPrecisionPolicy", ", ".join(SHARDED), strategy)


def precision_of(what: object) -> Precision | None:
    """The dtype of a name such as `bf16`, or a policy of `fully_shard`."""
    if what is None or isinstance(what, (torch.dtype, MixedPrecisionPolicy)):
        return what
    if isinstance(what, str) and what in _DTYPES:
        return _DTYPES[what]
    raise UsageError(
        "no precision", where="mixed_precision", value=what, hint='write "bf16" or "fp16"'
    )


def group_size(what: int | str) -> int:
    """The bytes below which modules are gathered together; 0 gathers each alone."""
    return 1 if what in (0, "0") else parse_size(what)


def schedule_of(what: str | None) -> tuple[str, int]:
    """The name of a schedule, and how many stages it gives to a rank."""
    name, colon, count = (what or "1f1b").lower().partition(":")
    if name not in _SCHEDULES or (colon and (name != "interleaved" or not count.isdecimal())):
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


def microbatches_of(given: int | None, strategy: Strategy, schedule: str) -> int:
    """How many micro-batches a batch is cut into; by default twice as many as there are ranks in
    a pipeline, and one elsewhere.
    """
    ranks = size_of(strategy, "pp")
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


def balance_of(what: str) -> str:
    """What stages are made to have alike."""
    if what not in _BALANCES:
        raise UsageError(
            "no way to balance", where="balance", value=what, hint=" or ".join(_BALANCES)
        )
    return what


def _needs(what: str, kinds: str, strategy: Strategy) -> UsageError:
    return UsageError(f"{what} is for {kinds}", value=str(strategy), hint="leave it out here")
