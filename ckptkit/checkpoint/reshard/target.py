"""The step that will be: all of it but its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.reshard.objects import chosen_objects, parameter_order
from ckptkit.checkpoint.reshard.selection import Choice, Chosen, Selection, choose
from ckptkit.errors import LayoutError
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import Alias, ArrayInfo
from ckptkit.format.leaves import dumps
from ckptkit.format.manifest import Manifest
from ckptkit.format.names import DIGEST_ALGORITHM
from ckptkit.format.objects import ObjectInfo
from ckptkit.format.record import SaveInfo
from ckptkit.model import Layout, Rules, Strategy, layout_of
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import Placed, place
from ckptkit.plan.regrid import target_grid
from ckptkit.plan.write import Owned, chunks_to_write
from ckptkit.version import __version__

# What a source says of itself, and no longer of what is made of it.
_OWN = ("resharded", "digest")

SAVE_ID_PREFIX = "resharded-"


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A step without its chunks: enough to decide everything."""

    save: SaveInfo
    arrays: tuple[ArrayInfo, ...]
    aliases: tuple[Alias, ...] = ()
    objects: tuple[ObjectInfo, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> Outline:
        """That of a manifest."""
        return cls(manifest.save, manifest.arrays, manifest.aliases, manifest.objects)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is to become of a step, whatever the step is."""

    strategy: Strategy
    rules: Rules | None = None
    replicate_unknown: bool = False
    allow_split_heads: bool = False
    selection: Selection = field(default_factory=Selection)
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    digest: str = ""
    """That of the state, to be recorded; empty where none is."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetArray:
    """One array: where it comes from, and how it is cut."""

    chosen: Chosen
    info: ArrayInfo
    layout: Layout
    why: str
    """What decided how it is cut, in words."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element, here or in the source, whichever are more."""
        return max(self.info.dtype.itemsize, self.chosen.source.dtype.itemsize)

    @property
    def is_kept(self) -> bool:
        """Whether its chunks go over byte for byte."""
        return self.info.grid == self.chosen.source.grid and not self.chosen.is_cast


@dataclass(frozen=True, eq=False)
class Target:
    """The arrays, sorted by name, and the objects of the step, and who writes what."""

    outline: Outline
    recipe: Recipe
    arrays: tuple[TargetArray, ...]
    choice: Choice
    objects: tuple[ObjectInfo, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks, and of packs."""
        return self.recipe.strategy.world_size

    @cached_property
    def table(self) -> ArrayTable:
        """What every record says of the arrays."""
        return ArrayTable.of([array.info for array in self.arrays], self.choice.aliases)

    @cached_property
    def save(self) -> SaveInfo:
        """The same however often, wherever and by whom it is made, so that packs which were
        finished before an interruption, or by another machine, are those that are needed.

        Its time is that of the source: that is how old the state is.
        """
        source = self.outline.save
        details = self._details(source)
        what: list[Any] = [
            self.recipe.strategy.to_doc(),
            source.save_id,
            source.step,
            [[chosen.number, chosen.name] for chosen in self.choice.arrays],
            [[item.name, item.value] for item in self.objects],
            details,
            __version__,
        ]
        digest = hashlib.sha256(self.table.digest + dumps(what)).hexdigest()[:16]
        return SaveInfo(
            save_id=f"{SAVE_ID_PREFIX}{digest}",
            step=source.step,
            time=source.time,
            writer=f"ckptkit {__version__}",
            world_size=self.world_size,
            strategy=self.recipe.strategy,
            details=details,
        )

    def chunks_of(self, rank: int) -> list[npt.NDArray[np.int64]]:
        """For each array the chunks that a rank's pack has."""
        return chunks_to_write(self.held, rank)

    @cached_property
    def held(self) -> list[Owned]:
        """The arrays as planning knows them."""
        return [
            Owned(a.info.name, a.layout, a.info.grid, a.info.dtype.itemsize) for a in self.arrays
        ]

    def _details(self, source: SaveInfo) -> dict[str, Any]:
        details: dict[str, Any] = {
            **{key: value for key, value in source.details.items() if key not in _OWN},
            "resharded": {"from": str(source.strategy), "save_id": source.save_id},
        }
        if self.recipe.digest:
            details["digest"] = {"algorithm": DIGEST_ALGORITHM, "step": self.recipe.digest}
        return details


def target_of(outline: Outline, recipe: Recipe) -> Target:
    """Decide everything; no byte of any array is read."""
    selection = recipe.selection
    choice = choose(outline.arrays, outline.aliases, selection)
    objects = chosen_objects(outline.objects, choice, selection)
    placed = place(
        tensors_of(choice, objects),
        source=outline.save.strategy,
        target=recipe.strategy,
        rules=recipe.rules,
        replicate_unknown=recipe.replicate_unknown,
        allow_split_heads=recipe.allow_split_heads,
    )
    known: Mapping[str, Placed] = {each.name: each for each in placed}
    arrays = tuple(_array(chosen, known[chosen.name], recipe) for chosen in choice.arrays)
    return Target(outline, recipe, arrays, choice, objects)


def tensors_of(choice: Choice, objects: Sequence[ObjectInfo]) -> list[Tensor]:
    """What is placed, in the order of the optimizers' parameters, which decides who owns what."""
    order = parameter_order(objects)
    tensors = map(_tensor, choice.arrays)
    return sorted(tensors, key=lambda tensor: order.get(tensor.of, len(order)))


def _tensor(chosen: Chosen) -> Tensor:
    source = chosen.source
    return Tensor(
        chosen.name,
        source.shape,
        chosen.dtype.itemsize,
        source.role,
        chosen.of,
        source.placements,
    )


def _array(chosen: Chosen, placed: Placed, recipe: Recipe) -> TargetArray:
    source = chosen.source
    try:
        layout = layout_of(source.shape, recipe.strategy, placed.placements)
    except LayoutError as error:
        error.where = f"{chosen.name}: {error.where}" if error.where else chosen.name
        error.hint = error.hint or f"{placed.why} says so: `ckpt rules` shows all of them"
        raise
    grid = target_grid(source.grid, chosen.dtype.itemsize, layout.edges, recipe.chunk_bytes)
    info = ArrayInfo(
        chosen.name,
        source.shape,
        chosen.dtype,
        grid,
        source.role,
        placed.placements,
        chosen.of,
    )
    return TargetArray(chosen, info, layout, placed.why)
