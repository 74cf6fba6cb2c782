"""Asynchronous SGD: parameters on servers, and workers each at its own pace.

A server has whole parameters, the optimizer that steps them (`ParameterShard`), and the clocks of
all workers. A worker asks that of its own process directly, and others over a socket, where a
thread for each worker answers.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.live.state.entries import parameter_names
from ckptkit.live.state.ranks import World, current_world, meeting
from ckptkit.live.state.sockets import Listener, connect, hear, message, own_address, tell
from ckptkit.live.wrappers import Model
from ckptkit.plan.chunks import owners_of

log = logging.getLogger("ckptkit.parallel")

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_STATES = 16  # more tensors of its own size does no optimizer keep for a parameter


class AsynchronousSGD:
    """Pushes gradients to servers and pulls parameters from them, without a barrier.

    Every rank makes one of the same model, a plain one. Parameters lie whole on the ranks
    `servers`, by default on all, each a worker as well; `workers` are the ranks that call `step`.
    `optimizer` makes the servers' optimizer of their parameters: a class of torch's, or a
    `functools.partial` of one. With `staleness`, a worker that is more than so many steps ahead of
    the last one waits for it. A worker that dies, or is waited for longer than `timeout` seconds,
    is an error for all, or with `on_loss="continue"` the others go on; a server that dies takes
    parameters with it, and is always an error.

    >>> model = nn.Linear(2, 1)
    >>> with AsynchronousSGD(model, torch.optim.SGD) as training:
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     training.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        *,
        servers: Sequence[int] | None = None,
        workers: Sequence[int] | None = None,
        staleness: int | None = None,
        timeout: float = 60.0,
        on_loss: str = "fail",
    ) -> None:
        self._world = world = current_world()
        self._timeout = timeout
        self._access: dict[int, InProcess | OverSocket] = {}
        self._server: Listener | None = None
        self._met: dict[str, Any] | None = {}
        self._closed = False
        begins = meeting(world, "asynchronous", timeout, "no training begins")
        with ExitStack() as begun, begins as ranks:
            begun.callback(self._end)  # unless all goes well
            self._workers = _ranks("workers", workers, world)
            if on_loss not in ("fail", "continue"):
                raise UsageError('on_loss is "fail" or "continue"', value=on_loss)
            if staleness is not None and staleness < 0:
                raise UsageError("a number of steps", where="staleness", value=staleness)
            names = parameter_names(Model(model).entries())
            self._parameters = {name: p for p, name in names.items() if p.requires_grad}
            if not self._parameters:
                raise UsageError("the model has no parameter to train", value=type(model).__name__)
            sizes = {name: p.nbytes for name, p in self._parameters.items()}
            of = _ranks("servers", servers, world)
            self._shares: dict[int, list[str]] = {server: [] for server in of}
            for name, owner in owners_of(sizes, len(of)).items():
                self._shares[of[owner]].append(name)
            self._clocks = Clocks(self._workers, staleness, timeout, goes_on=on_loss == "continue")
            own = {name: self._parameters[name] for name in self._shares.get(world.rank, ())}
            self._shard = ParameterShard(own, optimizer) if own else None
            self._connect(ranks)
            self._pull()
            ranks.wait()
            begun.pop_all()

    @property
    def steps(self) -> dict[int, int]:
        """By worker, how many steps it has done."""
        return next(iter(self._access.values())).steps()

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self) -> None:
        """Push the gradients and pull the parameters, however far the other workers are."""
        self._check_open()
        if self._world.rank not in self._workers:
            raise UsageError("this rank is no worker", value=self._world.rank)
        self._met = None
        # All servers get their gradients before an answer is waited for: they step at one time.
        for server, access in self._access.items():
            access.begin_push([self._parameters[name].grad for name in self._shares[server]])
        for server, access in self._access.items():
            self._put(server, access.end_push())

    def set_options(self, **options: object) -> None:
        """Change options of the servers' optimizers for all workers, such as `lr=0.01`."""
        self._check_open()
        for access in self._access.values():
            access.set_options(options)

    def meet(self) -> None:
        """Wait for all ranks; then all have the same parameters, and `state_dict` what belongs to
        them; buffers stay each rank's own. Every rank calls it, also one that is no worker, before
        a save and at the end: once one is lost the others cannot meet, even with
        `on_loss="continue"`.
        """
        self._check_open()
        with meeting(self._world, "meeting", self._timeout, "there is no common state") as ranks:
            ranks.wait()
            self._pull()
            states, steps = [access.state() for access in self._access.values()], self.steps
            # Nobody pushes again before all have pulled.
            ranks.wait()
        self._met = {
            "steps": steps,
            "options": next((s["options"] for s in states if s["options"]), {}),
            "state": {name: kept for s in states for name, kept in s["state"].items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """What the optimizers of all servers keep and the steps of all workers, as of `meet`."""
        if self._met is None:
            raise UsageError("each worker is at another step", hint="call meet() on all ranks")
        return self._met

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, and from the parameters that the model has now; any number of
        servers and workers may have saved it. All ranks load before one steps.
        """
        options, kept = state.get("options", {}), state.get("state", {})
        if self._shard is not None:
            self._shard.load(self._parameters, options, kept)
        steps = {int(worker): count for worker, count in state.get("steps", {}).items()}
        if set(steps) != set(self._workers):
            # Who did them is of no use to others: all begin alike.
            steps = dict.fromkeys(self._workers, sum(steps.values()) // len(self._workers))
        self._clocks.go_on_from(steps)
        self._met = {**state, "steps": steps} if state else {}  # it had not begun

    def close(self) -> None:
        """Say that this worker has done its last step; a server then still answers the others."""
        if self._closed:
            return
        self._closed = True
        for access in self._access.values():
            access.leave()
        if self._server is not None:
            self._clocks.wait_until_empty()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # without a word, so that the others notice
            self._closed = True
            self._end()

    def _end(self) -> None:
        for access in self._access.values():
            access.close()
        if self._server is not None:
            self._server.close()

    def _pull(self) -> None:
        for server, access in self._access.items():
            self._put(server, access.pull())

    def _put(self, server: int, values: Sequence[torch.Tensor]) -> None:
        """A call of its own, so that nothing keeps the values while the next server is asked."""
        with torch.no_grad():
            for name, value in zip(self._shares[server], values, strict=True):
                self._parameters[name].copy_(value)

    def _connect(self, ranks: Ranks) -> None:
        """Reach all servers; a rank that is no worker asks them too, when all meet."""
        shard, clocks, rank = self._shard, self._clocks, self._world.rank
        hosts = ranks.agree(socket.gethostname(), list)
        address = None
        if shard is not None and self._world.size > 1:
            host, token = own_address(hosts), secrets.token_bytes()
            self._server = Listener(host, token, partial(answer_worker, shard, clocks))
            address = host, self._server.port, token
        addresses = ranks.agree(address, list)
        for server, names in self._shares.items():
            if server == rank and shard is not None:
                self._access[server] = InProcess(shard, clocks, rank)
            elif names:
                nbytes = sum(self._parameters[name].nbytes for name in names)
                reached = OverSocket(server, addresses[server], rank, nbytes, self._timeout)
                self._access[server] = reached

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("closed: this worker has said that it has done its last step")


def _ranks(what: str, ranks: Sequence[int] | None, world: World) -> list[int]:
    found = list(range(world.size)) if ranks is None else sorted(set(ranks))
    if not found or found[0] < 0 or found[-1] >= world.size:
        raise UsageError(f"ranks of this job, 0 to {world.size - 1}", where=what, value=ranks)
    return found


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
        self._optimizer = make_optimizer(self._parameters.values())
        if len(self._optimizer.param_groups) > 1:
            raise UsageError(
                "the optimizer of a server has one group of parameters",
                value=f"{len(self._optimizer.param_groups)} groups",
                hint="pass a class of torch's, or a functools.partial of one",
            )
        (self._group,) = self._optimizer.param_groups

    def push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step by a worker's gradients; those that are None are of parameters that stay."""
        with self._lock:
            for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            self._optimizer.zero_grad()

    def pull(self) -> list[torch.Tensor]:
        """The values of all parameters, at one time."""
        with self._lock:
            return [parameter.detach().clone() for parameter in self._parameters.values()]

    def set_options(self, options: Mapping[str, Any]) -> None:
        with self._lock:
            if unknown := options.keys() - (self._group.keys() - {"params"}):
                raise UsageError("the servers' optimizers have no such option", value=min(unknown))
            self._group.update(options)

    def state(self) -> dict[str, Any]:
        """What the optimizer keeps, by the name of the parameter, and its options."""
        with self._lock:
            options = {key: value for key, value in self._group.items() if key != "params"}
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
            self._group.update(options)
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])
                self._optimizer.state[parameter] = _copied(state.get(name) or {})


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
        self._shard.push([None if g is None else g.detach().to_dense().cpu() for g in gradients])

    def end_push(self) -> list[torch.Tensor]:
        """Wait until the worker may go on; the parameters then."""
        self._clocks.tick(self._worker)
        return self._shard.pull()

    def push(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        self.begin_push(gradients)
        return self.end_push()

    def close(self) -> None: ...


class OverSocket:
    """Asks a server in another process, by messages: the name of what `InProcess` has, and what
    that takes. An answer has the name again, or none and what went wrong.
    """

    def __init__(
        self, server: int, address: tuple[str, int, bytes], worker: int, nbytes: int, timeout: float
    ) -> None:
        self._where, self._timeout = f"server {server}", timeout
        self._largest = _STATES * nbytes + 2**24
        self._asked = ""  # what is not answered yet
        self.close: Callable[[], None] = lambda: None
        with self._talking():
            self._pipe = connect(*address, timeout)
            self.close = self._pipe.close
            # An answer may wait for other workers as long as they may take, and then says so.
            self._pipe.settimeout(2 * timeout)
            tell(self._pipe, worker)
        self.pull, self.state, self.steps, self.set_options = (
            partial(self._ask, what) for what in ("pull", "state", "steps", "set_options")
        )

    def begin_push(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._begin("push", [None if g is None else g.detach().to_dense() for g in gradients])

    def end_push(self) -> Any:
        with self._talking():
            what, answer = hear(self._pipe, self._largest)
            if what not in ("", self._asked):
                raise PeerError("answers another question", where=self._where, value=what)
            self._asked = ""
        if not what:
            raise PeerError(answer, where=self._where)
        return answer

    def leave(self) -> None:
        with suppress(PeerError):  # whether anybody hears it matters to nobody
            self._ask("leave")

    def _ask(self, what: str, *given: Any) -> Any:
        self._begin(what, *given)
        return self.end_push()

    def _begin(self, what: str, *given: Any) -> None:
        parts = message([what, *given])  # what cannot be said has not been asked
        with self._talking():
            if self._asked:  # an error or Ctrl-C came before its answer was heard
                raise PeerError("an earlier answer was not waited for", where=self._where)
            self._asked = what
            for part in parts:
                self._pipe.sendall(part)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Say of a lost connection what that means."""
        try:
            yield
        except BaseException as error:
            self.close()  # an answer that comes later would be taken for that to the next question
            if isinstance(error, CkptkitError) or not isinstance(error, (OSError, EOFError)):
                raise
            late = f"does not answer within {self._timeout:g} s"
            what = late if isinstance(error, TimeoutError) else "is gone"
            hint = "it held parameters that nobody else has: go on from the last checkpoint"
            raise PeerError(what, where=self._where, hint=hint) from error


def answer_worker(shard: ParameterShard, clocks: Clocks, pipe: socket.socket) -> None:
    """Answer the questions of one worker until it leaves; one that ends otherwise is lost."""
    worker = hear(pipe, 0)
    if type(worker) is not int:
        return  # no worker, so nobody is lost
    here = InProcess(shard, clocks, worker)
    names = ("push", "pull", "state", "steps", "set_options", "leave")
    answers: dict[str, Callable[..., Any]] = {name: getattr(here, name) for name in names}
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
