"""Whose checkpoint is it? The table of formats, and who reads which of them: a module for each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptkit.errors import CkptkitError, FormatError
from ckptkit.foreign.folder import APART, Folder
from ckptkit.model.document import located
from ckptkit.storage import Store, open_store

if TYPE_CHECKING:
    from ckptkit.foreign.contents import ForeignManifest

_NUMBERED = re.compile(r"(?:.*[^0-9])?(?:step|checkpoint|iter|epoch)[_=-]?([0-9]{1,18})(?:\.ckpt)?")
# As Orbax calls its steps; of others such folders are parts.
_ONLY_NUMBER = re.compile("[0-9]{1,18}", re.ASCII)
# Folders that are part of a checkpoint are entered where they are links, too; others may be large.
_LINKED = re.compile(
    rf"{APART.pattern}|global_step\d+(_universal)?|\d+|replicated|sharded|batched|d|ocdbt\.process_\d+"
)
_MOST_FILES = 1 << 20
_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class Format:
    """What a folder or a file is, and who reads it."""

    what: str
    """In words: `a DCP checkpoint`."""
    pattern: str | bytes
    """What a name in the folder matches; as bytes, what the file begins with."""
    reader: str = ""
    """Who reads it; empty for what nobody reads yet."""
    and_: str = ""
    """What another name matches, which has to be in the folder too."""

    def fits(self, looks: Sequence[str] | bytes) -> bool:
        """Whether a folder with these names, or a file that begins so, is one."""
        if isinstance(looks, bytes):
            return isinstance(self.pattern, bytes) and bool(
                re.match(self.pattern, looks, re.DOTALL)
            )
        patterns = [it for it in (self.pattern, self.and_) if it]
        return all(
            isinstance(pattern, str) and any(re.fullmatch(pattern, name) for name in looks)
            for pattern in patterns
        )


# Who reads them: functions, by where they are from here; search for the last word. Each module is
# imported when there is something to read, for nearly all commands need none of them.
_DCP = ".dcp.read_dcp"
_DEEPSPEED = "..deepspeed.tag.read_deepspeed"
_MEGATRON = ".megatron.read_megatron"
_ORBAX = ".orbax.read_orbax"
_SAFETENSORS = ".safetensors.read_safetensors"
_TORCH = ".torch_save.read_torch"
_TORCH_CHECKPOINTING = ".torch_save.read_torch_checkpointing"
_TORCHSNAPSHOT = ".torchsnapshot.read_torchsnapshot"
# The first that fits counts.
FORMATS = (
    Format(
        "a Megatron checkpoint (torch_dist)",
        r"\.metadata|.*\.distcp",
        _MEGATRON,
        and_=r"metadata\.json|common\.pt",
    ),
    Format("a DCP checkpoint (torch.distributed.checkpoint)", r"\.metadata|.*\.distcp", _DCP),
    Format("a snapshot of torchsnapshot", r"\.snapshot_metadata", _TORCHSNAPSHOT),
    # Without its metadata, which `cp *` leaves out: so that this is said.
    Format(
        "a snapshot of torchsnapshot", r"replicated|sharded|batched", _TORCHSNAPSHOT, and_=r"\d+"
    ),
    Format("a DCP checkpoint of accelerate", r"pytorch_model_fsdp_\d+", _DCP),
    Format(
        "a DeepSpeed checkpoint",
        r"global_step\d+(_universal)?|zero_to_fp32\.py|.*zero_pp_rank_.*"
        r"|(layer_\d+_expert_\d+_)?mp_rank_\d+_model_states\.pt",
        _DEEPSPEED,
    ),
    Format("a Megatron checkpoint of a file for each rank", r"mp_rank_\d+(_\d+)*"),
    Format("checkpoints of Megatron", r"iter_\d+|latest_checkpointed_iteration\.txt"),
    Format("a Hugging Face model", r".*\.safetensors(\.index\.json)?", _SAFETENSORS),
    Format("a Hugging Face model", r"pytorch_model.*\.bin(\.index\.json)?", _TORCH),
    Format(
        "a checkpoint of Orbax",
        r"_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|orbax\.checkpoint",
        _ORBAX,
    ),
    Format("a plain Zarr folder", r"zarr\.json|\.zgroup|\.zarray|\.zmetadata"),
    Format(
        "a checkpoint of torch_checkpointing",
        r"commit\.msgpack",
        _TORCH_CHECKPOINTING,
        and_="files",
    ),
    Format(
        "a checkpoint of torch_checkpointing",
        r"metadata\.pkl",
        _TORCH_CHECKPOINTING,
        and_=r".*_\d+\.pt",
    ),
    Format("a folder of torch.save files", r".*\.(pt|pth|ckpt|bin)", _TORCH),
    Format("a safetensors file", rb".{5}\x00{3}\{", _SAFETENSORS),
    Format("the index of a Hugging Face model", rb"\s*\{.*\"weight_map\".*\.bin\"", _TORCH),
    Format("the index of a Hugging Face model", rb"\s*\{.*\"weight_map\"", _SAFETENSORS),
    # Before packs: a file, or a tensor in it, may be called zarr.json.
    Format("a torch.save file", rb"PK\x03\x04.{26}[^\x00/]*/data\.pkl(?!/)", _TORCH),
    Format("the pack of one rank of a step", rb"PK\x03\x04.{26}.*zarr\.json"),
    Format("a pickle, as torch.save wrote before torch 1.6", rb"\x80[\x02-\x05]"),
    Format("a zip file", rb"PK\x03\x04"),
    Format("a GGUF file", rb"GGUF"),
    Format("an HDF5 file", rb"\x89HDF\r\n"),
    Format("a file of a kind that is not known", rb"."),
)


def format_of(store: Store, names: Sequence[str] | None = None) -> Format | None:
    """What is at the location of a store, whose folder has these names, if it can be told."""
    looks: Sequence[str] | bytes = store.children("") if names is None else names
    if not looks:
        # A store is of folders only: for it a file is a folder without names.
        looks = b""
        location = store.location
        with suppress(CkptkitError):
            above = open_store(replace(store.address, location=location.parent))
            looks = above.read(location.name, 0, min(_HEAD_BYTES, above.size(location.name)))
    return next((known for known in FORMATS if known.fits(looks)), None)


def find_foreign(store: Store) -> tuple[Store, str, ForeignManifest] | None:
    """Read the foreign checkpoint at the location of a store, of numbered ones the newest. The
    store of its folder, the file that it is (empty for a folder), and what is in it; None where
    there is none that can be read.
    """
    names = store.children("")
    known = format_of(store, names)
    if known and known.reader == _TORCH and isinstance(known.pattern, str):
        # Lightning calls folders as others call files.
        files = {it.key: it for it in store.list("", deep=False)}
        known = known if known.fits([*files]) else None
    if known and known.reader:
        if isinstance(known.pattern, str):
            return store, "", _manifest(known.reader, _folder(store, names))
        name = store.location.name
        store = open_store(replace(store.address, location=store.location.parent))
        # One file is itself, whatever lies beside it; an index says which files it means. What is
        # below folders beside it, the rest of a home perhaps, is not looked at.
        files = {it.key: it for it in store.list("", deep=False)}
        return store, name, _manifest(known.reader, Folder(store, files, name))
    for number, alike in groupby(numbered(store, names), key=itemgetter(0)):
        readable = [(below, known.reader) for _, below, known in alike if known.reader]
        if len(readable) > 1:
            # A model and its optimizer, perhaps: neither is all of the step.
            places = sorted(str(below.location) for below, _ in readable)
            raise FormatError(
                f"several checkpoints have the same number, {number}",
                where=str(store.location),
                value=sorted(below.location.name for below, _ in readable),
                hint=f"name one of them, such as {places[0]}",
            )
        for below, reader in readable:
            return below, "", _manifest(reader, _folder(below, below.children("")))
    return None


def numbered(store: Store, names: Iterable[str]) -> Iterator[tuple[int, Store, Format]]:
    """The checkpoints of a known format in those folders of a store whose names, of these, have a
    number: the highest first.
    """
    matches = [_NUMBERED.fullmatch(name) or _ONLY_NUMBER.fullmatch(name) for name in names]
    found = [(int(m[m.lastindex or 0]), m[0]) for m in matches if m]
    for number, name in sorted(found, reverse=True):
        below = open_store(replace(store.address, location=store.location / name))
        known = format_of(below)
        is_step = known is not None and (not _ONLY_NUMBER.fullmatch(name) or known.reader == _ORBAX)
        if known and is_step and isinstance(known.pattern, str):
            yield number, below, known


def _folder(store: Store, names: Iterable[str]) -> Folder:
    linked = [name for name in store.links() if _LINKED.fullmatch(name)]
    files = {it.key: it for below in ("", *linked) for it in store.list(below)}
    if len(files) > _MOST_FILES:
        raise FormatError(
            f"more than {_MOST_FILES} files", where=str(store.location), value=len(files)
        )
    return Folder(store, files, names=names)


def _manifest(read: str, folder: Folder) -> ForeignManifest:
    from ckptkit.foreign.contents import manifest_of  # noqa: PLC0415 — as the readers

    module, _, function = read.rpartition(".")
    found = getattr(import_module(module, __name__), function)(folder)
    if not found.arrays and not found.objects:
        raise FormatError(
            "no tensor is in the checkpoint",
            where=str(folder.store.location),
            hint="its files were not copied along, or only their names are those of a checkpoint",
        )
    number = _NUMBERED.fullmatch(folder.store.location.name)
    used = [folder.files[key] for key in sorted(found.files)]
    if not found.step and number:
        found = replace(found, step=int(number[1]))
    if not found.time and used:
        found = replace(found, time=max(it.modified for it in used))
    # What a resumed reshard goes on with must be of the same bytes: where a file was written anew,
    # its time has changed.
    files = "".join(f"{it.key}\0{it.size}\0{it.modified}\0" for it in used)
    fingerprint = hashlib.sha256(files.encode() + folder.seen.digest()).digest()
    with located(str(folder.store.location)):
        return manifest_of(found, fingerprint)
