"""The parameters that one rank serves, and the optimizer that steps them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UsageError

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def shares(sizes: Mapping[str, int], servers: Sequence[int]) -> dict[int, list[str]]:
    """The names of the parameters of each server, whole ones, about as many bytes for each."""
    names: dict[int, list[str]] = {server: [] for server in servers}
    load = dict.fromkeys(servers, 0)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        server = min(servers, key=lambda server: (load[server], server))
        names[server].append(name)
        load[server] += sizes[name]
    return names


class Shard:
    """Whole parameters in host memory, stepped by one gradient at a time; safe for threads."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], make_optimizer: MakeOptimizer
    ) -> None:
        self._lock = threading.Lock()
        self._parameters = {
            name: nn.Parameter(parameter.detach().to("cpu", copy=True).contiguous())
            for name, parameter in parameters.items()
        }
        self._optimizer = make_optimizer(self._parameters.values()) if parameters else None
        if self._optimizer is not None and len(self._optimizer.param_groups) > 1:
            raise UsageError(
                "the optimizer of a server has one group of parameters",
                value=f"{len(self._optimizer.param_groups)} groups",
                hint="pass a class of torch's, or a functools.partial of one",
            )

    def push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step by a worker's gradients; those that are None are of parameters that stay."""
        with self._lock:
            for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
                parameter.grad = gradient
            if self._optimizer is not None:
                self._optimizer.step()
                self._optimizer.zero_grad()

    def pull(self) -> list[torch.Tensor]:
        """The values of all parameters, at one time."""
        with self._lock:
            return [parameter.detach().clone() for parameter in self._parameters.values()]

    def take(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take over values of the parameters."""
        with self._lock, torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Change options of the optimizer, such as the learning rate."""
        with self._lock:
            for group in self._optimizer.param_groups if self._optimizer else ():
                group.update(options)

    def state(self) -> dict[str, Any]:
        """What the optimizer keeps, by the name of the parameter, and its options."""
        if self._optimizer is None:
            return {"options": {}, "state": {}}
        with self._lock:
            (group,) = self._optimizer.param_groups
            options = {key: value for key, value in group.items() if key != "params"}
            kept = self._optimizer.state
            state = {name: _copied(kept.get(p, {})) for name, p in self._parameters.items()}
            return {"options": options, "state": state}

    def load(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take over what the optimizers of any number of servers kept."""
        self.set_options(options)
        with self._lock:
            for name, parameter in self._parameters.items():
                if self._optimizer is not None and state.get(name):
                    self._optimizer.state[parameter] = _copied(state[name])


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
