"""A committed step, open for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.array import Array
from ckptkit.checkpoint.budget import Pace
from ckptkit.checkpoint.job import Request
from ckptkit.checkpoint.locate import manifest_at, read_manifest
from ckptkit.checkpoint.places import Place, described, store_at
from ckptkit.checkpoint.reading import Reader
from ckptkit.checkpoint.sources import Sources
from ckptkit.checkpoint.workers import Progress
from ckptkit.errors import FormatError, LayoutError, NotFoundError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.format.manifest import Manifest
from ckptkit.format.objects import whole
from ckptkit.model import Box, Strategy
from ckptkit.storage import Address, Options, Store
from ckptkit.storage.closing import Closing

if TYPE_CHECKING:
    import zarr


def open_checkpoint(location: Place, *, storage_options: Options | None = None) -> Checkpoint:
    """Open a step, or the newest committed step of a run.

    `storage_options` say how to reach an object store: `endpoint`, `region`, `profile` and others;
    what they leave out comes from the environment, as is usual there.
    """
    store = store_at(location, storage_options)
    prefix, manifest = manifest_at(store)
    return Checkpoint(store, prefix, manifest)


def _reopened(address: Address, prefix: str, save_id: str) -> Checkpoint:
    store = store_at(address)
    manifest = read_manifest(store, prefix)
    if manifest.save.save_id != save_id:
        raise FormatError(
            "the step was saved anew since it was opened",
            where=described(store, prefix),
            hint="open it again",
        )
    return Checkpoint(store, prefix, manifest)


def _inside(array: ArrayInfo, name: str, box: Box) -> Box:
    if len(box.shape) != len(array.shape) or not Box.whole(array.shape).contains(box):
        raise LayoutError(f"the box is not inside of {array.shape}", where=name, value=box)
    return box


class Checkpoint(Closing):
    """A committed step: what is in it, and any box of any array of it.

    Usable from any thread; close it, or use it in a `with` block, to free file handles.
    """

    def __init__(self, store: Store, prefix: str, manifest: Manifest) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self._sources = Sources(store, prefix, manifest)
        self._places = {array.name: index for index, array in enumerate(manifest.arrays)}
        for alias in manifest.aliases:
            self._places[alias.name] = self._places[alias.alias_of]

    @property
    def location(self) -> str:
        """Where the step is, for messages."""
        return described(self.store, self.prefix)

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
        """The strategy that wrote it."""
        return self.manifest.save.strategy

    @property
    def details(self) -> Mapping[str, Any]:
        """What its writer said about it besides the strategy, such as the precision."""
        return MappingProxyType(self.manifest.save.details)

    @cached_property
    def arrays(self) -> Mapping[str, Array]:
        """All arrays by name, tied ones under each of their names."""
        return MappingProxyType({name: self[name] for name in sorted(self._places)})

    @property
    def objects(self) -> Mapping[str, Any]:
        """What is no tensor: one value, a list by rank (`PerRank`), or the total (`Sum`)."""
        return MappingProxyType({item.name: whole(item) for item in self.manifest.objects})

    @property
    def zarr(self) -> zarr.Group:
        """The step as a read-only Zarr group, every chunk checked as it is read."""
        # Here, because the view stands on this module.
        from ckptkit.checkpoint.zarr_view import open_group  # noqa: PLC0415

        return open_group(self)

    def __getitem__(self, name: str) -> Array:
        return Array(self, name, self.manifest.arrays[self._place(name)], self.strategy)

    def __contains__(self, name: object) -> bool:
        return name in self._places

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
        box = _inside(array.info, name, box or Box.whole(array.shape))
        if out is None:
            out = np.empty(box.shape, dtype=array.dtype.numpy)
        self.read_many([(name, box, out)], verify=verify)
        return out

    def read_many(
        self,
        wanted: Sequence[tuple[str, Box, npt.NDArray[Any]]],
        *,
        verify: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Fill many arrays at once: (name, box, memory of the box's shape and the array's
        dtype).

        With `verify`, the default, chunks are read whole, and every byte that reaches the caller
        was compared with its checksum; without, only the bytes needed are read, unchecked. What
        is in the memory after an error is undefined. `pace` says how much is asked of the store at
        a time: without, what it likes best.
        """
        requests = [self._request(name, box, target) for name, box, target in wanted]
        reader = Reader(self.manifest, self._sources, pace)
        reader.read(requests, verify=verify, threads=threads, progress=progress)

    def __reduce__(self) -> tuple[Any, ...]:
        # Opened again where it arrives: handles do not travel.
        return (_reopened, (self.store.address, self.prefix, self.save_id))

    def close(self) -> None:
        """Close the packs; reading opens them again."""
        self._sources.close()

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise NotFoundError(
                "no such array",
                where=self.location,
                value=name,
                hint=f"`ckpt show {self.location}` lists the arrays",
            )
        return self._places[name]

    def _request(self, name: str, box: Box, target: npt.NDArray[Any]) -> Request:
        place = self._place(name)
        array = self.manifest.arrays[place]
        _inside(array, name, box)
        if target.shape != box.shape or target.dtype not in (array.dtype.numpy, array.dtype.bits):
            raise LayoutError(
                f"the memory does not fit {box.shape} of {array.dtype.name}",
                where=name,
                value=(target.shape, str(target.dtype)),
            )
        if not target.flags.writeable:
            raise LayoutError("the memory is read-only", where=name)
        return Request(place, box, target.view(array.dtype.bits))
