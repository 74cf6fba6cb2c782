"""What rules would do to the tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.checkpoint.places import Place
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.checkpoint.reshard.selection import Selection, choose
from ckptkit.checkpoint.reshard.target import Outline, tensors_of
from ckptkit.checkpoint.rules_file import RulesLike, rules_between
from ckptkit.model import Strategy, layout_of
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import Placed, decide
from ckptkit.storage import Options


@dataclass(frozen=True, slots=True)
class Explained:
    """How a strategy cuts one tensor, and which rule says so."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, str], ...]
    """Per axis its name and how it cuts, such as ("tp", "shard(0)")."""
    part: tuple[int, ...]
    """The shape of what rank 0 holds."""
    why: str
    unknown: tuple[str, ...] = ()
    """The axes for which no rule knows the tensor."""
    unknown_sizes: tuple[str, ...] = ()
    """Sizes that nobody gave, and without which heads may be cut in two; `reshard` refuses that."""


def explain_rules(
    src: Place,
    *,
    to: str | Strategy,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    replicate_unknown: bool = False,
    storage_options: Options | None = None,
) -> list[Explained]:
    """How `reshard` with the same arguments would cut every tensor of the step at `src`.

    Only the manifest is read. Tensors that no rule knows are in the list, as replicated; unless
    that was asked for, their `unknown` is not empty, and `reshard` would refuse them.
    """
    target = Strategy.of(to)
    with open_checkpoint(src, storage_options=storage_options) as checkpoint:
        source, outline = checkpoint.strategy, Outline.of(checkpoint.manifest)
    choice = choose(outline.arrays, outline.aliases, Selection())
    names = [chosen.inner for chosen in choice.arrays]
    found = rules_between(source, target, rules, names=names, sizes=sizes)
    tensors = tensors_of(choice, outline.objects)
    placed = decide(tensors, source=source, target=target, rules=found)
    explained = [
        _explained(tensor, replace(each, unknown=()) if replicate_unknown else each, target)
        for tensor, each in zip(tensors, placed, strict=True)
    ]
    return sorted(explained, key=lambda each: each.name)


def _explained(tensor: Tensor, placed: Placed, target: Strategy) -> Explained:
    axes = [axis.name for axis in target.mesh.axes]
    layout = layout_of(tensor.shape, target, placed.placements)
    return Explained(
        tensor.name,
        tensor.shape,
        tuple(zip(axes, map(str, placed.placements), strict=True)),
        layout.part(0).shape,
        placed.why,
        placed.unknown,
        placed.unknown_sizes,
    )
