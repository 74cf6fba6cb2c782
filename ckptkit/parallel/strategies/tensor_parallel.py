"""From rules, the same that the resharder goes by, to a style of torch for each module, which
are tried out on an example before they are used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ckptkit.checkpoint.rules_file import load_rules
from ckptkit.errors import LayoutError, RulesError
from ckptkit.model import Replicate, Shard
from ckptkit.model.document import located
from ckptkit.model.rules import Cut, Rules
from ckptkit.parallel.strategies.distributed import all_ranks
from ckptkit.parallel.strategies.options import StrategyOptions, mapped, opened, tensors_of

_KNOWN = (nn.Linear, nn.Embedding)
_OUTPUT = "the output"


def styles_of(model: nn.Module, size: int, options: StrategyOptions) -> dict[str, ParallelStyle]:
    """The style of each module that the rules cut over so many ranks."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # A Hugging Face model knows sizes of itself.
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    config: Any = to_dict() if callable(to_dict) else None
    sizes = {**(config if isinstance(config, Mapping) else {}), **options.sizes}
    rules = load_rules(options.rules, names=names, sizes=sizes)
    dims: dict[str, int] = {}
    for path, module in model.named_modules():
        own = module.named_parameters(path, recurse=False)
        cuts = {name: _cut_dim(rules, name, tuple(p.shape), size) for name, p in own}
        if any(dim is not None for dim in cuts.values()):
            dims[path] = _dim_of(path, module, cuts)
    if not dims:
        raise RulesError(
            "no parameter is cut by these rules",
            where=rules.name,
            hint='pass rules=, such as {"rules": [{"match": "*.up.weight", "tp": "shard(0)"}, …]}',
        )
    # Cut outputs stay cut where a row-wise module of the same block takes them on, if somebody is
    # sure of that: else only where the block is one of those that the presets were made for.
    is_sure = options.rules != "auto" or options.example is not None
    linear = [path for path in dims if isinstance(model.get_submodule(path), nn.Linear)]
    pairs = [
        (a, b)
        for a in linear
        for b in linear
        if (dims[a], dims[b]) == (0, 1) and _goes_on(model, linear, a, b, is_sure=is_sure)
    ]
    feeding, fed = {a for a, _ in pairs}, {b for _, b in pairs}
    for path in sorted(feeding | fed):
        # Between the two nobody knows how long the other ranks' slices are.
        length = model.get_parameter(f"{path}.weight").shape[dims[path]]
        if length % size:
            raise _uneven(path, f"{length} columns", length, size)
    styles: dict[str, ParallelStyle] = {}
    for path, dim in dims.items():
        # Dim 0 of a linear layer is its outputs; of an embedding its words, which come in.
        if (dim == 0) == (path in linear):
            goes_out = None if path in feeding else TorchReplicate()
            styles[path] = ColwiseParallel(output_layouts=goes_out)
        else:
            comes_in = None if path in fed else TorchReplicate()
            styles[path] = RowwiseParallel(input_layouts=comes_in)
    return styles


def _cut_dim(rules: Rules, name: str, shape: tuple[int, ...], size: int) -> int | None:
    """The dim along which rules cut a parameter, if they do, in a way that torch's engine can."""
    rule = rules.find(name, shape)
    if rule is None and rules.default == "error":
        raise RulesError(
            "no rule matches this parameter",
            where=rules.name,
            value=name,
            hint='give it one, such as {"match": "' + name + '", "tp": "replicate"}',
        )
    if rule is None or not isinstance(rule.tp, Cut):
        return None
    with located(name):
        placement = rule.tp.placement(shape, rules.known)
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, Shard):
        raise LayoutError("tensor parallelism cuts by shard(…)", where=name, value=str(placement))
    # It has no padding, and no copies of heads.
    if placement.blocks is not None and len(placement.blocks) > 1:
        raise LayoutError(
            "torch has no style for a fused projection, whose blocks are cut apart",
            where=name,
            value=str(placement),
            hint="split it into modules of one block each, or use fsdp",
        )
    units, over = divmod(shape[placement.dim], placement.unit)
    if placement.unit > 1 and (over or units % size):
        raise _uneven(name, f"{units} heads", units, size)
    return placement.dim


def _uneven(name: str, what: str, count: int, size: int) -> LayoutError:
    return LayoutError(
        f"{what} cannot be cut evenly over {size} ranks",
        where=name,
        hint=f"tp has to divide {count}",
    )


def _dim_of(path: str, module: nn.Module, cuts: Mapping[str, int | None]) -> int:
    """The dim of a module's weight that is cut, if a style of torch does just that."""
    weight = next((name for name in cuts if name.endswith("weight")), next(iter(cuts)))
    dim = cuts[weight]
    if not isinstance(module, _KNOWN) or dim is None:
        raise LayoutError(
            f"torch has no style for a {type(module).__name__}",
            where=path,
            value=list(cuts.items()),
            hint="only nn.Linear and nn.Embedding can be cut; replicate this one in the rules",
        )
    for name, other in cuts.items():
        if name != weight and other != (0 if dim == 0 else None):
            raise LayoutError(
                "the bias is not cut as the output is",
                where=name,
                value=other,
                hint="shard(0) beside a weight that is cut along dim 0, else replicate",
            )
    return dim


