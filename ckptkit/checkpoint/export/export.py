"""A step as the files of another format: the files are laid out first, then filled from the step,
some bytes of each at a time, within a budget of memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.check.unpack import appearing
from ckptkit.checkpoint.places import Place, store_at, stored_size
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY, bands
from ckptkit.checkpoint.reshard.copy import (
    Budget,
    ChunkCopier,
    check_huge_chunks,
    resident_bytes,
)
from ckptkit.checkpoint.reshard.selection import Selection, choose
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress, copy_threads, share_out
from ckptkit.errors import AlreadyExistsError, NoSpaceError, NotFoundError, PeerError, UsageError
from ckptkit.foreign.output.dcp import dcp_folder
from ckptkit.foreign.output.files import (
    EMBEDDINGS,
    Checked,
    NewFile,
    NewTensor,
    hugging_face,
    plain_name,
    safetensors_file,
)
from ckptkit.foreign.output.opcodes import Path as Keys
from ckptkit.foreign.output.torch_save import torch_file
from ckptkit.foreign.readers.safetensors import CONFIG, parsed
from ckptkit.format.names import MODEL, OPTIMIZER, inner_name, split
from ckptkit.format.objects import ObjectInfo
from ckptkit.model import Box
from ckptkit.model.document import parse_size
from ckptkit.storage import Options, Store, open_store

FORMATS = ("hf", "safetensors", "torch", "dcp")
_FOLDERS: Mapping[str, Any] = {"hf": hugging_face, "dcp": dcp_folder}
_WITH_OPTIMIZER = ("dcp", "torch")

# As much of a file is filled and written at a time.
_SEGMENT = 8 << 20
# What is taken along of the folder of a model: all small files that are no weights.
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "tokenizer*", "LICENSE*")
_NOT_BESIDE = ("*.index.json", "*.safetensors", "*.bin", "trainer_state.json")
_MOST_BESIDE = 256 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    location: str
    files: tuple[str, ...]
    """In the order in which they were written."""
    arrays: int
    nbytes: int
    """Of their elements."""
    left_out: tuple[str, ...]
    """Names in the step that the files do not have."""
    tied: tuple[tuple[str, str], ...]
    """Second names of tensors that are written once, and the first ones."""


def export(  # noqa: PLR0913 — one keyword for each decision, all but one with defaults
    src: Place,
    out: str | os.PathLike[str],
    *,
    to_format: str,
    max_file_size: int | str = "5GB",
    beside: Place | None = None,
    optimizer: bool = False,
    selection: Selection | None = None,
    sizes: Mapping[str, Any] | None = None,
    memory: int | str = STREAM_MEMORY,
    workers: int | None = None,
    progress: Progress | None = None,
    storage_options: Options | None = None,
    source_options: Options | None = None,
) -> Exported:
    """Write the model of a step (of a run: its newest one) for other programs: as `hf`, the folder
    of a Hugging Face model, as `dcp`, that of a torch.distributed.checkpoint, or as one file,
    `safetensors` or `torch` (of torch.save).

    `out` must not be there; it appears whole or not at all. Never more than `memory` is in use,
    whatever the size of the model. Each file of a folder has at most `max_file_size` bytes of
    tensors. `beside` is a folder with the model's `config.json` and its tokenizer, which are
    copied. `selection` leaves arrays out, renames and converts them; what is no part of the model
    stays behind, but with `optimizer`, for `dcp` and `torch`, the state of the optimizer, as
    `get_optimizer_state_dict` of torch has it. `storage_options` reach all places, unless
    `source_options` are those of `src` and `beside`.
    """
    if to_format not in FORMATS:
        raise UsageError("no such format to write", value=to_format, hint=f"{', '.join(FORMATS)}")
    if beside is not None and to_format != "hf":
        raise UsageError("only a Hugging Face folder has files beside the model", value=to_format)
    if optimizer and to_format not in _WITH_OPTIMIZER:
        raise UsageError(
            "this format has no place for the state of an optimizer",
            value=to_format,
            hint=f"{' and '.join(_WITH_OPTIMIZER)} have",
        )
    own = storage_options if source_options is None else source_options
    place, is_file = open_store(out, storage_options or {}), to_format not in _FOLDERS
    config = None if beside is None else store_at(beside, own)
    said = _config_in(config)
    before = resident_bytes()
    with open_checkpoint(src, storage_options=own) as checkpoint:
        selection = replace(selection or Selection(), optimizer=optimizer)
        arrays, tensors, objects, left_out = _chosen(
            checkpoint, selection, {**said, **(sizes or {})}
        )
        more = {"objects": objects} if optimizer else {}
        if to_format == "hf":
            # Without a word of it that is another thing for each kind of model, and so is what the
            # config of a part says.
            ties = said.get("tie_word_embeddings") is True
            arrays, tensors = _untied(arrays, tensors, EMBEDDINGS if ties else ())
        if not is_file:
            new = _FOLDERS[to_format](tensors, parse_size(max_file_size), **more)
        else:
            layout: Any = torch_file if to_format == "torch" else safetensors_file
            new = layout(place.location.name, tensors, **more)
        budget = Budget.of(
            parse_size(memory),
            max(4, copy_threads()) if workers is None else workers,
            checkpoint.store,
            place,
            largest=0,
            pack_bytes=sum(tensor.nbytes for tensor in tensors) // len(new.files),
            fixed=max(0, resident_bytes() - before),
        )
        with _appearing(place, is_file=is_file) as store, _removing(store) as written:
            _check_room(store, tensors, place)
            if config is not None:
                written.extend(_copied(config, store))
            check_huge_chunks(arrays, checkpoint, budget)
            copier = ChunkCopier(checkpoint, budget, None, None)
            for file in new.files:
                _write(file, arrays, copier, store, progress)
                written.append(file.key)
            for key, data in new.closing:
                # Where there are no folders, it makes a model of the files: the first one counts.
                store.put(key, data, exclusive=True)
                written.append(key)
        return Exported(
            str(place.location),
            tuple(written),
            len(tensors),
            sum(tensor.nbytes for tensor in tensors),
            tuple(left_out),
            tuple((name, tensor.name) for tensor in tensors for name in tensor.tied),
        )


def _chosen(
    checkpoint: Checkpoint, selection: Selection, sizes: Mapping[str, Any]
) -> tuple[list[Chosen], list[NewTensor], dict[Keys, Any], list[str]]:
    """The arrays that go over, what each will be; the objects, by their places in nested
    dictionaries; and what is left out.
    """
    groups = (f"{MODEL}/", f"{OPTIMIZER}/")[: 1 + selection.optimizer]
    include = selection.include or (f"{MODEL}/*", *_state_of(checkpoint, selection))
    choice = choose(checkpoint.manifest, replace(selection, include=include), sizes)
    arrays = [chosen for chosen in choice.arrays if chosen.name.startswith(groups)]
    if not any(chosen.name.startswith(f"{MODEL}/") for chosen in arrays):
        raise UsageError("nothing is left of the model", where=checkpoint.location)
    others: dict[str, list[str]] = {}
    for alias in choice.aliases:
        others.setdefault(alias.alias_of, []).append(alias.name)
    tensors = []
    for chosen in arrays:
        names = [chosen.name, *others.get(chosen.name, ())]
        info = chosen.info
        if chosen.name.startswith(f"{OPTIMIZER}/"):
            _, *above, name = split(chosen.name)
            if len(above) != 1 or "/" in name:
                raise UsageError(
                    "torch has no name for this state of the optimizer", where=chosen.name
                )
            place = (OPTIMIZER, "state", *above)
            tensors.append(NewTensor(name, info.shape, info.dtype, above=place))
            continue
        inner = [inner_name(name, "param") for name in names]
        plain = plain_name(inner)
        tied = tuple(name for name in inner if name != plain)
        tensors.append(NewTensor(plain, info.shape, info.dtype, tied))
    into = {name: new for name, new in choice.names.items() if new.startswith(groups)}
    left_out = [name for name in checkpoint.arrays if name not in into]
    return arrays, tensors, _optimizer_objects(choice.objects), left_out


def _state_of(checkpoint: Checkpoint, selection: Selection) -> tuple[str, ...]:
    """A pattern for the state of the optimizer, where it is asked for."""
    if not selection.optimizer:
        return ()
    is_there = any(item.name == OPTIMIZER for item in checkpoint.manifest.objects)
    has_state = any(array.role == "optimizer" for array in checkpoint.manifest.arrays)
    if not is_there:
        raise UsageError(
            "the step does not say which parameters an optimizer has", where=checkpoint.location
        )
    return (f"{OPTIMIZER}/*",) if has_state else ()


def _optimizer_objects(objects: Sequence[ObjectInfo]) -> dict[Keys, Any]:
    """What optimizers have besides tensors, as `get_optimizer_state_dict` has it: all of them are
    one there.
    """
    documents: Any = next((item.value for item in objects if item.name == OPTIMIZER), [])
    found: dict[Keys, Any] = {}
    place = 0
    for document in documents if isinstance(documents, list) else ():
        for name, values in document.get("values", {}).items():
            found |= {(OPTIMIZER, "state", name, key): value for key, value in values.items()}
        for group in document.get("groups", ()):
            said = {**group.get("options", {}), "params": group.get("params", [])}
            found |= {(OPTIMIZER, "param_groups", place, key): v for key, v in said.items()}
            place += 1
    return found


def _config_in(beside: Store | None) -> Mapping[str, Any]:
    """What the model's config says, if it is there."""
    if beside is None or CONFIG not in beside.children(""):
        return {}
    said = parsed(beside.read_whole(CONFIG, _MOST_BESIDE), f"{beside.location}/{CONFIG}")
    return said if isinstance(said, dict) else {}


