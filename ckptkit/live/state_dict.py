"""A step as dictionaries of whole tensors, as `torch.load` would give it: without a job, and
without the objects whose state it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.checkpoint.places import Place
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.errors import FormatError
from ckptkit.format.names import (
    ALIKE,
    DATA_RANK,
    MODEL,
    OPTIMIZER,
    OWN,
    WRAPPED,
    check_used,
    escape,
    in_group,
    inner_name,
    matches,
    pattern_list,
    split,
    unescape,
)
from ckptkit.format.objects import whole
from ckptkit.live.state.extra import is_marked
from ckptkit.live.state.tensors import as_bits, torch_dtype
from ckptkit.live.state.trees import arrays_in, parts_of, put_tensors, with_value
from ckptkit.model import Box
from ckptkit.storage import Options

_GONE: Any = object()


def load_state(
    location: Place,
    *,
    names: Iterable[str] | None = None,
    nested: bool = False,
    device: torch.device | str = "cpu",
    mmap: bool = False,
    verify: bool = True,
    storage_options: Options | None = None,
) -> dict[str, Any]:
    """Whole tensors of a step by name, without any job; all by default. `names` may be patterns
    with * and ?, which match whole names or those inside of their group, as `--include` does.

    With `nested` also what is no tensor, as nested dictionaries: `model` by the names of its
    tensors, `optimizer` with `state` (by parameter and key) and `param_groups`, `extra`, and each
    group of `state=` as it was saved, lists as lists. `names` then also picks these by their
    names, a group with all that it has. Values of each rank are a list of all ranks'; a tensor
    that wraps others is a dictionary of these.

    With `mmap` a tensor that lies in one piece of a local file is a view of it, which is neither
    read nor checked before it is used, and whose changes never reach the file. At the usual chunk
    size these are the small ones (see `mapped`); others are read as always.
    """
    patterns = None if names is None else pattern_list(names, "names")
    with open_checkpoint(location, storage_options=storage_options) as checkpoint:
        objects = _objects(checkpoint) if nested else {}
        if patterns is None:
            wanted = list(checkpoint.arrays)
        elif nested:
            visible = [name for name in objects if name.split("/")[0] != WRAPPED]
            others = [*visible, *(name.removeprefix("extra/") for name in visible)]
            wanted = _picked(checkpoint, patterns, others)
        else:
            found: list[str] = []
            for name in patterns:
                is_pattern = "*" in name or "?" in name
                found += _picked(checkpoint, (name,), []) if is_pattern else [name]
            wanted = list(dict.fromkeys(found))
        tensors = mapped(checkpoint, wanted) if mmap else {}
        rest: dict[str, torch.Tensor] = {}
        for name in wanted:
            if name not in tensors:
                array = checkpoint[name]
                rest[name] = torch.empty(array.shape, dtype=torch_dtype(array.dtype), device="cpu")
        checkpoint.read_many(
            [(name, Box.whole(each.shape), as_bits(name, each)) for name, each in rest.items()],
            verify=verify,
        )
        tensors |= rest
        state = {name: tensors[name].to(device) for name in wanted}
        return _nested(objects, state, patterns) if nested else state


def nested_state(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """All that `load_state(nested=True)` gives of a step whose arrays are these tensors."""
    return _nested(_objects(checkpoint), tensors, None)


def _picked(checkpoint: Checkpoint, patterns: tuple[str, ...], others: list[str]) -> list[str]:
    """The arrays that patterns pick, by name, by the name inside of their group, or with all of
    their group; a pattern that picks neither an array nor one of the `others` is refused.
    """
    inner = {
        name: inner_name(name, OPTIMIZER if name.startswith(f"{OPTIMIZER}/") else "")
        for name in checkpoint.arrays
    }
    groups = {name.split("/")[0] for name in inner}
    known = [*inner.items(), *((group, group) for group in groups), *((n, n) for n in others)]
    check_used(patterns, known, "the step has nothing of this name")
    return [n for n in inner if _takes(patterns, n) or matches(patterns, n, inner[n])]


def _takes(patterns: tuple[str, ...] | None, name: str) -> bool:
    """Whether a name is picked by itself, or with all of its group."""
    return patterns is None or matches(patterns, name, name.split("/", maxsplit=1)[0])


def _objects(checkpoint: Checkpoint) -> dict[str, Any]:
    """The values of all objects by name, those of some ranks only at their places."""
    items = checkpoint.manifest.objects
    found = {item.name: whole(item) for item in items}
    for item in items:
        if is_marked(item):
            # An empty mark, which no save writes, gives nothing.
            found[item.name] = [leaf for v in item.value for leaf in v[DATA_RANK][-1:]]
    for item in items:
        if item.name.startswith(f"{OWN}/"):
            group, keys, _, value = parts_of(item)
            found[group] = with_value(found.get(group), keys, value)
    return {n: value for n, value in found.items() if n.split("/")[0] not in (ALIKE, OWN)}


def _nested(
    objects: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    patterns: tuple[str, ...] | None,
) -> dict[str, Any]:
    """Objects with the tensors that they refer to, and what they do not refer to beside them."""
    wrapped: dict[str, list[str]] = {}  # by name the parts of tensors that are made of others
    for name, record in in_group(WRAPPED, objects).items():
        inside = record.get("inner") if isinstance(record, dict) else None
        if not isinstance(inside, list) or not all(isinstance(key, str) for key in inside):
            where = f"objects.{WRAPPED}/{name}"
            raise FormatError("not what a save writes", where=where, value=record)
        wrapped[name] = inside
    placed: set[str] = set()

    def tensor_of(name: str) -> Any:
        if name in wrapped:
            parts = {key: tensor_of(f"{name}%2F{escape(key)}") for key in wrapped[name]}
            return _without_gone(parts) or _GONE
        placed.add(name)
        return tensors.get(name, _GONE)

    found: dict[str, Any] = {}
    for name, value in objects.items():
        group, _, inner = name.partition("/")
        if group == WRAPPED:
            continue
        if group == "extra" and inner:
            if patterns is None or matches(patterns, name, inner):
                found.setdefault("extra", {})[inner] = put_tensors(value, None, name)
        elif name == OPTIMIZER:
            has_some = any(each.startswith(f"{OPTIMIZER}/") for each in tensors)
            if has_some or _takes(patterns, name):
                found[name] = _optimizer(value, tensor_of)
        elif _takes(patterns, name) or any(each in tensors for each in arrays_in(value, name)):
            found[name] = _without_gone(put_tensors(value, tensor_of, name))
    for name in tensors.keys() - placed:
        *above, last = _path(name, wrapped)
        at = found
        for node in above:
            at = at.setdefault(node, {})
            if not isinstance(at, dict):
                raise FormatError(
                    "an array at the place of a value", where="/".join([*above, last])
                )
        at[last] = tensors[name]
    return found


def _optimizer(documents: Any, tensor_of: Callable[[str], Any]) -> dict[str, Any]:
    """As torch's `get_optimizer_state_dict` has it: all optimizers together, by names."""
    where = f"objects.{OPTIMIZER}"
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    try:
        for document in documents:
            for group in document["groups"]:
                found["param_groups"].append({"params": group["params"], **group["options"]})
            for parameter, values in document["values"].items():
                found["state"][parameter] = _without_gone(put_tensors(values, tensor_of, where))
    except (TypeError, KeyError, AttributeError) as error:
        raise FormatError("not what a save writes", where=where, value=documents) from error
    return found


