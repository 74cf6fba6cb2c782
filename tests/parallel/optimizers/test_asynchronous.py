"""Workers that wait for nobody, or not for long: they learn, go on after a save, and never hang."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ckptkit.errors import GivenUpError, PeerError, UsageError
from ckptkit.live import Checkpointer
from ckptkit.live.state import sockets
from ckptkit.live.state.sockets import Listener
from ckptkit.parallel import AsynchronousSGD
from ckptkit.parallel.optimizers.asynchronous import (
    Clocks,
    OverSocket,
    ParameterShard,
    answer_worker,
)
from tests.live.pool import Died, Pool
from tests.parallel.optimizers.problem import flat, loss_of, loss_unseen, network

SGD = partial(torch.optim.SGD, lr=0.1)
CALM = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.5)
STRAGGLER = 1


def one_step(model: torch.nn.Module, sgd: AsynchronousSGD, step: int) -> None:
    sgd.zero_grad()
    loss_of(model, step, dist.get_rank() if dist.is_initialized() else 0).backward()
    sgd.step()


def learn(servers: list[int] | None) -> tuple[float, dict[int, int], torch.Tensor]:
    """Train until the straggler has done 80 steps: the loss, the steps of all, the parameters."""
    model, late = network(), dist.get_rank() == STRAGGLER
    with AsynchronousSGD(model, CALM, servers=servers, timeout=30) as sgd:
        for step in range(80) if late else count():
            while late and min(sgd.steps[0], sgd.steps[2]) < 2 * (step + 1):
                time.sleep(0.001)
            one_step(model, sgd, step)
            if not late and sgd.steps[STRAGGLER] == 80:
                break
        sgd.meet()
        return loss_unseen(model), sgd.steps, flat(model)


@pytest.mark.parametrize("servers", [None, [0], [1, 2]])
def test_all_learn_and_the_straggler_holds_up_nobody(gloo: Pool, servers: list[int] | None) -> None:
    found = gloo.run(3, learn, servers)
    for loss, steps, parameters in found:
        assert loss < 0.2
        assert steps[STRAGGLER] == 80
        assert min(steps[0], steps[2]) >= 160
        assert torch.equal(parameters, found[0][2])


def bounded(staleness: int) -> tuple[int, int]:
    """How far the fast worker was ahead at most, and how many steps it did."""
    model, late = network(), dist.get_rank() == STRAGGLER
    with AsynchronousSGD(model, SGD, servers=[0], staleness=staleness, timeout=30) as sgd:
        ahead = 0
        for step in range(12):
            if late:
                time.sleep(0.01)
            one_step(model, sgd, step)
            counts = sgd.steps
            ahead = max(ahead, counts[0] - counts[STRAGGLER])
        return ahead, sgd.steps[0]


@pytest.mark.parametrize("staleness", [0, 3])
def test_nobody_begins_a_step_too_far_ahead_of_the_last(gloo: Pool, staleness: int) -> None:
    for ahead, _ in gloo.run(2, bounded, staleness):
        # The gradient of the step under way may have come already.
        assert ahead <= staleness + 1


def alone(location: str | None, first: int, last: int) -> torch.Tensor:
    model = network(seed=first)
    with AsynchronousSGD(model, MOMENTUM) as sgd:
        if location and first:
            with Checkpointer(location) as checkpointer:
                assert checkpointer.restore(model=model, state={"asynchronous": sgd})
        for step in range(first, last):
            one_step(model, sgd, step)
        if location and not first:
            sgd.meet()
            with Checkpointer(location) as checkpointer:
                checkpointer.save(last, model=model, state={"asynchronous": sgd})
        assert sgd.steps == {0: last}
    return flat(model)


def test_one_worker_goes_on_bit_for_bit(tmp_path: Path) -> None:
    expected = alone(None, 0, 9)
    alone(str(tmp_path), 0, 5)
    assert torch.equal(alone(str(tmp_path), 5, 9), expected)


def saved(location: str) -> dict[str, Any]:
    model = network()
    with AsynchronousSGD(model, MOMENTUM, timeout=30) as sgd:
        for step in range(3 + dist.get_rank()):
            one_step(model, sgd, step)
        sgd.set_options(lr=0.015)
        sgd.meet()
        with Checkpointer(location, timeout=30) as checkpointer:
            checkpointer.save(1, model=model, state={"asynchronous": sgd})
        return {"parameters": flat(model), **sgd.state_dict()}


def restored(location: str) -> dict[str, Any]:
    model = network(seed=1)
    with AsynchronousSGD(model, MOMENTUM, timeout=30) as sgd:
        with Checkpointer(location, timeout=30) as checkpointer:
            assert checkpointer.restore(model=model, state={"asynchronous": sgd})
        sgd.meet()
        found = {"parameters": flat(model), **sgd.state_dict()}
        one_step(model, sgd, 9)
        return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_the_servers_kept_goes_to_any_number_of_servers(
    gloo: Pool, tmp_path: Path, ranks: int
) -> None:
    before = gloo.run(3, saved, str(tmp_path))[0]
    assert before["steps"] == {0: 3, 1: 4, 2: 5}
    for after in gloo.run(ranks, restored, str(tmp_path)):
        assert torch.equal(after["parameters"], before["parameters"])
        assert after["options"] == before["options"]
        assert after["options"]["lr"] == 0.015
        for name, state in before["state"].items():
            assert torch.equal(after["state"][name]["momentum_buffer"], state["momentum_buffer"])
        assert after["steps"] == (before["steps"] if ranks == 3 else {0: 6, 1: 6})


def looked_up(servers: list[int] | None) -> tuple[torch.Tensor, list[str]]:
    """A step of rows of an embedding; and what is said of options that there are not."""
    rows = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(rows.weight)
    refused = []
    with AsynchronousSGD(rows, SGD, servers=servers, timeout=30) as sgd:
        if not dist.is_initialized() or dist.get_rank() == 1:
            rows(torch.tensor([1, 1, 3])).sum().backward()
            sgd.step()
        for option in ("learning_rate", "params"):
            with pytest.raises((UsageError, PeerError)) as caught:
                sgd.set_options(**{option: 1})
            refused.append(str(caught.value))
        sgd.meet()
        return rows.weight.detach().clone(), refused


def test_sparse_gradients_are_taken_and_unknown_options_are_not(gloo: Pool) -> None:
    """They waited for their time-out, and were kept for nobody."""
    for rows, refused in (looked_up(None), *gloo.run(2, looked_up, [0])):
        assert torch.equal(rows, torch.tensor([[0.0] * 2, [-0.2] * 2, [0.0] * 2, [-0.1] * 2]))
        assert ["no such option" in each for each in refused] == [True, True]


def passed_on(source: str, target: str) -> None:
    """Restore, and save before anybody has stepped."""
    model = network(seed=2)
    with AsynchronousSGD(model, MOMENTUM, timeout=30) as sgd:
        with Checkpointer(source, timeout=30) as checkpointer:
            assert checkpointer.restore(model=model, state={"asynchronous": sgd})
        with Checkpointer(target, timeout=30) as checkpointer:
            checkpointer.save(1, model=model, state={"asynchronous": sgd})


def test_a_save_before_the_first_step_has_all_that_was_restored(gloo: Pool, tmp_path: Path) -> None:
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    before = gloo.run(2, saved, source)[0]
    gloo.run(2, passed_on, source, target)
    for after in gloo.run(2, restored, target):
        assert torch.equal(after["parameters"], before["parameters"])
        assert after["steps"] == before["steps"] == {0: 3, 1: 4}
        assert after["options"] == before["options"]
        for name, state in before["state"].items():
            assert torch.equal(after["state"][name]["momentum_buffer"], state["momentum_buffer"])


def test_servers_take_over_what_was_saved_before_any_step(tmp_path: Path) -> None:
    first, second = network(), network(seed=1)
    expected = flat(first)
    with AsynchronousSGD(first, SGD) as sgd, Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, model=first, state={"asynchronous": sgd})
    with AsynchronousSGD(second, SGD) as sgd, Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(model=second, state={"asynchronous": sgd})
        sgd.meet()
        assert torch.equal(flat(second), expected)


def test_a_state_of_before_the_first_step_takes_back_what_was_done_since() -> None:
    model = network()
    with AsynchronousSGD(model, MOMENTUM) as sgd:
        before = sgd.state_dict()
        one_step(model, sgd, 0)
        sgd.load_state_dict(before)
        assert sgd.steps == {0: 0}
        assert sgd.state_dict() == {}
        sgd.meet()
        assert not any(sgd.state_dict()["state"].values())


def with_a_death(on_loss: str) -> str | int:
    """Worker 1, which serves nothing, dies after 3 steps; what becomes of the others."""
    model, rank = network(), dist.get_rank()
    sgd = AsynchronousSGD(model, SGD, servers=[0], staleness=2, timeout=20, on_loss=on_loss)
    try:
        with sgd:
            for step in range(12):
                if rank == 1 and step == 3:
                    os._exit(3)
                one_step(model, sgd, step)
            return sgd.steps[rank]
    except PeerError as error:
        return str(error)


@pytest.mark.parametrize("on_loss", ["fail", "continue"])
def test_a_worker_that_dies_holds_up_nobody(gloo: Pool, on_loss: str) -> None:
    results: list[Any] = gloo.run(3, with_a_death, on_loss, may_die=[1])
    first, died, last = results
    assert isinstance(died, Died)
    if on_loss == "continue":
        assert (first, last) == (12, 12)
    else:
        assert "worker 1 is gone" in str(first)
        assert "is gone" in str(last)


def with_a_dead_server() -> str:
    model = network()

    def train() -> None:
        with AsynchronousSGD(model, SGD, timeout=5, on_loss="continue") as sgd:
            for step in range(50):
                if dist.get_rank() == 1 and step == 3:
                    os._exit(3)
                one_step(model, sgd, step)

    with pytest.raises(PeerError, match="go on from the last checkpoint") as caught:
        train()
    return str(caught.value)


def test_a_server_that_dies_is_an_error_with_what_to_do(gloo: Pool) -> None:
    said, _ = gloo.run(2, with_a_dead_server, may_die=[1])
    assert str(said).startswith("server 1")


def test_a_worker_that_does_not_come_is_an_error_or_left_behind() -> None:
    clocks = Clocks([0, 1], 0, 0.05, goes_on=False)
    with pytest.raises(PeerError, match=r"worker 1 did not come within 0\.05 s"):
        clocks.tick(0)
    with pytest.raises(PeerError, match="worker 1 did not come"):
        clocks.tick(1)
    patient = Clocks([0, 1], 0, 0.05, goes_on=True)
    patient.tick(0)
    patient.tick(0)
    patient.tick(1)  # it is back, and nobody waits for what it has missed
    assert patient.steps() == {0: 2, 1: 3}


def test_one_who_has_left_is_not_waited_for() -> None:
    clocks = Clocks([0, 1, 2], 0, 5, goes_on=False)
    clocks.leave(1)
    waiting = threading.Thread(target=clocks.tick, args=(0,))
    waiting.start()
    clocks.tick(2)
    waiting.join()
    assert clocks.steps() == {0: 1, 1: 0, 2: 1}
    clocks.leave(0)
    clocks.leave(2)
    clocks.wait_until_empty()


class Server(NamedTuple):
    """What answers one worker, and what it has."""

    shard: ParameterShard
    clocks: Clocks
    port: int


@pytest.fixture
def server() -> Iterator[Server]:
    shard = ParameterShard({"w": torch.zeros(3, dtype=torch.bfloat16)}, SGD)
    clocks = Clocks([0], None, 5, goes_on=False)
    listener = Listener("127.0.0.1", b"t" * 16, partial(answer_worker, shard, clocks))
    yield Server(shard, clocks, listener.port)
    listener.close()


def test_who_does_not_know_the_token_gets_no_answer(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as pipe:
        pipe.sendall(b"x" * 16)
        assert pipe.recv(1) == b""


@pytest.mark.parametrize("nonsense", [b"\xff" * 4, b"\x00\x00\x00\x08" + b"\xff" * 8])
def test_nonsense_ends_the_connection_and_counts_as_a_lost_worker(
    server: Server, nonsense: bytes
) -> None:
    with sockets.connect("127.0.0.1", server.port, b"t" * 16, 5) as pipe:
        sockets.tell(pipe, 0)
        pipe.sendall(nonsense)
        assert pipe.recv(1) == b""
    server.clocks.wait_until_empty()
    with pytest.raises(PeerError, match="worker 0 is gone"):
        server.clocks.check()


def test_a_gradient_of_another_shape_is_refused_and_changes_nothing(server: Server) -> None:
    with sockets.connect("127.0.0.1", server.port, b"t" * 16, 5) as pipe:
        sockets.tell(pipe, 0)
        sockets.tell(pipe, ["push", [torch.ones(2, dtype=torch.bfloat16)]])
        what, said = sockets.hear(pipe, 0)
        assert (what, "shape" in said or "size" in said) == ("", True)
    assert torch.equal(server.shard.pull()[0], torch.zeros(3, dtype=torch.bfloat16))


def test_an_answer_that_was_not_waited_for_is_never_taken_for_another(server: Server) -> None:
    address = "127.0.0.1", server.port, b"t" * 16
    left = OverSocket(0, address, 0, 6, 5)
    left.begin_push([None])
    with pytest.raises(PeerError, match="an earlier answer was not waited for"):
        left.steps()
    late = OverSocket(0, address, 0, 6, 0.05)
    with server.shard._lock, pytest.raises(PeerError, match=r"does not answer within 0\.05 s"):
        late.pull()
    with pytest.raises(PeerError, match="an earlier answer was not waited for"):
        late.steps()
    assert left._pipe.fileno() == late._pipe.fileno() == -1


def test_an_answer_to_another_question_is_refused() -> None:
    def answer(pipe: socket.socket) -> None:
        sockets.hear(pipe, 0)
        sockets.hear(pipe, 0)
        sockets.tell(pipe, ["pull", []])

    listener = Listener("127.0.0.1", b"t" * 16, answer)
    access = OverSocket(0, ("127.0.0.1", listener.port, b"t" * 16), 0, 6, 5)
    with pytest.raises(PeerError, match=r"another question.*'pull'"):
        access.steps()
    listener.close()


def begin_where_rank_1_fails(where: str) -> tuple[str, bool, list[str]]:
    """What is said, whether at once, and the threads that are left."""
    module = "ckptkit.parallel.optimizers.asynchronous"
    broken = mock.patch(f"{module}.{where}", side_effect=MemoryError("no memory"))
    began = time.monotonic()
    with (
        broken if dist.get_rank() == 1 else nullcontext(),
        pytest.raises((PeerError, GivenUpError, MemoryError)) as caught,
    ):
        AsynchronousSGD(network(), SGD, timeout=40)
    took = time.monotonic() - began
    left = [each.name for each in threading.enumerate() if each.name.startswith("ckptkit")]
    return str(caught.value), took < 20, left


@pytest.mark.parametrize("where", ["_ranks", "ParameterShard", "own_address", "connect"])
def test_no_training_begins_where_a_rank_cannot(gloo: Pool, where: str) -> None:
    first, own, last = gloo.run(3, begin_where_rank_1_fails, where)
    assert own == ("no memory", True, [])
    heard = "no training begins, because of rank 1: MemoryError: no memory"
    assert first == last == (heard, True, [])


@pytest.mark.parametrize(
    "wrong", [{"servers": []}, {"workers": [1]}, {"staleness": -1}, {"on_loss": "ignore"}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AsynchronousSGD(network(), SGD, **wrong)


def test_a_model_that_nothing_trains_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameter to train"):
        AsynchronousSGD(network().requires_grad_(False), SGD)


def test_an_optimizer_of_several_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="one group of parameters"):
        AsynchronousSGD(network(), lambda each: SGD([{"params": [p]} for p in each]))


def test_a_state_is_saved_only_when_all_have_met() -> None:
    model = network()
    with AsynchronousSGD(model, torch.optim.SGD) as sgd:
        one_step(model, sgd, 0)
        with pytest.raises(UsageError, match="meet"):
            sgd.state_dict()
        sgd.meet()
        assert sgd.state_dict()["steps"] == {0: 1}
    with pytest.raises(UsageError, match="closed"):
        sgd.step()
