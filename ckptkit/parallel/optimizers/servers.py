"""The servers of asynchronous SGD: what each has, and how a worker asks it.

A server has whole parameters, the optimizer that steps them (`ParameterShard`), and the clocks of
all workers. A worker asks that of its own process directly, and others over a socket, in messages
of a few fixed numbers and then bytes, which a thread for each worker answers.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import in_one_line
from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.format.leaves import dumps, unpack
from ckptkit.live.state.sockets import connect, memory_of, receive
from ckptkit.live.state.trees import put_tensors, tensors_inline

log = logging.getLogger("ckptkit.parallel")

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_HEAD = struct.Struct("<BIQ")  # what, from whom, how many bytes follow
_STATES = 16  # more tensors of its own size does no optimizer keep for a parameter
_SLACK_OF_QUESTIONS, _SLACK_OF_ANSWERS = 2**20, 2**24


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
        self.like = [parameter.detach() for parameter in self._parameters.values()]
        """What tells the forms of its tensors, not their values: those may change meanwhile."""
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
    """Asks a server in another process, by messages."""

    def __init__(
        self,
        server: int,
        address: tuple[str, int, bytes],
        worker: int,
        like: Sequence[torch.Tensor],
        timeout: float,
    ) -> None:
        self._server, self._worker, self._timeout = server, worker, timeout
        self._like = list(like)
        self._largest = _STATES * sum(t.nbytes for t in self._like) + _SLACK_OF_ANSWERS
        with self._talking():
            self._pipe = connect(*address, timeout)
        # An answer may wait for other workers as long as they may take, and then says so.
        self._pipe.settimeout(2 * timeout)
        self._send(Kind.HELLO)

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send which parameters have a gradient, a byte for each, and the gradients."""
        which = bytes(gradient is not None for gradient in gradients)
        found = [each.detach().cpu().contiguous() for each in gradients if each is not None]
        self._send(Kind.PUSH, [memoryview(which), *map(memory_of, found)])

    def end_push(self) -> list[torch.Tensor]:
        return tensors_in(self._answer(), self._like)

    def pull(self) -> list[torch.Tensor]:
        self._send(Kind.PULL)
        return tensors_in(self._answer(), self._like)

    def state(self) -> dict[str, Any]:
        self._send(Kind.STATE)

        def refused(name: str) -> torch.Tensor:
            raise PeerError("a server's state has no arrays", value=name)

        tree = unpack(bytes(self._answer()), "state")
        found: dict[str, Any] = put_tensors(tree, refused, "state")
        return found

    def steps(self) -> dict[int, int]:
        self._send(Kind.STEPS)
        steps: dict[int, int] = unpack(bytes(self._answer()), "steps")
        return steps

    def set_options(self, options: Mapping[str, Any]) -> None:
        self._send(Kind.OPTIONS, [memoryview(dumps(dict(options), "options"))])
        self._answer()

    def leave(self) -> None:
        with suppress(PeerError):  # whether anybody hears it matters to nobody
            self._send(Kind.LEAVE)
            self._answer()

    def close(self) -> None:
        self._pipe.close()

    def _send(self, kind: Kind, parts: Sequence[memoryview] = ()) -> None:
        with self._talking():
            send_message(self._pipe, kind, self._worker, parts)

    def _answer(self) -> bytearray:
        with self._talking():
            kind, _, data = receive_message(self._pipe, self._largest)
        if kind != Kind.DONE:
            raise PeerError(data.decode(errors="replace"), where=f"server {self._server}")
        return data

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
    largest = sum(p.nbytes for p in shard.like) + len(shard.like) + _SLACK_OF_QUESTIONS
    kind, worker, _ = receive_message(pipe, 0)
    if kind != Kind.HELLO:
        return  # no worker, so nobody is lost
    here = InProcess(shard, clocks, worker)
    try:
        while kind != Kind.LEAVE:
            kind, _, data = receive_message(pipe, largest)
            answer: list[memoryview] = []
            try:
                if kind == Kind.PUSH:
                    here.begin_push(gradients_in(data, shard.like))
                    answer = [memory_of(value) for value in here.end_push()]
                elif kind == Kind.PULL:
                    answer = [memory_of(value) for value in here.pull()]
                elif kind == Kind.STATE:
                    answer = [memoryview(dumps(tensors_inline(here.state()), "state"))]
                elif kind == Kind.STEPS:
                    answer = [memoryview(dumps(here.steps(), "steps"))]
                elif kind == Kind.OPTIONS:
                    options = unpack(bytes(data), "options")
                    here.set_options(options if isinstance(options, dict) else {})
                elif kind == Kind.LEAVE:
                    here.leave()
            except Exception as error:  # noqa: BLE001 — told to the worker, who raises it
                told = memoryview(in_one_line(error).encode())
                send_message(pipe, Kind.FAILED, worker, [told])
            else:
                send_message(pipe, Kind.DONE, worker, answer)
    finally:
        clocks.lose(worker)  # which does nothing where it has left


class Kind(IntEnum):
    HELLO = 0
    PUSH = 1
    PULL = 2
    STATE = 3
    OPTIONS = 4
    LEAVE = 5
    DONE = 6
    FAILED = 7
    STEPS = 8


def send_message(
    pipe: socket.socket, kind: Kind, worker: int, parts: Sequence[memoryview] = ()
) -> None:
    """Send a message whose bytes lie in several places."""
    pipe.sendall(_HEAD.pack(kind, worker, sum(part.nbytes for part in parts)))
    for part in parts:
        pipe.sendall(part)


def receive_message(pipe: socket.socket, largest: int) -> tuple[Kind, int, bytearray]:
    """The next message, of a bounded size; EOFError when the other side is gone."""
    kind, worker, length = _HEAD.unpack(receive(pipe, _HEAD.size))
    if kind > max(Kind) or length > largest:
        raise PeerError("not a message of a worker or a server", value=(kind, length))
    return Kind(kind), worker, receive(pipe, length)


def gradients_in(data: bytearray, like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of a message, as `begin_push` sends them, for parameters alike."""
    which = data[: len(like)]
    present = [parameter for has, parameter in zip(which, like, strict=True) if has]
    found = iter(tensors_in(data, present, len(like)))
    return [next(found) if has else None for has in which]


def tensors_in(data: bytearray, like: Sequence[torch.Tensor], at: int = 0) -> list[torch.Tensor]:
    """The tensors of a message, like some that there are."""
    found = []
    for each in like:
        if at + each.nbytes > len(data):
            raise PeerError("a message is too short for its tensors", value=len(data))
        if each.numel():
            raw = torch.frombuffer(data, dtype=torch.uint8, count=each.nbytes, offset=at)
            # Numbers begin where they may, and a tensor of them may not begin anywhere.
            found.append(raw.clone().view(each.dtype).view(each.shape))
        else:
            found.append(torch.empty(each.shape, dtype=each.dtype))
        at += each.nbytes
    if at != len(data):
        raise PeerError("a message is too long for its tensors", value=len(data))
    return found
