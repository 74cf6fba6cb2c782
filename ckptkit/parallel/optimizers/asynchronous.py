"""Asynchronous SGD: parameters on servers, and workers each at its own pace."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.live.state.ranks import World, current_world, meeting
from ckptkit.live.state.sockets import Listener, own_address
from ckptkit.live.wrappers.entries import parameter_names
from ckptkit.live.wrappers.training import Model
from ckptkit.parallel.optimizers.servers import (
    Access,
    Clocks,
    InProcess,
    MakeOptimizer,
    OverSocket,
    ParameterShard,
    answer_worker,
    shares,
)

_TOKEN_BYTES = 16


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
        self._world = current_world()
        self._timeout = timeout
        self._servers = _ranks("servers", servers, self._world)
        self._workers = _ranks("workers", workers, self._world)
        if on_loss not in ("fail", "continue"):
            raise UsageError('on_loss is "fail" or "continue"', value=on_loss)
        if staleness is not None and staleness < 0:
            raise UsageError("a number of steps", where="staleness", value=staleness)
        names = parameter_names(Model(model).entries())
        self._parameters = {name: p for p, name in names.items() if p.requires_grad}
        sizes = {name: p.nbytes for name, p in self._parameters.items()}
        self._shares = shares(sizes, self._servers)
        self._clocks = Clocks(self._workers, staleness, timeout, goes_on=on_loss == "continue")
        own = self._shares.get(self._world.rank, [])
        self._shard = ParameterShard({name: self._parameters[name] for name in own}, optimizer)
        self._server: Listener | None = None
        self._met: dict[str, Any] | None = {}
        self._closed = False
        self._access = self._connect()
        self._pull()

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
            raise UsageError(
                "each worker is at another step", hint="call meet() on all ranks before saving"
            )
        return self._met

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, and from the parameters that the model has now; any number of
        servers and workers may have saved it. All ranks load before one steps.
        """
        if not state:  # of a training that had not begun
            self._shard.load(self._parameters, {}, {})
            return
        self._shard.load(self._parameters, state["options"], state["state"])
        steps = {int(worker): count for worker, count in state["steps"].items()}
        if set(steps) != set(self._workers):
            # Who did them is of no use to others: all begin alike.
            steps = dict.fromkeys(self._workers, sum(steps.values()) // len(self._workers))
        self._clocks.go_on_from(steps)
        self._met = {**state, "steps": steps}

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

    def _connect(self) -> dict[int, Access]:
        """Reach all servers; a rank that is no worker asks them too, when all meet."""
        world, shard, clocks = self._world, self._shard, self._clocks
        used = [server for server in self._servers if self._shares[server]]
        with meeting(world, "asynchronous", self._timeout, "no training begins") as ranks:
            hosts = ranks.agree(socket.gethostname(), list)
            address = None
            if world.rank in used and world.size > 1:
                host, token = own_address(hosts), secrets.token_bytes(_TOKEN_BYTES)
                self._server = Listener(host, token, partial(answer_worker, shard, clocks))
                address = host, self._server.port, token
            addresses = ranks.agree(address, list)
        found: dict[int, Access] = {}
        for server in used:
            if server == world.rank:
                found[server] = InProcess(shard, clocks, world.rank)
            else:
                nbytes = sum(self._parameters[name].nbytes for name in self._shares[server])
                found[server] = OverSocket(
                    server, addresses[server], world.rank, nbytes, self._timeout
                )
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("closed: this worker has said that it has done its last step")


def _ranks(what: str, ranks: Sequence[int] | None, world: World) -> list[int]:
    found = list(range(world.size)) if ranks is None else sorted(set(ranks))
    if not found or found[0] < 0 or found[-1] >= world.size:
        raise UsageError(f"ranks of this job, 0 to {world.size - 1}", where=what, value=ranks)
    return found
