"""DeepSpeed engines whose checkpoints are the steps of a run: `save_checkpoint(engine, "runs/7b")`
and `load_checkpoint(engine, "runs/7b")`, in place of the engine's methods.

What an engine trains is shown to a `Checkpointer` as a model and an optimizer of torch, whose
tensors are rows of the master weights and of their states. The engine's own are rows of elements of
many parameters. Only it knows which: all that is private in DeepSpeed is looked at here, as it is
in 0.19.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from ckptkit.checkpoint.places import Place
from ckptkit.errors import NotFoundError, UnsupportedTypeError, UsageError
from ckptkit.live import Checkpointer, Restored, StateMismatchError, load
from ckptkit.live.state.entries import canonical_names, every_module, state_of
from ckptkit.live.state.tensors import local_of, spread_as
from ckptkit.plugins import Framework, extra_beside, opened
from ckptkit.plugins.deepspeed_elements import ElementCut, HeldElements, Move, exchange

DEEPSPEED = Framework("deepspeed", "0.19", "deepspeed")

# What torch calls the optimizers that DeepSpeed has versions of.
_AS_TORCH = {
    "FusedAdam": "AdamW",
    "DeepSpeedCPUAdam": "AdamW",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
    "DeepSpeedCPUAdagrad": "Adagrad",
}
# What each kind of optimizer calls its groups of parameters, and the rows of their master weights.
_ROWS = {
    "DeepSpeedZeroOptimizer": ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
    "FP16_Optimizer": ("fp16_groups", "fp32_groups_flat"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
}
_OWN = "deepspeed"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def save_checkpoint(
    engine: Any,
    checkpoints: Checkpointer | Place,
    step: int | None = None,
    *,
    extra: Mapping[str, object] | None = None,
    **objects: Any,
) -> str | None:
    """Save a step, by default that of the engine's counter, and return its location, or None where
    it was skipped; every rank calls it.

    `checkpoints` is the location of a run, or a `Checkpointer` with all that one can do. `extra` is
    what DeepSpeed calls `client_state`; `objects` are `dataloader=` and `state=`.
    """
    state = EngineState(engine)
    state.gather()
    own: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
    if state.scaler is not None:
        own["loss_scaler"] = {key: getattr(state.scaler, key, None) for key in _SCALE}
    kept = extra_beside({_OWN: own}, extra)
    with opened(checkpoints) as checkpointer:
        return checkpointer.save(
            engine.global_steps if step is None else step,
            extra=kept,
            model=SimpleNamespace(model=state.model, mesh=state.mesh),
            optimizer=state.optimizer,
            scheduler=engine.lr_scheduler,
            **objects,
        )


def load_checkpoint(
    engine: Any, checkpoints: Checkpointer | Place, *, step: int | None = None, **how: Any
) -> Restored | None:
    """Load the newest step of a run, or the one asked for, of any stage and number of ranks; None
    where there is none yet. Every rank calls it. A folder that DeepSpeed wrote is loaded, too.

    `how` is what `Checkpointer.restore` takes: `fallback=True`, `skip=[…]`, `dataloader=`.
    """
    state = EngineState(engine)
    state.gather()  # what the step does not have stays
    model = SimpleNamespace(model=state.model, mesh=state.mesh)
    trained: dict[str, Any] = {"model": model, "optimizer": state.optimizer}
    with opened(checkpoints) as checkpointer:
        restored = checkpointer.restore(step=step, scheduler=engine.lr_scheduler, **trained, **how)
        is_theirs = restored is None
        if restored is None:
            how.pop("fallback", None)
            try:
                restored = load(checkpointer._store, **trained, **how)
            except NotFoundError:
                return None
    state.hand_back()
    # What DeepSpeed saves lies beside what its user saved along.
    said = restored.extra if is_theirs else restored.extra.get(_OWN, {})
    if is_theirs and engine.lr_scheduler is not None and "lr_scheduler" in said:
        engine.lr_scheduler.load_state_dict(said["lr_scheduler"])
    engine.global_steps = restored.step
    for name in _COUNTERS:
        if name in said:
            setattr(engine, name, said[name])
    for key, value in (said.get("loss_scaler") or {}).items():
        if key in _SCALE and value is not None and hasattr(state.scaler, key):
            setattr(state.scaler, key, value)
    return restored


class _Held(NamedTuple):
    """A parameter whose master weight is not in the module as it is."""

    parameter: nn.Parameter
    share: HeldElements
    group: int | None
    """The number of the optimizer's group that it is in; None where nothing steps it."""