def _goes_on(model: nn.Module, order: list[str], column: str, row: str, *, is_sure: bool) -> bool:
    """Whether what a column-wise module gives out goes into a row-wise one, as far as names say:
    they have the same parent, or lie in the same numbered layer.
    """
    first, second = column.split(".")[:-1], row.split(".")[:-1]
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    shared = [node for node, _ in pairs]
    runs_both = model.get_submodule(".".join(shared))
    # Of models of Hugging Face it is known what lies between the two: others may have the same
    # names, and a norm or a softmax there.
    if not is_sure and not type(runs_both).__module__.startswith("transformers."):
        return False
    if first == second:
        runs_in_order = runs_both is model or isinstance(runs_both, nn.Sequential)
        return not runs_in_order or order.index(column) < order.index(row)
    return any(node.isdecimal() for node in shared)


def parallelize(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Cut what a model has of the modules that have a style; a stage has only some of them."""
    present = {name for name, module in model.named_modules() if isinstance(module, _KNOWN)}
    # The names of each parameter that has several: torch's styles make one for each.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parallelize_module(model, mesh, {n: style for n, style in styles.items() if n in present})
    for first, *others in names.values():
        kept = model.get_parameter(first)
        for name in others:
            other = model.get_parameter(name)
            if getattr(other, "placements", None) != getattr(kept, "placements", None):
                raise LayoutError(
                    "tied weights that are cut in two ways",
                    where=name,
                    value=(first, name),
                    hint="give both the same rule, or untie them",
                )
            path, _, own = name.rpartition(".")
            model.get_submodule(path).register_parameter(own, kept)


def try_out(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, ParallelStyle],
    example: Any,
    device: torch.device,
) -> None:
    """Raise, on all ranks, where the cut model does not give on the example what the whole one
    does, or a layer gets something else than its columns of what it gets there.

    Both are copies, which share parameters with the model as they may be large: nothing of the
    model changes.
    """

    def of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.to(device, copy=True).contiguous()
        dist.broadcast(there, group=mesh.get_group(), group_src=0)
        return there

    fed = [
        name
        for name, style in styles.items()
        if isinstance(style, RowwiseParallel) and style.input_layouts == (TorchShard(-1),)
    ]
    places = [*fed, _OUTPUT]
    example = mapped(example, of_first_rank)
    here = next(model.parameters()).device
    wanted: dict[str, list[torch.Tensor]] = {name: [] for name in places}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in places}
    whole = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    with all_ranks("trial") as ranks:
        _run_noting(whole, mapped(example, lambda tensor: tensor.to(here)), wanted)
        # The cut model exchanges tensors: no rank runs it without the others.
        ranks.wait()
    # These are replaced when they are cut. The others move to the device, so they are copied.
    styled = [p for name in styles for p in model.get_submodule(name).parameters(recurse=False)]
    cut = copy.deepcopy(model, {id(p): p for p in styled})
    parallelize(cut, mesh, styles)
    problem: Exception | None = None
    try:
        # What one rank raises has to wait: the others are on their way to the all-reduce below.
        _run_noting(cut.to(device), example, found)
    except Exception as error:  # noqa: BLE001 — the model's own, of any kind
        problem = error
    for name in fed:
        whole_inputs, rank = wanted[name], mesh.get_local_rank()
        wanted[name] = [each.chunk(mesh.size(), -1)[rank] for each in whole_inputs]
    alike = [
        len(wanted[name]) == len(found[name]) and all(map(_is_close, found[name], wanted[name]))
        for name in places
    ]
    # The first of the places at which any rank differs.
    first = torch.tensor([*alike, False].index(False), device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if int(first) < len(places):
        raise LayoutError(
            "cut by these rules, the model does not give on the example what it gives whole",
            where=places[int(first)],
            hint="between layers that are cut each column has to go its own way, unlike in a "
            "softmax or a norm: let the rules replicate this layer and those that feed it",
        ) from problem


def _run_noting(model: nn.Module, example: Any, given: dict[str, list[torch.Tensor]]) -> None:
    """Run on an example, named inputs, several, or one, and note what layers get."""
    for name in given.keys() - {_OUTPUT}:
        # Before torch's own hook, which makes a DTensor of what it takes for columns.
        hook = partial(lambda got, _module, inputs: got.append(inputs[0]), given[name])
        model.get_submodule(name).register_forward_pre_hook(hook, prepend=True)
    inputs, named, _ = opened((example, None))
    with torch.no_grad(), torch.random.fork_rng():
        output = model.eval()(*inputs, **named)
    given[_OUTPUT] = tensors_of(output)


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether nothing but rounding differs, which adds up from layer to layer."""
    if found.shape != wanted.shape or not wanted.is_floating_point():
        return found.shape == wanted.shape
    found = found.to(wanted.device)
    alike = (found == wanted) | (found.isnan() & wanted.isnan())
    apart = torch.where(alike, 0, found - wanted).double().norm()
    size = wanted[wanted.isfinite()].double().norm()
    return bool(apart <= math.sqrt(torch.finfo(wanted.dtype).eps) * size)
