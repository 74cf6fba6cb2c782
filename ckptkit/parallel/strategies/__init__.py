"""Any strategy in one line: `as_distributed`, from a model and a text to a model spread over ranks,
by torch's own engines. It looks at both, decides, cuts and wraps.

What it returns is in `distributed`: a model that ranks train together. `options` has the choices,
which are checked before anything changes. Of the engines, `data_parallel` wraps for ddp and fsdp,
and shares out the optimizer of zero1; `tensor_parallel` cuts modules by rules; `pipeline` cuts the
model into stages, and has the schedules that run them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, update_wrapper
from itertools import zip_longest
from typing import Any, Unpack, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import OneRank, Ranks
from ckptkit.errors import PeerError, StrategyError, UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.optimizers.methods import compression_of
from ckptkit.parallel.ranks import init
from ckptkit.parallel.strategies.data_parallel import (
    Unit,
    check_parameters,
    in_ddp,
    is_replicated,
    wrap_units,
    zero1_optimizer,
)
from ckptkit.parallel.strategies.distributed import Distributed, SpreadJob, all_ranks
from ckptkit.parallel.strategies.options import (
    Choices,
    StrategyOptions,
    check_optimizer,
    microbatches_of,
    optimizer_for,
    resolved,
    sharder_of,
    size_of,
)
from ckptkit.parallel.strategies.pipeline import StagePipeline, split_into_stages
from ckptkit.parallel.strategies.tensor_parallel import parallelize, styles_of, try_out
from ckptkit.plan.read import batches

_SYNC_BYTES = 250 * 2**20

log = logging.getLogger("ckptkit.parallel")

# By a model, and by what was made of it. Not in the models themselves, whose copies and pickles
# would have it too; and weak, as a model may outlive what it was spread as.
_spread_as: WeakKeyDictionary[object, weakref.ref[Distributed]] = WeakKeyDictionary()


def as_distributed(
    model: nn.Module | Distributed | Any, spec: str | Strategy, **choices: Unpack[Choices]
) -> Distributed:
    """Spread a model over the ranks of the job as a text such as `fsdp` or `pp:2,tp:2,fsdp:2` says.

    Every rank calls it alike, with the whole model; values are those of rank 0. The model given is
    taken over. Called again with what it made (the Distributed, or its model while that is in use)
    and the same strategy it returns the same, and refuses other choices. The choices are keywords
    (`optimizer=`, `rules=`, `microbatches=`, …): `Choices` lists them, and docs/strategies.md has a
    paragraph for each.
    """
    if str(spec).strip() != "single" and not dist.is_initialized():
        joined = init()
        if not dist.is_initialized():
            raise UsageError(
                "these ranks have no process group of torch's, which its engines need",
                value=f"{joined.world_size} ranks in memory",
                hint="use gloo, nccl or mpi: ckptkit.parallel.init()",
            )
    # Look at the model, and decide: a refusal changes nothing, and is one on all ranks.
    known = _spread_as.get(model) if isinstance(model, (nn.Module, _PipelineSchedule)) else None
    made = None if known is None else known()
    plain = model if made is None else made  # what it was spread as, as long as that is in use
    is_known = isinstance(plain, Distributed)
    with nullcontext(OneRank()) if is_known else all_ranks("spread") as ranks:
        if not isinstance(plain, (Distributed, nn.Module)):
            raise UsageError(
                "no module",
                value=type(model).__name__,
                hint="pass the plain model, or what as_distributed has made of it",
            )
        strategy = resolved(spec, dist.get_world_size() if dist.is_initialized() else 1)
        options = StrategyOptions.of(strategy, choices)
        if isinstance(plain, Distributed):
            _check_same(plain, strategy, options)
            return plain
        options.check(strategy)
        _check_plain(plain)
        check_parameters(plain, strategy, options)
        check_optimizer(plain, options, strategy)
        check_alike(ranks, _compared(plain, strategy, options))
    made = _spread(plain, SpreadJob.of(strategy, options, device_of(plain, options.device)))
    for each in (model, made.model, *made.modules):
        _spread_as[each] = weakref.ref(made)
    return made


def _spread(model: nn.Module, job: SpreadJob) -> Distributed:
    """Carry out what was decided. What rules, an example or stages refuse, they refuse before the
    model is cut.
    """
    strategy, options = job.strategy, job.options
    _take_off_autocast(model)
    tp, pp = size_of(strategy, "tp"), size_of(strategy, "pp")
    styles = styles_of(model, tp, options) if tp > 1 else {}

    # Begin alike; then the cut model can be compared with the whole one, before that is gone.
    _begin_alike(model, job)
    if styles and options.example is not None:
        try_out(model, job.along("tp"), styles, options.example, job.device)

    # Cut the model into stages, keep those of this rank, cut their modules by the styles, and wrap
    # them.
    modules, numbers, count = [model], [0], pp * options.stages_per_rank
    if pp > 1:
        first = job.along("pp").get_local_rank()
        numbers = [first + pp * turn for turn in range(options.stages_per_rank)]
        with all_ranks("stages") as ranks:
            stages = split_into_stages(model, count, options, ranks)
            check_alike(ranks, {"split into stages": stages.compared()})
        modules = stages.made(numbers, options.split)
    wrapped = [_wrapped(module, job, styles) for module in modules]
    modules, units = [module for module, _ in wrapped], [unit for _, own in wrapped for unit in own]

    # What steps, what compresses, and what runs the stages.
    compressor = None if options.compression is None else compression_of(options.compression)
    for module in modules:
        # A stage of which nothing is trained is in no wrapper.
        if compressor and isinstance(module, (DistributedDataParallel, FSDPModule)):
            compressor.attach(module)
    pipeline = None
    if pp > 1:
        pipeline = StagePipeline(
            modules,
            options,
            numbers=numbers,
            count=count,
            device=job.device,
            group=job.along("pp").get_group(),
        )
    made = Distributed(
        job,
        modules,
        optimizer=_optimizer_of(modules, job),
        pipeline=pipeline,
        compression=compressor,
        units=units,
    )
    if units and dist.get_rank() == 0:
        layers = sum(len(unit.names) for unit in units)
        plural = "" if len(units) == 1 else "s"
        log.info("%s layers in %s unit%s", f"{layers:,}", f"{len(units):,}", plural)
    return made


def _check_same(known: Distributed, strategy: Strategy, given: StrategyOptions) -> None:
    """Refuse what is chosen otherwise than before; what is left out stays as it is."""
    if known.strategy != strategy:
        raise StrategyError(
            f"the model is spread as {known.strategy} already",
            value=str(strategy),
            hint="make the model anew, spread that, and load a checkpoint of this one",
        )
    before = known.options
    # An option that is as it would be by default may have been left out.
    default = StrategyOptions(microbatches=microbatches_of(None, strategy)).compared()
    first, now = before.compared(), given.compared()
    differing = [name for name in first if now[name] not in (first[name], default[name])]
    if given.optimizer_options and given.optimizer_options != before.optimizer_options:
        differing.append("optimizer_options")
    if differing:
        raise UsageError(
            f"the model is spread with another {differing[0]} already",
            value=differing,
            hint="leave these out, or spread the model anew",
        )
    if given.optimizer is None or given.optimizer is before.optimizer:
        return
    if before.optimizer is None:
        raise UsageError(
            "the model was spread without an optimizer",
            hint="pass optimizer= in the first call",
        )
    if given.optimizer is not known.optimizer:
        raise UsageError(
            "the model has another optimizer already",
            value=type(known.optimizer).__name__,
            hint="leave it out",
        )


def _check_plain(model: nn.Module) -> None:
    """Refuse a model that something else has spread or wrapped, or that has no values."""
    wrapped = next(
        (m for m in model.modules() if isinstance(m, (DistributedDataParallel, FSDPModule))), None
    )
    tensor = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if wrapped is not None or tensor is not None:
        raise UsageError(
            "the model is spread already",
            value=type(model if wrapped is None else wrapped).__name__,
            hint="pass the plain model",
        )
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise UsageError(
            "the model is on the meta device: it has no values to begin with",
            where=empty,
            hint="make it on the host; or model.to_empty(device=…), and load a checkpoint",
        )


def device_of(model: nn.Module, given: torch.device | str | None) -> torch.device:
    """Where to compute: on this rank's GPU where ranks communicate from there, else where the
    model is.
    """
    if given is not None:
        return torch.device(given)
    if dist.is_initialized() and "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _wrapped(
    module: nn.Module, job: SpreadJob, styles: Mapping[str, Any]
) -> tuple[nn.Module, list[Unit]]:
    """A model or a stage, cut by the styles, and then spread by an engine of data parallelism; the
    units in which that gathers it.
    """
    options, sharder = job.options, sharder_of(job.strategy)
    is_stage = size_of(job.strategy, "pp") > 1
    # `fully_shard` casts by itself.
    if not sharder and isinstance(options.precision, torch.dtype):
        own = module.forward
        halved = partial(_in_autocast, job.device.type, options.precision, own)
        vars(module)["forward"] = update_wrapper(halved, own)
    if styles:
        parallelize(module, job.along("tp"), styles)
    if sharder:  # which moves the model to the device unit by unit
        return module, wrap_units(module, job.along("ddp", sharder), options, sharder)
    module = module.to(job.device)
    if is_replicated(job.strategy, options):
        return module, wrap_units(module, job.along("ddp"), options, None)
    if "ddp" in job.axis_of or "zero1" in job.axis_of:
        group = job.along("ddp", "zero1").get_group()
        module = in_ddp(module, group, job.device, is_stage=is_stage)
    return module, []


def _in_autocast(
    device: str, precision: torch.dtype, forward: Callable[..., Any], *inputs: Any, **named: Any
) -> Any:
    """Run a forward in half precision.

    What torch makes of a decorated one is a function of this very module: a copy of the module,
    such as an average of its weights, would run on these weights.
    """
    with torch.autocast(device, precision):
        return forward(*inputs, **named)


def _take_off_autocast(model: nn.Module) -> None:
    """A model that is spread anew, or a copy of one, computes as it is told now."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _in_autocast:
            del vars(module)["forward"]
            if module.forward != forward.args[-1]:  # somebody else's
                vars(module)["forward"] = forward.args[-1]