def _path(name: str, wrapped: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Where an array goes that no object refers to."""
    above, _, inner = name.rpartition("%2F")
    if above in wrapped:
        return (*_path(above, wrapped), unescape(inner))
    group, *nodes = split(name)
    if group == MODEL:
        return (group, "/".join(nodes))
    return (group, *(["state"] if group == OPTIMIZER else []), *nodes)


def _without_gone(tree: Any) -> Any:
    """A tree with only those of its tensors that were chosen."""
    if type(tree) is dict:  # a Counter has no tensors, and stays one
        return {key: _without_gone(value) for key, value in tree.items() if value is not _GONE}
    if type(tree) in (list, tuple):
        return type(tree)(_without_gone(value) for value in tree if value is not _GONE)
    return tree


def mapped(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those of the tensors that lie in one piece of a local file, as views of it.

    That is a tensor of one chunk. At the usual chunk size it has less than half a MiB, as norms
    and biases have: a larger one is many chunks, with the headers of a zip file between them. It
    is not among those returned, nor is what lies where files cannot be mapped.

    A view is private: what is written to it stays in memory. It holds for as long as nobody cuts
    the file short, which ckptkit never does; the step may be replaced or removed meanwhile.
    """
    if checkpoint.store.location.scheme != "file":
        return {}
    manifest = checkpoint.manifest
    found: dict[str, torch.Tensor] = {}
    packs: dict[int, npt.NDArray[np.uint8] | None] = {}
    for name in names:
        info = checkpoint[name].info
        grid = info.grid
        # What pads a chunk lies behind the elements only along the first dim.
        if grid.chunk_count != 1 or grid.stored_shape(grid.index(0))[1:] != info.shape[1:]:
            continue
        row = checkpoint.first_row(name)
        pack, offset = int(manifest.pack[row]), int(manifest.offset[row])
        if pack not in packs:
            packs[pack] = _mapped_pack(checkpoint, pack)
        memory = packs[pack]
        if memory is not None and offset % info.dtype.itemsize == 0:
            count, dtype = math.prod(info.shape), torch_dtype(info.dtype)
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            found[name] = flat.reshape(info.shape)
    return found


def _mapped_pack(checkpoint: Checkpoint, pack: int) -> npt.NDArray[np.uint8] | None:
    """The bytes of a pack; None where the system does not map it."""
    manifest = checkpoint.manifest
    info = manifest.packs[pack]
    key = checkpoint.packs.key(pack)
    # While it is open, its size is known to be what the manifest says: touching a page of a
    # mapping that has no file below it would kill the process.
    with checkpoint.packs.use(pack):
        try:
            storage: Any = torch.UntypedStorage.from_file(
                (checkpoint.store.location / key).path, shared=False, nbytes=info.size
            )
        except RuntimeError:
            return None
    memory: npt.NDArray[np.uint8] = (
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    )
    return memory
