"""A step as the files of another format: the files are laid out first, then filled from the step,
some bytes of each at a time, within a budget of memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ckptkit.checkpoint.export.files import (
    FinishedFiles,
    place_to_write,
    removed_on_failure,
    write_file,
)
from ckptkit.checkpoint.export.formats import (
    EMBEDDINGS,
    Checked,
    Keys,
    NewFiles,
    NewTensor,
    dcp_folder,
    hugging_face,
    plain_name,
    safetensors_file,
    torch_file,
)
from ckptkit.checkpoint.places import Place, check_room, refuse_inside_step, store_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import STREAM_MEMORY
from ckptkit.checkpoint.reshard.copy import ChunkCopier, check_huge_chunks
from ckptkit.checkpoint.reshard.selection import Selection, check_numbers, choose
from ckptkit.checkpoint.reshard.target import Budget, resident_bytes
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress
from ckptkit.errors import AlreadyExistsError, NotFoundError, UsageError
from ckptkit.foreign.folder import CONFIG, parsed
from ckptkit.format.names import MODEL, OPTIMIZER, inner_name, split
from ckptkit.format.objects import ObjectInfo
from ckptkit.model import Box
from ckptkit.model.document import counted, parse_size, size_text
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
    refuse_inside_step(place)
    config = None if beside is None else store_at(beside, own)
    said = _config_in(config)
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
                for copied in _copied_beside(config):
                    keys.append(copied)
                    store.put(copied, config.read_whole(copied, _MOST_BESIDE))
            wholes = ((array, Box.whole(array.info.shape)) for array in arrays)
            check_huge_chunks(wholes, checkpoint, budget)
            copier = ChunkCopier(checkpoint, budget)
            for file in missing:
                # A folder is ours, and a file that fails may be there all the same. A single file
                # may be somebody else's until it is written.
                if finished.note:
                    keys.append(file.key)
                finished.add(file.key, *write_file(file, arrays, copier, store, progress))
                if not finished.note:
                    keys.append(file.key)
            checkpoint.check_unchanged()
            _close(store, new, keys, exclusive=not finished.is_resumed)
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


def _config_in(folder: Store | None) -> Mapping[str, Any]:
    """What the config of a model says; nothing where there is none."""
    if folder is None or CONFIG not in folder.children(""):
        return {}
    said = parsed(folder.read_whole(CONFIG, _MOST_BESIDE), f"{folder.location}/{CONFIG}")
    return said if isinstance(said, dict) else {}


def _close(store: Store, new: NewFiles, keys: list[str], *, exclusive: bool) -> None:
    """Write what makes a model of the files, and note it among the keys of this export. Where there
    are no folders two exports may end in one place: the first one counts.
    """
    for key, data in new.closing:
        keys.append(key)
        try:
            store.put(key, data, exclusive=exclusive)
        except AlreadyExistsError:
            keys.remove(key)  # it is somebody else's
            raise


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
            "the step does not say which parameters an optimizer has",
            where=checkpoint.location,
            hint="a training that saves its optimizer says so; else export the model alone",
        )
    has_state = any(array.role == "optimizer" for array in manifest.arrays)
    state = (f"{OPTIMIZER}/*",) if selection.optimizer and has_state else ()
    include = selection.include or (f"{MODEL}/*", *state)
    choice = choose(manifest, replace(selection, include=include), sizes)
    check_numbers(checkpoint, choice)
    others: dict[str, list[str]] = {}
    for alias in choice.aliases:
        others.setdefault(alias.alias_of, []).append(alias.name)
    pairs = []
    for chosen in choice.arrays:
        info = chosen.info
        # The first name of a tied tensor may be of a group that stays behind.
        names = [chosen.name, *others.get(chosen.name, ())]
        inner = [inner_name(name, "param") for name in names if name.startswith(groups[0])]
        if inner:
            plain = plain_name(inner)
            tied = tuple(name for name in inner if name != plain)
            pairs.append((chosen, NewTensor(plain, info.shape, info.dtype, tied)))
        for state in (name for name in names if name.startswith(groups[1:])):
            _, *above, name = split(state)
            if len(above) != 1 or "/" in name:
                raise UsageError("torch has no name for this state of the optimizer", where=state)
            place = (OPTIMIZER, "state", *above)
            pairs.append((chosen, NewTensor(name, info.shape, info.dtype, above=place)))
    if not any(tensor.above == (MODEL,) for _, tensor in pairs):
        raise UsageError("nothing is left of the model", where=checkpoint.location)
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
    # Not its children: a folder may be called `tokenizer`.
    names = [it.key for it in source.list("", deep=False)]
    if CONFIG not in names:
        raise NotFoundError(
            f"no {CONFIG} is there",
            where=str(source.location),
            hint="pass the folder of the model that the training began with",
        )
    for name in names:
        is_beside = any(fnmatchcase(name, pattern) for pattern in _BESIDE)
        if is_beside and not any(fnmatchcase(name, pattern) for pattern in _NOT_BESIDE):
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
