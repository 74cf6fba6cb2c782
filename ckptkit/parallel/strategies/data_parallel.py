"""Torch's engines of data parallelism, and the units in which they gather parameters: many tiny
modules in one go, large ones alone; and ZeRO-1, an optimizer whose state ranks share out.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ckptkit.errors import UsageError
from ckptkit.live.state.tensors import local_of
from ckptkit.live.wrappers.modules import CONTAINERS, own_param_groups, settled_by
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.options import (
    StrategyOptions,
    optimizer_for,
    sharder_of,
    size_of,
    tensors_of,
)

# Not all of them run in each step, so that they can only be gathered with what contains them.
_EXPERTS = re.compile(r"experts?")
_MIB = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Modules whose parameters are gathered by one collective."""

    names: tuple[str, ...]
    """The names of the layers in it, in the model or in a stage of it."""
    modules: tuple[nn.Module, ...]
    nbytes: int
    """The bytes of their parameters on this rank, before they were cut."""


def is_replicated(strategy: Strategy, options: StrategyOptions) -> bool:
    """Whether `ddp` is torch's `replicate`, which stands on FSDP: DDP takes no parameters that are
    cut, and stages badly. `replicate` takes both, but does not let its gradients be compressed.
    """
    has_ddp = any(axis.kind == "ddp" for axis in strategy.mesh.axes)
    in_stages = size_of(strategy, "pp") > 1 and options.compression is None
    return has_ddp and (size_of(strategy, "tp") > 1 or in_stages)


def check_parameters(model: nn.Module, strategy: Strategy, options: StrategyOptions) -> None:
    """Refuse dtypes and shapes that torch refuses in the first step, or by no name."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    kinds = {axis.kind for axis in strategy.mesh.axes}
    together = [list(name_of)] if "zero1" in kinds else []
    if sharder_of(strategy) or is_replicated(strategy, options):
        point = next((parameter for parameter in name_of if not parameter.ndim), None)
        if point is not None:
            raise UsageError(
                "a parameter without dims cannot be cut",
                where=name_of[point],
                value=str(strategy),
                hint="make it of shape (1,); or use ddp, which takes any",
            )
        found = [
            [parameter for module in unit.modules for parameter in module.parameters()]
            for unit in units_of(model, options.group_below)
        ]
        inside = {parameter for parameters in found for parameter in parameters}
        together += [*found, [parameter for parameter in name_of if parameter not in inside]]
    for parameters in together:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        other = next((p for p in trained if p.dtype != trained[0].dtype), None)
        if other is not None:
            raise UsageError(
                "parameters of several dtypes",
                where=name_of[other],
                value=f"{other.dtype} beside {trained[0].dtype}, {strategy}",
                hint="give them one dtype; or use ddp, which takes any",
            )


def wrap_units(
    model: nn.Module, mesh: DeviceMesh, options: StrategyOptions, sharder: str | None
) -> list[Unit]:
    """Wrap a model by `fully_shard`, or without a sharder by `replicate`; returns its units.

    - `fully_shard` cuts parameters over the last axis of the mesh, and repeats them over the one
      before.
    - `replicate` keeps them alike over the mesh. It stands in for DDP, which bears neither what
      tensor parallelism has cut nor a stage of a pipeline.
    """
    units = units_of(model, options.group_below)
    inside = {id(p) for unit in units for m in unit.modules for p in m.parameters()}
    rest = {name: p for name, p in model.named_parameters() if id(p) not in inside}
    layers = dict.fromkeys(name.rpartition(".")[0] for name in rest)
    own = [Unit(tuple(layers), (model,), nbytes_of(rest.values()))] if rest else []
    if sharder is None:
        for unit in units:
            replicate(list(unit.modules), mesh=mesh)
        replicate(model, mesh=mesh)
    else:
        precision = options.precision
        if isinstance(precision, torch.dtype):
            # Sums over many ranks lose too much in 16 bits.
            precision = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        settings: dict[str, Any] = {"mesh": mesh, "mp_policy": precision or MixedPrecisionPolicy()}
        if options.offload:
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        # ZeRO-2 keeps all parameters whole from the forward pass to the backward pass. Elsewhere
        # torch, told None, keeps only those of the outermost unit. The unit that was defined last
        # is kept too: with it a backward pass mostly begins.
        default = False if sharder == "zero2" else None
        for unit in units:
            reshards = False if len(units) > 1 and unit is units[-1] else default
            fully_shard(list(unit.modules), reshard_after_forward=reshards, **settings)
        fully_shard(model, reshard_after_forward=default, **settings)
    model.register_forward_hook(_after_forward)
    return [*units, *own]


def _after_forward(model: nn.Module, *_: Any) -> None:
    if not torch.is_grad_enabled():
        let_go(model)


def let_go(model: nn.Module) -> None:
    """Let go of what a forward pass has gathered for a backward pass that did not come: whoever
    looks at parameters and gradients would find those instead of the optimizer's.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def end_passes(modules: Iterable[nn.Module], *_: Any) -> None:
    """Let go of what any forward pass has gathered, where no backward pass can come any more.

    `let_go` does that for a forward that has ended. Another one may have raised. Or torch takes it
    to go on: of several modules that are gathered together, one was called by itself.
    """
    for module in (m for model in modules for m in model.modules() if isinstance(m, FSDPModule)):
        state: Any = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        for each in (state, *own_param_groups(module)):
            if each._training_state.name == "FORWARD":
                each._training_state = type(each._training_state).IDLE
        module.reshard()


