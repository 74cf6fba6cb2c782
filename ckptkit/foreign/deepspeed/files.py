"""Which files of a tag's folder are whose, and what those of each rank say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.globals import Placeholder
from ckptkit.foreign.states import StateTensor
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import document

_LATEST = ("latest", "latest_universal")
_TAG = re.compile(r"(?:.*[^0-9])?global_step(\d{1,18})(_universal)?")
_MODEL = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(?:-model_(?P<tp>\d{1,9}))?-model_states\.pt")
# Without its layer before DeepSpeed 0.5.9.
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,9})_)?expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
_OF_EXPERTS = re.compile(r"expp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt")
# What has a file for each rank, by the names of `RankFiles`.
_BY_RANK = {"models": _MODEL, "optimizers": _OPTIMIZER, "expert_optimizers": _OF_EXPERTS}

MIXED = "the files are of different saves; copy the folder of one of them again"
UNIVERSAL = "zero/"
NOT_COPIED = "it was not copied along; copy the folder again"
OTHERWISE = "load it with DeepSpeed in the job that wrote it, and save it with `ckptkit.live.save`"


@dataclass(slots=True)
class RankFiles:
    """The files of one rank of model parallelism, by rank of data parallelism."""

    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    experts: dict[int, dict[int, str]] = field(default_factory=dict)
    """By layer, and by number of the expert in it."""
    expert_optimizers: dict[int, str] = field(default_factory=dict)
    """By rank of expert parallelism."""


@dataclass(slots=True)
class TagFiles:
    """The files of a tag, none of which is missing."""

    tag: str
    """The folder, with a slash behind it; empty where it is the folder that was named."""
    ranks: dict[int, RankFiles] = field(default_factory=dict)
    """By rank of model parallelism."""
    layers: dict[int, dict[int, str]] = field(default_factory=dict)
    """The files of the layers of a pipeline, by rank of tensor parallelism."""
    universal: list[str] = field(default_factory=list)
    """The files of a Universal Checkpoint."""

    @property
    def all(self) -> list[str]:
        groups: list[dict[int, str]] = []
        for it in self.ranks.values():
            groups += [it.models, it.optimizers, *it.experts.values(), it.expert_optimizers]
        groups += self.layers.values()
        return [*(key for group in groups for key in group.values()), *self.universal]


@dataclass(slots=True)
class ModelPart:
    """What the files of one rank of model parallelism say: a stage of a pipeline, or some of each
    tensor; mostly all there is.
    """

    where: str
    files: RankFiles
    models: list[dict[str, Any]]
    """What one file has; of stage 3 what the files of all ranks of data parallelism have."""
    optimizers: list[tuple[str, Any]]
    world: int
    """How many ranks of data parallelism there are."""
    stage: int
    reordered: bool
    experts: dict[str, Any] = field(default_factory=dict)
    """Their tensors, by their names in the whole model."""

    @property
    def tree(self) -> dict[str, Any]:
        return self.models[0]

    @property
    def module(self) -> dict[str, Any]:
        """What of the model is in its own files; of a pipeline most is in those of layers."""
        return {**as_dict(self.tree.get("module")), **self.experts}

    @property
    def buffers(self) -> list[str]:
        said = self.tree.get("buffer_names")
        return [name for name in said if type(name) is str] if isinstance(said, list) else []


def _tag_folder(folder: Folder) -> str:
    """The folder of the tag that counts, with a slash behind it; empty where it is this one."""
    here = (_MODEL, _OPTIMIZER, _EXPERT)
    if any(pattern.fullmatch(key) for key in folder.files for pattern in here):
        return ""
    tags = {key.partition("/")[0] for key in folder.files if "/" in key}
    for latest in _LATEST:
        if latest not in folder.files:
            continue
        text = folder.read(latest, 0, min(folder.size(latest), 4096)).decode("utf-8", "replace")
        if text.strip() not in tags:
            raise FormatError(
                "the folder that it names is missing",
                where=folder.where(latest),
                value=text.strip()[:200],
                hint="copy it along, or name the folder of another tag",
            )
        return f"{text.strip()}/"
    numbered = {
        (int(match[1]), not match[2]): tag for tag in tags if (match := _TAG.fullmatch(tag))
    }
    if not numbered:
        raise FormatError(
            "no file of a model's or an optimizer's states is in the folder",
            where=str(folder.store.location),
            hint="name the folder that has the files zero_pp_rank_0_mp_rank_00_optim_states.pt",
        )
    return f"{numbered[max(numbered)]}/"


def find_files(folder: Folder) -> TagFiles:
    """The files of the tag that counts: the one that `latest` names, or the newest."""
    tag = _tag_folder(folder)
    found = TagFiles(tag)
    for key in folder.files:
        name = key.removeprefix(tag) if key.startswith(tag) else "/"
        if match := _LAYER.fullmatch(name):
            found.layers.setdefault(int(match["tp"] or 0), {})[int(match["layer"])] = key
        elif match := _EXPERT.fullmatch(name):
            if match["layer"] is None:
                raise FormatError(
                    "a file with an expert of all layers, as DeepSpeed wrote it in 2021",
                    where=folder.where(key),
                    hint=OTHERWISE,
                )
            rank = found.ranks.setdefault(int(match["mp"]), RankFiles())
            of_layer = rank.experts.setdefault(int(match["layer"]), {})
            _add(folder, of_layer, int(match["expert"]), key)
        elif name.startswith(UNIVERSAL):
            found.universal.append(key)
        for what, pattern in _BY_RANK.items():
            if match := pattern.fullmatch(name):
                rank = found.ranks.setdefault(int(match["mp"]), RankFiles())
                _add(folder, getattr(rank, what), int(match["rank"] or 0), key)
    for number, rank in found.ranks.items():
        if not rank.models:
            raise FormatError(
                "the file of the model is missing: it says which weights are where",
                where=folder.where(f"{tag}mp_rank_{number:02d}_model_states.pt"),
                hint=NOT_COPIED,
            )
        _check_all(folder, rank.models, len(rank.models))
        _check_all(folder, rank.optimizers, len(rank.optimizers))
        _check_all(folder, rank.expert_optimizers, len(rank.expert_optimizers), "expp")
    if not found.ranks:
        raise FormatError(
            "the file of the model is missing",
            where=folder.where(f"{tag}mp_rank_00_model_states.pt"),
            hint=NOT_COPIED,
        )
    first_files = {number: rank.models[0] for number, rank in found.ranks.items()}
    _check_all(folder, first_files, len(found.ranks), "mp")
    for others in found.layers.values():
        if others.keys() != next(iter(found.layers.values())).keys():
            raise FormatError(
                "not all ranks have files of the same layers", where=folder.where(tag), hint=MIXED
            )
    return found


def _add(folder: Folder, files: dict[int, str], number: int, key: str) -> None:
    if number in files:
        raise FormatError(
            "two files of one rank, or of one expert",
            where=str(folder.store.location),
            value=[files[number], key],
            hint="they are of different saves: remove the files of one of them",
        )
    files[number] = key


def _check_all(folder: Folder, there: Mapping[int, str], count: int, what: str = "pp") -> None:
    """Refuse files of ranks of which one is missing, or that are of more ranks than they say."""
    world = max([count, *(rank + 1 for rank in there)])
    some = next(iter(there.values()), "")
    # A name may say any number of ranks.
    missing = islice((rank for rank in range(world) if rank not in there), 8)
    number = re.compile(rf"(?<={what}_rank_)\d+")
    width = len((number.search(some) or [""])[0])
    named = [number.sub(f"{rank:0{width}}", some) for rank in missing]
    if named:
        raise FormatError(
            f"the files of {world} ranks belong together, {world - len(there)} are missing",
            where=str(folder.store.location),
            value=named,
            hint="copy the files of all ranks into one folder",
        )
    if len(there) > count:
        raise FormatError(
            f"the checkpoint is of {count} ranks, and there are files of {len(there)}",
            where=folder.where(there[count]),
            hint="they are of different saves: remove those that are too many",
        )


def degrees(
    tree: Mapping[str, Any], count: int, layers: Mapping[int, Mapping[int, str]], where: str
) -> tuple[int, int]:
    """How many stages of a pipeline, and ranks of tensor parallelism, there are, by what the first
    file says, the number of files, and those of layers.
    """
    said = tree.get("checkpoint_parallel_dimensions")
    if isinstance(said, dict):
        stages = document.integer(said.get("pp_degree"), f"{where}: pp_degree", least=1)
        columns = document.integer(said.get("tp_degree"), f"{where}: tp_degree", least=1)
    else:
        columns = len(layers) or count
        stages = count // columns
    if stages * columns != count or (layers and sorted(layers) != list(range(columns))):
        raise FormatError(
            f"the checkpoint is of {stages} stages of {columns} ranks of tensor parallelism each, "
            f"there are the files of {count}",
            where=where,
            hint="copy the files mp_rank_…_model_states.pt and layer_… of all ranks",
        )
    return stages, columns


def read_part(folder: Folder, rank: RankFiles, *, is_universal: bool) -> ModelPart:
    """What the files of one rank of model parallelism say, which is the same where it should be."""
    models = [read_tree(folder, rank.models[dp]) for dp in range(len(rank.models))]
    tree, where = models[0], folder.where(rank.models[0])
    said = as_dict(as_dict(tree.get("ds_config")).get("zero_optimization"))
    groups = said.get("mics_shard_size")
    if type(groups) is int and groups > 0:
        raise FormatError(
            "shards in groups of ranks (MiCS) are not read here",
            where=where,
            value=f"mics_shard_size {groups}",
            hint=OTHERWISE,
        )
    world = document.integer(tree.get("dp_world_size", 1), f"{where}: dp_world_size", least=1)
    optimizers = {
        dp: (folder.where(key), read_tree(folder, key).get("optimizer_state_dict"))
        for dp, key in rank.optimizers.items()
    }
    own = said.get("stage", 0) if is_universal else 0
    if optimizers:
        own = as_dict(optimizers[0][1]).get("zero_stage")
        own = own.args[0] if isinstance(own, Placeholder) and own.args else own
        # The optimizer for bfloat16 does not say it: it is of stage 1.
        own = 1 if own is None else own
        _check_all(folder, rank.optimizers, world)
    elif tree.get("param_shapes") is not None and not is_universal:
        raise FormatError(
            "the files of the optimizer are missing, in which the weights are",
            where=where,
            hint="copy them along; the copies of the weights that the model's file may have are "
            "what you get where you name that file itself",
        )
    stage = document.integer(own, f"{where}: stage", most=3)
    _check_all(folder, rank.models, world if stage == 3 else 1)
    for dp, other in enumerate(models):
        for name in ("global_steps", "dp_world_size", "param_shapes", "frozen_param_shapes"):
            # As text: the order of shapes counts, and an array is equal to nothing.
            if repr(other.get(name)) != repr(tree.get(name)):
                raise FormatError(
                    f"{name} is not that of rank 0",
                    where=folder.where(rank.models[dp]),
                    hint=MIXED,
                )
        if dp and other.get("shared_params") and not tree.get("shared_params"):
            raise FormatError(
                "it says which parameters are tied, as only the file of rank 0 does",
                where=folder.where(rank.models[dp]),
                hint="the files have each other's names: copy the folder again",
            )
    reordered = world > 1 and bool(said.get("round_robin_gradients"))
    found = [optimizers[dp] for dp in range(len(optimizers))]
    return ModelPart(where, rank, models, found, world, stage, reordered)


def read_tree(folder: Folder, key: str) -> dict[str, Any]:
    """What a file says, if it has the name that it was written by: nothing else tells whose pieces
    an optimizer's file has.
    """
    file = read_file(folder, key)
    if not isinstance(file.tree, dict):
        raise FormatError("not a file of DeepSpeed", where=folder.where(key))
    name = f"{file.name}.pt"
    is_of_rank = _OPTIMIZER.fullmatch(name) or _OF_EXPERTS.fullmatch(name)
    if is_of_rank and name != key.rpartition("/")[2]:
        raise FormatError(
            f"the file was written as {name}",
            where=folder.where(key),
            hint="the files have each other's names: copy the folder again",
        )
    return file.tree


def as_dict(value: Any) -> dict[Any, Any]:
    """What a file says, if it is a dictionary as it should be; else an empty one."""
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class RankPieces:
    """What the optimizer's file of one rank says: of each row its piece."""

    where: str
    said: Mapping[str, Any]
    teams: Sequence[Sequence[range]] = ()
    """The ranks that have cut each row among them."""
    weights: list[StateTensor] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]


