"""What is what in a state dictionary: which of its tensors are the model's, which the optimizer's,
by the habits of those who save with torch.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptkit.errors import CkptkitError, FormatError, InvalidNameError, UnsupportedTypeError
from ckptkit.foreign.extents import Extent, ForeignArray, ForeignStep
from ckptkit.foreign.folder import Folder
from ckptkit.format.encoding import encode
from ckptkit.format.names import BY_ORDER, join
from ckptkit.format.objects import ObjectInfo
from ckptkit.model import DType, Placement

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network")
OPTIMIZER_KEYS = (
    *("optimizer", "optimizer_state_dict", "optimizer_states", "optim", "optimizers"),
    "optimizer_state",
)
_OPTIMIZER = re.compile(r"optimizer_([0-9]{1,4})", re.ASCII)
# Of modules of torch: what they keep besides parameters, by the end of the name.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")
# In the order in which they are around each other, DDP around what was compiled or inside of it.
_WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")
_NUMBERS = ("bfloat", "complex", "float")
_DEPTH = 64
# Of a name: what lies deeper is one node.
_MOST_NODES = 16

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor of a state dictionary, and where its elements lie."""

    shape: tuple[int, ...]
    dtype: DType
    extents: tuple[Extent, ...]
    placements: tuple[Placement, ...] = ()
    identity: object = None
    """Equal for tensors that are one: names for the same elements."""
    content: object = None
    """Equal where the elements are, as checksums tell: of tensors that are whole in a file."""
    is_flat: bool = False
    """Whether its extents are boxes of it as one row of elements."""


@dataclass(slots=True)
class States:
    """The arrays and objects that the state dictionary of a file is."""

    where: str
    arrays: list[ForeignArray] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    theirs: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """What is no plain value, by name."""
    noted: dict[str, Any] = field(default_factory=dict)
    """More of the details, as they are."""
    without_group: list[str] = field(default_factory=list)
    """Parameters that an optimizer has state of, and in none of its groups."""
    by_identity: dict[object, str] = field(default_factory=dict)
    """The first name of each tensor of the model."""

    @property
    def details(self) -> dict[str, Any]:
        found = dict(self.noted)
        if self.without_group:
            first, *others = self.without_group
            more = f" and {len(others)} more" if others else ""
            found["without_group"] = f"{first}{more}: they got the options that all groups share"
        return found | ({"left_out": self.left_out} if self.left_out else {})

    def add(
        self, name: str, tensor: StateTensor, path: Path, *, of: str | None = None, role: str = ""
    ) -> str:
        """The name of the array that a tensor is: another one's where it is the same tensor."""
        group = name.partition("/")[0]
        if name in self.theirs:
            raise FormatError("two tensors have this name", where=self.where, value=name)
        self.theirs[name] = ".".join(map(str, path))
        if group == "model" and tensor.identity is not None:
            first = self.by_identity.setdefault(tensor.identity, name)
            if first != name:
                self.aliases[name] = first
                return first
        role = role or {"model": "param", "optimizer": "optimizer"}.get(group, "other")
        if role == "param" and _is_buffer(name, tensor):
            role = "buffer"
        told = (tensor.shape, tensor.dtype, tensor.extents, role, of)
        self.arrays.append(ForeignArray(name, *told, tensor.placements, tensor.is_flat))
        return name

    def keep(self, name: str, value: Any) -> None:
        """An object, if it is a plain value."""
        if name in self.objects:
            raise FormatError("two objects have this name", where=self.where, value=name)
        try:
            encode(value, name)
        except UnsupportedTypeError as error:
            # Its text names the class of our placeholder.
            self.left_out[name] = f"{error.where}: a value that is neither plain nor a tensor"
        else:
            self.objects[name] = ObjectInfo(name, "replicated", value)

    def step(self, format_: str, folder: Folder, used: Iterable[str], **told: Any) -> ForeignStep:
        """The step that this is, of the files that were used of a folder."""
        files = {key: folder.size(key) for key in used}
        self.left_out = folder.unread(files) | self.left_out
        details = self.details | told.pop("details", {})
        found = {"arrays": self.arrays, "aliases": self.aliases, "theirs": self.theirs}
        found |= {"objects": [*self.objects.values()], "details": details}
        return ForeignStep(format=format_, files=files, **found | told)


