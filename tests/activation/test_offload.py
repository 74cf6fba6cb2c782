"""Activations that wait in host memory."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.activation import checkpoint_activations, kept_bytes
from ckptkit.activation.host import HostBuffers
from ckptkit.activation.moved import Lane, _Leaving
from ckptkit.activation.offload import Offload, Offloaded
from tests.activation.network import batch, gpt, loss_of


class Event:
    """A copy that ends when somebody waits for it."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        """Whether it has ended."""
        return self.has_come

    def synchronize(self) -> None:
        """Wait for it."""
        self.has_come = True


def test_the_last_forward_may_be_on_its_way_and_changes_meanwhile_are_told() -> None:
    lane = Lane()
    told: list[int] = []
    tensors = [torch.zeros(2) for _ in range(3)]
    events = []
    for number, tensor in enumerate(tensors):
        lane.next_forward()
        assert len(lane._pending) <= 1
        event: Any = Event()
        events.append(event)
        lane._pending.append(
            _Leaving(tensor, tensor._version, event, partial(told.append, number), lane._forward)
        )
    assert [event.has_come for event in events] == [True, False, False]
    tensors[1].add_(1)
    lane.next_forward()
    assert told == [1]
    events[2].has_come = True
    lane.drain()
    assert not lane._pending


def test_host_memory_goes_to_another_only_when_its_copies_have_ended() -> None:
    buffers, event = HostBuffers(pin=False), Event()
    first = buffers.take(100)
    copies: Any = [event]
    buffers.give(first, copies)
    assert not event.has_come
    assert buffers.take(50) is first
    assert event.has_come


class Shared(nn.Module):
    """Saves views of one memory several times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Products of halves."""
        y = x * 2
        a, b = y[:500], y[500:]
        return (y.sin() * y).sum() + (a * b).sum() + (a * a * b).sum()


def test_each_memory_is_moved_once_and_comes_back_as_all_its_views() -> None:
    offload, block = Offload(), Shared()
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    block(x).backward()
    wanted = torch.as_tensor(x.grad).clone()
    x.grad = None
    run = Offloaded(block, block.forward, offload)
    loss = run(x)
    assert offload.buffers.in_use <= 8 * 8192  # some of them are more than y alone
    loss.backward(retain_graph=True)
    assert torch.equal(torch.as_tensor(x.grad), wanted)
    loss.backward()
    assert torch.equal(torch.as_tensor(x.grad), 2 * wanted)
    del loss
    gc.collect()
    assert offload.buffers.in_use == 0


def test_forwards_may_overlap() -> None:
    inputs, targets = batch()
    plain, moved = gpt(2, dropout=0.0), gpt(2, dropout=0.0)
    checkpoint_activations(moved, "offload")
    for model in (plain, moved):
        losses = [loss_of(model(part), want) for part, want in ((inputs, targets),) * 3]
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()
    for one, other in zip(plain.parameters(), moved.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_nothing_but_the_result_stays_on_the_device() -> None:
    model = gpt(6)
    checkpoint_activations(model, "offload")
    inputs, targets = batch(16, 64)
    one = kept_bytes(lambda: loss_of(model(inputs), targets))
    short = gpt(1)
    checkpoint_activations(short, "offload")
    assert one == pytest.approx(kept_bytes(lambda: loss_of(short(inputs), targets)), rel=0.1)
