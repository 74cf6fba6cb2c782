"""Optimizers whose state lies beside its parameters, as that of torch's own does, and of those
whose state only some ranks keep (ZeRO-1).
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adagrad, Optimizer

from ckptkit.errors import InvalidNameError, UnsupportedTypeError, UsageError
from ckptkit.format.names import join, split
from ckptkit.live.state.entries import (
    Line,
    Names,
    Saved,
    SavedState,
    SharedOut,
    StateEntry,
    StateMismatchError,
    line_of,
)
from ckptkit.live.state.tensors import as_spread, local_of, parts_of_tensor, spread_as
from ckptkit.live.state.trees import arrays_in, no_tensor, put_tensors, take_tensors


class PlainOptimizer:
    """Any `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.stepping = optimizer
        """The one that does the steps, where another is around it."""
        self.copied: MutableMapping[nn.Parameter, dict[str, Any]] | None = None
        """What is looked at in place of the optimizer's own state."""

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """What it keeps on this rank, by parameter."""
        # Asked each time: torch's `load_state_dict` puts another dictionary there.
        return cast("Any", self.stepping.state) if self.copied is None else self.copied

    @property
    def kind(self) -> str:
        """The name of the class that does the steps."""
        return type(self.stepping).__name__

    def lines(self) -> list[Line]:
        """The lines of ranks over which it spreads its state; none where that is cut as its
        parameters are.
        """
        return []

    def entries(self, names: Names) -> list[StateEntry]:
        """All that it keeps on this rank, tensors in memory that a load may fill."""
        found, kept = list[StateEntry](), self.state
        for parameter in self.parameters():
            state = kept.get(parameter)
            name = _name_of(names, parameter) if state else ""
            for key, value in state.items() if state else ():
                if isinstance(value, torch.Tensor):
                    found.append(self.entry(name, key, value, parameter))
                    continue
                # What lies in lists and dictionaries is one entry for each tensor.
                array_at = partial(join, "optimizer", name)
                tree, tensors = take_tensors(value, key, array_at)
                found.append(self.entry(name, key, tree, parameter))
                for path, tensor in tensors.items():
                    found.append(self.entry(name, path, tensor, parameter))
        return found

    def entry(self, name: str, key: str, value: Any, parameter: nn.Parameter) -> StateEntry:
        """One entry; where its value lies is seen from the value itself."""
        spread = as_spread(value, parameter) if isinstance(value, torch.Tensor) else value
        return StateEntry(name, key, spread)

    def keeps(self, parameter: nn.Parameter) -> bool:  # noqa: ARG002 — others do not keep all
        """Whether the state of a parameter, or this rank's part of it, is this rank's to keep."""
        return True

    def names_of(self, names: Names, parameters: Sequence[nn.Parameter]) -> list[str]:
        """The names of parameters of the optimizer."""
        return [_name_of(names, parameter) for parameter in parameters]

    def options(self, names: Names) -> list[dict[str, Any]]:
        """Its parameter groups: the names below `params`, and the options, whose tensors such as
        learning rates become plain values, below `options`.
        """
        found = []
        for group in self._optimizer.param_groups:
            options = {
                key: _plain(value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            found.append({"params": self.names_of(names, group["params"]), "options": options})
        return found

    def prepare(self, names: Names, saved: SavedState) -> None:
        """Make memory for what is saved and not there yet, and drop what is not saved; parameters
        that are not named are left as they are.
        """
        mine = [(p, _name_of(names, p)) for p in self.parameters() if self.keeps(p)]
        known = {p: saved[name] for p, name in mine if name in saved}
        left = {}
        for parameter, kept in known.items():
            # Of most there is what is to be filled, and nothing else.
            state = self.state.get(parameter, {})
            has_just = len(kept) == len(state) > 0 and all(
                isinstance(kept.get(key), Saved) and _is_as(value, kept[key])
                for key, value in state.items()
            )
            if not has_just:
                left[parameter] = kept
        for parameter, kept in left.items():
            self._drop(parameter, kept)
        if any(self._needs_a_step(parameter, kept) for parameter, kept in left.items()):
            left = known
            wanted = [parameter for parameter, kept in known.items() if kept]
            try:
                # Ranks that own nothing would not come to the collectives of a step of ZeRO.
                step_without_effect(self.stepping, wanted)
            except NotImplementedError as error:
                made = [names[each] for each in wanted if parts_of_tensor(each)]
                raise UnsupportedTypeError(
                    f"the {self.kind} cannot make its state by a step: {error}",
                    where=join("model", made[0]) if made else "optimizer",
                    hint="let it make a step before the load",
                ) from error
        for parameter, kept in left.items():
            # Again: the step has made all that the optimizer keeps, saved or not.
            self._drop(parameter, kept)
            for key, item in kept.items():
                state = self.state[parameter]
                if key not in state or not isinstance(item, Saved):
                    where = join("optimizer", names[parameter], key)
                    state[key] = self._made(parameter, item, state.get(key), where)

    def absorb(
        self,
        names: Names,
        entries: Sequence[StateEntry],  # noqa: ARG002 — filled where they lie
        values: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take over the tensors that were filled, by parameter the values that are no tensors, and
        for each group the options that its parameters were saved with.
        """
        mine = [p for p in self.parameters() if self.keeps(p)]
        given = {p: kept for p in mine if (kept := values.get(_name_of(names, p)))}
        for parameter, kept in given.items():
            for key, value in kept.items():
                if not arrays_in(value, key):  # those were made with their tensors
                    self.state[parameter][key] = put_tensors(value, no_tensor, key)
        for group in self._optimizer.param_groups:
            alike, _ = options_alike(self.names_of(names, group["params"]), options)
            for key, value in alike.items():
                group[key] = _taken(group.get(key), value)
            if group.get("capturable") or group.get("fused"):
                # These count steps on the device, which the optimizer here may not have done.
                for parameter in group["params"]:
                    state = self.state.get(parameter, {})
                    if torch.is_tensor(state.get("step")):
                        state["step"] = state["step"].to(parameter.device)
        if any(type(kept.get("step")) in (int, float) for kept in given.values()):
            # Torch counts steps in tensors, and makes one of a number when it loads.
            its = {"state": self._optimizer.state, "param_groups": self._optimizer.param_groups}
            self._optimizer.__setstate__(its)

    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _drop(self, parameter: nn.Parameter, kept: Mapping[str, Any]) -> None:
        """Forget what the checkpoint does not have, or has otherwise."""
        state = self.state.get(parameter, {})
        for key, value in list(state.items()):
            item = kept.get(key)
            if item is None or (isinstance(item, Saved) and not _is_as(value, item)):
                del state[key]
        if not state:
            self.state.pop(parameter, None)

    def _made(self, parameter: nn.Parameter, item: Any, mine: Any, where: str) -> Any:
        """What the checkpoint has, in memory to be filled: that which is here already, where it
        fits. Containers stay the same ones, as optimizers may keep them in several places.
        """
        if isinstance(item, Saved):
            fits = _is_as(mine, item) and tuple(mine.shape) == item.shape
            if item.is_wrapper and not fits:
                raise StateMismatchError(
                    f"the {self.kind} here does not keep a tensor made of others, as the step has",
                    where=where,
                    hint="its options differ from those of the one that saved, or it keeps parts "
                    "of this size otherwise: load into as many ranks as saved",
                )
            return mine if fits else self._empty(parameter, item, split(where)[-1])
        if isinstance(item, dict):
            known = mine if isinstance(mine, Mapping) else {}
            made = {
                key: self._made(parameter, each, known.get(key), where)
                for key, each in item.items()
            }
            if type(mine) is not dict:
                return made
            mine.clear()
            mine.update(made)
            return mine
        if isinstance(item, (list, tuple)):
            here = list(mine) if isinstance(mine, (list, tuple)) else []
            here += [None] * (len(item) - len(here))
            items = [self._made(parameter, each, here[at], where) for at, each in enumerate(item)]
            if type(mine) is not list:
                return items if isinstance(item, list) else tuple(items)
            mine[:] = items
            return mine
        return item

    def _empty(self, parameter: nn.Parameter, item: Saved, key: str) -> torch.Tensor:
        if item.is_like_parameter:
            like: torch.Tensor = parameter
            if parts_of_tensor(parameter):
                # Of one that is made of others torch would make another such.
                local = local_of(parameter)
                like = torch.empty(local.shape, dtype=local.dtype, device=local.device)
                if isinstance(parameter, DTensor):
                    like = spread_as(like, parameter._spec)
            return torch.empty_like(like, dtype=item.dtype, requires_grad=False)
        if item.shape:
            return torch.empty(item.shape, dtype=item.dtype, device=parameter.device)
        # As torch has it when it loads; `absorb` sees to steps that count on the device.
        device = torch.device("cpu") if key == "step" else parameter.device
        return torch.empty((), dtype=item.dtype, device=device)

    def _needs_a_step(self, parameter: nn.Parameter, kept: Mapping[str, Any]) -> bool:
        """Whether only the optimizer itself knows how a value of another shape is spread."""
        state = self.state.get(parameter, {})
        is_cut = isinstance(parameter, DTensor)
        return any(
            each.is_wrapper or (is_cut and each.shape and not each.is_like_parameter)
            for key, item in kept.items()
            for each in _saved_in(item)
            if key not in state
        )


def options_alike(
    parameters: Iterable[str], saved: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """The options that all of these parameters were saved with, and the names of those that some
    had otherwise: they were in several groups then.
    """
    alike: dict[str, Any] = {}
    apart: list[str] = []
    for options in {id(each): each for name in parameters if (each := saved.get(name))}.values():
        apart += [key for key, value in options.items() if alike.setdefault(key, value) != value]
    return {key: value for key, value in alike.items() if key not in apart}, apart


def _plain(option: Any) -> Any:
    """An option without tensors, of which learning rates and betas may be some, of one element."""
    if torch.is_tensor(option) and option.numel() == 1:
        return option.item()
    if type(option) in (list, tuple):
        return type(option)(map(_plain, option))
    return option


def _taken(mine: Any, option: Any) -> Any:
    """An option that was saved, in the tensors that are here."""
    if torch.is_tensor(mine):
        return mine.fill_(option)
    kinds = {type(mine), type(option)}
    if kinds <= {list, tuple} and len(mine) == len(option):
        return type(option)(map(_taken, mine, option))
    return option


def _is_as(value: object, item: Saved) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype != item.dtype:
        return False
    return bool(parts_of_tensor(value)) == item.is_wrapper


def _saved_in(item: Any) -> Iterator[Saved]:
    if isinstance(item, Saved):
        yield item
    elif isinstance(item, (dict, list, tuple)):
        for each in item.values() if isinstance(item, dict) else item:
            yield from _saved_in(each)


def _name_of(names: Names, parameter: nn.Parameter) -> str:
    name = names.get(parameter)
    if name is None:
        raise InvalidNameError(
            "the optimizer has a parameter that is not the model's",
            value=tuple(parameter.shape),
            hint="pass the model that the optimizer was made for, after it was wrapped",
        )
    return name


def step_without_effect(optimizer: Optimizer, wanted: Sequence[nn.Parameter]) -> None:
    """Let an optimizer make the state of some of its parameters, by a step with no gradient and no
    learning rate: its own step, as one that wraps others would step these by a twin of it too.
    """
    chosen = set(wanted)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, p.grad, p.detach().clone() if p in chosen else p) for p in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            if "lr" in group:  # some optimizers insist on a tensor
                is_tensor = torch.is_tensor(group["lr"])
                group["lr"] = torch.zeros_like(group["lr"]) if is_tensor else 0.0
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter in chosen else None
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient, value in kept:
            parameter.grad = gradient
            with torch.no_grad():
                parameter.copy_(value)


class Zero1Optimizer(PlainOptimizer):
    """A `ZeroRedundancyOptimizer` (ZeRO-1): each rank keeps the whole state of some parameters.
    Nothing is gathered, every rank saves what it keeps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        # torch annotates little of what is asked of it here.
        self._zero = cast("Any", optimizer)
        self._zero._check_overlap_initialized()
        self.stepping = self._zero.optim

    def lines(self) -> list[Line]:
        """The ranks that share the parameters out among them."""
        return [line_of("zero1", self._zero.process_group)]

    def keeps(self, parameter: nn.Parameter) -> bool:
        return bool(self._zero._param_to_rank[parameter] == self._zero.rank)

    def entry(self, name: str, key: str, value: Any, parameter: nn.Parameter) -> StateEntry:
        """An entry that only its owner has."""
        if not torch.is_tensor(value):
            return StateEntry(name, key, value)
        (line,) = self.lines()
        owner = self._zero._param_to_rank[parameter]
        return StateEntry(name, key, value, SharedOut(line.ranks, tuple(value.shape), owner))

    def absorb(
        self,
        names: Names,
        entries: Sequence[StateEntry],
        values: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        super().absorb(names, entries, values, options)
        self._zero._sync_param_groups(self._zero.param_groups, self._zero.optim.param_groups)


def fresh_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state after a step without gradient, its counter at zero; nothing for an optimizer that
    keeps none.

    Only the optimizer knows what it keeps, so a twin of it makes that step, on a twin of the
    parameter: neither of the two changes. For a DTensor the step may communicate.
    """
    groups = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    group = next(groups, None)
    if group is None:
        raise UsageError("the optimizer does not step this parameter", value=tuple(parameter.shape))
    own = nn.Parameter(torch.zeros_like(parameter))
    if isinstance(optimizer, Adagrad):
        # Its state is there before the first step, which expects it.
        first = group["initial_accumulator_value"]
        return dict(Adagrad([own], initial_accumulator_value=first).state[own])
    own.grad = torch.zeros_like(parameter)
    twin = object.__new__(type(optimizer))
    # A scheduler puts a `step` of its own on the instance, which would step the original.
    twin.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
    # Nobody is told that it steps.
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    twin.param_groups = [{**options, "params": [own]}]
    type(twin).step(twin)
    state = dict(twin.state.get(own, {}))
    if torch.is_tensor(state.get("step")):
        state["step"].zero_()
    elif "step" in state:
        state["step"] = 0
    return state