def reason(error: CkptkitError) -> str:
    """Why something is left out, for a list of what is."""
    return error.what + (f" (got {error.value})" if error.has_value else "")


def states_of(tree: Mapping[Any, Any], where: str, buffers: Container[str] = ()) -> States:
    """The arrays and objects of a state dictionary, whose leaves are tensors and plain values.

    `buffers` are those of the model, as far as they are known; more are told by their names.
    """
    found = States(where)
    model_key = next((key for key in MODEL_KEYS if _has_tensors(tree.get(key))), None)
    optimizers = dict(_optimizers(tree))
    optimizer_keys = {path[0] for path in optimizers}
    model = tree if model_key is None else tree[model_key]
    inside = _wrapped([k for k, value in model.items() if isinstance(value, StateTensor)])
    rest: dict[Any, Any] = {}
    names: list[tuple[str, StateTensor]] = []
    for key, value in model.items():
        if isinstance(value, StateTensor) and type(key) is str:
            role = "buffer" if key in buffers else ""
            spelled = (key,) if model_key is None else (model_key, key)
            own = key[len(inside) :]
            name = found.add(join("model", own), value, spelled, role=role)
            if name == join("model", own) and key not in buffers:
                names.append((own, value))
        elif model_key is None:
            if key not in optimizer_keys:
                rest[key] = value
        elif type(value) is dict and not value:
            continue
        else:
            rest.setdefault(model_key, {})[key] = value
    if model_key is not None:
        taken = {model_key, *optimizer_keys}
        rest |= {k: v for k, v in tree.items() if k not in taken}
    documents: list[dict[str, Any]] = []
    for (key, *number), state in optimizers.items():
        document, more = _optimizer(found, state, names, (key, *number))
        if more:
            rest.setdefault(key, {}).update({number[0]: more} if number else more)
        if document is not None:
            documents.append(document)
    if documents:
        found.objects["optimizer"] = ObjectInfo("optimizer", "replicated", documents)
    for key, value in rest.items():
        for path, tensor in _tensors({key: value}, ()):
            nodes = [str(node) or "_" for node in path]
            if len(nodes) > _MOST_NODES:
                nodes[_MOST_NODES - 1 :] = [".".join(nodes[_MOST_NODES - 1 :])]
            found.add(join("other", *nodes), tensor, path)
        plain, has_some = _without_tensors(value)
        if has_some:
            found.keep(join("extra", str(key)), plain)
    return found


def _wrapped(names: Sequence[Any]) -> str:
    """What the names of a model begin with where it was saved inside of DDP, or compiled: of these
    it is the only child. An optimizer has such names only where it was told them so.
    """
    inside = ""
    for wrapper in _WRAPPERS:
        longer = inside + wrapper
        if names and all(type(name) is str and name.startswith(longer) for name in names):
            inside = longer
    return inside


def _optimizers(tree: Mapping[Any, Any]) -> Iterator[tuple[Path, Any]]:
    """The state of each optimizer, and where in the tree it is."""
    for key in OPTIMIZER_KEYS:
        if _is_optimizer(value := tree.get(key)):
            if isinstance(value, list):
                yield from (((key, number), state) for number, state in enumerate(value))
            else:
                yield (key,), value
            return
    # Lightning numbers them.
    numbers = {int(m[1]): key for key in tree if (m := _OPTIMIZER.fullmatch(str(key)))}
    for _, key in sorted(numbers.items()):
        if _is_optimizer(tree[key]) and not isinstance(tree[key], list):
            yield (key,), tree[key]