def _optimizer_of(modules: Sequence[nn.Module], job: SpreadJob) -> Optimizer | None:
    """The optimizer of what this rank has; of ZeRO-1, one whose state is shared out, and with
    `overlap` parameters may be on their way while the modules run.
    """
    options = job.options
    if options.optimizer is None:
        return None
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    group = job.along("zero1").get_group() if "zero1" in job.axis_of else None
    # Each stage may have groups of its own.
    with nullcontext(OneRank()) if "pp" in job.axis_of else all_ranks("optimizer") as ranks:
        if isinstance(options.optimizer, Optimizer):
            made = options.optimizer
        elif group is not None and trained:
            made = zero1_optimizer(modules, trained, options, group)
        else:
            made = optimizer_for(options, trained)
            if len({p.device_mesh if isinstance(p, DTensor) else None for p in trained}) > 1:
                made.register_step_pre_hook(_one_by_one)
        check_alike(ranks, {"optimizer_options": _described(made.param_groups)})
    return made


def _one_by_one(optimizer: Optimizer, *_: Any) -> None:
    """Step parameters one by one, as those of different meshes cannot go through one operation.

    Set in each step: a load brings the options of the strategy that saved.
    """
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
        if group.get("fused"):
            group["fused"] = False


def _compared(model: nn.Module, strategy: Strategy, options: StrategyOptions) -> dict[str, Any]:
    """What all ranks have to pass alike: also the tensors of the model, but for their values."""
    optimizer = options.optimizer
    is_made = isinstance(optimizer, Optimizer)
    return {
        "strategy": str(strategy),
        **options.compared(),
        "example": "none" if options.example is None else "given",
        "optimizer": getattr(type(optimizer) if is_made else optimizer, "__qualname__", ""),
        "optimizer_options": _described([options.optimizer_options]),
        "model": [
            f"{name}: {tuple(t.shape)} {t.dtype}{' trained' if t.requires_grad else ''}"
            for name, t in (*model.named_parameters(), *model.named_buffers())
        ],
    }


