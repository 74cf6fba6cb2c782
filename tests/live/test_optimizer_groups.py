"""What an optimizer has besides the state of one group: several of them, groups, frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

import ckptkit
from ckptkit.errors import InvalidNameError, UnsupportedTypeError
from ckptkit.live import StateMismatchError, load, save
from tests.live.gathering import whole
from tests.live.pool import Pool


class Net(nn.Module):
    """Two layers, and one that a loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.spare = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, *, spare: bool = False) -> torch.Tensor:
        """The output of the second layer, or of the spare one."""
        hidden = torch.relu(self.first(x))
        return self.spare(hidden) if spare else self.second(hidden)  # type: ignore[no-any-return]


def net(seed: int = 0, frozen: str = "") -> Net:
    torch.manual_seed(seed)
    made = Net()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    return made


def train(model: nn.Module, optimizer: Optimizer | list[Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.zero_grad()
        loss.backward()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
        losses.append(float(loss.detach()))
    return losses


def states(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        names[p]: {k: whole(v).tolist() if torch.is_tensor(v) else v for k, v in state.items()}
        for p, state in optimizer.state.items()
    }


def resume_with_frozen_weights(location: str, *, sharded: bool) -> None:
    def made(seed: int) -> tuple[nn.Module, Optimizer]:
        model = net(seed, frozen="first")
        if sharded:
            fully_shard(model)
        return model, AdamW(model.parameters(), lr=0.1, foreach=False)

    model, optimizer = made(0)
    train(model, optimizer, range(3))
    save(location, step=3, model=model, optimizer=optimizer)
    again, its_optimizer = made(1)
    load(location, model=again, optimizer=its_optimizer)
    assert set(states(again, its_optimizer)) == {"second.weight", "second.bias"}
    assert states(again, its_optimizer) == states(model, optimizer)
    assert not again.get_parameter("first.weight").requires_grad
    assert train(again, its_optimizer, range(3, 6)) == train(model, optimizer, range(3, 6))


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, True)])
def test_frozen_and_unused_weights_are_saved_without_optimizer_state(
    gloo: Pool, tmp_path: Path, ranks: int, sharded: bool
) -> None:
    gloo.run(ranks, _frozen, str(tmp_path), sharded)


def _frozen(location: str, sharded: bool) -> None:
    resume_with_frozen_weights(location, sharded=sharded)


def test_a_step_without_optimizer_state_takes_it_away(tmp_path: Path) -> None:
    fresh, trained = net(), net(1)
    optimizers = [AdamW(model.parameters(), lr=0.1) for model in (fresh, trained)]
    save(tmp_path, step=0, model=fresh, optimizer=optimizers[0])
    train(trained, optimizers[1], range(3))
    load(tmp_path, model=trained, optimizer=optimizers[1])
    assert not optimizers[1].state
    assert train(trained, optimizers[1], range(3)) == train(fresh, optimizers[0], range(3))


def test_state_of_some_parameters_only_comes_back_for_those(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(2))
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    expected = states(model, optimizer)
    model(torch.ones(1, 5), spare=True).sum().backward()
    optimizer.step()
    assert set(states(model, optimizer)) > set(expected)
    load(tmp_path, model=model, optimizer=optimizer)
    assert states(model, optimizer) == expected


@pytest.mark.parametrize("together", [list, lambda pair: dict(zip("ab", pair, strict=True))])
def test_several_optimizers_keep_apart_what_is_theirs(
    tmp_path: Path, together: Callable[[list[Optimizer]], Any]
) -> None:
    def made(seed: int) -> tuple[Net, list[Optimizer]]:
        model = net(seed)
        rest = [*model.second.parameters(), *model.spare.parameters()]
        return model, [
            AdamW(model.first.parameters(), lr=0.1 + seed),
            SGD(rest, lr=0.2 + seed, momentum=0.5),
        ]

    model, optimizers = made(0)
    train(model, optimizers, range(3))
    save(tmp_path, step=3, model=model, optimizer=together(optimizers))
    again, others = made(1)
    load(tmp_path, model=again, optimizer=together(others))
    assert [group["lr"] for each in others for group in each.param_groups] == [0.1, 0.2]
    assert train(again, others, range(3, 6)) == train(model, optimizers, range(3, 6))


