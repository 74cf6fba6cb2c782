"""A committed step, open for reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from shlex import quote
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import Place, StepFolder, manifest_at, read_manifest, store_at
from ckptkit.checkpoint.read.packs import ForeignFiles, OpenPacks
from ckptkit.checkpoint.read.reader import Wanted, plan_read
from ckptkit.checkpoint.workers import Pace, Progress, share_out, uncollected
from ckptkit.errors import (
    FormatError,
    LayoutError,
    NotCommittedError,
    NotFoundError,
    PeerError,
    nearest,
)
from ckptkit.foreign.contents import SAVE_ID_PREFIX as FOREIGN
from ckptkit.foreign.contents import ForeignManifest
from ckptkit.foreign.extents import ForeignStep
from ckptkit.foreign.readers import find_foreign
from ckptkit.format.arrays import ArrayInfo
from ckptkit.format.manifest import Manifest
from ckptkit.format.objects import whole
from ckptkit.model import Box, DType, Grid, Layout, Part, Strategy, display, layout_of
from ckptkit.model.document import counted, size_text, time_text
from ckptkit.storage import Address, Location, Options, Store
from ckptkit.storage.base.store import Closing

if TYPE_CHECKING:
    import zarr

    from ckptkit.format.zarr import ZarrView

_SHOWN = 12
UNKNOWN = "an unknown strategy"
"""What wrote a foreign checkpoint that does not say it."""


def open_checkpoint(location: Place, *, storage_options: Options | None = None) -> Checkpoint:
    """Open a step, or the newest committed step of a run; or what another program saved, in any
    format that docs/migration.md lists.

    `storage_options` say how to reach an object store: `endpoint`, `region`, `profile` and others;
    what they leave out comes from the environment, as is usual there.
    """
    store = store_at(location, storage_options)
    try:
        return Checkpoint(*manifest_at(store))
    except NotFoundError as error:
        return open_foreign(store, error)


@uncollected()
def open_foreign(store: Store, error: NotFoundError) -> Checkpoint:
    """Open the foreign checkpoint of a place that has no step of ours, as an error says; it is
    raised where there is nothing foreign either, or a step that was begun.
    """
    found = None if isinstance(error, NotCommittedError) else find_foreign(store)
    if found is None:
        raise error
    place, name, manifest = found
    return Checkpoint(StepFolder(place, name), manifest)


def reopened(address: Address, name: str, save_id: str) -> Checkpoint:
    """Open the very save that another process has open; FormatError where there is another now."""
    if save_id.startswith(FOREIGN):
        location = address.location / name if name else address.location
        found = open_checkpoint(replace(address, location=location))
    else:
        folder = StepFolder(store_at(address), name)
        found = Checkpoint(folder, read_manifest(folder))
    if found.save_id != save_id:
        raise FormatError(
            "its files were changed since it was opened"
            if save_id.startswith(FOREIGN)
            else "the step was saved anew since it was opened",
            where=found.location,
            hint="open it again",
        )
    return found


def open_alike(store: Store, name: str, location: str, digest: bytes) -> Checkpoint:
    """Open the foreign checkpoint that another rank has found at a location, for this one."""
    place = Location.parse(location)
    found = open_checkpoint(replace(store.address, location=place / name if name else place))
    if found.manifest.table.digest != digest:
        raise PeerError(
            "this rank finds other tensors here than rank 0",
            where=found.location,
            hint="all ranks need the same files: copy the folder again to this machine",
        )
    return found


def _inside(shape: tuple[int, ...], name: str, box: Box) -> Box:
    if len(box.shape) != len(shape) or not Box.whole(shape).contains(box):
        raise LayoutError(f"the box is not inside of {shape}", where=name, value=box)
    return box


class Checkpoint(Closing):
    """A committed step: what is in it, and any box of any array of it.

    Usable from any thread; close it, or use it in a `with` block, to free file handles.
    """

    def __init__(self, folder: StepFolder, manifest: Manifest) -> None:
        self.folder = folder
        self.store = folder.store
        self.manifest = manifest
        self.packs = OpenPacks(folder, manifest)
        if isinstance(manifest, ForeignManifest):
            self.packs = ForeignFiles(folder, manifest)
        self._numbers = {name: number for number, name in enumerate(manifest.table.names)}
        for alias in manifest.aliases:
            self._numbers[alias.name] = self._numbers[alias.alias_of]

    @property
    def location(self) -> str:
        """Where the step is, for messages."""
        return str(self.folder)

    @property
    def place(self) -> Place:
        """What opens this step again, whatever steps its run gets."""
        if not self.folder.name:
            return self.store
        return replace(self.store.address, location=self.store.location / self.folder.name)

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.manifest.save.step

    @property
    def time(self) -> float:
        """When it was saved, in Unix seconds."""
        return self.manifest.save.time

    @property
    def save_id(self) -> str:
        """What names the save that wrote it, as no other save of any step is named."""
        return self.manifest.save.save_id

    @property
    def strategy(self) -> Strategy:
        """The strategy that wrote it; of a foreign one that does not say, `single`."""
        return self.manifest.save.strategy

    @property
    def written_by(self) -> str:
        """The strategy for people: `an unknown strategy` where nothing says it."""
        is_known = self.foreign is None or self.foreign.strategy is not None
        return str(self.strategy) if is_known else UNKNOWN

    @property
    def foreign(self) -> ForeignStep | None:
        """What its reader has found, where ckptkit did not write it: its format, their names."""
        return self.manifest.foreign if isinstance(self.manifest, ForeignManifest) else None

    @property
    def details(self) -> Mapping[str, Any]:
        """What its writer said about it besides the strategy, such as the precision."""
        return MappingProxyType(self.manifest.save.details)

    @cached_property
    def arrays(self) -> Mapping[str, Array]:
        """All arrays by name, tied ones under each of their names."""
        return MappingProxyType({name: self[name] for name in self.names})

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of all arrays, in order, tied ones under each of theirs."""
        return sorted(self._numbers)

    @property
    def objects(self) -> Mapping[str, Any]:
        """What is no tensor: one value, a list by rank (`PerRank`), or the total (`Sum`)."""
        return MappingProxyType({item.name: whole(item) for item in self.manifest.objects})

    @property
    def zarr(self) -> zarr.Group:
        """The step as a read-only Zarr group, every chunk checked as it is read."""
        # Here, because importing zarr takes longer than most commands do.
        import zarr  # noqa: PLC0415

        from ckptkit.format.zarr import register  # noqa: PLC0415

        register()
        return zarr.open_group(self.zarr_store(), mode="r")

    def zarr_store(self) -> ZarrView:
        """The step as zarr's Store, whose keys can be read one by one."""
        from ckptkit.format.zarr import ZarrView  # noqa: PLC0415

        infos = {name: array.info for name, array in self.arrays.items()}
        return ZarrView(self.location, infos, self.read)

    @property
    def stored_bytes(self) -> int:
        """The size of its packs, or of the files of a foreign checkpoint."""
        if self.foreign is not None:
            return sum(self.foreign.files.values())
        return sum(pack.size for pack in self.manifest.packs)

    def __repr__(self) -> str:
        what = f"{counted(len(self._numbers), 'array')}, {size_text(self.stored_bytes)}"
        return f"Checkpoint({self.location!r}, step {self.step}, {self.written_by}, {what})"

    @uncollected()
    def _repr_html_(self) -> str:
        names, kinds = self.manifest.table.names, self.manifest.table.kinds
        # What differs only in its cuts is told together.
        alike = {id(k): (k.shape, k.dtype.name, k.role) for k in kinds}
        rows = []
        for name, places in display.fold_names(names, [alike[id(kind)] for kind in kinds]):
            kind, count = kinds[places[0]], f"{len(places)} x" if len(places) > 1 else ""
            nbytes = math.prod(kind.shape) * kind.dtype.itemsize * len(places)
            cells = (name, count, kind.dtype.name, str(kind.shape), kind.role, size_text(nbytes))
            rows.append((nbytes, cells))
        rows.sort(key=lambda row: -row[0])
        packs = counted(len(self.manifest.packs), "pack")
        if self.foreign is not None:
            packs = counted(len(self.foreign.files), "file")
        facts = {
            "where": self.location,
            "saved": time_text(self.time) or "at no date",
            "strategy": self.written_by,
            "size": f"{size_text(self.stored_bytes)} in {packs}",
            "arrays": f"{len(self._numbers)}, the largest below",
            "objects": ", ".join(item.name for item in self.manifest.objects[:_SHOWN]) or "none",
        }
        head = ("name", "", "dtype", "shape", "role", "size")
        return display.card(
            f"step {self.step}",
            facts,
            display.mesh_picture(self.strategy),
            display.table(head, [cells for _, cells in rows[:_SHOWN]]),
        )

    def show(self, **options: Any) -> display.Inline:
        """The page of `ckptkit.view`, which takes these options, as the result of a cell."""
        # By its name: pages stand on steps, and nothing that a step does needs one.
        return display.Inline(import_module("ckptkit.page").view(self.place, **options))

    def _ipython_key_completions_(self) -> list[str]:
        return display.natural_order(self._numbers)

    def __getitem__(self, name: str) -> Array:
        return Array(self, name, self.info(name))

    def info(self, name: str) -> ArrayInfo:
        """What the manifest says of an array."""
        return self.manifest.arrays[self.number(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def first_row(self, name: str) -> int:
        """Where the chunks of an array begin in the columns of the manifest."""
        return int(self.manifest.starts[self.number(name)])

    def read(
        self,
        name: str,
        box: Box | None = None,
        out: npt.NDArray[Any] | None = None,
        *,
        verify: bool = True,
    ) -> npt.NDArray[Any]:
        """A box of an array (all of it without one), into `out` where given."""
        array = self[name]
        box = _inside(array.shape, name, box or Box.whole(array.shape))
        if out is None:
            out = np.empty(box.shape, dtype=array.dtype.numpy)
        self.read_many([(name, box, out)], verify=verify)
        return out

    def read_many(
        self,
        wanted: Sequence[NamedBox],
        *,
        verify: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
        pace: Pace | None = None,
        alone: bool = False,
    ) -> None:
        """Fill boxes of many arrays at once.

        With `verify`, the default, chunks are read whole, and every byte that reaches the caller
        was compared with its checksum (foreign checkpoints have none); without, only the bytes
        needed are read, unchecked. What is in the memory after an error is undefined. `pace` says
        how much is asked of the store at a time: without, what it likes best.

        `alone` says that no other process of this machine reads the same bytes. Large reads of
        files that the page cache does not have go past it then, which is faster, the first time.
        """
        checked: list[Wanted] = []
        kinds, fitting = self.manifest.table.kinds, set[tuple[Any, ...]]()
        for name, box, target in wanted:
            number = self.number(name)
            kind = kinds[number]
            what = id(kind), box.offset, box.shape
            if what not in fitting:
                _inside(kind.shape, name, box)
                fitting.add(what)
            dtypes = (kind.dtype.bits, kind.dtype.numpy)
            if target.shape != box.shape or target.dtype not in dtypes:
                raise LayoutError(
                    f"the memory does not fit {box.shape} of {kind.dtype.name}",
                    where=name,
                    value=(target.shape, str(target.dtype)),
                )
            if not target.flags.writeable:
                raise LayoutError("the memory is read-only", where=name)
            is_raw = target.dtype is kind.dtype.bits
            checked.append(Wanted(number, box, target if is_raw else target.view(kind.dtype.bits)))
        pace = pace or self.packs.pace
        if threads:
            pace = replace(pace, requests=threads)
        plan = plan_read(self.packs, checked, pace, verify=verify, progress=progress, alone=alone)
        share_out(plan.runs, plan.read, plan.pace.requests)

    def __reduce__(self) -> tuple[Any, ...]:
        # Opened again where it arrives: handles do not travel.
        return (reopened, (self.store.address, self.folder.name, self.save_id))

    def check_unchanged(self) -> None:
        """Refuse a foreign checkpoint whose files are not as they were when it was opened: what was
        read of them may be of both. Of a step of ours checksums tell.
        """
        if self.foreign:
            reopened(self.store.address, self.folder.name, self.save_id).close()

    def close(self) -> None:
        """Close the packs; reading opens them again."""
        self.packs.close()

    def number(self, name: str) -> int:
        """Which of the arrays of the manifest a name means."""
        if name not in self._numbers:
            guess = nearest(str(name), self._numbers, 3)
            raise NotFoundError(
                "no such array",
                where=self.location,
                value=name,
                hint=f"{guess}`ckpt show {quote(self.location)}` lists the arrays",
            )
        return self._numbers[name]


NamedBox: TypeAlias = tuple[str, Box, npt.NDArray[Any]]
"""A box of the array of a name, and memory of the box's shape and the array's dtype."""
ReadMany: TypeAlias = Callable[[Sequence[NamedBox]], None]
"""Fills such boxes, as `Checkpoint.read_many` does."""
Index: TypeAlias = int | slice | EllipsisType


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """One array of a step; indexing reads, `array[:10, :]` gives a numpy array."""

    _checkpoint: Checkpoint
    name: str
    info: ArrayInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.info.shape

    @property
    def dtype(self) -> DType:
        """The element type; `.numpy` is numpy's."""
        return self.info.dtype

    @property
    def grid(self) -> Grid:
        """How it is cut into chunks."""
        return self.info.grid

    @property
    def role(self) -> str:
        """param, buffer, optimizer or other."""
        return self.info.role

    @property
    def alias_of(self) -> str | None:
        """The array that this is a second name of."""
        return self.info.name if self.info.name != self.name else None

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.info.nbytes

    def __repr__(self) -> str:
        what = f"{self.shape} {self.dtype}, {self.role}, {size_text(self.nbytes)}"
        return f"Array({self.name!r}, {what})"

    def _repr_html_(self) -> str:
        layout, checkpoint = self.layout, self._checkpoint
        axes = zip(layout.strategy.mesh.axes, layout.placements, strict=True)
        facts = {
            "of": f"step {checkpoint.step} of {checkpoint.written_by}",
            "shape": f"{self.shape} {self.dtype}, {size_text(self.nbytes)}",
            "role": self.role if self.alias_of is None else f"{self.role}, tied to {self.alias_of}",
            "cut": "; ".join(f"{axis.name} {cut}" for axis, cut in axes) or "whole",
            "chunks": self.grid.chunk_count,
        }
        return display.card(self.name, facts, display.cut_picture(layout))

    @property
    def layout(self) -> Layout:
        """Which rank of the strategy that wrote it held what."""
        try:
            return layout_of(self.info.shape, self._checkpoint.strategy, self.info.placements)
        except LayoutError as error:
            where = f"{self._checkpoint.location}: {self.info.name}"
            raise FormatError(error.what, where=where, hint=error.hint) from error

    def part(self, rank: int) -> Part:
        """What a rank of the strategy that wrote it held."""
        return self.layout.part(rank)

    def read(self, box: Box | None = None, *, verify: bool = True) -> npt.NDArray[Any]:
        """A box of it, or all of it."""
        return self._checkpoint.read(self.name, box, verify=verify)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> npt.NDArray[Any]:
        box, rest = _as_box(self.name, self.shape, index)
        result: npt.NDArray[Any] = self.read(box)[rest]
        return result

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 — numpy's protocol
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise LayoutError("the array is in storage: reading it is a copy", where=self.name)
        return self.read().astype(dtype or self.dtype.numpy, copy=False)


def _as_box(
    name: str, shape: tuple[int, ...], index: Index | tuple[Index, ...]
) -> tuple[Box, tuple[int | slice, ...]]:
    """The smallest box with all that an index selects, and the index within that box."""
    items = index if isinstance(index, tuple) else (index,)
    dots = [place for place, item in enumerate(items) if item is ...]
    unnamed = len(shape) - (len(items) - len(dots))
    if len(dots) > 1 or unnamed < 0:
        raise LayoutError(f"the index does not fit {len(shape)} dims", where=name, value=items)
    at = dots[0] if dots else len(items)
    filled = [*items[:at], *[slice(None)] * unnamed, *items[at + len(dots) :]]
    wanted: list[Any] = [item for item in filled if item is not ...]
    offset, extents = [], []
    rest: list[int | slice] = []
    for item, extent in zip(wanted, shape, strict=True):
        if isinstance(item, slice):
            chosen = range(extent)[item]
            ends = (chosen[0], chosen[-1]) if chosen else ()
            low, high = min(ends, default=0), max(ends, default=-1) + 1
            # A step of -1 from the end down to the first element cannot be written as a stop.
            inner: int | slice = slice(None, None, chosen.step)
        else:
            if not isinstance(item, (int, np.integer)) or isinstance(item, bool):
                raise LayoutError(
                    "an index is made of integers, slices and …", where=name, value=item
                )
            low = int(item)
            if not -extent <= low < extent:
                raise IndexError(f"{name}: index {low} is out of bounds for a dim of {extent}")
            low %= extent
            high, inner = low + 1, 0
        offset.append(low)
        extents.append(high - low)
        rest.append(inner)
    return Box(tuple(offset), tuple(extents)), tuple(rest)