def _optimizer(
    found: States,
    state: Mapping[str, Any],
    model: Sequence[tuple[str, StateTensor]],
    above: Path,
) -> tuple[dict[str, Any] | None, Mapping[Any, Any]]:
    """Add the tensors of one optimizer; what else it says, as a save of ours writes it, and what is
    of no parameter. None and all of it where nobody knows whose parameters' state it is.
    """
    by_parameter, groups, more = _by_parameter_and_group(state)
    indices = _indices(by_parameter, groups)
    names = None if indices is None else _told_names(indices, groups)
    if names:
        inside = _wrapped([*names.values()])
        names = {index: name[len(inside) :] for index, name in names.items()}
    # Groups are numbered one after the other: nobody knows which parameter is in which.
    if names is None and indices is not None and len(groups) == 1:
        names = _names_by_order(indices, by_parameter, model)
        found.noted |= {} if names is None else {"optimizer": BY_ORDER}
    known = dict(model)
    kind = next((_kind(group) for group in groups), "")
    misfit = _misfit(names or {}, by_parameter, known) if kind in _ALIKE else ""
    found.noted |= {"other_shape": f"{misfit}: the optimizer is of another model"} if misfit else {}
    if names is None or misfit or not (by_parameter or groups):
        return None, state
    values: dict[str, dict[str, Any]] = {}
    for index, entries in by_parameter.items():
        parameter = names[index]
        of = join("model", parameter) if parameter in known else None
        for key, value in entries.items():
            if not isinstance(value, StateTensor) and is_plain(value):
                values.setdefault(parameter, {})[str(key)] = value
                continue
            for path, tensor in _tensors(value, (key,)):
                name = join("optimizer", parameter, "/".join(map(str, path)))
                found.add(name, tensor, (*above, "state", index, *path), of=of)
            if _without_tensors(value)[1]:
                name = join("optimizer", parameter, str(key))
                found.left_out[name] = "a value that is neither plain nor a tensor"
    documents: list[dict[str, Any]] = []
    for group in groups:
        options: dict[str, Any] = {}
        for key, value in group.items():
            if key in ("params", "param_names"):
                continue
            if is_plain(value):
                options[str(key)] = value
            else:
                found.left_out[join("optimizer", "param_groups", str(key))] = "not a plain value"
        params = [names[index] for index in group.get("params", ()) if index in names]
        documents.append({"params": params, "options": options})
    # Where each stage of a pipeline saved a list of its groups, DCP has kept that of one of them.
    # What is in no group, no job would take over.
    told = {name for group in documents for name in group["params"]}
    if lost := [names[index] for index in by_parameter if names[index] not in told]:
        found.without_group += lost
        options = dict(documents[0]["options"]) if documents else {}
        for group in documents:
            has = group["options"]
            options = {k: v for k, v in options.items() if repr(has.get(k)) == repr(v)}
        documents.append({"params": lost, "options": options})
    return {"kind": kind, "groups": documents, "values": values}, more


def _by_parameter_and_group(
    state: Mapping[Any, Any],
) -> tuple[dict[Any, dict[Any, Any]], list[dict[Any, Any]], dict[Any, Any]]:
    """The state by parameter and the groups of parameters, of a dictionary that may be flat:
    `state.<name>.exp_avg`, `param_groups.<name>.lr`; and what is neither.
    """
    if not (isinstance(state.get("state"), dict) or isinstance(state.get("param_groups"), list)):
        return _from_flat(state)
    said, listed = state.get("state", {}), state.get("param_groups", [])
    by_parameter = {}
    if isinstance(said, dict):
        by_parameter = {k: v for k, v in said.items() if isinstance(v, dict)}
        said = {k: v for k, v in said.items() if not isinstance(v, dict)}
    groups = []
    if isinstance(listed, list):
        groups = [dict(group) for group in listed if isinstance(group, dict)]
        listed = [group for group in listed if not isinstance(group, dict)]
    more = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    rest = (("state", said), ("param_groups", listed))
    more |= {key: value for key, value in rest if value not in ({}, [])}
    for group in groups:
        # Of a flat dictionary with lists as they are, an empty list is left out.
        params = group.get("params", [])
        group["params"] = list(params) if isinstance(params, (list, tuple)) else []
    if any(type(index) is int for group in groups for index in group["params"]):
        # DCP makes text of keys that are numbers.
        is_number = {k: type(k) is str and k.isdecimal() for k in by_parameter}
        by_parameter = {int(k) if is_number[k] else k: v for k, v in by_parameter.items()}
    return by_parameter, groups, more