def zero_grad(model: nn.Module) -> None:
    """Forget all gradients, the optimizer's also where parameters are gathered."""
    let_go(model)
    model.zero_grad()
    for module in model.modules():
        for group in own_param_groups(module) if isinstance(module, FSDPModule) else ():
            for each in group.fsdp_params:
                each.sharded_param.grad = None


def in_ddp(
    model: nn.Module, group: dist.ProcessGroup, device: torch.device, *, is_stage: bool
) -> nn.Module:
    """The model in `DistributedDataParallel`; as it is where nothing is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=group,
        # About eight buckets, so that sending overlaps with computing, each of them large enough
        # to be worth a collective.
        bucket_cap_mb=min(64.0, max(1.0, nbytes_of(trained) / _MIB / 8)),
        # Else gradients lie in memory twice: in `grad`, and in the buckets that are sent.
        gradient_as_bucket_view=True,
        # A pipeline's first step runs a stage once more to see its shapes, which buckets that are
        # made anew after the first backward pass do not survive; with this they stay as they are.
        find_unused_parameters=is_stage,
    )
    # Sparse gradients come in another form.
    if not is_stage and not any(getattr(module, "sparse", False) for module in model.modules()):
        # DDP makes its buckets anew after its first backward pass, and sums over several ranks
        # round otherwise in other buckets. Have it do so now: a resumed job begins with the
        # buckets that it would have had, and goes on to the bit.
        wrapped.module = _Sum(model)
        try:
            wrapped(None).backward()
        finally:
            wrapped.module = model
        wrapped.zero_grad()
    return wrapped


class _Sum(nn.Sequential):
    """Stands for a model, and uses each of its parameters without running it."""

    def forward(self, _: None) -> torch.Tensor:
        """One number, whose gradients all parameters get."""
        trained = (p for p in self.parameters() if p.requires_grad)
        return torch.stack([p.sum().real.float() for p in trained]).sum()


def check_reduced(model: nn.Module) -> None:
    """Refuse to go on after a backward pass in which DDP did not get all gradients.

    It has then not sent the buckets that wait for those. It would say so in the next step, which is
    too late: this one is made of what each rank has by itself.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        # What DDP begins its next step with, and which does nothing but look after the first.
        model.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        trained = ((n, p) for n, p in model.module.named_parameters() if p.requires_grad)
        missing = [name for name, parameter in trained if parameter.grad is None]
        raise UsageError(
            "some parameters got no gradient, so that replicas could not take the mean of any",
            value=missing[:10] or "frozen since the model was spread",
            hint="freeze what never runs before as_distributed; or use fsdp, where parameters may "
            "be left out of a step",
        ) from error


