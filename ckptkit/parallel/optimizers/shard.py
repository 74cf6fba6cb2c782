"""What a server has: whole parameters, the optimizer that steps them, the clocks of workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import PeerError, UsageError

log = logging.getLogger("ckptkit.parallel")

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


class ParameterShard:
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


class Clocks:
    """The steps of all workers, as one server counts them; safe for threads.

    A worker that is more than `staleness` steps ahead of the last one waits. One that dies, or
    that keeps others waiting for `timeout` seconds, ends the training for all, or with
    `goes_on` is no longer waited for.
    """

    def __init__(
        self, workers: Iterable[int], staleness: int | None, timeout: float, *, goes_on: bool
    ) -> None:
        self._steps = dict.fromkeys(workers, 0)
        self._active = set(self._steps)
        self._present = set(self._steps)
        self._staleness = staleness
        self._timeout = timeout
        self._goes_on = goes_on
        self._problem = ""
        self._changed = threading.Condition()

    @property
    def steps(self) -> dict[int, int]:
        """By worker, how many gradients have come."""
        with self._changed:
            return dict(self._steps)

    def go_on_from(self, steps: dict[int, int]) -> None:
        with self._changed:
            self._steps = dict(steps)

    def tick(self, worker: int) -> None:
        """Count a step, and return when the worker may begin the next one."""
        with self._changed:
            if worker not in self._active:
                # One that was given up is back: nobody waits for what it has missed.
                others = [self._steps[other] for other in self._active]
                self._steps[worker] = max(self._steps[worker], min(others, default=0))
                self._active.add(worker)
                self._present.add(worker)
            self._steps[worker] += 1
            self._changed.notify_all()
            since, seen = time.monotonic(), -1
            while self._staleness is not None and not self._problem:
                slowest = min((self._steps[w] for w in self._active), default=self._steps[worker])
                if self._steps[worker] - slowest <= self._staleness:
                    break
                if slowest > seen:
                    since, seen = time.monotonic(), slowest
                left = since + self._timeout - time.monotonic()
                if left <= 0:
                    late = {w for w in self._active if self._steps[w] == slowest}
                    self._give_up(late, f"did not come within {self._timeout:g} s")
                else:
                    self._changed.wait(left)
            self.check()

    def check(self) -> None:
        """Raise if the training has ended for all."""
        if self._problem:
            raise PeerError(self._problem, hint='with on_loss="continue" the others go on')

    def leave(self, worker: int) -> None:
        """A worker has done its last step."""
        with self._changed:
            self._active.discard(worker)
            self._present.discard(worker)
            self._changed.notify_all()

    def lose(self, worker: int) -> None:
        """A worker is gone without a word."""
        with self._changed:
            if worker in self._present:
                self._present.discard(worker)
                self._give_up({worker}, "is gone")

    def wait_until_empty(self) -> None:
        """Return when no worker is left that may still ask, or when none has come for long."""
        with self._changed:
            while self._present and self._changed.wait(self._timeout):
                pass

    def _give_up(self, workers: set[int], why: str) -> None:
        who = ", ".join(f"worker {worker}" for worker in sorted(workers))
        self._active -= workers
        if self._goes_on:
            log.warning("%s %s; the others go on", who, why)
        else:
            self._problem = self._problem or f"{who} {why}"
        self._changed.notify_all()
