"""Policies under DDP, FSDP2, tensor and pipeline parallelism: the same gradients, less held."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)

from ckptkit.activation import (
    ActivationMeter,
    Checkpointed,
    checkpoint_activations,
    kept_bytes,
    parallelism,
    peak_bytes,
)
from ckptkit.activation.parallelism import _CutTensor
from ckptkit.activation.recompute import traceless
from ckptkit.errors import LayoutError
from tests.activation import network
from tests.activation.network import WAYS, batch, gpt, gradients, same
from tests.live import strategies
from tests.live.network import DEVICE, loss_of
from tests.live.network import batch as inputs_of
from tests.live.pool import Pool
from tests.parallel.strategies import training

POLICIES = ["full", "every:2", "selective", "offload"]


def differing(way: str, policies: list[str]) -> list[str]:
    """The policies whose gradients are not those of the plain model, in two steps."""
    _, modules, step = WAYS[way]()
    step()  # the first of a pipeline runs its blocks more often, to learn the shapes
    wanted = [gradients(modules, step) for _ in range(2)]
    wrong = []
    for policy in policies:
        model, modules, step = WAYS[way]()
        step()
        checkpointed(model, policy, modules, step)
        if not all(same(gradients(modules, step), each) for each in wanted):
            wrong.append(policy)
    return wrong


def checkpointed(
    model: Any, policy: str, modules: Sequence[nn.Module], step: Callable[[], object]
) -> Checkpointed:
    """Under a policy; "budget" is less than what the rank needs that needs most."""
    if policy != "budget":
        return checkpoint_activations(model, policy)
    peaks = []
    for _ in range(3):  # gloo's threads let go of what they have sent a moment later
        with traceless(modules):
            peaks.append(peak_bytes(step))
    needed = min(peaks)
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, needed)
    budget = int(0.8 * max(heard))
    found = checkpoint_activations(model, f"budget:{budget}", step=step)
    assert found.undo.blocks or needed <= budget
    return found


# Four for stages that are neither the first nor the last; nothing else differs with more than two.
@pytest.mark.parametrize(
    ("way", "ranks"), [("ddp", 2), ("fsdp2", 2), ("tp", 2), ("pp", 4), ("pp 1f1b", 4)]
)
def test_gradients_are_equal_to_the_bit_on_all_ranks(gloo: Pool, way: str, ranks: int) -> None:
    policies = [*POLICIES, "budget"] + ["partition"] * (way == "tp")
    assert gloo.run(ranks, differing, way, policies) == [[]] * ranks


def trained(layout: str, policy: str | None) -> list[torch.Tensor]:
    """The parameters of this rank after two steps, and how often its blocks were called."""
    job = strategies.build(layout)
    if policy is not None:
        for module in job.modules:
            names = [name for name, _ in module.named_modules() if name.endswith("up")]
            if names:
                checkpoint_activations(module, policy)
    job.train([1, 2])
    found: list[torch.Tensor] = [p for module in job.modules for p in module.parameters()]
    found += [
        buffer
        for module in job.modules
        for name, buffer in module.named_buffers()
        if name.endswith("calls")
    ]
    return [getattr(t, "_local_tensor", t).detach().clone() for t in found]


def unlike(layout: str) -> list[str]:
    """The policies after which the rank's state is not that without."""
    wanted = trained(layout, None)
    return [
        policy
        for policy in ("full", "selective", "offload")
        if not all(map(torch.equal, trained(layout, policy), wanted))
    ]


# What others have alike with these, or with what `as_distributed` gives below, takes minutes.
_CORE = {
    "fsdp1:2",
    "hsdp:2x2",
    "zero2:2",
    "fsdp:4, experts on ep:2",
    "pp:2, two stages each",
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout in _CORE else pytest.mark.long)
        for layout in strategies.LAYOUTS
    ],
)
def test_every_strategy_trains_as_without(gloo: Pool, layout: str) -> None:
    ranks = strategies.LAYOUTS[layout].ranks
    assert gloo.run(ranks, unlike, layout) == [[]] * ranks