def test_two_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    model = net()
    both: list[Optimizer] = [AdamW(model.parameters()), AdamW(model.parameters())]
    train(model, both, range(1))
    with pytest.raises(InvalidNameError, match=r"optimizer/first\.weight/step"):
        save(tmp_path, step=1, model=model, optimizer=both)
    assert not ckptkit.Run(tmp_path).steps()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidNameError, match="not the model's"):
        save(tmp_path, step=1, model=net(), optimizer=AdamW(net().parameters()))


class Counting(SGD):
    """Counts its steps beside the state of parameters, as MADGRAD does."""

    state: Any

    def step(self, closure: Any = None) -> Any:
        """One more."""
        self.state["k"] = self.state.get("k", torch.tensor(0)) + 1
        return super().step(closure)


def test_state_of_no_parameter_is_refused_rather_than_lost(tmp_path: Path) -> None:
    model = net()
    optimizer = Counting(model.parameters(), lr=0.25, momentum=0.9)
    train(model, optimizer, range(2))
    with pytest.raises(UnsupportedTypeError, match="belongs to no parameter") as refused:
        save(tmp_path, step=2, model=model, optimizer=optimizer)
    assert 'state={"optimizer state": optimizer}' in str(refused.value)  # which does keep it
    save(tmp_path, step=2, model=model, state={"optimizer state": optimizer})
    again = net(1)
    other = Counting(again.parameters(), lr=0.5)
    load(tmp_path, model=again, state={"optimizer state": other})
    assert other.state["k"] == 2
    assert train(again, other, range(2, 4)) == train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("value", [torch.ones(2), 5])
def test_state_without_a_name_is_refused(tmp_path: Path, value: object) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.25)
    state: dict[Any, Any] = optimizer.state[model.first.weight]
    state[3] = value
    with pytest.raises(
        UnsupportedTypeError, match=r"first\.weight: .*names, which are text \(got 3"
    ):
        save(tmp_path, step=1, model=model, optimizer=optimizer)


def test_groups_that_are_split_otherwise_take_the_options_of_their_parameters(
    tmp_path: Path,
) -> None:
    model = net()
    one_rate = SGD(model.parameters(), lr=0.25, momentum=0.9)
    train(model, one_rate, range(1))
    save(tmp_path, step=1, model=model, optimizer=one_rate)
    two_rates = SGD([{"params": model.first.parameters()}], lr=0.5, momentum=0.9)
    with pytest.raises(StateMismatchError, match=r"unexpected: optimizer/second\.bias/momentum"):
        load(tmp_path, model=model, optimizer=two_rates)
    assert not two_rates.state
    two_rates.add_param_group({"params": model.second.parameters(), "lr": 7.0})
    load(tmp_path, model=model, optimizer=two_rates)
    assert [group["lr"] for group in two_rates.param_groups] == [0.25] * 2
    assert states(model, two_rates) == states(model, one_rate)