def units_of(model: nn.Module, below: int) -> list[Unit]:
    """The units of a model in the order of its modules; what is in none belongs to the model's own.

    - Elements of containers are gathered whole, and so are modules without containers, unless they
      hold more than half of the model.
    - Several that are smaller than `below` bytes make up a unit of about that size. Small ones just
      before the last module go with it, where all are trained in one dtype.
    - Modules that share parameters with others stay out.
    """
    whole = nbytes_of(model.parameters())
    if whole <= below:
        return []
    singles = list(_gathered_whole("", model, whole, below))
    # How many use each parameter, of the modules to gather and of all others: it can be in the unit
    # of one only.
    inside = {id(m) for single in singles for m in single.modules[0].modules()}
    others = (m for m in model.modules() if id(m) not in inside)
    users = Counter(id(p) for m in others for p in m.parameters(recurse=False))
    for single in singles:
        users.update({id(p) for p in single.modules[0].parameters()})
    # One that stands at two places shares them with itself, and runs more than once in a step.
    alone = [s for s in singles if all(users[id(p)] == 1 for p in s.modules[0].parameters())]
    units: list[Unit] = []
    run: list[Unit] = []
    is_parted = False
    for single in alone:
        # What is left before the last one goes with it, as a norm with the head after it.
        rest = [*run, single] if single is alone[-1] and not is_parted else []
        trained = {p.dtype for r in rest for p in r.modules[0].parameters() if p.requires_grad}
        is_last = bool(rest) and len(trained) < 2
        if single.nbytes >= below and not is_last:
            units.append(single)
            is_parted = bool(run)  # what is left lies before a large one, not before the last
            continue
        run.append(single)
        nbytes = sum(each.nbytes for each in run)
        if nbytes >= below:
            names = tuple(each.names[0] for each in run)
            units.append(Unit(names, tuple(each.modules[0] for each in run), nbytes))
            run, is_parted = [], False
    return units  # what is left is less than that, and comes with the model's own unit


def nbytes_of(parameters: Iterable[torch.Tensor]) -> int:
    """What distinct tensors occupy on this rank."""
    return sum(local_of(parameter).nbytes for parameter in set(parameters))


def _gathered_whole(prefix: str, module: nn.Module, whole: int, below: int) -> Iterator[Unit]:
    """The modules to gather as they are, one by one."""
    is_container = isinstance(module, CONTAINERS)
    # Not by named_children, which names a module once that stands at two places.
    for name, child in module._modules.items():
        nbytes = nbytes_of(child.parameters()) if child is not None else 0
        if child is None or not nbytes:
            continue
        if _is_taken_apart(child, nbytes, whole, below, is_element=is_container):
            yield from _gathered_whole(f"{prefix}{name}.", child, whole, below)
        else:
            yield Unit((f"{prefix}{name}",), (child,), nbytes)


def _is_taken_apart(
    module: nn.Module, nbytes: int, whole: int, below: int, *, is_element: bool
) -> bool:
    """Whether to gather what is inside of a module rather than all of it."""
    if isinstance(module, CONTAINERS):
        return True
    names = (node for name, _ in module.named_modules() for node in name.split("."))
    if nbytes < below or any(_EXPERTS.fullmatch(node) for node in names):
        return False
    has_containers = any(isinstance(child, CONTAINERS) for child in module.modules())
    if type(module).__module__.startswith("torch.nn.") and not has_containers:
        return False  # such as MultiheadAttention, which uses parameters of what it does not call
    is_most = 2 * nbytes > whole
    return (is_most or (has_containers and not is_element)) and any(
        True for child in module.children() for _ in child.parameters()
    )


