"""What a strategy asks of a job: sizes filled in, and refused where torch has no engine for it."""

from __future__ import annotations

from ckptkit.errors import StrategyError
from ckptkit.model import Strategy

SHARDED = ("fsdp", "zero2", "zero3")
"""The kinds whose parameters `fully_shard` cuts."""


def resolved(spec: str | Strategy, world_size: int) -> Strategy:
    """The strategy on this many ranks; one axis may leave its size out, and gets what is left."""
    strategy = Strategy.of(_filled(spec, world_size) if isinstance(spec, str) else spec)
    if strategy.world_size != world_size:
        raise StrategyError(
            f"the strategy is of {strategy.world_size} ranks, the job has {world_size}",
            value=str(strategy),
            hint="leave one size out to use all ranks, such as tp:2,fsdp",
        )
    _check_engines(strategy)
    return strategy


def size_of(strategy: Strategy, kind: str) -> int:
    """How many ranks lie along the axis of a kind; 1 where there is none."""
    return next((axis.size for axis in strategy.mesh.axes if axis.kind == kind), 1)


def mesh_names(strategy: Strategy) -> dict[str, str]:
    """By kind, what a DeviceMesh calls the axes: stages of ZeRO that are FSDP are called that, as
    checkpoints know them.
    """
    return {
        axis.kind: "fsdp" if axis.name == axis.kind and axis.kind in SHARDED else axis.name
        for axis in strategy.mesh.axes
    }


def sharder_of(strategy: Strategy) -> str | None:
    """The kind of the axis that `fully_shard` cuts along."""
    return next((axis.kind for axis in strategy.mesh.axes if axis.kind in SHARDED), None)


def _filled(spec: str, world_size: int) -> str:
    items = [item.strip() for item in spec.split(",")]
    open_ones = [i for i, item in enumerate(items) if _lacks_size(item)]
    if not open_ones:
        return spec
    if len(open_ones) > 1:
        raise StrategyError(
            "more than one axis leaves its size out",
            value=spec,
            hint="only one of them can get the ranks that are left",
        )
    at = open_ones[0]
    known = Strategy.parse(",".join([*items[:at], f"{items[at]}:1", *items[at + 1 :]]))
    left, over = divmod(world_size, known.world_size)
    if over or not left:
        raise StrategyError(
            f"{world_size} ranks cannot be divided by the {known.world_size} of the other axes",
            value=spec,
        )
    return ",".join([*items[:at], f"{items[at]}:{left}", *items[at + 1 :]])


def _lacks_size(item: str) -> bool:
    return bool(item) and ":" not in item and item not in ("single", "hsdp")


def _check_engines(strategy: Strategy) -> None:
    """Refuse products of axes that no engine of torch runs."""
    kinds = [axis.kind for axis in strategy.mesh.axes]
    repeated = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if repeated is not None:
        raise _refusal(strategy, f"more than one {repeated} axis", "give it one axis")
    if "ep" in kinds:
        raise _refusal(
            strategy, "expert parallelism has no engine here", "cut experts along tp or fsdp"
        )
    if "zero1" in kinds and "ddp" in kinds:
        raise _refusal(
            strategy,
            "zero1 repeats parameters itself",
            "write zero1 with all of these ranks, or ddp with fsdp",
        )
    if "zero1" in kinds and size_of(strategy, "tp") > 1:
        raise _refusal(
            strategy,
            "DistributedDataParallel, which zero1 stands on, takes no DTensors",
            "write fsdp or zero2 in its place",
        )
    sharder = sharder_of(strategy)
    if "ddp" in kinds and sharder and kinds.index("ddp") > kinds.index(sharder):
        raise _refusal(strategy, "replicas lie outside of shards", f"write ddp before {sharder}")


def _refusal(strategy: Strategy, what: str, hint: str) -> StrategyError:
    return StrategyError(what, value=str(strategy), hint=hint)
