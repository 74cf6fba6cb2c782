"""The servers of asynchronous SGD: what each has, and how a worker asks it.

A server has whole parameters, the optimizer that steps them (`ParameterShard`), and the clocks of
all workers. A worker asks that of its own process directly, and others over a socket, where a
thread for each worker answers.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import in_one_line
from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.live.state.sockets import connect, hear, tell

log = logging.getLogger("ckptkit.parallel")

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_STATES = 16  # more tensors of its own size does no optimizer keep for a parameter
_SLACK = 2**24


def shares(sizes: Mapping[str, int], servers: Sequence[int]) -> dict[int, list[str]]:
    """The names of the parameters of each server, whole ones, about as many bytes for each."""
    names: dict[int, list[str]] = {server: [] for server in servers}
    load = dict.fromkeys(servers, 0)
    # The largest first: the small ones then even out what those leave.
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
        self.nbytes = sum(parameter.nbytes for parameter in self._parameters.values())
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

    def load(
        self,
        values: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        """Take over parameters, and what the optimizers of any number of servers kept."""
        with self._lock, torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])
        self.set_options(options)  # which takes the lock itself
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
                if slowest > seen:  # it is slow, and not gone: time begins anew
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


class InProcess:
    """Asks the server of this process. A push has two halves: between them all servers work."""

    def __init__(self, shard: ParameterShard, clocks: Clocks, worker: int) -> None:
        self._shard, self._clocks, self._worker = shard, clocks, worker
        self.pull, self.state, self.set_options = shard.pull, shard.state, shard.set_options
        self.steps, self.leave = clocks.steps, partial(clocks.leave, worker)

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._clocks.check()
        self._shard.push([None if g is None else g.detach().cpu() for g in gradients])

    def end_push(self) -> list[torch.Tensor]:
        """Wait until the worker may go on; the parameters then."""
        self._clocks.tick(self._worker)
        return self._shard.pull()

    def close(self) -> None: ...


class OverSocket:
    """Asks a server in another process, by messages: the name of what `InProcess` has, and what
    that takes. An answer has the name again, or none and what went wrong.
    """

    def __init__(
        self, server: int, address: tuple[str, int, bytes], worker: int, nbytes: int, timeout: float
    ) -> None:
        self._server, self._timeout = server, timeout
        self._largest = _STATES * nbytes + _SLACK
        with self._talking():
            self._pipe = connect(*address, timeout)
            # An answer may wait for other workers as long as they may take, and then says so.
            self._pipe.settimeout(2 * timeout)
            tell(self._pipe, worker)
        self.pull, self.state, self.steps, self.set_options = (
            partial(self._asked, what) for what in ("pull", "state", "steps", "set_options")
        )

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._ask("push", [None if each is None else each.detach() for each in gradients])

    def end_push(self) -> Any:
        with self._talking():
            what, answer = hear(self._pipe, self._largest)
        if not what:
            raise PeerError(answer, where=f"server {self._server}")
        return answer

    def leave(self) -> None:
        with suppress(PeerError):  # whether anybody hears it matters to nobody
            self._asked("leave")

    def close(self) -> None:
        self._pipe.close()

    def _asked(self, what: str, *given: Any) -> Any:
        self._ask(what, *given)
        return self.end_push()

    def _ask(self, what: str, *given: Any) -> None:
        with self._talking():
            tell(self._pipe, [what, *given])

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Say of a lost connection what that means."""
        try:
            yield
        except CkptkitError:
            raise
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            raise PeerError(
                f"does not answer within {self._timeout:g} s" if late else "is gone",
                where=f"server {self._server}",
                hint="it held parameters that nobody else has: go on from the last checkpoint",
            ) from error


Access: TypeAlias = InProcess | OverSocket


def answer_worker(shard: ParameterShard, clocks: Clocks, pipe: socket.socket) -> None:
    """Answer the questions of one worker until it leaves; one that ends otherwise is lost."""
    worker = hear(pipe, 0)
    if type(worker) is not int:
        return  # no worker, so nobody is lost
    here = InProcess(shard, clocks, worker)

    def push(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        here.begin_push(gradients)
        return here.end_push()

    answers: dict[str, Callable[..., Any]] = {
        name: getattr(here, name) for name in ("pull", "state", "steps", "set_options", "leave")
    }
    answers["push"] = push
    what = ""
    try:
        while what != "leave":
            asked = hear(pipe, shard.nbytes)
            if not isinstance(asked, list) or not asked or asked[0] not in answers:
                raise PeerError("not a message of a worker", value=asked)
            what, *given = asked
            try:
                tell(pipe, [what, answers[what](*given)])
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 — told to the worker, who raises it
                tell(pipe, ["", in_one_line(error)])
    finally:
        clocks.lose(worker)  # which does nothing where it has left