def _untied(
    arrays: Sequence[Chosen], tensors: Sequence[NewTensor], kept: Sequence[str]
) -> tuple[list[Chosen], list[NewTensor]]:
    """All under each of their names but those with one of `kept` in the first: what is not there
    under its own name transformers would make up, and ties those that are alike itself.
    """
    pairs: list[tuple[Chosen, NewTensor]] = []
    for chosen, tensor in zip(arrays, tensors, strict=True):
        if any(part in tensor.name for part in kept):
            pairs.append((chosen, tensor))
        else:
            names = (tensor.name, *tensor.tied)
            pairs += [(chosen, replace(tensor, name=name, tied=())) for name in names]
    return [chosen for chosen, _ in pairs], [tensor for _, tensor in pairs]


@contextmanager
def _appearing(place: Store, *, is_file: bool) -> Iterator[Store]:
    """Where to write the files; AlreadyExistsError where something is at the place."""
    location = place.location
    if location.scheme == "file":
        with appearing(Path(location.path), location.name if is_file else "") as folder:
            yield open_store(folder)
        return
    store = place
    if is_file:
        store = open_store(replace(place.address, location=location.parent))
    if store.children("") if not is_file else stored_size(store, location.name) is not None:
        raise AlreadyExistsError(
            "there is something already",
            where=str(location),
            hint="name a place that is empty, or delete what an export left that was killed",
        )
    yield store


