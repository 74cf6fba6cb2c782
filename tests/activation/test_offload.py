"""Activations that wait in host memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from ckptkit.activation import ActivationMeter, checkpoint_activations, kept_bytes
from ckptkit.activation.offload import HostMemory, Offloaded, _Departure
from ckptkit.errors import UsageError
from tests.activation.network import WIDTH, batch, gpt, loss_of


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


class SlowEvent(Event):
    """A copy that has ended, which is told late."""

    def query(self) -> bool:
        """Yes."""
        time.sleep(1e-4)
        return True


def test_the_last_forward_may_be_on_its_way_and_changes_meanwhile_are_told() -> None:
    memory = HostMemory()
    tensors = [torch.zeros(2) for _ in range(3)]
    sent: list[_Departure] = []
    for tensor in tensors:
        memory.next_forward()
        assert len(memory._pending) <= 1
        event: Any = Event()
        sent.append(_Departure(tensor, tensor._version, event, memory._forward))
        memory._pending.append(sent[-1])
    events: list[Any] = [each.event for each in sent]
    assert [event.has_come for event in events] == [True, False, False]
    tensors[1].add_(1)
    memory.next_forward()
    assert [each.was_changed for each in sent] == [False, True, False]
    events[2].has_come = True
    memory.drain()
    assert not memory._pending


def test_host_memory_goes_to_another_only_when_its_copies_have_ended() -> None:
    buffers, event = HostMemory(pin=False), Event()
    first = buffers.take(100)
    copies: Any = [event]
    buffers.give(first, copies)
    assert not event.has_come
    assert buffers.take(50) is first
    assert event.has_come


def test_lengths_that_vary_need_no_more_than_was_in_use_at_once() -> None:
    buffers, most = HostMemory(pin=False), 0
    generator = torch.Generator().manual_seed(0)
    for length in torch.randint(1, 1 << 20, (200,), generator=generator).tolist():
        taken = [buffers.take(length // part) for part in (1, 2, 3)]
        most = max(most, buffers.in_use)
        for buffer in taken:
            assert buffers.in_use + buffers.unused <= most
            buffers.give(buffer)
    assert buffers.in_use == 0
    assert buffers.unused <= most <= 6 << 20
    buffers.release()
    assert buffers.unused == 0


def test_a_longer_buffer_serves_what_is_shorter() -> None:
    buffers = HostMemory(pin=False)
    first = buffers.take(1 << 20)
    buffers.give(first)
    assert buffers.take(1 << 19) is first
    assert buffers.in_use == 1 << 20


def test_threads_may_let_go_at_once() -> None:
    memory = HostMemory()
    for _ in range(200):
        tensor, event = torch.zeros(()), cast("Any", SlowEvent())
        tensor.add_(1)
        memory._pending.append(_Departure(tensor, 0, event, 0))
    sent = list(memory._pending)
    threads = [threading.Thread(target=memory.drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not memory._pending
    assert all(each.was_changed for each in sent)


class Shared(nn.Module):
    """Saves views of one memory several times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Products of halves."""
        y = x * 2
        a, b = y[:500], y[500:]
        return (y.sin() * y).sum() + (a * b).sum() + (a * a * b).sum()


def test_each_memory_is_moved_once_and_comes_back_as_all_its_views() -> None:
    memory, block = HostMemory(), Shared()
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    block(x).backward()
    wanted = torch.as_tensor(x.grad).clone()
    x.grad = None
    run = Offloaded(block, block.forward, memory)
    loss = run(x)
    assert memory.in_use <= 8 * 8192  # some of them are more than y alone
    loss.backward(retain_graph=True)
    assert torch.equal(torch.as_tensor(x.grad), wanted)
    loss.backward()
    assert torch.equal(torch.as_tensor(x.grad), 2 * wanted)
    del loss
    gc.collect()
    assert memory.in_use == 0


class Rows(nn.Module):
    """Saves some rows of what it makes, one by one."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.range = range(first, last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum over rows, in which each comes twice."""
        y = x * 2
        total = torch.zeros((), dtype=x.dtype)
        for number in self.range:
            total = total + (y[number : number + 1].sin() * y[number]).sum()
        return total


