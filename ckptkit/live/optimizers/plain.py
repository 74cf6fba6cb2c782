"""An optimizer whose state lies beside its parameters: what torch's own are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.errors import FormatError, InvalidNameError, UnsupportedTypeError
from ckptkit.format.names import join
from ckptkit.live.groups import Group
from ckptkit.live.optimizers.adapter import Names, Saved, SavedState, StateEntry
from ckptkit.live.report import StateMismatchError
from ckptkit.live.tensors import as_spread
from ckptkit.live.trees import arrays_in, put_tensors, take_tensors
from ckptkit.live.wrapped import as_plain, parts_of_tensor


class PlainOptimizer:
    """Any `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def kind(self) -> str:
        """The optimizer's class."""
        return type(self._optimizer).__name__

    @property
    def state(self) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """What it keeps, by parameter."""
        state: Any = self._optimizer.state
        return state  # type: ignore[no-any-return]

    def groups(self) -> list[Group]:
        """None: its state is cut as its parameters are."""
        return []

    def entries(self, names: Names) -> list[StateEntry]:
        """The state of every parameter that has any."""
        found = []
        for parameter in self._parameters():
            for key, value in self.state.get(parameter, {}).items():
                name = _name_of(names, parameter)
                # What lies in lists and dictionaries is one entry for each tensor.
                array_at = partial(join, "optimizer", name)
                tree, tensors = take_tensors(value, key, array_at)
                if not torch.is_tensor(value):
                    found.append(self.entry(name, key, tree, parameter))
                for path, tensor in tensors.items():
                    found.append(self.entry(name, path, tensor, parameter))
        return found

    def entry(
        self,
        name: str,
        key: str,
        value: Any,
        parameter: nn.Parameter,
    ) -> StateEntry:
        """One entry; where its value lies is seen from the value itself."""
        return StateEntry(
            name, key, as_spread(value, parameter) if torch.is_tensor(value) else value
        )

    def names_of(self, names: Names, parameters: Sequence[nn.Parameter]) -> list[str]:
        """The names of parameters of the optimizer."""
        return [_name_of(names, parameter) for parameter in parameters]

    def options(self, names: Names) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return [
            {
                "params": self.names_of(names, group["params"]),
                "options": {k: _plain(v) for k, v in group.items() if k not in _NOT_OPTIONS},
            }
            for group in self._optimizer.param_groups
        ]

    def prepare(self, names: Names, saved: SavedState) -> None:
        """Make the state of each parameter that the checkpoint has one for."""
        known = {p: saved[names[p]] for p in self._parameters() if _name_of(names, p) in saved}
        for parameter, kept in known.items():
            self._drop(parameter, kept)
        if any(self._needs_a_step(parameter, kept) for parameter, kept in known.items()):
            wanted = [parameter for parameter, kept in known.items() if kept]
            try:
                self._step_without_effect(wanted)
            except NotImplementedError as error:
                made = [names[each] for each in wanted if parts_of_tensor(each)]
                raise UnsupportedTypeError(
                    f"the {self.kind} cannot make its state by a step: {error}",
                    where=join("model", made[0]) if made else "optimizer",
                    hint="let it make a step before the load",
                ) from error
        for parameter, kept in known.items():
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
        """Set values that are no tensors, and the options of each group to those that its
        parameters were saved with.
        """
        for parameter in self._parameters():
            for key, value in values.get(_name_of(names, parameter), {}).items():
                if not arrays_in(value, key):  # those were made with their tensors
                    self.state[parameter][key] = put_tensors(value, _no_tensor, key)
        for group in self._optimizer.param_groups:
            known = (options[n] for n in self.names_of(names, group["params"]) if n in options)
            for key, value in next(known, {}).items():
                _set(group, key, value)

    def _parameters(self) -> list[nn.Parameter]:
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
            return mine if fits else self._empty(parameter, item)
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

    def _empty(self, parameter: nn.Parameter, item: Saved) -> torch.Tensor:
        if item.is_like_parameter:
            # Of a parameter that is made of others torch would make another such.
            like = as_plain(parameter) if parts_of_tensor(parameter) else parameter
            return torch.empty_like(like, dtype=item.dtype, requires_grad=False)
        if item.shape:
            return torch.empty(item.shape, dtype=item.dtype, device=parameter.device)
        group = next(
            g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"])
        )
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=item.dtype, device=parameter.device if on_device else "cpu")

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

    def _step_without_effect(self, parameters: list[nn.Parameter]) -> None:
        """Let the optimizer make its state by a step with no gradient and no learning rate."""
        wanted = set(parameters)
        kept = [(p, p.grad, p.detach().clone() if p in wanted else p) for p in self._parameters()]
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        try:
            for group in self._optimizer.param_groups:
                if "lr" in group:  # some optimizers insist on a tensor
                    is_tensor = torch.is_tensor(group["lr"])
                    group["lr"] = torch.zeros_like(group["lr"]) if is_tensor else 0.0
            for parameter, _, _ in kept:
                parameter.grad = torch.zeros_like(parameter) if parameter in wanted else None
            self._optimizer.step()
        finally:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
            for parameter, gradient, value in kept:
                parameter.grad = gradient
                with torch.no_grad():
                    parameter.copy_(value)


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


def _no_tensor(name: str) -> torch.Tensor:
    raise FormatError("not a value without tensors", where=name)


_NOT_OPTIONS = ("params", "param_names")


def _name_of(names: Names, parameter: nn.Parameter) -> str:
    if parameter not in names:
        raise InvalidNameError(
            "the optimizer has a parameter that is not the model's",
            value=tuple(parameter.shape),
            hint="pass the model that the optimizer was made for, after it was wrapped",
        )
    return names[parameter]


def _plain(value: Any) -> Any:
    """An option as a plain value: learning rates may be tensors."""
    return value.item() if torch.is_tensor(value) and value.ndim == 0 else value


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if torch.is_tensor(group.get(key)):
        group[key].fill_(value)
    else:
        group[key] = value
