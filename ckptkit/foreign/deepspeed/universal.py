"""Universal Checkpoints of DeepSpeed: what `ds_to_universal.py` writes, a folder for each parameter
with a file for its master weight and one for each state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.deepspeed.files import MIXED, UNIVERSAL, TagFiles
from ckptkit.foreign.deepspeed.model_parallel import same_on_all
from ckptkit.foreign.deepspeed.zero import Zero
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.globals import Placeholder
from ckptkit.foreign.states import StateTensor
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import Box, document

_STATES = "optimizer_state.pt"
_FILE = re.compile(r"(?P<name>.+)/(?P<key>[^/]+)\.pt")


def read_universal(
    folder: Folder, tagged: TagFiles, parts: Sequence[Sequence[Mapping[str, tuple[int, ...]]]]
) -> Zero:
    """The weights and states of the parameters of `param_shapes` of all parts of a model. Of all
    else in the folder the model's own files have what was saved: here it was made float32, and of
    tied parameters it is the copy.
    """
    top = f"{tagged.tag}{UNIVERSAL}"
    files: dict[str, dict[str, str]] = {}
    for key in tagged.universal:
        if match := _FILE.fullmatch(key.removeprefix(top)):
            files.setdefault(match["name"], {})[match["key"]] = key
    rows: list[dict[str, set[tuple[int, ...]]]] = []
    for shapes in parts:
        rows += [{} for _ in range(len(shapes) - len(rows))]
        for row, names in zip(rows, shapes, strict=False):
            for name, shape in names.items():
                row.setdefault(name, set()).add(shape)
    said = read_file(folder, f"{top}{_STATES}").tree
    if not isinstance(said, dict):
        raise FormatError("not the state of an optimizer", where=folder.where(f"{top}{_STATES}"))
    found = Zero()
    if isinstance(scaler := said.get("loss_scaler"), Placeholder):
        found.scaler = scaler.fields()
    parameters = [name for row in rows for name in row]
    keys = {key for name in parameters for key in files.get(name, {})} - {"fp32"}
    for number, shapes_by_name in enumerate(rows):
        own = _own_state(said, number)
        for name, known in shapes_by_name.items():
            there = files.get(name, {})
            # What got no gradient has no state.
            missing = {"fp32", *keys} - there.keys() if len(there) != 1 else {"fp32"} - there.keys()
            if missing:
                raise FormatError(
                    "a file of a parameter is missing",
                    where=folder.where(f"{top}{name}/{min(missing)}.pt"),
                    hint="it was not copied along; copy the folder again",
                )
            values = {key: _value(folder, file, known, parts) for key, file in there.items()}
            found.weights[name] = values.pop("fp32")
            if values:
                found.states[name] = own | values
    if "step" in keys:
        steps = [states["step"] for states in found.states.values()]
        same_on_all("step", steps, folder.where(top))
    groups = said.get("param_groups")
    groups = groups if isinstance(groups, list) else []
    for group in (each for each in groups if isinstance(each, dict)):
        numbers = document.integers(group.get("params"), f"{folder.where(top)}: params")
        params = [name for n in numbers if n < len(rows) for name in rows[n]]
        found.groups.append({**group, "params": params})
    return found


def _own_state(said: Mapping[str, Any], row: int) -> dict[str, Any]:
    """What is no part of a parameter, such as the step: after stage 3 it is in one file for all."""
    inner = said.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    state = states.get(row) if isinstance(states, dict) else None
    return {
        key: value
        for key, value in (state.items() if isinstance(state, dict) else ())
        if not isinstance(value, StateTensor) or not value.shape
    }


def _value(
    folder: Folder,
    file: str,
    known: set[tuple[int, ...]],
    parts: Sequence[Any],
) -> Any:
    """What one file has: a tensor of the shape of the parameter, or a number."""
    said = read_file(folder, file).tree
    where = folder.where(file)
    if isinstance(said, dict):
        value = said.get("param")
        if not isinstance(value, StateTensor):
            raise FormatError("no parameter is in the file", where=where)
        # Ranks of tensor parallelism had parts of it, or the padding of a vocabulary was cut.
        if value.shape not in known and len(parts) == 1 and not said.get("vocab_tensor"):
            raise _other_shape(value.shape, known, where)
        return value
    if not isinstance(said, StateTensor) or not said.shape:
        return said
    # After stage 3 it is one row.
    (shape,) = known if len(known) == 1 else (said.shape,)
    if said.shape != shape and (said.shape != (math.prod(shape),) or said.extents[0].strides):
        raise _other_shape(said.shape, known, where)
    row = replace(said.extents[0], box=Box((0,), (math.prod(shape),)))
    return replace(said, shape=shape, extents=(row,), is_flat=True)


def _other_shape(found: object, known: object, where: str) -> FormatError:
    return FormatError(
        f"it has the shape {found}, by param_shapes {known}", where=where, hint=MIXED
    )