def zero1_optimizer(
    modules: Sequence[nn.Module],
    trained: Sequence[nn.Parameter],
    options: StrategyOptions,
    group: dist.ProcessGroup,
) -> Optimizer:
    """The optimizer of this rank's share of the parameters."""
    make: Any = options.optimizer
    settings, groups = dict(options.optimizer_options), cast("Sequence[Any]", trained)
    if not isinstance(make, type):
        # A function takes parameters, but torch would pass it groups. So it is called here, with
        # all parameters, and what it made is narrowed to the groups of the share.
        whole = optimizer_for(options, trained)

        def narrowed(groups: list[dict[str, Any]]) -> Optimizer:
            whole.param_groups = groups
            kept = {parameter for each in groups for parameter in each["params"]}
            for other in whole.state.keys() - kept:
                del whole.state[other]
            return whole

        groups, settings, make = [*whole.param_groups], {}, narrowed
    shared: ZeroRedundancyOptimizer
    if options.overlap:
        shared = OverlappingZero1(modules, groups, make, group, **settings)
    else:
        shared = ZeroRedundancyOptimizer(groups, make, process_group=group, **settings)
    # Schedulers look there for what they may change.
    shared.defaults = {**shared.optim.defaults, **shared.defaults}
    return shared


class OverlappingZero1(ZeroRedundancyOptimizer):
    """Returns from `step` with parameters still on their way from the ranks that updated them.

    The forward pass waits for each layer as it comes to it, and for what it uses of layers that it
    does not call; when it has ended all is here. `state_dict`, checkpoints and the next step wait
    for everything. Other code that reads parameters after a step calls `wait` before.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        make: Callable[..., Optimizer],
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        self._coming: dict[torch.Tensor, dist.Work] = {}
        super().__init__(parameters, cast("Any", make), process_group=group, **options)
        self.register_step_pre_hook(lambda *_: self.wait())
        for module in modules:
            self._watch(module.module if isinstance(module, DistributedDataParallel) else module)

    @property
    def on_their_way(self) -> frozenset[torch.Tensor]:
        """The parameters that nobody has waited for yet."""
        return frozenset(self._coming)

    def wait(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until these parameters, or all of them, are here."""
        for parameter in list(self._coming) if parameters is None else parameters:
            if work := self._coming.pop(parameter, None):
                work.wait()

    def _sync_params(self) -> None:
        # In the order of the model: on all ranks the same, as broadcasts have to be, and about that
        # in which the next forward needs them.
        torch_knows = cast("Any", self)
        for parameter in torch_knows._index_to_param:
            rank = torch_knows._param_to_rank[parameter]
            source = dist.get_global_rank(self.process_group, rank)
            work = dist.broadcast(parameter.data, source, self.process_group, async_op=True)
            self._coming[parameter] = work

    def _watch(self, module: nn.Module) -> None:
        """Wait where parameters are used: in layers, by operations on what layers have that are not
        called, and by those who save or fill the module.
        """
        # The hooks live as long as the model, which may outlive the optimizer.
        optimizer = weakref.ref(self)

        def waiting_for(parameters: Iterable[torch.Tensor] | None) -> Callable[..., None]:
            wanted = None if parameters is None else list(parameters)

            def wait(*_: object) -> None:
                if (alive := optimizer()) is not None:
                    alive.wait(wanted)

            return wait

        for unit in units_of(module, 1):
            for layer in unit.modules:
                layer.register_forward_pre_hook(waiting_for(layer.parameters()))
        passes: list[Any] = []

        def begin(*_: object) -> None:
            alive = optimizer()
            if alive is None or not alive.on_their_way:
                return
            # What is compiled would be so anew, with the mode and without it.
            if torch.compiler.is_compiling() or any(
                each._compiled_call_impl is not None or hasattr(each, "_orig_mod")
                for each in module.modules()
            ):
                alive.wait()
            else:
                passes.append(_WaitingMode(alive))
                passes[-1].__enter__()

        at_its_end = waiting_for(module.parameters())

        def end(*_: object) -> None:
            if passes:
                passes.pop().__exit__(None, None, None)
            at_its_end()  # a loss may use the others

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        everything = waiting_for(None)
        module.register_state_dict_pre_hook(everything)
        module.register_load_state_dict_pre_hook(everything)
        settled_by(module, everything)


class _WaitingMode(TorchFunctionMode):
    """Has each of torch's operations wait for the parameters that it takes."""

    def __init__(self, optimizer: OverlappingZero1) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        self._optimizer.wait(tensors_of((*args, *named.values())))
        return func(*args, **named)
