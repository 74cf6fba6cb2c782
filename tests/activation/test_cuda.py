"""Activations of a GPU: moved on streams of their own, and none of it changes a gradient."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ckptkit.activation import ActivationStore, checkpoint_activations, peak_bytes
from ckptkit.activation.offload import HostMemory, Moved
from tests.activation.network import WORDS, Gpt

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
]

POLICIES = ["full", "every:2", "selective", "offload"]
LAYERS, WIDTH = 8, 256


@pytest.fixture
def _in_one_order() -> Iterator[None]:
    """Attention and embeddings add up gradients in any order otherwise."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def made(policy: str | None = None, dropout: float = 0.1) -> Gpt:
    torch.manual_seed(3)
    model = Gpt(LAYERS, WIDTH, dropout).cuda()
    if policy is not None:
        checkpoint_activations(model, policy)
    return model


def step_of(model: nn.Module) -> Callable[[], None]:
    words = torch.randint(0, WORDS, (16, 257), generator=torch.Generator().manual_seed(1)).cuda()

    def step() -> None:
        loss: torch.Tensor = cross_entropy(
            model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        )
        loss.backward()

    return step


def gradients(model: nn.Module, *, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(11)
    for _ in range(steps):
        step_of(model)()
    found = [parameter.grad for parameter in model.parameters()]
    return [grad.clone() for grad in found if grad is not None]


def peak(step: Callable[[], object]) -> int:
    """What torch allocates at most for activations and gradients in a later step."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.usefixtures("_in_one_order")
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_equal_to_the_bit_with_dropout(policy: str) -> None:
    wanted = gradients(made())
    assert all(map(torch.equal, gradients(made()), wanted))  # which they are by themselves
    assert all(map(torch.equal, gradients(made(policy)), wanted))


@pytest.mark.parametrize("policy", POLICIES)
def test_random_numbers_of_the_device_go_on_as_without_it(policy: str) -> None:
    after = []
    for chosen in (None, policy):
        model = made(chosen)
        torch.manual_seed(1)
        step_of(model)()
        after.append(torch.rand(4, device="cuda"))
    assert torch.equal(*after)


def test_each_policy_needs_less_of_the_device() -> None:
    needed = {policy: peak(step_of(made(policy))) for policy in (None, *POLICIES)}
    none = needed[None]
    assert needed["selective"] < 0.9 * none
    assert needed["every:2"] < 0.8 * none
    assert needed["full"] < 0.5 * none
    assert needed["offload"] < 0.5 * none


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_budget_is_kept_by_what_torch_allocates(share: float) -> None:
    plain = step_of(made())
    plain()
    budget, allocated = int(share * peak_bytes(plain)), peak(plain)
    model = made()
    step_of(model)()
    checkpoint_activations(model, f"budget:{budget}", step=step_of(model))
    assert peak_bytes(step_of(model)) <= budget
    assert peak(step_of(model)) <= (share + 0.1) * allocated


def test_what_is_sent_is_what_was_there_when_it_was_sent() -> None:
    memory, moved, wanted = HostMemory(), [], []
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(40):  # more than the two that may be on their way
        memory.next_forward()
        flat = torch.randint(
            0, 255, (16 << 20,), dtype=torch.uint8, device="cuda", generator=generator
        )
        wanted.append(int(flat.sum(dtype=torch.int64)))
        moved.append(Moved(flat, memory))
        del flat  # the next one may get its memory
    for each in reversed(moved):
        each.prefetch()
    found = [int(each.fetch().sum(dtype=torch.int64)) for each in moved]
    assert found == wanted


def test_a_buffer_goes_to_another_only_when_the_copy_back_has_ended() -> None:
    memory = HostMemory()
    for turn in range(20):
        flat = torch.full((32 << 20,), turn, dtype=torch.uint8, device="cuda")
        moved = Moved(flat, memory)
        back = moved.fetch()
        del moved
        gc.collect()
        other = Moved(torch.full_like(flat, 255 - turn), memory)  # into the same buffer
        assert bool((back == turn).all())
        assert bool((other.fetch() == 255 - turn).all())
        del other
    assert memory.in_use == 0


@pytest.mark.usefixtures("_in_one_order")
def test_offload_computes_on_whatever_stream_the_step_runs() -> None:
    wanted, side, model = gradients(made()), torch.cuda.Stream(), made("offload")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradients(model)
    torch.cuda.current_stream().wait_stream(side)
    assert all(map(torch.equal, found, wanted))


def test_what_is_changed_while_it_waits_is_seen() -> None:
    model, _ = checkpoint_activations(nn.ModuleList([nn.Tanh()]), "offload", blocks=["0"])
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    torch.cuda._sleep(100_000_000)  # the copy begins after that, and sees the change
    result = model[0](x)
    with torch.no_grad():
        result.add_(1)
    with pytest.raises(Exception, match="changed in place"):
        result.sum().backward()


@pytest.mark.parametrize("offload", [False, True])
def test_a_store_gives_to_another_stream_what_the_first_has_made(*, offload: bool) -> None:
    store, side = ActivationStore(offload=offload), torch.cuda.Stream()
    for turn in range(10):
        torch.cuda._sleep(20_000_000)
        store.register("a", torch.full((8 << 20,), float(turn), device="cuda"))
        with torch.cuda.stream(side):
            found = store.retrieve("a")
            store.clear()
            right = (found == turn).all()
            del found
        torch.full((8 << 20,), -1.0, device="cuda")  # may get its memory
        side.synchronize()
        assert bool(right)