@contextmanager
def _removing(store: Store) -> Iterator[list[str]]:
    """Keys of what is written, which goes again where the block fails."""
    keys: list[str] = []
    try:
        yield keys
    except BaseException:
        store.delete(keys)
        raise


def _check_room(store: Store, tensors: Sequence[NewTensor], place: Store) -> None:
    room, needed = store.room(), sum(tensor.nbytes for tensor in tensors)
    if room is not None and needed > room:
        raise NoSpaceError(
            f"{needed} bytes are to be written, {room} are free",
            where=str(place.location),
            hint="nothing was written; `ckpt prune` frees what runs do not need",
        )


def _copied(source: Store, target: Store) -> Iterator[str]:
    """Copy what says how a model is built and how its texts are cut; the name of each file, once it
    is there.
    """
    names = source.children("")
    if CONFIG not in names:
        raise NotFoundError(
            f"no {CONFIG} is there",
            where=str(source.location),
            hint="pass the folder of the model that the training began with",
        )

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    for name in names:
        if fits(name, _BESIDE) and not fits(name, _NOT_BESIDE):
            target.put(name, source.read_whole(name, _MOST_BESIDE))
            yield name


_Piece: TypeAlias = "bytes | Checked | FileBand"


@dataclass(frozen=True, slots=True)
class FileBand:
    """Elements of a tensor that come next in a file."""

    tensor: int
    start: int
    """How many bytes of the tensor come before them."""
    box: Box
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileSegment:
    """Neighbours in a file that are filled and written together, and where each begins."""

    nbytes: int
    pieces: tuple[tuple[int, _Piece], ...]


