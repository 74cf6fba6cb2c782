"""From rules, the same that the resharder goes by, to a plan for `parallelize_module`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as Replicated
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ckptkit.checkpoint.rules_file import load_rules
from ckptkit.errors import LayoutError, RulesError
from ckptkit.model import Cut, Replicate, Rules, Shard
from ckptkit.parallel.strategies.options import Options

_KNOWN = (nn.Linear, nn.Embedding)


@dataclass(frozen=True, slots=True)
class _Said:
    """How a parameter is cut: along which dim, or not at all."""

    name: str
    shape: tuple[int, ...]
    dim: int | None


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Cut what a model has of the modules in a plan; a stage has only some of them."""
    present = {name for name, module in model.named_modules() if isinstance(module, _KNOWN)}
    tied = _tied(model)
    parallelize_module(model, mesh, {n: style for n, style in plan.items() if n in present})
    for first, *others in tied:
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


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several: torch's styles make one for each."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def plan_of(model: nn.Module, ranks: int, options: Options) -> dict[str, ParallelStyle]:
    """The style of each module that the rules cut over so many ranks."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    rules = load_rules(options.rules, names=names, sizes={**_config(model), **options.sizes})
    dims: dict[str, int] = {}
    kinds: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        own = module.named_parameters(path, recurse=False)
        said = [_said(rules, name, parameter, ranks) for name, parameter in own]
        if any(each.dim is not None for each in said):
            dims[path] = _dim_of(path, module, said)
            kinds[path] = module
    if not dims:
        raise RulesError(
            "no parameter is cut by these rules",
            where=rules.name,
            hint='pass rules=, such as {"rules": [{"match": "*.up.weight", "tp": "shard(0)"}, …]}',
        )
    is_sure = options.rules != "auto" or options.example is not None
    return _styles(model, dims, kinds, ranks, is_sure=is_sure)


def _said(rules: Rules, name: str, parameter: nn.Parameter, ranks: int) -> _Said:
    shape = tuple(parameter.shape)
    rule = rules.find(name, shape)
    if rule is None and rules.default == "error":
        raise RulesError(
            "no rule matches this parameter",
            where=rules.name,
            value=name,
            hint='give it one, such as {"match": "' + name + '", "tp": "replicate"}',
        )
    if rule is None or not isinstance(rule.tp, Cut):
        return _Said(name, shape, None)
    try:
        placement = rule.tp.placement(shape, rules.known)
    except (LayoutError, RulesError) as error:
        error.where = name
        raise
    if isinstance(placement, Replicate):
        return _Said(name, shape, None)
    if not isinstance(placement, Shard):
        raise LayoutError("tensor parallelism cuts by shard(…)", where=name, value=str(placement))
    _check_cut(name, shape, placement, ranks)
    return _Said(name, shape, placement.dim)


def _check_cut(name: str, shape: tuple[int, ...], placement: Shard, ranks: int) -> None:
    """Refuse what torch's engine cannot cut evenly: it has no padding, and no copies of heads."""
    if placement.blocks is not None and len(placement.blocks) > 1:
        raise LayoutError(
            "torch has no style for a fused projection, whose blocks are cut apart",
            where=name,
            value=str(placement),
            hint="split it into modules of one block each, or use fsdp",
        )
    units, over = divmod(shape[placement.dim], placement.unit)
    if placement.unit > 1 and (over or units % ranks):
        raise _uneven(name, f"{units} heads", units, ranks)


def _uneven(name: str, what: str, count: int, ranks: int) -> LayoutError:
    return LayoutError(
        f"{what} cannot be cut evenly over {ranks} ranks",
        where=name,
        hint=f"tp has to divide {count}",
    )


def _dim_of(path: str, module: nn.Module, said: list[_Said]) -> int:
    """The dim of a module's weight that is cut, if a style of torch does just that."""
    weight = next((each for each in said if each.name.endswith("weight")), said[0])
    if not isinstance(module, _KNOWN) or weight.dim is None:
        raise LayoutError(
            f"torch has no style for a {type(module).__name__}",
            where=path,
            value=[(each.name, each.dim) for each in said],
            hint="only nn.Linear and nn.Embedding can be cut; replicate this one in the rules",
        )
    wanted = 0 if weight.dim == 0 else None
    for each in said:
        if each is not weight and each.dim != wanted:
            raise LayoutError(
                "the bias is not cut as the output is",
                where=each.name,
                value=each.dim,
                hint="shard(0) beside a weight that is cut along dim 0, else replicate",
            )
    return weight.dim


def _styles(
    model: nn.Module,
    dims: Mapping[str, int],
    kinds: Mapping[str, nn.Module],
    ranks: int,
    *,
    is_sure: bool,
) -> dict[str, ParallelStyle]:
    """Cut outputs stay cut where a row-wise module of the same block takes them on, if somebody is
    sure of that: else only where the block is one of those that the presets were made for.
    """
    linear = [path for path in dims if isinstance(kinds[path], nn.Linear)]
    columns = [path for path in linear if dims[path] == 0]
    rows = [path for path in linear if dims[path] == 1]
    pairs = [
        (a, b)
        for a in columns
        for b in rows
        if _goes_on(model, linear, a, b) and (is_sure or _is_known(model, a, b))
    ]
    feeding, fed = {a for a, _ in pairs}, {b for _, b in pairs}
    for path in sorted(feeding | fed):
        # Between the two nobody knows how long the other ranks' slices are.
        length = model.get_parameter(f"{path}.weight").shape[dims[path]]
        if length % ranks:
            raise _uneven(path, f"{length} columns", length, ranks)
    styles: dict[str, ParallelStyle] = {}
    for path, dim in dims.items():
        if isinstance(kinds[path], nn.Embedding):
            by_rows = RowwiseParallel(input_layouts=Replicated())
            styles[path] = ColwiseParallel(output_layouts=Replicated()) if dim else by_rows
        elif dim == 0:
            goes_out = None if path in feeding else Replicated()
            styles[path] = ColwiseParallel(output_layouts=goes_out)
        else:
            comes_in = None if path in fed else Replicated()
            styles[path] = RowwiseParallel(input_layouts=comes_in)
    return styles


def _goes_on(model: nn.Module, order: list[str], column: str, row: str) -> bool:
    """Whether what a column-wise module gives out goes into a row-wise one, as far as names say:
    they have the same parent, or lie in the same numbered layer.
    """
    first, second = column.split("."), row.split(".")
    if first[:-1] == second[:-1]:
        parent = model.get_submodule(".".join(first[:-1]))
        runs_in_order = parent is model or isinstance(parent, nn.Sequential)
        return not runs_in_order or order.index(column) < order.index(row)
    return any(node.isdecimal() for node in _shared(column, row))


def _is_known(model: nn.Module, column: str, row: str) -> bool:
    """Whether a model of Hugging Face has the two, of which it is known what lies between them:
    others may have the same names, and a norm or a softmax there.
    """
    runs_both = model.get_submodule(".".join(_shared(column, row)))
    return type(runs_both).__module__.startswith("transformers.")


def _shared(one: str, other: str) -> list[str]:
    """The names of the modules that contain both."""
    pairs = zip(one.split(".")[:-1], other.split(".")[:-1], strict=False)
    return [node for node, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _config(model: nn.Module) -> Mapping[str, Any]:
    """The sizes that a Hugging Face model knows of itself."""
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    found: Any = to_dict() if callable(to_dict) else {}
    return found if isinstance(found, Mapping) else {}
