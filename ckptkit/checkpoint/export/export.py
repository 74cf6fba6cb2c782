"""A step as the files of another format: the files are laid out first, then filled from the step,
some bytes of each at a time, within a budget of memory.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.export.files import FinishedFiles, place_to_write, removed_on_failure
from ckptkit.checkpoint.export.formats import (
    EMBEDDINGS,
    Checked,
    Keys,
    NewFile,
    NewFiles,
    NewTensor,
    dcp_folder,
    hugging_face,
    plain_name,
    safetensors_file,
    torch_file,
)
from ckptkit.checkpoint.places import Place, check_room, store_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY, bands
from ckptkit.checkpoint.reshard.copy import ChunkCopier, check_huge_chunks
from ckptkit.checkpoint.reshard.selection import Selection, check_numbers, choose
from ckptkit.checkpoint.reshard.target import Budget, resident_bytes
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.errors import (
    AlreadyExistsError,
    NotFoundError,
    PeerError,
    UsageError,
)
from ckptkit.foreign.folder import CONFIG, parsed
from ckptkit.format.names import MODEL, OPTIMIZER, inner_name, split
from ckptkit.format.objects import ObjectInfo
from ckptkit.model import Box
from ckptkit.model.document import counted, parse_size, size_text
from ckptkit.plan.read import batches
from ckptkit.storage import Options, Store, open_store
from ckptkit.version import __version__

FORMATS = ("hf", "safetensors", "torch", "dcp")
# How the files are laid out: of a folder by the most bytes of each, one file by its name.
_FOLDERS: Mapping[str, Any] = {"hf": hugging_face, "dcp": dcp_folder}
_FILES: Mapping[str, Any] = {"safetensors": safetensors_file, "torch": torch_file}
_WITH_OPTIMIZER = ("dcp", "torch")

# What is taken along of the folder of a model: all small files that are no weights.
_BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "tokenizer*", "LICENSE*")
_NOT_BESIDE = ("*.index.json", "*.safetensors", "*.bin", "trainer_state.json")
_MOST_BESIDE = 256 << 20

# As much of a file is filled and written at a time.
_SEGMENT = 8 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    location: str
    files: tuple[str, ...]
    """In the order in which they were written."""
    arrays: int
    nbytes: int
    """The bytes of their elements."""
    left_out: tuple[str, ...]
    """Names in the step that the files do not have."""
    finished: tuple[str, ...]
    """The files that an earlier run had completed."""
    tied: tuple[tuple[str, str], ...]
    """Second names of tensors that are written once, and the first ones."""

    def __repr__(self) -> str:
        what = f"{counted(self.arrays, 'array')}, {size_text(self.nbytes)}"
        return f"Exported({self.location!r}, {what} in {counted(len(self.files), 'file')})"


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

    `out` must not be there; it appears whole or not at all. After a kill or an interruption the
    same call goes on where it was: of a folder, files that were complete are kept. Never more than
    `memory` is in use, whatever the size of the model. Each file of a folder has at most
    `max_file_size` bytes of tensors. `beside` is a folder with the model's `config.json` and its
    tokenizer, which are copied. `selection` leaves arrays out, renames and converts them; what is
    no part of the model stays behind, but with `optimizer`, for `dcp` and `torch`, the state of the
    optimizer, as `get_optimizer_state_dict` of torch has it. `storage_options` reach all places,
    unless `source_options` are those of `src` and `beside`.
    """
    _check_format(to_format, beside=beside, optimizer=optimizer)
    own = storage_options if source_options is None else source_options
    place, is_file = open_store(out, storage_options or {}), to_format not in _FOLDERS
    config = None if beside is None else store_at(beside, own)
    said: Any = {}
    if config is not None and CONFIG in config.children(""):
        said = parsed(config.read_whole(CONFIG, _MOST_BESIDE), f"{config.location}/{CONFIG}")
        said = said if isinstance(said, dict) else {}
    before = resident_bytes()
    with open_checkpoint(src, storage_options=own) as checkpoint:
        selection = replace(selection or Selection(), optimizer=optimizer)
        pairs, objects, left_out = _tensors_of(checkpoint, selection, {**said, **(sizes or {})})
        if to_format == "hf":
            # Where the config does not say it, each kind of model has a default of its own. What
            # the config of a part of the model says does not count either.
            ties = said.get("tie_word_embeddings") is True
            pairs = _untied(pairs, EMBEDDINGS if ties else ())
        arrays, tensors = [chosen for chosen, _ in pairs], [tensor for _, tensor in pairs]
        more = {"objects": objects} if optimizer else {}
        new: NewFiles
        if is_file:
            new = _FILES[to_format](place.location.name, tensors, **more)
        else:
            new = _FOLDERS[to_format](tensors, parse_size(max_file_size), **more)
        budget = Budget.of(
            parse_size(memory),
            workers,
            checkpoint.store,
            place,
            largest=0,
            pack_bytes=sum(tensor.nbytes for tensor in tensors) // len(new.files),
            fixed=max(0, resident_bytes() - before),
            decoded=checkpoint.packs.kept_bytes,
        )
        name = export_name(checkpoint.save_id, arrays, new)
        with (
            place_to_write(place, name, is_file=is_file) as store,
            removed_on_failure(store) as keys,
        ):
            finished = FinishedFiles(store, "" if is_file else name)
            resumed = finished.begin([file.key for file in new.files], progress)
            keys.extend([finished.note, *resumed] if finished.note else [])
            missing = [file for file in new.files if file.key not in resumed]
            numbers = (n for file in missing for n in file.pieces if isinstance(n, int))
            check_room(store, sum(tensors[n].nbytes for n in numbers), place.location)
            if config is not None:
                for name in _copied_beside(config):
                    keys.append(name)
                    store.put(name, config.read_whole(name, _MOST_BESIDE))
            check_huge_chunks(arrays, checkpoint, budget)
            copier = ChunkCopier(checkpoint, budget)
            for file in missing:
                # Before it is written: what fails may be there all the same.
                keys.extend([file.key] if finished.note else [])
                finished.add(file.key, *write_file(file, arrays, copier, store, progress))
                keys.extend([] if finished.note else [file.key])
            checkpoint.check_unchanged()
            for key, data in new.closing:
                keys.append(key)
                try:
                    # Where there are no folders, it makes a model of the files: the first one
                    # counts.
                    store.put(key, data, exclusive=not finished.is_resumed)
                except AlreadyExistsError:
                    keys.remove(key)  # it is somebody else's
                    raise
            finished.forget()
        return Exported(
            str(place.location),
            tuple(key for key in keys if key != finished.note),
            len(tensors),
            sum(tensor.nbytes for tensor in tensors),
            tuple(left_out),
            tuple(resumed),
            tuple((name, tensor.name) for tensor in tensors for name in tensor.tied),
        )