class EngineState:
    """A model and an optimizer that stand in for those of an engine."""

    def __init__(self, engine: Any) -> None:
        _check(engine)
        self._engine, self._wrapper = engine, engine.optimizer
        self._kinds = {each.__name__ for each in type(self._wrapper).__mro__}
        self._stage = engine.zero_optimization_stage()
        if "BF16_Optimizer" in self._kinds:  # which cuts as stage 1 does, whatever the stage
            self._stage = 1
        self._group: Any = None
        self.mesh = self._mesh()
        """The mesh of the whole job."""
        self._held: dict[nn.Parameter, _Held] = {}
        self.model: nn.Module = engine.module
        self.optimizer: Any = self._wrapper
        if isinstance(self._wrapper, Optimizer):  # nothing is cut, and nothing kept twice
            return
        self._inner: Any = self._private("optimizer")
        held = self._shares_of_stage_3() if self._stage == 3 else self._shares()
        self._held = {each.parameter: each for each in held}
        self._stand_ins = {
            each.parameter: nn.Parameter(
                self._spread(each.share, each.share.row.dtype), requires_grad=False
            )
            for each in self._held.values()
        }
        self.model = _Model(engine.module, self._stand_ins)
        self._names = {p: name for name, p in reversed(self.model._parameters.items())}
        groups = [{**group, "params": []} for group in self._inner.param_groups]
        for each in self._held.values():
            if each.group is not None:
                groups[each.group]["params"].append(self._stand_ins[each.parameter])
        kind = type(self._inner).__name__
        kind = _AS_TORCH.get(kind, kind) if getattr(self._inner, "adam_w_mode", True) else "Adam"
        self.optimizer = type(kind, (_Optimizer,), {})(groups)

    @property
    def scaler(self) -> Any:
        """What scales the loss by turns more and less; None where nothing does."""
        for name, says in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
            found = getattr(self._wrapper, name, None)
            if getattr(found, says, False):
                return found
        return None

    @torch.no_grad()
    def gather(self) -> None:
        """Have in the rows what the engine has. A collective."""
        moves: list[Move] = []
        for parameter, share, group in self._held.values():
            stand_in = self._stand_ins[parameter]
            moves.append(share.to_rows(share.row, local_of(stand_in)))
            state = {} if group is None else self._inner.state.get(share.row, {})
            for key, value in state.items():
                if _is_cut(key, value, share.row):
                    kept = self._spread(share, value.dtype)
                    moves.append(share.to_rows(value, local_of(kept)))
                elif torch.is_tensor(value) and value.ndim:
                    raise UnsupportedTypeError(
                        f"the {type(self._inner).__name__} keeps what is not cut as its "
                        "parameters are",
                        where=f"optimizer state {key}",
                        value=tuple(value.shape),
                        hint="engine.save_checkpoint(…) is its own way",
                    )
                else:  # torch counts steps in tensors, other optimizers in numbers
                    kept = torch.tensor(float(value)) if key == "step" else value
                self.optimizer.state[stand_in][key] = kept
        exchange(moves, self._group)

    @torch.no_grad()
    def hand_back(self) -> None:
        """Have in the engine what the rows have. A collective."""
        if not self._held:
            return
        members: dict[torch.Tensor, list[_Held]] = {}
        for each in self._held.values():
            members.setdefault(each.share.row, []).append(each)
        values = {row: self._common_values(of_row) for row, of_row in members.items()}
        # From here on the engine changes.
        if self._stage == 3:
            self._private("checkpoint_event_prologue")()
        moves = [
            share.from_rows(local_of(self._stand_ins[parameter]), share.row)
            for parameter, share, _ in self._held.values()
        ]
        for row, of_row in members.items():
            if of_row[0].group is not None:
                moves += self._take_states(row, of_row, values[row])
        exchange(moves, self._group)
        for group, taken in zip(self._inner.param_groups, self.optimizer.param_groups, strict=True):
            group |= {key: value for key, value in taken.items() if key != "params"}
        if self._stage == 3:
            for number in range(len(self._private("fp32_partitioned_groups_flat"))):
                self._private("_reassign_or_swap_out_partitioned_parameters")(number)
            self._private("checkpoint_event_epilogue")()
        elif self._stage:
            self._private("update_lp_params")()
        else:
            for parameter, share, _ in self._held.values():
                parameter.copy_(share.elements(share.row).view(share.shape))

    def _common_values(self, members: Sequence[_Held]) -> dict[str, Any]:
        """What is no tensor of elements in the states of parameters that lie in one row: the
        engine has it once for all of them.
        """
        found: dict[str, Any] = {}
        first: dict[str, str] = {}
        for stand_in in (self._stand_ins[each.parameter] for each in members):
            for key, value in self.optimizer.state.get(stand_in, {}).items():
                if _is_cut(key, value, stand_in):
                    continue
                plain = local_of(value).item() if torch.is_tensor(value) else value
                name = self._names[stand_in]
                if found.setdefault(key, plain) != plain:
                    raise StateMismatchError(
                        f"{key} is {found[key]} for {first[key]}, {plain} for {name}, and the "
                        "engine has one for both",
                        where=f"optimizer/{name}/{key}",
                        hint="make them two groups of the optimizer, or leave its state as it is: "
                        'skip=["optimizer"]',
                    )
                first.setdefault(key, name)
        return found

    def _take_states(
        self, row: torch.Tensor, members: Sequence[_Held], values: Mapping[str, Any]
    ) -> Iterator[Move]:
        """What fills the state that is kept for a row; it is there and of zeros where it was not,
        and what was not saved is gone.
        """
        states = [self.optimizer.state.get(self._stand_ins[it.parameter], {}) for it in members]
        cut = {k: v.dtype for state in states for k, v in state.items() if k not in values}
        mine = self._inner.state.pop(row, {})
        if not cut and not values:
            return
        kept = self._inner.state[row]
        for key, dtype in cut.items():
            there = mine.get(key)
            kept[key] = torch.zeros_like(row, dtype=dtype) if there is None else there.zero_()
            for each, state in zip(members, states, strict=True):
                if key in state:
                    yield each.share.from_rows(local_of(state[key]), kept[key])
        for key, value in values.items():
            there = mine.get(key)
            if torch.is_tensor(there):
                kept[key] = there.fill_(value)
            elif key == "step":
                is_torch = type(self._inner).__module__.startswith("torch.")
                kept[key] = torch.tensor(float(value)) if is_torch else int(value)
            else:
                kept[key] = value

    def _spread(self, share: HeldElements, dtype: torch.dtype) -> torch.Tensor:
        """Rows to be filled, as what all ranks have together."""
        rows = share.empty_rows(dtype)
        if self._group is None:
            return rows
        whole = torch.empty(share.shape, device="meta")
        meta = TensorMeta(whole.shape, whole.stride(), dtype)
        return spread_as(rows, DTensorSpec(self._rows_mesh, (Shard(0),), tensor_meta=meta))

    def _mesh(self) -> DeviceMesh:
        """The mesh of the job; on the way, who shares out what is trained."""
        engine, kind = self._engine, f"zero{self._stage}" if self._stage else "ddp"
        device, world = engine.device.type, dist.get_world_size()
        if engine.pipeline_parallelism:
            grid = DEEPSPEED.private(engine, "grid")
            stages = grid.get_pipe_parallel_world_size()
            group = grid.get_data_parallel_group()
            mesh = DeviceMesh.from_group(
                [grid.get_pipe_parallel_group(), group],
                device,
                mesh=torch.arange(world).view(stages, -1),
                mesh_dim_names=("pp", kind),
            )
            self._rows_mesh = mesh[kind]
        else:
            group = DEEPSPEED.private(engine, "seq_data_parallel_group")
            all_ranks: Any = dist.group.WORLD
            group = all_ranks if group is None else group
            if group.size() != world:
                raise _refusal(f"{group.size()} of {world} ranks share out the parameters")
            mesh = self._rows_mesh = DeviceMesh.from_group(group, device, mesh_dim_names=(kind,))
        if self._stage:
            self._group = group
        return mesh

    def _shares_of_stage_3(self) -> Iterator[_Held]:
        """Each parameter is cut for itself; groups have rows, which may go on in another."""
        numbers = self._private("sub_group_to_group_id")
        rows = self._private("fp32_partitioned_groups_flat")
        places: dict[Any, tuple[torch.Tensor, int, int | None]] = {}
        for at_group, parameters in enumerate(self._private("fp16_groups")):
            at = 0
            for each in parameters:
                places[each] = rows[at_group], at, numbers[at_group]
                at += each.partition_numel()
        for each in self._engine.module.parameters():  # what nothing steps
            places.setdefault(each, (each.ds_tensor, 0, None))
        rank, ranks = self._group.rank(), self._group.size()
        for each, (row, at, number) in places.items():
            shape = tuple(each.ds_shape)
            cut = ElementCut(torch.Size(shape).numel(), each.partition_numel())
            yield _Held(each, HeldElements(shape, cut, row, at, rank, ranks), number)

    def _shares(self) -> Iterator[_Held]:
        """Groups of parameters are one row each, which the ranks have cut into equal parts, or all
        of them have as a whole.
        """
        group = self._group
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        kind = next(kind for kind in _ROWS if kind in self._kinds)
        groups, rows = map(self._private, _ROWS[kind])
        offsets: Any = None
        if kind == "DeepSpeedZeroOptimizer":
            offsets = self._private("round_robin_bit16_offsets")
        for number, parameters in enumerate(groups):
            before = 0
            for at, each in enumerate(parameters):
                size = each.numel()
                row = rows[number]
                if not torch.is_tensor(row):  # one for each parameter
                    row, before = row[at], 0
                if offsets is not None:
                    before = offsets[number][at]
                cut = ElementCut(size, row.numel(), before)
                start, _ = cut.of(rank)
                begin = before + start - rank * row.numel()
                yield _Held(
                    each, HeldElements(tuple(each.shape), cut, row, begin, rank, ranks), number
                )
                before += size

    def _private(self, name: str) -> Any:
        return DEEPSPEED.private(self._wrapper, name)