def _from_flat(
    state: Mapping[Any, Any],
) -> tuple[dict[Any, dict[Any, Any]], list[dict[Any, Any]], dict[Any, Any]]:
    """As `_by_parameter_and_group`, of a flat dictionary."""
    more: dict[Any, Any] = {}
    by_name: dict[Any, dict[Any, Any]] = {}
    options: dict[str, dict[Any, Any]] = {}
    told = [str(path).partition(".")[2] for path in state if str(path).startswith("param_groups.")]
    known = {rest.rpartition(".")[0] for rest in told}
    for path, value in state.items():
        kind, _, rest = str(path).partition(".")
        # Since torch 2.10 a name may be followed by several keys, so it is what is known as one.
        nodes = rest.split(".")
        ends = range(len(nodes) - 1, 0, -1)
        end = next((end for end in ends if ".".join(nodes[:end]) in known), len(nodes) - 1)
        name, keys = ".".join(nodes[:end]), nodes[end:]
        into = {"state": by_name, "param_groups": options}.get(kind)
        if into is None or not name or not keys[-1]:
            more[path] = value
        else:
            put(into.setdefault(name, {}), keys, value, str(path))
    alike: dict[str, dict[Any, Any]] = {}
    for name, said in options.items():
        # Parameters with the same options are a group: which they were in is not told.
        group = alike.setdefault(repr(sorted(said.items(), key=lambda it: str(it[0]))), dict(said))
        group.setdefault("params", []).append(name)
    return by_name, list(alike.values()), more


def step_counted(tree: Mapping[Any, Any]) -> int:
    """The number of the step, where the file says it."""
    for key in ("global_step", "step", "iteration"):
        value = tree.get(key)
        if type(value) is int and 0 <= value < 1 << 53:
            return value
    return 0