def _check_format(to_format: str, *, beside: Place | None, optimizer: bool) -> None:
    """Refuse what a format has no place for."""
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


def _tensors_of(
    checkpoint: Checkpoint, selection: Selection, sizes: Mapping[str, Any]
) -> tuple[list[tuple[Chosen, NewTensor]], dict[Keys, Any], list[str]]:
    """The arrays that go over, with what each will be; the objects, by their places in nested
    dictionaries; and what is left out.
    """
    groups = (f"{MODEL}/", f"{OPTIMIZER}/")[: 1 + selection.optimizer]
    manifest = checkpoint.manifest
    if selection.optimizer and not any(item.name == OPTIMIZER for item in manifest.objects):
        raise UsageError(
            "the step does not say which parameters an optimizer has", where=checkpoint.location
        )
    has_state = any(array.role == "optimizer" for array in manifest.arrays)
    state = (f"{OPTIMIZER}/*",) if selection.optimizer and has_state else ()
    include = selection.include or (f"{MODEL}/*", *state)
    choice = choose(manifest, replace(selection, include=include), sizes)
    check_numbers(checkpoint, choice)
    arrays = [chosen for chosen in choice.arrays if chosen.name.startswith(groups)]
    if not any(chosen.name.startswith(f"{MODEL}/") for chosen in arrays):
        raise UsageError("nothing is left of the model", where=checkpoint.location)
    others: dict[str, list[str]] = {}
    for alias in choice.aliases:
        others.setdefault(alias.alias_of, []).append(alias.name)
    pairs = []
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
            pairs.append((chosen, NewTensor(name, info.shape, info.dtype, above=place)))
            continue
        inner = [inner_name(name, "param") for name in names]
        plain = plain_name(inner)
        tied = tuple(name for name in inner if name != plain)
        pairs.append((chosen, NewTensor(plain, info.shape, info.dtype, tied)))
    into = {name: new for name, new in choice.names.items() if new.startswith(groups)}
    left_out = [name for name in checkpoint.arrays if name not in into]
    return pairs, _optimizer_objects(choice.objects), left_out


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


