"""An optimizer whose state lies beside its parameters: what torch's own are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.errors import InvalidNameError
from ckptkit.live.groups import Group
from ckptkit.live.optimizers.adapter import Names, Saved, SavedState, StateEntry
from ckptkit.live.tensors import as_spread


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
                found.append(self.entry(_name_of(names, parameter), key, value, parameter))
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
            self._step_without_effect([parameter for parameter, kept in known.items() if kept])
        for parameter, kept in known.items():
            self._drop(parameter, kept)
            for key, item in kept.items():
                if key not in self.state[parameter]:
                    self.state[parameter][key] = self._empty(parameter, item)

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
            given = values.get(_name_of(names, parameter))
            if given:
                self.state[parameter] |= given
        for group in self._optimizer.param_groups:
            known = (options[n] for n in self.names_of(names, group["params"]) if n in options)
            for key, value in next(known, {}).items():
                _set(group, key, value)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _drop(self, parameter: nn.Parameter, kept: Mapping[str, Saved]) -> None:
        """Forget what the checkpoint does not have, or has otherwise."""
        state = self.state.get(parameter, {})
        for key, value in list(state.items()):
            item = kept.get(key)
            if item is None or not torch.is_tensor(value) or value.dtype != item.dtype:
                del state[key]
        if not state:
            self.state.pop(parameter, None)

    def _empty(self, parameter: nn.Parameter, item: Saved) -> torch.Tensor:
        if item.is_like_parameter:
            return torch.empty_like(parameter, dtype=item.dtype, requires_grad=False)
        if item.shape:
            return torch.empty(item.shape, dtype=item.dtype, device=parameter.device)
        group = next(
            g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"])
        )
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=item.dtype, device=parameter.device if on_device else "cpu")

    def _needs_a_step(self, parameter: nn.Parameter, kept: Mapping[str, Saved]) -> bool:
        """Whether only the optimizer itself knows how a value of another shape is spread."""
        state = self.state.get(parameter, {})
        return isinstance(parameter, DTensor) and any(
            item.shape and not item.is_like_parameter and key not in state
            for key, item in kept.items()
        )

    def _step_without_effect(self, parameters: list[nn.Parameter]) -> None:
        """Let the optimizer make its state by a step with no gradient and no learning rate."""
        wanted = set(parameters)
        kept = [(p, p.grad, p.detach().clone() if p in wanted else p) for p in self._parameters()]
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        try:
            for group in self._optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = 0.0
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
