"""What the caller of `as_distributed` decides, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.model.document import parse_size
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
_OF_THE_CALLER = ("example", "split")
"""What only makes stages, or is tried out: it cannot be compared, and need not be."""


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The choices that are not the strategy's."""

    group_below: int
    precision: Precision | None = None
    offload: bool = False
    compression: str | None = None
    overlap: bool = False
    rules: RulesLike = "auto"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    balance: str = "parameters"
    example: Any = None
    split: Split | None = None

    @classmethod
    def of(  # noqa: PLR0913 — those of `as_distributed`
        cls,
        strategy: Strategy,
        *,
        rules: RulesLike | None = None,
        sizes: Mapping[str, Any] | None = None,
        mixed_precision: Precision | str | None = None,
        offload: bool = False,
        group_below: int | str = "1MiB",
        microbatches: int | None = None,
        schedule: str | None = None,
        balance: str = "parameters",
        example: Any = None,
        split: Split | None = None,
        compression: str | None = None,
        overlap: bool = False,
    ) -> Options:
        """What the arguments of a call mean under a strategy."""
        name, stages = schedule_of(schedule)
        return cls(
            group_size(group_below),
            precision_of(mixed_precision),
            offload=offload,
            compression=compression,
            overlap=overlap,
            rules="auto" if rules is None else rules,
            sizes=dict(sizes or {}),
            microbatches=microbatches_of(microbatches, strategy, name),
            schedule=name,
            stages_per_rank=stages,
            balance=balance_of(balance),
            example=example,
            split=split,
        )

    def said(self) -> dict[str, str]:
        """By name and as text, what all ranks have to choose alike."""
        names = [each.name for each in fields(self) if each.name not in _OF_THE_CALLER]
        return {name: str(getattr(self, name)) for name in names}

    def differing(self, given: Options, unsaid: Options) -> list[str]:
        """The names of what is given, as `unsaid` has it not, and is other than here."""
        mine, theirs, nothing = self.said(), given.said(), unsaid.said()
        return [name for name in mine if theirs[name] not in (mine[name], nothing[name])]

    def check(self, strategy: Strategy) -> None:
        """Refuse what the strategy has no use for, rather than do nothing."""
        kinds = {axis.kind for axis in strategy.mesh.axes}
        if self.offload and not sharder_of(strategy):
            raise _needs("offload", ", ".join(SHARDED), strategy)
        if self.overlap and "zero1" not in kinds:
            raise _needs("overlap", "zero1", strategy)
        if self.compression is not None:
            if not kinds & {"ddp", "zero1", *SHARDED}:
                # Ranks of tp and pp sum or hand on activations, which need all of their bits.
                raise _needs("compression of gradients", "ddp, zero1, zero2 and fsdp", strategy)
            self._check_compression(self.compression, strategy)
        if isinstance(self.precision, MixedPrecisionPolicy) and not sharder_of(strategy):
            raise _needs("a MixedPrecisionPolicy", ", ".join(SHARDED), strategy)

    def _check_compression(self, compression: str, strategy: Strategy) -> None:
        from ckptkit.parallel.optimizers.compression import compression_of  # noqa: PLC0415

        remembers = compression_of(compression).remembers
        if "ddp" in {axis.kind for axis in strategy.mesh.axes} and (
            sharder_of(strategy) or size_of(strategy, "tp") > 1
        ):
            raise UsageError(
                "replicas of what is cut take their mean by an all-reduce that torch lets nobody "
                "replace",
                value=f"{compression}, {strategy}",
                hint="cut over all ranks instead of ddp: fsdp, or tp and fsdp",
            )
        if remembers and sharder_of(strategy):
            raise UsageError(
                "what is left unsent is as large as all gradients, on every rank, and "
                f"{sharder_of(strategy)} keeps a part of them only",
                value=f"{compression}, {strategy}",
                hint="fp16, bf16 and int8 leave nothing unsent; or use ddp or zero1",
            )
        if remembers and size_of(strategy, "pp") > 1:
            raise UsageError(
                "what stages have left unsent cannot be saved together",
                value=f"{compression}, {strategy}",
                hint="fp16, bf16 and int8 leave nothing unsent",
            )
        if self.stages_per_rank > 1:
            raise UsageError(
                "compression is for one stage on each rank",
                value=f"{compression}, {self.schedule}:{self.stages_per_rank}",
                hint='schedule="1f1b"',
            )


def precision_of(what: object) -> Precision | None:
    """The dtype of a name such as `bf16`, or a policy of `fully_shard`."""
    if what is None or isinstance(what, MixedPrecisionPolicy):
        return what
    if isinstance(what, torch.dtype) and what in _DTYPES.values():
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