def partitioned() -> dict[str, int]:
    """What a forward keeps under each policy, its result and the embedding taken out."""
    found = {}
    for policy in ("full", "partition"):
        model, _, _ = network.tp(layers=8, width=256)
        checkpoint_activations(model, policy)
        head, model.head = model.head, nn.Identity()
        inputs, _ = batch()
        # Gloo's threads let go of what they have sent a moment later.
        found[policy] = min(kept_bytes(partial(model, inputs)) for _ in range(3))
        model.head = head
    result = network.BATCH * network.LENGTH * 256 * 4
    return {policy: kept - result for policy, kept in found.items()}


@pytest.mark.parametrize(
    ("ranks", "share"), [(2, 0.55), pytest.param(4, 0.30, marks=pytest.mark.long)]
)
def test_a_partition_keeps_its_share(gloo: Pool, ranks: int, share: float) -> None:
    for kept in gloo.run(ranks, partitioned):
        assert 0.9 / ranks < kept["partition"] / kept["full"] <= share


def partitioned_step() -> bool:
    """Whether memory is the same after many steps."""
    model, _, step = network.tp(layers=2)
    checkpoint_activations(model, "partition", group=dist.group.WORLD)
    step()
    first = min(peak_bytes(step) for _ in range(3))
    for _ in range(8):
        step()
    return min(peak_bytes(step) for _ in range(3)) == first


def test_a_partition_leaves_nothing_behind(gloo: Pool) -> None:
    assert gloo.run(2, partitioned_step) == [True, True]


def cut_by_sequence() -> str:
    """What is said of blocks between which each rank has other words."""
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    model = gpt(dropout=0.0)
    inputs, _ = batch(8, 32)
    mine = inputs.chunk(2)[mesh.get_local_rank()]
    checkpoint_activations(model, "partition", group=mesh["tp"])
    try:
        model(mine)
    except LayoutError as error:
        return str(error)
    return ""


def test_pieces_of_what_differs_between_ranks_are_refused(gloo: Pool) -> None:
    for said in gloo.run(2, cut_by_sequence):
        assert "input 0 of layers.0: the ranks" in said


def sequence_parallel() -> bool:
    """DTensors that are cut already stay as they are."""
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole = nn.Sequential(*(_Normed(64) for _ in range(2)))
    plan: dict[str, ParallelStyle] = {
        f"{n}.norm": SequenceParallel(use_local_output=False) for n in range(2)
    }
    plan["0"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
    parallelize_module(whole, mesh, plan)
    inputs = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(mesh.get_local_rank()))
    found = []
    for policy in (None, "partition"):
        whole.zero_grad()
        if policy:
            checkpoint_activations(whole, policy, blocks=["0", "1"], group=mesh)
        whole(inputs).to_local().square().sum().backward()
        found.append([p.grad.to_local().clone() for p in whole.parameters()])  # type: ignore[union-attr]
    return all(map(torch.equal, *found))


class _Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


def test_a_partition_leaves_alone_what_is_cut_already(gloo: Pool) -> None:
    assert gloo.run(2, sequence_parallel) == [True, True]


def budgets() -> list[tuple[int, int, tuple[str, ...]]]:
    """The most that a step needs, the budget, and the blocks that were chosen."""
    found = []
    for share in (0.9, 0.6):
        model, _, step = WAYS["fsdp2"]()
        step()  # the first one also makes what is made once
        whole = peak_bytes(step)
        least = int(share * whole)
        _, undo = checkpoint_activations(model, f"budget:{least}", step=step)
        found.append((peak_bytes(step), least, undo.blocks))
    return found


def test_ranks_choose_the_same_blocks_and_stay_within_the_budget(gloo: Pool) -> None:
    one, other = gloo.run(2, budgets)
    # What FSDP gathers ahead depends on the moment, and so do the last bytes of a peak.
    assert [blocks for *_, blocks in one] == [blocks for *_, blocks in other]
    for peak, budget, blocks in (*one, *other):
        assert peak <= budget
        assert blocks
    assert len(one[0][2]) < 4


