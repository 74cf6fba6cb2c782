"""Pipelines keep what the micro-batches in flight need, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

from ckptkit.activation import (
    ActivationStore,
    DistributedActivationStore,
    PipelineActivations,
    checkpoint_activations,
)
from ckptkit.errors import UnsupportedTypeError, UsageError
from tests.activation.network import batch, gpt, gradients, pipeline, same
from tests.live.pool import Pool

STAGES, MICROBATCHES = 4, 8


def followed(
    kind: Any, keep_saved: bool, policy: str | None, offload: bool, shared: bool = False
) -> dict[str, Any]:
    """Three steps with and without it; what was in flight, and what was left."""
    stage, _, step = pipeline(kind, MICROBATCHES, layers=4)
    step()
    wanted = [gradients([stage.submod], step) for _ in range(3)]
    stage, schedule, step = pipeline(kind, MICROBATCHES, layers=4)
    step()
    if policy:
        checkpoint_activations(schedule, policy)
    store: Any = ActivationStore(offload=offload)
    store = DistributedActivationStore(store=store) if shared else store
    kept = PipelineActivations(store)
    undo = kept.attach(schedule, keep_saved=keep_saved)
    equal = all(same(gradients([stage.submod], step), each) for each in wanted)
    left = kept.memory_stats()
    undo()
    if shared:
        store.close()
    return {
        "equal": equal and "forward_one_chunk" not in vars(stage),
        "most": kept.most_in_flight(stage.stage_index),
        "left": (left.current, left.count, kept.in_flight(stage.stage_index)),
        "peak": left.peak,
    }


@pytest.mark.parametrize("keep_saved", [False, True])
@pytest.mark.parametrize(
    ("kind", "most"),
    [(ScheduleGPipe, [8, 8, 8, 8]), (Schedule1F1B, [4, 3, 2, 1])],
    ids=["GPipe", "1F1B"],
)
def test_a_stage_holds_only_micro_batches_in_flight(
    gloo: Pool, kind: Any, most: list[int], keep_saved: bool
) -> None:
    found = gloo.run(STAGES, followed, kind, keep_saved, None, False)
    assert all(each["equal"] for each in found)
    assert [each["most"] for each in found] == most
    assert [each["left"] for each in found] == [(0, 0, [])] * STAGES
    output = batch()[0].shape[1] * 32 * 4  # of one passage, which a micro-batch is
    if not keep_saved:
        assert [each["peak"] for each in found] == [n * output for n in most[:3]] + [0]


@pytest.mark.parametrize(
    ("policy", "offload"), [("full", False), ("selective", True), (None, True)]
)
def test_it_goes_with_recomputing_and_offloading(
    gloo: Pool, policy: str | None, offload: bool
) -> None:
    found = gloo.run(STAGES, followed, Schedule1F1B, True, policy, offload)
    assert all(each["equal"] for each in found)
    assert [each["left"] for each in found] == [(0, 0, [])] * STAGES


def test_it_goes_with_a_store_that_spans_the_stages(gloo: Pool) -> None:
    found = gloo.run(STAGES, followed, Schedule1F1B, True, None, True, True)
    assert all(each["equal"] for each in found)
    assert [each["left"] for each in found] == [(0, 0, [])] * STAGES


def failing() -> tuple[int, int]:
    """A stage whose forward fails in the fifth micro-batch."""
    stage, schedule, step = pipeline(ScheduleGPipe, MICROBATCHES, layers=1)
    step()
    kept = PipelineActivations()
    kept.attach(schedule)
    forward, calls = stage.submod.forward, []

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError
        return forward(*args)

    stage.submod.forward = fails
    with pytest.raises(RuntimeError):
        step()
    return kept.most_in_flight(0), kept.memory_stats().current + len(kept.in_flight(0))


def test_an_exception_leaves_it_clean(gloo: Pool) -> None:
    assert gloo.run(1, failing) == [(5, 0)]


def failing_loss() -> tuple[int, tuple[int, int]]:
    """A loss that fails once, in the third micro-batch; then a whole step."""
    _, schedule, step = pipeline(Schedule1F1B, MICROBATCHES, layers=1)
    step()
    kept = PipelineActivations()
    kept.attach(schedule, keep_saved=True)
    loss, calls = schedule._loss_fn, []

    def fails(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError
        return loss(*args)

    schedule._loss_fn = fails
    with pytest.raises(ZeroDivisionError):
        step()
    schedule._internal_losses.clear()  # torch does not
    step()
    return kept.most_in_flight(0), (kept.memory_stats().current, len(kept.in_flight(0)))


def test_what_a_loss_that_fails_leaves_is_forgotten_in_the_next_step(gloo: Pool) -> None:
    assert gloo.run(1, failing_loss) == [(1, (0, 0))]


class Heads(nn.Module):
    """Three layers of one input; it may change what exp saves."""

    def __init__(self, *, spoils: bool = False) -> None:
        super().__init__()
        self.up, self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(4))
        self._spoils = spoils

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).exp()
        z: torch.Tensor = self.q(y) + self.k(y) * self.v(y)
        if self._spoils:
            y.add_(1)
        return z


def alone(model: nn.Module, loss: Any, kept: PipelineActivations) -> Callable[[], object]:
    """A step of one stage, each micro-batch of which has 8 KiB."""
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss)
    kept.attach(schedule, keep_saved=True)
    inputs = torch.ones(32 * MICROBATCHES, 64)
    return lambda: schedule.step(inputs, target=inputs)


def saved(offload: bool) -> tuple[int, int]:
    """The most bytes that a step saves, and those that are left."""
    kept = PipelineActivations(ActivationStore(offload=offload))
    alone(Heads(), mse_loss, kept)()
    stats = kept.memory_stats()
    return stats.peak, stats.current


@pytest.mark.parametrize("offload", [False, True])
def test_what_several_layers_save_is_kept_once(gloo: Pool, offload: bool) -> None:
    each = 3 * 8192  # of what exp, k and v give; the inputs are the schedule's
    assert gloo.run(1, saved, offload) == [(MICROBATCHES * each, 0)]


def changed(what: str, offload: bool) -> str:
    """What is said where something is changed between forward and backward."""
    model = Heads(spoils=what == "activation")
    kept = PipelineActivations(ActivationStore(offload=offload))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if what == "weight":
            with torch.no_grad():
                model.q.weight.add_(1)
        return mse_loss(output, target)

    with pytest.raises(RuntimeError) as caught:
        alone(model, loss, kept)()
    return str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("what", "offload"), [("weight", False), ("weight", True), ("activation", False)]
)
def test_what_backward_needs_may_not_be_changed(gloo: Pool, what: str, offload: bool) -> None:
    assert "changed in place after the forward" in gloo.run(1, changed, what, offload)[0]


def evaluates() -> int:
    """Without backward nothing is kept."""
    stage, schedule, step = pipeline(ScheduleGPipe, MICROBATCHES)
    step()
    kept = PipelineActivations()
    kept.attach(stage)
    inputs, targets = batch()
    if stage.is_first:
        schedule.eval(inputs)
    else:
        schedule.eval(target=targets)
    return kept.most_in_flight(stage.stage_index)


def test_nothing_is_kept_without_backward(gloo: Pool) -> None:
    assert gloo.run(2, evaluates) == [0, 0]


def test_micro_batches_are_kept_by_hand() -> None:
    kept = PipelineActivations()
    for microbatch in range(3):
        for stage in range(2):
            kept.register(stage, microbatch, torch.full((2,), float(microbatch)), is_boundary=True)
            kept.register(stage, microbatch, torch.zeros(3), name="hidden")
    assert kept.in_flight(0) == [0, 1, 2]
    assert list(kept.get(1, 2)) == ["output", "hidden"]
    assert torch.equal(kept.get(1)[2]["output"], torch.full((2,), 2.0))
    assert list(kept.get(1)) == [0, 1, 2]
    assert torch.equal(kept.boundaries(0)[2][0], torch.full((2,), 2.0))
    assert kept.memory_stats().count == 12
    kept.clear(1)
    assert kept.in_flight(0) == kept.in_flight(1) == [0, 2]
    assert kept.get(0, 1) == {}
    kept.clear(0, stage=1)
    assert (kept.in_flight(0), kept.in_flight(1)) == ([0, 2], [2])
    kept.clear()
    assert kept.boundaries(0) == {}
    assert kept.memory_stats().current == 0
    assert kept.most_in_flight(0) == 3


def test_what_is_no_tensor_leaves_no_micro_batch() -> None:
    kept = PipelineActivations()
    bad: Any = "x"
    with pytest.raises(UnsupportedTypeError):
        kept.register(0, 0, bad)
    assert kept.in_flight(0) == []
    assert kept.most_in_flight(0) == 0


@pytest.mark.parametrize("bad", [-1, "a", None, True, 1.0])
def test_stages_and_micro_batches_are_numbers(bad: Any) -> None:
    kept = PipelineActivations()
    for numbers in ((bad, 0), (0, bad)):
        with pytest.raises(UsageError, match="no number from 0"):
            kept.register(numbers[0], numbers[1], torch.ones(1))
    assert kept.memory_stats().count == 0


def test_what_is_closed_keeps_nothing() -> None:
    with ActivationStore(offload=True) as store, PipelineActivations(store) as kept:
        store.register("own", torch.ones(3))
        kept.register(0, 0, torch.ones(2))
        kept.close()
        assert kept.in_flight(0) == []
        assert store.keys() == ["own"]
        store.close()
        assert store.memory_stats().current == 0


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(UsageError, match="no stage"):
        PipelineActivations().attach(gpt(1))
    with pytest.raises(UsageError, match="cannot be evicted"):
        PipelineActivations(ActivationStore(budget=10)).attach(gpt(1), keep_saved=True)
