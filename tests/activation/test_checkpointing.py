"""The one-liner changes what is held between forward and backward, and nothing else."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from ckptkit.activation import checkpoint_activations, kept_bytes, peak_bytes
from ckptkit.errors import UsageError
from ckptkit.live import load, save
from tests.activation.network import Block, batch, by_torch, gpt, gradients, loss_of, same

POLICIES = ["full", "every:1", "every:2", "every:3", "selective", "offload"]


def step_of(model: nn.Module) -> Any:
    inputs, targets = batch()
    return lambda: loss_of(model(inputs), targets).backward()


def kept_of(model: nn.Module) -> int:
    inputs, targets = batch()
    return kept_bytes(lambda: loss_of(model(inputs), targets))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_equal_to_the_bit_with_dropout(policy: str) -> None:
    model = gpt()
    wanted = gradients([model], step_of(model))
    fresh = gpt()
    checkpoint_activations(fresh, policy)
    assert same(gradients([fresh], step_of(fresh)), wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_random_numbers_go_on_as_without_it(policy: str) -> None:
    after = []
    for chosen in (None, policy):
        model = gpt()
        if chosen:
            checkpoint_activations(model, chosen)
        torch.manual_seed(1)
        step_of(model)()
        after.append(torch.rand(4))
    assert torch.equal(*after)


@pytest.mark.parametrize("policy", [*POLICIES, "budget:1GiB"])
def test_no_name_changes_and_undo_leaves_no_trace(policy: str) -> None:
    model = gpt()
    before = {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "parameters": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
    }
    kept = kept_of(model)
    step = step_of(model) if "budget" in policy else None
    returned, undo = checkpoint_activations(model, policy, step=step)
    assert returned is model
    assert [(name, type(module)) for name, module in model.named_modules()] == before["modules"]
    assert [name for name, _ in model.named_parameters()] == before["parameters"]
    assert list(model.state_dict()) == before["state"]
    undo()
    undo()
    assert undo.blocks == ()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert kept_of(model) == kept


def test_checkpoints_on_disk_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model, _ = checkpoint_activations(gpt(), "full")
    step_of(model)()
    save(tmp_path, step=1, model=model)
    other = gpt()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert load(tmp_path, model=other).report.is_exact
    assert same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_less_is_kept_by_each_than_by_the_one_before() -> None:
    def kept(policy: str | None) -> int:
        model = gpt(8)
        if policy:
            checkpoint_activations(model, policy)
        return kept_of(model)

    sizes = [kept(policy) for policy in (None, "selective", "every:2", "full", "offload")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < sizes[0] / 5


def perceptrons() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(4)
        )
    )


def test_full_needs_no_more_than_torchs_own_checkpoint() -> None:
    ours, theirs = perceptrons(), perceptrons()
    checkpoint_activations(ours, "full", blocks=["?"])
    by_torch(theirs)
    inputs = torch.randn(32, 64)
    kept, peak = [], []
    for model in (ours, theirs):
        kept.append(kept_bytes(lambda model=model: model(inputs).sum()))  # type: ignore[misc]
        peak.append(peak_bytes(lambda model=model: model(inputs).sum().backward()))  # type: ignore[misc]
    assert kept[0] <= kept[1]
    assert peak[0] <= peak[1]


def test_of_buffers_that_blocks_change_full_keeps_a_copy() -> None:
    ours, theirs = gpt(), gpt()
    checkpoint_activations(ours, "full")
    by_torch(theirs.layers.values())
    # It lets its recomputation change the buffer again; ours has what the forward began with.
    buffers = sum(buffer.nbytes for buffer in ours.buffers())
    assert kept_of(ours) <= kept_of(theirs) + buffers
    assert peak_bytes(step_of(ours)) <= peak_bytes(step_of(theirs)) + 2 * buffers


def test_every_second_block_is_recomputed_from_the_first_on() -> None:
    _, undo = checkpoint_activations(gpt(5), "every:2")
    assert undo.blocks == ("layers.0", "layers.2", "layers.4")


def test_blocks_are_found_named_or_of_a_class() -> None:
    model = gpt(3)
    for wanted in (None, Block, [Block], ["layers.*"], ["layers.0", "layers.[12]"]):
        _, undo = checkpoint_activations(model, "full", blocks=wanted)
        assert undo.blocks == ("layers.0", "layers.1", "layers.2")
        undo()
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Block(), Block()), nn.Linear(2, 2))
    assert checkpoint_activations(nested).undo.blocks == ("1.0", "1.1")


def test_a_buffer_that_forward_changes_is_changed_once() -> None:
    model, _ = checkpoint_activations(gpt(), "full")
    for _ in range(3):
        step_of(model)()
    assert [int(block.forwards) for block in model.layers.values()] == [3] * 4


def test_batch_norm_sees_every_batch_once() -> None:
    def trained(policy: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
        model = nn.ModuleList(nn.ModuleDict({"inner": layer}) for layer in layers)
        whole = nn.Sequential(*layers)
        if policy:
            checkpoint_activations(whole, policy, blocks=["0", "1"])
        for _ in range(3):
            whole(torch.randn(8, 4)).square().sum().backward()
        return gradients_and_buffers(model)

    assert same(trained("full"), trained(None))
    assert same(trained("selective"), trained(None))


def gradients_and_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | dict(model.named_buffers())


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_gradients_nothing_runs_but_the_forward(policy: str) -> None:
    plain, model = gpt(), gpt()
    checkpoint_activations(model, policy)
    found = []
    for each in (plain, model):
        with torch.no_grad(), Calls() as calls:
            each(batch()[0])
        found.append(calls.names)
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", [*POLICIES, "budget:1MB"])
def test_a_copy_of_the_model_runs_its_own_blocks(policy: str) -> None:
    model = gpt(dropout=0.0)
    step = step_of(model) if "budget" in policy else None
    checkpoint_activations(model, policy, step=step)
    other = copy.deepcopy(model)
    wanted = gpt(dropout=0.0)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
    assert same(gradients([other], step_of(other)), gradients([wanted], step_of(wanted)))
    moved = {id(forward._memory) for forward in forwards_of(other) if "offload" in policy}
    assert len(moved) == ("offload" in policy)


@pytest.mark.parametrize("policy", [*POLICIES, "budget:1MB"])
def test_a_pickle_of_the_model_runs_its_own_blocks(policy: str) -> None:
    model = gpt(dropout=0.0)
    step = step_of(model) if "budget" in policy else None
    checkpoint_activations(model, policy, step=step)
    step_of(model)()
    model.zero_grad()
    model.load_state_dict(gpt(dropout=0.0).state_dict())
    other = pickle.loads(pickle.dumps(model))
    assert len(forwards_of(other)) == len(forwards_of(model))
    assert not any(each in forwards_of(model) for each in forwards_of(other))
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
    wanted = gpt(dropout=0.0)
    assert same(gradients([other], step_of(other)), gradients([wanted], step_of(wanted)))


def forwards_of(model: nn.Module) -> list[Any]:
    return [vars(each)["forward"] for each in model.modules() if "forward" in vars(each)]


@pytest.mark.filterwarnings("ignore")  # of what the compiler itself uses
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("when", ["before", "after", "blocks"])
def test_it_composes_with_torch_compile(policy: str, when: str) -> None:
    model = gpt(2, dropout=0.0)
    wanted = gradients([model], step_of(model))
    model = gpt(2, dropout=0.0)
    run: Any = model
    if when == "before":
        checkpoint_activations(run, policy)
    if when == "blocks":
        for name, block in model.layers.items():
            model.layers[name] = cast("nn.Module", torch.compile(block, backend="aot_eager"))
        checkpoint_activations(run, policy)
    else:
        run = torch.compile(run, backend="aot_eager")
    if when == "after":
        checkpoint_activations(run, policy)
    step_of(run)()
    names = [name.replace("_orig_mod.", "") for name, _ in run.named_parameters()]
    for name, parameter in zip(names, run.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted[name])
    torch.compiler.reset()


@pytest.mark.parametrize(
    "policy", ["half", "every:0", "every:", "budget:", "budget:0", "budget:much", ""]
)
def test_what_is_no_policy_is_refused(policy: str) -> None:
    with pytest.raises(UsageError):
        checkpoint_activations(gpt(), policy, step=lambda: None)


def test_what_cannot_be_done_is_refused_before_anything_changes() -> None:
    model = gpt()
    with pytest.raises(UsageError, match="no such blocks"):
        checkpoint_activations(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="no such blocks"):
        checkpoint_activations(model, blocks=["blocks.*"])
    with pytest.raises(UsageError, match="step to measure"):
        checkpoint_activations(model, "budget:1GiB")
    bad: Any = 3
    with pytest.raises(UsageError, match="step to measure"):
        checkpoint_activations(model, "budget:1GiB", step=bad)
    for bad in (3, [3], []):
        with pytest.raises(UsageError, match="takes a class, or a list"):
            checkpoint_activations(model, blocks=bad)
    with pytest.raises(UsageError, match="what a budget measures"):
        checkpoint_activations(model, "full", step=lambda: None)
    with pytest.raises(UsageError, match="host memory of offload"):
        checkpoint_activations(model, "full", pin_memory=False)
    group: Any = "who"
    with pytest.raises(UsageError, match="who shares a partition"):
        checkpoint_activations(model, "budget:1GiB", group=group)
    with pytest.raises(UsageError, match="same activations"):
        checkpoint_activations(model, "partition")
    _, undo = checkpoint_activations(model)
    with pytest.raises(UsageError, match="checkpointed already"):
        checkpoint_activations(model)
    undo()
    checkpoint_activations(model)


@pytest.mark.parametrize(
    "policy",
    ["half", "every", "every:0", "every:2.0", "every:1000000", "full:2", "budget"],
)
def test_a_policy_that_is_none_is_refused(policy: str) -> None:
    with pytest.raises(UsageError, match="no policy for activations"):
        checkpoint_activations(nn.Sequential(), policy)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="less than one byte"):
        checkpoint_activations(nn.Sequential(), "budget:0")


def test_a_block_of_two_names_is_checkpointed_once_and_undone() -> None:
    block, model = Block(), nn.Module()
    model.first, model.second = nn.ModuleList([block]), nn.ModuleList([block, Block()])
    for _ in range(2):
        _, undo = checkpoint_activations(model)
        assert undo.blocks == ("first.0", "second.1")
        undo()
        assert not forwards_of(model)
    assert checkpoint_activations([model, model]).undo.blocks == ("first.0", "second.1")


def test_undo_leaves_alone_and_names_what_somebody_changed_since() -> None:
    model, undo = checkpoint_activations(gpt(2))
    block = model.layers["1"]
    ours = vars(block)["forward"]
    vars(block)["forward"] = partial(ours)
    with pytest.raises(UsageError, match=r"layers\.1: the forward of a block was changed again"):
        undo()
    assert undo.blocks == ("layers.1",)
    assert len(forwards_of(model)) == 1
    vars(block)["forward"] = ours
    undo()
    assert not forwards_of(model)


def test_what_torch_has_wrapped_already_is_refused() -> None:
    model = nn.Sequential(checkpoint_wrapper(Block()), Block())
    for wanted in (None, Block, ["0"]):
        with pytest.raises(UsageError, match="0: a block is checkpointed already"):
            checkpoint_activations(model, blocks=wanted)


def test_stages_with_blocks_of_equal_names_are_all_checkpointed() -> None:
    stages = [nn.Sequential(Block(), Block()) for _ in range(2)]
    _, undo = checkpoint_activations(stages, "full")
    assert undo.blocks == ("0", "1", "stage 1: 0", "stage 1: 1")
    assert len(forwards_of(nn.ModuleList(stages))) == 4


def test_memory_returns_to_the_start_after_many_steps() -> None:
    for policy in ("full", "selective", "offload"):
        model, _ = checkpoint_activations(gpt(2), policy)
        step = step_of(model)
        step()
        first = peak_bytes(step)
        for _ in range(15):
            step()
        assert peak_bytes(step) == first