def under(spec: str) -> list[str]:
    """The policies under which what `as_distributed` gives does not train as without."""
    wanted = None
    wrong = []
    for policy in (None, *POLICIES, "budget", *["partition"] * ("tp" in spec)):
        spread = training.spread(spec)
        step = partial(spread.backward, loss_of, spread.share(inputs_of(0)))
        step()  # the first one also makes what is made once
        if policy:
            assert checkpointed(spread, policy, spread.modules, step).model is spread
        with (
            patch.object(parallelism, "_LEAST", 1),
            patch.object(parallelism, "_CutTensor", wraps=_CutTensor) as cuts,
        ):
            losses = training.train(spread, [1, 2])
        assert cuts.called == (policy == "partition")
        found = losses, training.values(spread)
        wanted = wanted or found
        if found[0] != wanted[0] or not same(found[1], wanted[1]):
            wrong.append(str(policy))
    return wrong


@pytest.mark.parametrize(
    "spec",
    [
        *("ddp:2", "fsdp:2", "zero1:2", "tp:2", "pp:2"),
        pytest.param("fsdp:2,tp:2", marks=pytest.mark.long),
    ],
)
def test_what_as_distributed_gives_trains_as_without(gloo: Pool, spec: str) -> None:
    ranks = 4 if "," in spec else 2
    assert gloo.run(ranks, under, spec) == [[]] * ranks


def nested_units() -> list[int]:
    """What offload moves of a model, and of one with FSDP units within its blocks."""
    moved = []
    for units in ((), ("up", "down", "o")):
        model = gpt(2, 64)
        for block in model.layers.values():
            for name in units:
                fully_shard(block.get_submodule(name))
        _, undo = checkpoint_activations(model, "offload")
        inputs, targets = batch()
        loss = network.loss_of(model(inputs), targets)
        forward: Any = vars(model.layers["0"])["forward"]
        moved.append(forward._memory.in_use)
        loss.backward()
        undo()
    return moved


def test_gathered_weights_of_units_within_a_block_are_not_moved(gloo: Pool) -> None:
    for plain, nested in gloo.run(2, nested_units):
        assert plain == nested > 0


def offloaded() -> dict[str | None, int]:
    """What a forward keeps of DTensors, its result and the embedding taken out."""
    found = {}
    for policy in (None, "offload"):
        model, _, _ = network.tp(layers=4, width=256)
        if policy:
            checkpoint_activations(model, policy)
        head, model.head = model.head, nn.Identity()
        inputs, _ = batch()
        found[policy] = min(kept_bytes(partial(model, inputs)) for _ in range(5))
        model.head = head
    result = network.BATCH * network.LENGTH * 256 * 4
    return {policy: kept - result for policy, kept in found.items()}


def test_offload_moves_what_dtensors_save(gloo: Pool) -> None:
    for kept in gloo.run(2, offloaded):
        assert kept["offload"] < 0.05 * kept[None]


class Named(nn.Module):
    """Takes its only large tensor by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
        """A layer."""
        return torch.as_tensor(self.layer(hidden).sin())


def partitioned_by_keyword() -> tuple[float, bool]:
    """The part that a rank keeps of an input by keyword, and whether a copy does likewise."""
    torch.manual_seed(0)
    found = []
    model = nn.ModuleList([Named()])
    checkpoint_activations(model, "partition", blocks=["0"], group=dist.group.WORLD)
    for each in (model, copy.deepcopy(model)):
        with ActivationMeter() as meter:
            result = each[0](hidden=torch.ones(64, 64))
            found.append(meter.current - result.nbytes)
            kept = meter.mark()
            result.sum().backward()
            brought = meter.marked_peak - kept
        assert brought >= 64 * 64 * 4  # it is gathered, and that is counted
    return found[0] / (64 * 64 * 4), found[0] == found[1]


def test_a_partition_cuts_what_comes_by_keyword(gloo: Pool) -> None:
    assert gloo.run(2, partitioned_by_keyword) == [(0.5, True)] * 2