class ByRank(list[Any]):
    """Each rank's piece of a state."""


def read_piece(
    where: str, said: Any, part: ModelPart, teams: Callable[[int, int], Sequence[range]]
) -> RankPieces:
    """What the optimizer's file of one rank says, its shape checked. `teams` tells the ranks that
    have the same experts, where so many ranks of all have cut a row.
    """
    if not isinstance(said, dict):
        raise FormatError("no optimizer is in the file", where=where)
    rows = said.get("fp32_flat_groups" if part.stage == 3 else "single_partition_of_fp32_groups")
    inner = said.get("optimizer_state_dict" if part.stage == 3 else "base_optimizer_state")
    if not isinstance(rows, (list, tuple)):
        raise FormatError("the file has no master weights", where=where, hint=MIXED)
    piece = RankPieces(where, said)
    for row, weight in enumerate(rows):
        if not _is_row(weight):
            raise FormatError(
                "a group of weights that is no row of numbers", where=where, value=row
            )
        piece.weights.append(weight)
    piece.teams = [
        teams(count, len(part.optimizers))
        for count in counts_of(said, len(rows), len(part.optimizers), where)
    ]
    if isinstance(inner, dict):
        groups, states = inner.get("param_groups"), inner.get("state")
        if not isinstance(groups, list) or not isinstance(states, dict):
            raise FormatError("not the state of an optimizer of torch", where=where)
        piece.groups = [group for group in groups if isinstance(group, dict)]
        piece.states = [as_dict(states.get(row)) for row in range(len(rows))]
    elif isinstance(inner, list) and len(inner) == len(rows):  # of an elastic checkpoint
        # What a group counts is not in its state.
        step = said.get("base_optimizer_state_step")
        own = {} if step is None else {"step": step}
        piece.states = [own | as_dict(state) for state in inner]
    else:
        raise FormatError("the file has no state of an optimizer", where=where, hint=MIXED)
    return piece