@pytest.mark.parametrize(("first", "last", "most"), [(7, 8, 1), (97, 100, 3), (0, 100, 132)])
def test_a_few_rows_of_much_move_without_the_rest(first: int, last: int, most: int) -> None:
    memory, block, row = HostMemory(), Rows(first, last), 8192
    x = torch.randn(100, row // 8, dtype=torch.float64, requires_grad=True)
    block(x).backward()
    wanted = torch.as_tensor(x.grad).clone()
    x.grad = None
    loss = Offloaded(block, block.forward, memory)(x)
    sines = (last - first) * row  # saved, too
    assert memory.in_use <= sines + most * row
    loss.backward()
    assert torch.equal(torch.as_tensor(x.grad), wanted)


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


class Scaled(nn.Module):
    """Saves its weight and a small input as they are, and changes neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """A layer."""
        return torch.as_tensor((self.layer(x) * scale).sum())


@pytest.mark.parametrize("change", ["weight", "small", "result"])
def test_what_stays_and_is_changed_before_backward_is_no_silent_mistake(change: str) -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Scaled()]), "offload", blocks=["0"])
    x = torch.randn(64, 64, requires_grad=True)
    small = torch.ones(64, requires_grad=True)
    scale = small.exp()
    loss = model[0](x, scale)
    with torch.no_grad():
        {"weight": model[0].layer.weight, "small": scale, "result": loss}[change].add_(1)
    if change == "result":  # nobody needs it
        loss.backward()
        return
    with pytest.raises(UsageError, match="changed in place"):
        loss.backward()


def test_small_results_are_freed_without_a_backward() -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Small()]), "offload", blocks=["0"])
    gc.collect()
    gc.disable()
    try:
        freed = weakref.ref(model[0](torch.ones(4, requires_grad=True)).untyped_storage())
        assert freed() is None
    finally:
        gc.enable()


class Small(nn.Module):
    """Saves its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The exponential."""
        return x.exp()


class Gated(nn.Module):
    """Changes the halves of a product in place, which count their changes each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A gate, and what goes through."""
        gate, value = self.layer(x).unsafe_chunk(2, 1)
        return torch.as_tensor(gate.sigmoid_() * value.tanh_())


class Recurrent(nn.Module):
    """The gates of torch's own cells are such halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The states of all steps."""
        return torch.as_tensor(self.layer(x)[0])


class Conjugate(nn.Module):
    """Saves views that read memory otherwise than it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product with the conjugate, and one with its negative imaginary part."""
        h = self.layer(x.to(torch.complex64))
        turned = (2 * h).conj()
        return torch.as_tensor((h * turned).abs() + turned.imag * h.real)


class Halves(nn.Module):
    """Saves rows as real numbers, and then the same as complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product with the imaginary part."""
        h = 2 * self.layer(x.to(torch.complex64))
        return torch.as_tensor(torch.view_as_real(h)[20:24, :, 1].sin() * h[20:24].abs())


@pytest.mark.parametrize("make", [Gated, Recurrent, Conjugate, Halves])
def test_memory_is_known_by_more_than_its_place(make: Callable[[], nn.Module]) -> None:
    def trained(policy: str | None) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = nn.ModuleList([make()])
        if policy:
            checkpoint_activations(model, policy, blocks=["0"])
        model[0](torch.randn(64, 64)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(trained("offload"), trained(None), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_nothing_is_moved_within_a_transformation_of_functions() -> None:
    model = nn.ModuleList([nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh())])
    x, change = torch.randn(2, 64, 64)
    jvp: Any = torch.func.jvp
    _, wanted = jvp(model[0], (x,), (change,))
    checkpoint_activations(model, "offload", blocks=["0"])
    _, tangent = jvp(model[0], (x,), (change,))
    assert torch.equal(tangent, wanted)


def test_what_has_no_memory_is_not_moved() -> None:
    model, _ = checkpoint_activations(gpt(2).to("meta"), "offload")
    model(batch(16, 64)[0].to("meta")).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_comes_back_is_counted() -> None:
    model, _ = checkpoint_activations(gpt(2), "offload")
    inputs, targets = batch(16, 64)
    with ActivationMeter() as meter:
        loss = loss_of(model(inputs), targets)
        kept = meter.mark()
        loss.backward()
    hidden = 16 * 64 * WIDTH * 4
    assert meter.marked_peak - kept > 2 * hidden
