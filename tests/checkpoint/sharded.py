"""One state, cut by whatever axes a strategy has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit import Strategy, Writer
from ckptkit.model import DTYPES
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Fill, State, Tensor, add, random_values, save_by

STRATEGIES = ("single", "fsdp:8", "tp:4", "ddp:2,fsdp:4", "tp:2,fsdp:2", "fsdp:2,tp:3", "pp:2,tp:2")


def awkward_state() -> dict[str, Tensor]:
    """Every dtype; uneven, empty and fused shapes, scalars, and cuts that fit no regular grid."""
    state = {
        f"model/{name}": Tensor(
            random_values((7, 5), name, seed), {"fsdp": "shard(0)", "tp": "shard(1)"}
        )
        for seed, name in enumerate(DTYPES)
    }
    fused = {"fsdp": "shard(1)", "tp": "shard(0, blocks=[8,4,4])"}
    late = {"fsdp": "strided(0)", "tp": "shard(0)", "pp": "stage(1)"}
    return {
        **state,
        "model/cube": Tensor(random_values((3, 11, 4)), {"fsdp": "shard(1)", "tp": "shard(2)"}),
        "model/none": Tensor(random_values((0, 3)), {"fsdp": "shard(0)"}),
        "model/qkv": Tensor(random_values((16, 6), "bfloat16"), fused),
        "model/scalar": Tensor(random_values((), "float64")),
        "model/strided": Tensor(random_values((13, 3)), late),
    }


def for_strategy(tensor: Tensor, strategy: str) -> Tensor:
    """The same values, cut by the axes there are; strided only over another cut."""
    axes = [axis.name for axis in Strategy.of(strategy).mesh.axes]
    cuts = {axis: cut for axis, cut in tensor.placements.items() if axis in axes}
    if str(cuts.get("fsdp", "")).startswith("strided") and axes != ["tp", "fsdp"]:
        cuts["fsdp"] = "shard(0)"
    return Tensor(tensor.whole, cuts)


def saved(
    state: State,
    strategy: str = "single",
    *,
    objects: Fill | None = None,
    tied: Mapping[str, str] | None = None,
    **options: Any,
) -> MemoryStore:
    """A run with a step of the state, written by the ranks of the strategy."""
    store = MemoryStore()

    def fill(writer: Writer) -> None:
        for name, tensor in state.items():
            add(writer, name, for_strategy(tensor, strategy))
        for name, of in (tied or {}).items():
            writer.add_alias(name, of)
        if objects is not None:
            objects(writer)

    save_by(store, fill, strategy=strategy, **options)
    return store
