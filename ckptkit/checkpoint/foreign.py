"""Checkpoints of others, known by names and first bytes alone, so that an error can say what is
there instead of a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from ckptkit.checkpoint.places import MANIFEST, store_at
from ckptkit.errors import CkptkitError
from ckptkit.storage import Store

FOREIGN_HINT = (
    "this version cannot read it: load it with what wrote it, and save that with ckptkit.live.save"
    " or ckptkit.Writer; of a pack or a manifest pass the folder of the step"
)

_HEAD = 256

# What a folder is, and the names that tell; the first that fits counts.
_FOLDERS = (
    ("a DCP checkpoint (torch.distributed.checkpoint)", r"\.metadata|.*\.distcp"),
    (
        "a DeepSpeed checkpoint",
        r"global_step\d+|zero_to_fp32\.py|.*zero_pp_rank_.*|mp_rank_\d+_model_states\.pt",
    ),
    ("a Megatron checkpoint", r"iter_\d+|latest_checkpointed_iteration\.txt|mp_rank_\d+(_\d+)*"),
    (
        "a Hugging Face model",
        r".*\.safetensors(\.index\.json)?|pytorch_model.*\.bin(\.index\.json)?",
    ),
    ("a plain Zarr folder", r"zarr\.json|\.zgroup|\.zarray|\.zmetadata"),
    ("a folder of torch.save files", r".*\.(pt|pth|ckpt|bin)"),
)
# What a file is, and the bytes that tell.
_FILES = (
    ("a safetensors file", rb".{5}\x00{3}\{"),
    ("the pack of one rank of a step", rb"PK\x03\x04.{26}.*zarr\.json"),
    ("a torch.save file", rb"PK\x03\x04.{26}[^\x00]*data\.pkl"),
    ("a pickle, as torch.save wrote before torch 1.6", rb"\x80[\x02-\x05]"),
    ("a zip file", rb"PK\x03\x04"),
    ("a GGUF file", rb"GGUF"),
    ("an HDF5 file", rb"\x89HDF\r\n"),
)


def foreign(store: Store, names: Iterable[str]) -> str | None:
    """What is at the location of a store whose folder has these names, if it can be told."""
    known = list(names)
    for what, pattern in _FOLDERS:
        if any(re.fullmatch(pattern, name) for name in known):
            return what
    return None if known else _file(store)


def _file(store: Store) -> str | None:
    """What the location is if it is a file; there is a store of folders only."""
    location = store.location
    if location.name == MANIFEST:
        return "the manifest of a step"
    head = b""
    with suppress(CkptkitError):  # it is no file, or may not be read
        above = store_at(replace(store.address, location=location.parent))
        with above.open(location.name) as source:
            head = bytes(source.fetch(0, min(_HEAD, source.size)))
    found = (what for what, magic in _FILES if re.match(magic, head, re.DOTALL))
    return next(found, "a file of a kind that is not known" if head else None)