class _Model(nn.Module):
    """The tensors of a module by name, some of them others than the module itself has."""

    def __init__(self, module: nn.Module, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> None:
        super().__init__()
        self._of = [module]  # not as a module in this one
        self._extra: dict[str, tuple[str, Any]] = {}
        canonical = canonical_names(every_module(module))
        for key, value in state_of(module).items():
            name = canonical(key)
            if isinstance(value, nn.Parameter):
                self._parameters[name] = stand_ins.get(value, value)
            elif isinstance(value, torch.Tensor):
                self._buffers[name] = value
            else:
                self._extra[name] = key, value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        own = super().state_dict(*args, **kwargs)
        return {**own, **{name: value for name, (_, value) in self._extra.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        # Called with what is no tensor; these are filled in place.
        given = {self._extra[name][0]: value for name, value in state_dict.items()}
        return self._of[0].load_state_dict(given, strict=False)


class _Optimizer(Optimizer):
    """Has what an optimizer keeps, and steps nothing."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        # Not torch's own, which wants parameters in all groups; a stage of a pipeline may have
        # none in some.
        self.state = defaultdict(dict)
        self.param_groups = groups
        self.defaults = {}

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("DeepSpeed's engine does the steps")


def _is_cut(key: str, value: object, like: torch.Tensor) -> bool:
    """Whether what an optimizer keeps has an element for each of the parameter's."""
    return torch.is_tensor(value) and value.shape == like.shape and key != "step"


def _check(engine: Any) -> None:
    """Refuse what is no engine, or trains what cannot be kept."""
    kind = DEEPSPEED.module("deepspeed").DeepSpeedEngine
    if not isinstance(engine, kind):
        raise UsageError(
            "not an engine of DeepSpeed",
            value=type(engine).__name__,
            hint="pass what deepspeed.initialize(…) returned first",
        )
    optimizer = engine.optimizer
    config = DEEPSPEED.private(engine, "_config").zero_config
    param, states = config.offload_param, config.offload_optimizer
    kinds = {each.__name__ for each in type(optimizer).__mro__}
    known = {"DeepSpeedZeroOptimizer_Stage3", "Optimizer", *_ROWS}
    inner = getattr(optimizer, "optimizer", optimizer)
    parts = engine.mp_world_size
    if engine.pipeline_parallelism:  # where that counts its stages too
        parts = DEEPSPEED.private(engine, "grid").get_slice_parallel_world_size()
    for is_so, what in (
        (
            not kinds & known or not isinstance(inner, Optimizer),
            "its optimizer is not known",
        ),
        (engine.has_moe_layers, "ranks have experts (MoE) of their own"),
        (parts > 1, "ranks have parts of tensors (tensor parallelism)"),
        (kinds & {"MiCS_Optimizer"}, "shards are in groups of ranks (MiCS)"),
        (engine.zenflow, "ZenFlow keeps some of the state elsewhere"),
        (any(each and each.device == "nvme" for each in (param, states)), "its state is on NVMe"),
        (
            getattr(optimizer, "offloaded_states", ()),
            "engine.reload_states() comes first",
        ),
        (engine.curriculum_learning_enabled(), "curriculum learning draws its data"),
        (engine.random_ltd_enabled(), "random layers drop tokens"),
    ):
        if is_so:
            raise _refusal(what)


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"a run cannot keep what this engine trains: {what}",
        hint="engine.save_checkpoint(…) is its own way, and ckptkit.open(…) reads most of that",
    )