class _Checksums:
    """The checksums of tensors of a file, of which threads fill some bytes at a time.

    A thread waits only for what comes before its own segment. That was begun before, by threads
    that say what they have filled before they wait themselves.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._left = list(sizes)
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
        self._changed = threading.Condition()
        self._stopped = False

    def add(self, band: FileBand, crc: int) -> None:
        """Some bytes of a tensor are there."""
        with self._changed:
            self._parts[band.tensor].append((band.start, band.nbytes, crc))
            self._left[band.tensor] -= band.nbytes
            if not self._left[band.tensor]:
                self._changed.notify_all()

    def of(self, tensor: int) -> int:
        """The checksum of a tensor, once all of its bytes are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._left[tensor])
            if self._left[tensor]:
                raise PeerError("another thread could not fill its part of the file")
            parts = sorted(self._parts[tensor])
        whole = 0
        for _, nbytes, crc in parts:
            whole = int(isal_zlib.crc32_combine(whole, crc, nbytes))
        return whole

    def stop(self) -> None:
        """Nobody has to wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _write(
    file: NewFile,
    arrays: Sequence[Chosen],
    copier: ChunkCopier,
    store: Store,
    progress: Progress | None,
) -> None:
    segments = list(_segments(file, arrays, copier.budget.batch_bytes))
    extents = [segment.nbytes for segment in segments]
    checksums = None
    if any(isinstance(piece, Checked) for piece in file.pieces):
        checksums = _Checksums([array.info.nbytes for array in arrays])
    sink = store.create(file.key, extents, memory=copier.budget.sink_bytes)

    def write(number: int) -> None:
        try:
            with sink.filling(number) as memory:
                _fill(segments[number], memory, arrays, copier, checksums)
        except BaseException:
            if checksums is not None:
                checksums.stop()
            raise
        if progress:
            progress(extents[number])

    try:
        share_out(range(len(segments)), write, copier.budget.workers)
        sink.finish()
    except BaseException:
        sink.abort()
        raise


def _segments(file: NewFile, arrays: Sequence[Chosen], most: int) -> Iterator[FileSegment]:
    """The bytes of a file in order, small tensors together, large ones a band at a time."""
    held: list[tuple[int, _Piece]] = []
    end = 0
    for piece, nbytes in _pieces(file, arrays, most):
        if held and end + nbytes > _SEGMENT:
            yield FileSegment(end, tuple(held))
            held, end = [], 0
        held.append((end, piece))
        end += nbytes
    yield FileSegment(end, tuple(held))


def _pieces(file: NewFile, arrays: Sequence[Chosen], most: int) -> Iterator[tuple[_Piece, int]]:
    for piece in file.pieces:
        if isinstance(piece, Checked):
            yield piece, piece.nbytes
        elif isinstance(piece, bytes):
            for begin in range(0, len(piece), _SEGMENT):
                data = piece[begin : begin + _SEGMENT]
                yield data, len(data)
        else:
            chosen, start = arrays[piece], 0
            itemsize = chosen.info.dtype.itemsize
            widest = max(itemsize, chosen.source.dtype.itemsize)
            for box in bands([chosen.source.grid], _SEGMENT // widest, most // widest):
                band = FileBand(piece, start, box, box.size * itemsize)
                yield band, band.nbytes
                start += band.nbytes


def _fill(
    segment: FileSegment,
    memory: memoryview,
    arrays: Sequence[Chosen],
    copier: ChunkCopier,
    checksums: _Checksums | None,
) -> None:
    boxes = []
    filled: list[tuple[FileBand, memoryview]] = []
    for begin, piece in segment.pieces:
        if isinstance(piece, bytes):
            memory[begin : begin + len(piece)] = piece
        elif isinstance(piece, FileBand):
            chosen, data = arrays[piece.tensor], memory[begin : begin + piece.nbytes]
            values = np.frombuffer(data, chosen.info.dtype.bits).reshape(piece.box.shape)
            boxes.append((chosen, piece.box, values))
            filled.append((piece, data))
    copier.fill_boxes(boxes)
    if checksums is None:
        return
    for band, data in filled:
        checksums.add(band, int(isal_zlib.crc32(data)))
    for begin, piece in segment.pieces:
        if isinstance(piece, Checked):
            memory[begin : begin + piece.nbytes] = piece.make([*map(checksums.of, piece.tensors)])