def counts_of(said: Mapping[str, Any], rows: int, world: int, where: str) -> list[int]:
    """How many ranks have cut each row."""
    told = said.get("partition_count", world)
    told = list(told) if isinstance(told, (list, tuple)) else [told] * rows
    if isinstance(parts := said.get("ds_zero_partition_groups"), list):
        told = [as_dict(part).get("partition_count") for part in parts]
    if len(told) != rows or any(
        type(count) is not int or count < 1 or world % count for count in told
    ):
        raise FormatError(
            f"its groups are cut for {sorted(set(map(str, told)))} ranks, there are the files of "
            f"{world}",
            where=where,
            hint="files of other ranks are missing or too many; shards in groups of ranks (MiCS) "
            "are not read here",
        )
    return told


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, StateTensor)
        and len(value.shape) == 1
        and value.extents[0].strides is None
    )


def states_of_row(
    row: int, pieces: Sequence[RankPieces], left_out: dict[str, str]
) -> dict[str, Any]:
    """The states of a row: those that are cut as it is by rank, others as they are."""
    by_rank = [piece.states[row] for piece in pieces]
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for state in by_rank for key in state):
        values = [state.get(key) for state in by_rank]
        fits = [_fits(value, piece, row) for value, piece in zip(values, pieces, strict=True)]
        if any(fits):
            if not all(fits):
                raise FormatError(
                    f"the pieces of {key} are not as long as those of the weights",
                    where=pieces[fits.index(False)].where,
                    hint=MIXED,
                )
            found[key] = ByRank(values)
        elif any(isinstance(value, StateTensor) and value.shape for value in values):
            left_out[f"optimizer/{row}/{key}"] = "a state that is not cut as the parameters are"
        elif len({likeness(value) for value in values}) > 1:
            rank = next(n for n, v in enumerate(values) if likeness(v) != likeness(values[0]))
            raise FormatError(
                f"its {key} is not that of rank 0", where=pieces[rank].where, hint=MIXED
            )
        else:
            found[key] = values[0]
    return found


def _fits(value: Any, piece: RankPieces, row: int) -> bool:
    """Whether a state is a row as long as that of the weights, of which the padding may be cut."""
    if not _is_row(value):
        return False
    paddings = piece.said.get("group_paddings")
    padding = paddings[row] if isinstance(paddings, list) and row < len(paddings) else 0
    length = piece.lengths[row]
    return value.shape[0] in (length, length + document.integer(padding, piece.where))


def likeness(value: Any) -> object:
    """Equal for values that are: of tensors in files as their checksums tell."""
    return value.content if isinstance(value, StateTensor) else repr(value)


def same_on_all(name: str, values: Sequence[Any], where: str) -> Any:
    """A value that is no part of a tensor, of the first of several files."""
    if len({likeness(value) for value in values}) > 1:
        raise FormatError(f"{name} is not the same in all files", where=where, hint=MIXED)
    return values[0]