def test_groups_that_become_one_are_refused_where_their_options_differ(tmp_path: Path) -> None:
    """All got the options of the first parameter."""
    model = net()
    # What only other programs call their groups by counts for nothing here.
    two_rates = SGD([{"params": model.first.parameters(), "name": "1"}], lr=0.25, momentum=0.9)
    two_rates.add_param_group({"params": model.second.parameters(), "lr": 0.5, "name": "2"})
    train(model, two_rates, range(1))
    save(tmp_path, step=1, model=model, optimizer=two_rates)
    again = net(1)
    one_rate = SGD([*again.first.parameters(), *again.second.parameters()], lr=0.125)
    torn = "optimizer: one lr for the group of first.weight, which was several groups"
    with pytest.raises(StateMismatchError, match=f"missing: {torn}") as refused:
        load(tmp_path, model=again, optimizer=one_rate)
    assert "give the optimizer the groups of parameters that were saved" in str(refused.value)
    assert not one_rate.state
    restored = load(tmp_path, model=again, optimizer=one_rate, partial=True)
    assert restored.report.missing == [torn]
    # What both groups had alike is taken over.
    assert [one_rate.param_groups[0][key] for key in ("lr", "momentum")] == [0.125, 0.9]
    assert states(again, one_rate) == states(model, two_rates)


def test_rates_and_betas_may_be_tensors_of_one_element(tmp_path: Path) -> None:
    def made(rate: float, betas: tuple[float, float]) -> tuple[Net, AdamW, list[torch.Tensor]]:
        model, first, second = net(), *map(torch.tensor, betas)
        optimizer = AdamW(model.parameters(), torch.tensor([rate]), (first, second), foreach=False)
        return model, optimizer, [optimizer.param_groups[0]["lr"], first, second]

    model, optimizer, options = made(0.5, (0.25, 0.75))
    train(model, optimizer, range(2))
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    again, other, its_options = made(0.125, (0.5, 0.875))
    load(tmp_path, model=again, optimizer=other)
    assert its_options == options  # the very tensors, which a scheduler may have
    group = other.param_groups[0]
    assert [id(each) for each in (group["lr"], *group["betas"])] == list(map(id, its_options))
    assert train(again, other, range(2, 4)) == train(model, optimizer, range(2, 4))
    plain = AdamW(again.parameters())
    load(tmp_path, model=again, optimizer=plain)
    assert [plain.param_groups[0][key] for key in ("lr", "betas")] == [0.5, (0.25, 0.75)]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_parameter_that_the_saved_optimizer_did_not_have_is_missing(
    tmp_path: Path, momentum: float
) -> None:
    model = net()
    few = SGD(model.second.parameters(), lr=0.25, momentum=momentum)
    train(model, few, range(1))
    save(tmp_path, step=1, model=model, optimizer=few)
    again = net(1)
    every = SGD(again.parameters(), lr=0.25, momentum=momentum)
    if momentum:
        with pytest.raises(StateMismatchError, match=r"missing: optimizer/first\.weight, "):
            load(tmp_path, model=again, optimizer=every)
        assert not every.state
        restored = load(tmp_path, model=again, optimizer=every, partial=True)
        left = [f"{name}.{kind}" for name in ("first", "spare") for kind in ("weight", "bias")]
        assert restored.report.missing == [f"optimizer/{name}" for name in left]
        assert states(again, every) == states(model, few)
        again = net(frozen="first")
        again.spare.requires_grad_(requires_grad=False)
        every = SGD(again.parameters(), lr=1.0, momentum=0.9)  # which steps no more than were saved
    assert load(tmp_path, model=again, optimizer=every).report.is_exact


def test_another_kind_of_optimizer_is_refused_or_left_as_it_was(tmp_path: Path) -> None:
    model = net()
    adamw = AdamW(model.parameters(), lr=0.1)
    train(model, adamw, range(2))
    save(tmp_path, step=2, model=model, optimizer=adamw)
    sgd = SGD(model.parameters(), lr=0.5, momentum=0.9)
    train(model, sgd, range(1))
    before = states(model, sgd)
    with pytest.raises(StateMismatchError, match="with the optimizers AdamW, here they are SGD"):
        load(tmp_path, model=model, optimizer=sgd)
    restored = load(tmp_path, model=model, optimizer=sgd, partial=True)
    assert restored.report.skipped == ["optimizer: no SGD has saved"]
    assert states(model, sgd) == before
    assert sgd.param_groups[0]["lr"] == 0.5
    assert "betas" not in sgd.param_groups[0]