def _described(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The options in groups of parameters: by their types, where they are no plain values."""

    def plain(value: object) -> str:
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(plain, value))})"
        is_plain = isinstance(value, (bool, int, float, complex, str, torch.dtype))
        return repr(value) if is_plain or value is None else type(value).__name__

    return [
        f"{name}={plain(value)}"
        for group in groups
        for name, value in sorted(group.items())
        if name != "params"
    ]


def check_alike(ranks: Ranks, mine: Mapping[str, Any]) -> None:
    """Raise on all ranks when one passes something else than rank 0: they would wait for ever."""
    wanted = ranks.share(lambda: mine)
    what = next((what for what, value in mine.items() if value != wanted[what]), None)
    difference = ""
    if what is not None:
        told = str(mine[what])
        if isinstance(mine[what], list):
            pairs = zip_longest(wanted[what], mine[what], fillvalue="nothing")
            told = "; ".join([f"{b} (on rank 0 {a})" for a, b in pairs if a != b][:3])
        difference = f"rank {ranks.rank} has another {what} than rank 0: {told}"
    # Each knows only whether it differs itself: all raise what the first that does has found.
    problem = ranks.agree(difference, lambda heard: next(filter(None, heard), ""))
    if problem:
        raise PeerError(problem, hint="call as_distributed alike on every rank")


def _begin_alike(model: nn.Module, job: SpreadJob) -> None:
    """Let ranks that compute the same draw the same random numbers, and all have one's values."""
    device = job.device
    if size_of(job.strategy, "tp") > 1:
        group = job.along("tp").get_group()
        state = torch.get_rng_state().to(device)
        dist.broadcast(state, group=group, group_src=0)
        torch.set_rng_state(state.cpu())
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device).to(device)
            dist.broadcast(state, group=group, group_src=0)
            torch.cuda.set_rng_state(state.cpu(), device)
    # DDP gives rank 0's values to all ranks when it wraps, but it refuses a model of which nothing
    # is trained.
    is_in_ddp = job.axis_of.keys() <= {"ddp", "zero1"}
    is_in_ddp &= any(parameter.requires_grad for parameter in model.parameters())
    if job.strategy.world_size == 1 or is_in_ddp:
        return
    # By way of the device that ranks communicate on, and a few tensors at a time: the whole model
    # may be too large for it.
    whole = cast("dist.ProcessGroup", dist.group.WORLD)
    tensors = [*dict.fromkeys((*model.parameters(), *model.buffers()))]
    for first, last in batches([tensor.nbytes for tensor in tensors], _SYNC_BYTES):
        few = tensors[first:last]
        there = [tensor.detach().to(device).contiguous() for tensor in few]
        # As bytes: neither gloo nor NCCL knows all dtypes that a buffer may have.
        _broadcast_coalesced(whole, [t.flatten().view(torch.uint8) for t in there], _SYNC_BYTES, 0)
        for tensor, values in zip(few, there, strict=True):
            if tensor.data_ptr() != values.data_ptr():
                tensor.detach().copy_(values)