def put(tree: dict[Any, Any], path: Sequence[str | int], value: Any, name: str) -> None:
    """Put a value where its path says in a tree of dictionaries."""
    node = tree
    for key in path[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise FormatError("it is a value, and others are inside of it", where=name)
    if path[-1] in node:
        raise FormatError("two values are at one place", where=name)
    node[path[-1]] = value


def _indices(
    by_parameter: Mapping[Any, Mapping[Any, Any]], groups: Sequence[Mapping[Any, Any]]
) -> list[Any] | None:
    """What an optimizer calls its parameters, in order; None where that is no name or number."""
    indices = [index for group in groups for index in group.get("params", ())]
    indices = indices or list(by_parameter)
    if any(type(index) not in (int, str) for index in (*indices, *by_parameter)):
        return None
    if not by_parameter.keys() <= set(indices):
        indices = list(dict.fromkeys([*indices, *by_parameter]))
    return indices if len(set(indices)) == len(indices) else None


def _told_names(
    indices: Sequence[Any], groups: Sequence[Mapping[Any, Any]]
) -> dict[Any, str] | None:
    """The names of the parameters that an optimizer has state of, where it tells them: they are
    names already, or it has `param_names`.
    """
    are_texts = all(type(index) is str for index in indices)
    if are_texts and not all(index.isdigit() for index in indices):
        return {index: index for index in indices}
    told: list[str] = []
    for group in groups:
        names = group.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(group["params"]):
            return None
        told += names
    is_text = all(type(name) is str for name in told)
    if not is_text or len(set(told)) != len(told) or len(told) != len(indices):
        return None
    return dict(zip(indices, told, strict=True))


def _names_by_order(
    indices: Sequence[Any],
    by_parameter: Mapping[Any, Mapping[Any, Any]],
    model: Sequence[tuple[str, StateTensor]],
) -> dict[Any, str] | None:
    """The names of the model in order, where all that may be parameters have state of their shape.
    That the optimizer was given them in this order nothing tells.
    """
    parameters = [
        (name, tensor)
        for name, tensor in model
        if not _is_buffer(name, tensor) and tensor.dtype.name.startswith(_NUMBERS)
    ]
    names = {i: name for i, (name, _) in zip(indices, parameters, strict=False)}
    fits = len(parameters) == len(indices) and not _misfit(names, by_parameter, dict(parameters))
    return names if fits else None


def _misfit(
    names: Mapping[Any, str],
    by_parameter: Mapping[Any, Mapping[Any, Any]],
    model: Mapping[str, StateTensor],
) -> str:
    """A state whose shape is not that of its parameter; empty where all fit."""
    for index, name in names.items():
        shape = model[name].shape if name in model else None
        for key, value in by_parameter.get(index, {}).items() if shape is not None else ():
            if isinstance(value, StateTensor) and value.shape not in (shape, (), (1,)):
                return f"{key} of {name} has the shape {value.shape}, the parameter {shape}"
    return ""


# By the options that only it has; others stay without a name.
_KINDS = (
    ({"momentum_decay", "betas"}, "NAdam"),
    ({"betas", "amsgrad", "decoupled_weight_decay"}, "Adam"),
    ({"momentum", "dampening", "nesterov"}, "SGD"),
    ({"alpha", "centered"}, "RMSprop"),
    ({"lr_decay", "initial_accumulator_value"}, "Adagrad"),
)
# Those whose states have the shape of the parameter, or one element. Others have rows and columns
# (Adafactor), fewer of them (GaLore) or blocks (Shampoo); an Adagrad by rows looks like Adagrad.
_ALIKE = ("Adam", "AdamW", "NAdam", "RMSprop", "SGD")


def _kind(options: Mapping[str, Any]) -> str:
    """The class of an optimizer, where its options tell; empty where they do not."""
    kind = next((name for keys, name in _KINDS if keys <= options.keys()), "")
    return "AdamW" if kind == "Adam" and options["decoupled_weight_decay"] else kind


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_optimizer(each) for each in value)
    if not isinstance(value, dict):
        return False
    heads = {str(key).partition(".")[0] for key in value}
    return bool(heads & {"state", "param_groups"})


def _is_buffer(name: str, tensor: StateTensor) -> bool:
    # As GPT-2 calls its causal mask; a layer may be called `attn`, and have a bias.
    is_mask = tensor.dtype.name in ("bool", "uint8") or tensor.shape[:-2] == (1, 1)
    return name.endswith(_BUFFERS) or (name.endswith("attn.bias") and is_mask)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(v, StateTensor) for v in value.values())


def is_plain(value: Any) -> bool:
    try:
        encode(value)
    except UnsupportedTypeError:
        return False
    return True


def _tensors(value: Any, path: Path, depth: int = 0) -> Iterator[tuple[Path, StateTensor]]:
    if depth > _DEPTH:
        raise FormatError(
            f"values in more than {_DEPTH} levels", where="/".join(map(str, path[:4]))
        )
    if isinstance(value, StateTensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) in (str, int):
                yield from _tensors(item, (*path, key), depth + 1)
            elif any(True for _ in _tensors(item, path, depth + 1)):
                raise InvalidNameError("a key that is neither text nor number", value=key)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(item, (*path, number), depth + 1)


def _without_tensors(value: Any, depth: int = 0) -> tuple[Any, bool]:
    """A tree without its tensors, and whether anything is left."""
    if isinstance(value, StateTensor) or depth > _DEPTH:
        return None, False
    if isinstance(value, dict):
        items = {key: _without_tensors(item, depth + 1) for key, item in value.items()}
        kept = {key: item for key, (item, has_some) in items.items() if has_some}
        return kept, bool(kept) or not value
    if isinstance(value, (list, tuple)):
        parts = [_without_tensors(item, depth + 1) for item in value]
        kept_parts = [item for item, has_some in parts if has_some]
        return type(value)(kept_parts), bool(kept_parts) or not value
    return value, True