def _untied(
    pairs: Sequence[tuple[Chosen, NewTensor]], kept: Sequence[str]
) -> list[tuple[Chosen, NewTensor]]:
    """All under each of their names but those with one of `kept` in the first: what is not there
    under its own name transformers would make up, and ties those that are alike itself.
    """
    found: list[tuple[Chosen, NewTensor]] = []
    for chosen, tensor in pairs:
        if any(part in tensor.name for part in kept):
            found.append((chosen, tensor))
        else:
            names = (tensor.name, *tensor.tied)
            found += [(chosen, replace(tensor, name=name, tied=())) for name in names]
    return found


def _copied_beside(source: Store) -> Iterator[str]:
    """The config, the tokenizer and other small files that are copied."""
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
            yield name


def export_name(save_id: str, arrays: Sequence[Chosen], new: NewFiles) -> str:
    """The name of an export: the same for all that write the same bytes."""
    digest = hashlib.sha256(f"{__version__} {save_id}".encode())
    for chosen in arrays:
        rows = [(rows.number, rows.start, rows.count, rows.at) for rows in chosen.rows]
        digest.update(repr((chosen.number, chosen.info.dtype.name, rows)).encode())
    for file in new.files:
        pieces = [hashlib.sha256(p).hexdigest() if type(p) is bytes else p for p in file.pieces]
        known = [piece.tensors if isinstance(piece, Checked) else piece for piece in pieces]
        digest.update(repr((file.key, known)).encode())
    for key, data in new.closing:
        digest.update(repr((key, data)).encode())
    return digest.hexdigest()[:16]


# Each file is filled some bytes at a time, by a few threads.


@dataclass(frozen=True, slots=True)
class FileBand:
    """Elements of a tensor that come next in a file."""

    tensor: int
    start: int
    """How many bytes of the tensor come before them."""
    box: Box
    nbytes: int


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
        return combined([crc for _, _, crc in parts], [nbytes for _, nbytes, _ in parts])

    def stop(self) -> None:
        """Nobody has to wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def write_file(
    file: NewFile,
    arrays: Sequence[Chosen],
    copier: ChunkCopier,
    store: Store,
    progress: Progress | None,
) -> tuple[int, int]:
    """Write a file; its size, and its checksum."""
    contents = list(_contents(file, arrays, copier.budget.batch_bytes))
    # Small tensors are written together, large ones a band at a time.
    runs = batches([nbytes for _, nbytes in contents], _SEGMENT) or [(0, 0)]
    sizes = [sum(nbytes for _, nbytes in contents[first:last]) for first, last in runs]
    crcs = [0] * len(runs)
    checksums = None
    if any(isinstance(piece, Checked) for piece in file.pieces):
        checksums = _Checksums([array.info.nbytes for array in arrays])
    sink = store.create(file.key, sizes, memory=copier.budget.sink_bytes)

    def fill(number: int, memory: memoryview) -> None:
        bands: list[tuple[FileBand, memoryview]] = []
        boxes = []
        checked: list[tuple[Checked, memoryview]] = []
        end = 0
        for piece, nbytes in contents[slice(*runs[number])]:
            data = memory[end : end + nbytes]
            end += nbytes
            if isinstance(piece, bytes):
                data[:] = piece
            elif isinstance(piece, Checked):
                checked.append((piece, data))
            else:
                chosen = arrays[piece.tensor]
                values = np.frombuffer(data, chosen.info.dtype.bits).reshape(piece.box.shape)
                boxes.append((chosen, piece.box, values))
                bands.append((piece, data))
        copier.fill_boxes(boxes)
        if checksums is not None:
            # All of this segment before any wait: others may wait for it (see `_Checksums`).
            for band, data in bands:
                checksums.add(band, int(isal_zlib.crc32(data)))
            for piece, data in checked:
                data[:] = piece.make([*map(checksums.of, piece.tensors)])
        crcs[number] = int(isal_zlib.crc32(memory))

    def write(number: int) -> None:
        try:
            with sink.filling(number) as memory:
                fill(number, memory)
        except BaseException:
            if checksums is not None:
                checksums.stop()
            raise
        if progress:
            progress(sizes[number])

    try:
        share_out(range(len(runs)), write, copier.budget.workers)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return sum(sizes), combined(crcs, sizes)


def combined(crcs: Sequence[int], sizes: Sequence[int]) -> int:
    """The checksum of bytes that have these, one after the other."""
    whole = 0
    for crc, nbytes in zip(crcs, sizes, strict=True):
        whole = int(isal_zlib.crc32_combine(whole, crc, nbytes))
    return whole


def _contents(
    file: NewFile, arrays: Sequence[Chosen], most: int
) -> Iterator[tuple[bytes | Checked | FileBand, int]]:
    """What comes next in a file, and how many bytes that is."""
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
