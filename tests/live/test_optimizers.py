"""Every optimizer resumes with its state, its counts and its options, here or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RMSprop,
)

import ckptkit
from ckptkit import live
from ckptkit.errors import PeerError, UnsupportedTypeError
from ckptkit.live import Checkpointer
from tests.live.gathering import Arrays, Comparison, gathered, tensors_in
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, MakeOptimizer, build
from tests.live.test_wrapped import EightBit

PLACES = ("plain", "ddp:2", "fsdp2:2", "zero1:2")
FIRST, REST = range(3), range(3, 5)


def two_groups(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """What most trainings do: no decay for vectors."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim < 2]
    return AdamW(
        [
            {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "lr": 0.02, "name": "vectors"},
        ],
        lr=0.03,
        betas=(0.8, 0.95),
    )


# What LBFGS keeps is of all parameters together, and nested tensors are not cut with theirs.
WHOLE = {("LBFGS", "fsdp2:2"), ("LBFGS", "zero1:2"), ("nested", "fsdp2:2")}
MORE_PLACES = {"AdamW, two groups": ("pp:2", "tp:2"), "by row": ("pp:2",), "in lists": ("tp:2",)}
# torch's Adafactor does not take DTensors, and ZeRO hands its groups over as they are.
IMPOSSIBLE = WHOLE | {
    ("Adafactor", "fsdp2:2"),
    ("AdamW, two groups", "zero1:2"),
    ("Muon", "zero1:2"),
}


class ByRow(Optimizer):
    """Keeps one number for each row, a short history, and a value that is no tensor."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gradients are divided by the size that those of their row have had."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                size = gradient.square().reshape(gradient.shape[0], -1).mean(dim=1, keepdim=True)
                state["rows"] = state.get("rows", torch.zeros_like(size)) * 0.9 + size
                state["history"] = state.get("history", torch.zeros(3)).roll(1)
                state["history"][0] += group["lr"]
                state["seen"] = state.get("seen", 0) + 1
                scaled = gradient / (state["rows"].reshape(-1, *[1] * (gradient.ndim - 1)) + 1e-8)
                parameter.sub_(group["lr"] * scaled * state["history"].sum() * state["seen"])


class Nested(Optimizer):
    """As Shampoo does, it keeps a dictionary with a list of factors; and a history that grows."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gradients are scaled along each dim by what that dim has seen."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    dims = range(gradient.ndim)
                    factors = [torch.ones(gradient.shape[dim]) for dim in dims]
                    state["blocks"] = {0: {"factors": factors, "of": ("whole", None)}, "count": 0}
                    state["past/means"] = ()
                block = state["blocks"][0]
                for dim, factor in enumerate(block["factors"]):
                    rows = gradient.square().movedim(dim, 0).reshape(factor.shape[0], -1)
                    factor.add_(rows.mean(1))
                    shape = [-1 if other == dim else 1 for other in range(gradient.ndim)]
                    gradient = gradient / factor.reshape(shape).sqrt()
                state["blocks"]["count"] += 1
                state["past/means"] = (*state["past/means"], gradient.mean())[-2:]
                rate = group["lr"] * sum(map(float, state["past/means"])) + group["lr"]
                parameter.sub_(rate * gradient / state["blocks"]["count"])


class InLists(Optimizer):
    """Keeps what is cut as its parameter is, in a list and a dictionary inside of it."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Momentum, divided by the size of what there was."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    more = {"square": torch.zeros_like(gradient), "of": 0}
                    state["moments"] = [torch.zeros_like(gradient), more]
                first, more = state["moments"]
                first.mul_(0.9).add_(gradient)
                more["square"].mul_(0.9).add_(gradient.square())
                more["of"] += 1
                size = (more["square"] / more["of"]).sqrt() + 1e-8
                parameter.sub_(group["lr"] * first / size)


class Closing(torch.optim.LBFGS):
    """LBFGS that looks once for each batch, as the jobs of these tests pass no closure."""

    def step(self, closure: Any = None) -> Any:
        """The gradients are there already."""
        closure = closure or (lambda: torch.tensor(1.0, requires_grad=True))
        return super().step(closure)  # type: ignore[no-untyped-call]


KINDS: dict[str, MakeOptimizer] = {
    "AdamW": lambda p: AdamW(p, lr=0.03),
    "AdamW, many at once": lambda p: AdamW(p, lr=0.03, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=0.03, fused=True),
    "AdamW, rate in a tensor": lambda p: AdamW(p, lr=torch.tensor(0.03)),
    "AdamW, two groups": two_groups,
    "Adam, amsgrad": lambda p: Adam(p, lr=0.03, amsgrad=True),
    "Adamax": lambda p: Adamax(p, lr=0.03),
    "NAdam": lambda p: NAdam(p, lr=0.03),
    "SGD": lambda p: SGD(p, lr=0.03),
    "SGD, momentum": lambda p: SGD(p, lr=0.03, momentum=0.9, nesterov=True),
    "Adadelta": lambda p: Adadelta(p, lr=0.5),
    "Adagrad": lambda p: Adagrad(p, lr=0.03, initial_accumulator_value=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    "Adafactor": lambda p: Adafactor(p, lr=0.03),
    "by row": lambda p: ByRow(p, lr=0.001),
    "nested": lambda p: Nested(p, lr=0.01),
    "in lists": lambda p: InLists(p, lr=0.01),
    "Muon": lambda p: Muon([each for each in p if each.ndim == 2], lr=0.01),
    "LBFGS": lambda p: Closing(p, lr=0.01, max_iter=2, history_size=3),
}


def save(layout: str, kind: str, location: str) -> tuple[Arrays, list[dict[str, Any]], list[float]]:
    """Train and save; the tensors and options then, and the losses of the next steps."""
    job = build(layout, make=KINDS[kind])
    job.train(FIRST)
    for number, group in enumerate(job.optimizer.param_groups):
        group["lr"] *= 0.9 + number  # as a scheduler would have done
    with Checkpointer(location, timeout=30, differing=["*seen"]) as checkpointer:
        checkpointer.save(3, model=job.model, optimizer=job.optimizer)
    return gathered(job), options(job.optimizer), job.train(REST)


def load(
    layout: str, kind: str, steps: Mapping[str, tuple[str, Arrays]]
) -> dict[str, tuple[list[str], list[dict[str, Any]], list[float]]]:
    """What differs after loading each step, the options, and the losses of the next steps."""
    found = {}
    for source, (location, whole) in steps.items():
        job = build(layout, seed=5, make=KINDS[kind])
        with Checkpointer(location, timeout=30) as checkpointer:
            checkpointer.restore(model=job.model, optimizer=job.optimizer)
        differences = Comparison(job).differences(whole)
        found[source] = (differences, options(job.optimizer), job.train(REST))
    return found


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: float(v) if torch.is_tensor(v) else v for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def save_each(layout: str, kinds: Sequence[str], folder: str) -> dict[str, Any]:
    """What `save` finds with each kind; what torch learns of DTensors it learns once."""
    return {kind: save(layout, kind, f"{folder}/{kind}") for kind in kinds}


def load_each(
    layout: str, steps: Mapping[str, Mapping[str, tuple[str, Arrays]]]
) -> dict[str, dict[str, tuple[list[str], list[dict[str, Any]], list[float]]]]:
    """What `load` finds with each kind."""
    return {kind: load(layout, kind, sources) for kind, sources in steps.items()}


# Kinds whose state has a shape of its own; that of the others is as AdamW's or SGD's, and to them
# DDP is as no wrapper.
PECULIAR = ("AdamW, two groups", "Adafactor", "by row", "nested", "in lists", "Muon", "LBFGS")


OTHERS = [kind for kind in KINDS if kind not in PECULIAR]
PLACES_OF_OTHERS = ("plain", "fsdp2:2", "zero1:2")


def places_of(kind: str) -> list[str]:
    places = [place for place in PLACES if (kind, place) not in IMPOSSIBLE]
    return [*places, *MORE_PLACES.get(kind, ())]


@pytest.mark.parametrize("kind", PECULIAR)
def test_an_optimizer_goes_on_where_it_was(gloo: Pool, tmp_path: Path, kind: str) -> None:
    go_on(gloo, tmp_path, [kind], places_of(kind), everywhere=False)


def test_all_others_go_on_where_they_were(gloo: Pool, tmp_path: Path) -> None:
    go_on(gloo, tmp_path, OTHERS, PLACES_OF_OTHERS, everywhere=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_from_everywhere(gloo: Pool, tmp_path: Path, kind: str) -> None:
    go_on(gloo, tmp_path, [kind], places_of(kind), everywhere=True)


def go_on(
    gloo: Pool, tmp_path: Path, kinds: Sequence[str], places: Sequence[str], *, everywhere: bool
) -> None:
    """Save in each place, and go on in each: from everywhere, or from there and the next place.
    All kinds can be in the same places.
    """
    saved: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for layout in places:
        folder = str(tmp_path / layout)
        ranks = gloo.run(LAYOUTS[layout].ranks, save_each, layout, kinds, folder)
        for kind in kinds:
            whole: dict[str, Any] = {}
            for rank in ranks:
                whole = dict(rank[kind][0]) | whole
            saved[kind][layout] = (whole, *ranks[0][kind][1:])
    for kind in kinds:
        deepest = max(name.count("/") for name in saved[kind]["plain"][0])
        assert deepest == {"nested": 5, "in lists": 4, "LBFGS": 3, "SGD": 1}.get(kind, 2)
    for layout, after in zip(places, [*places[1:], places[0]], strict=True):
        sources = places if everywhere else [layout, after]
        steps = {
            kind: {
                place: (str(tmp_path / place / kind), saved[kind][place][0]) for place in sources
            }
            for kind in kinds
        }
        for rank in gloo.run(LAYOUTS[layout].ranks, load_each, layout, steps):
            for kind in kinds:
                goes_on_as_saved(rank[kind], saved[kind], layout, f"{kind}: into {layout}")


def goes_on_as_saved(
    loaded: Mapping[str, Any], saved: Mapping[str, Any], layout: str, where: str
) -> None:
    for source, (differences, found, losses) in loaded.items():
        assert not differences, f"{where} from {source}"
        assert found == saved[source][1], f"{where} from {source}"
        assert losses == pytest.approx(saved[source][2], rel=1e-3), f"{where} from {source}"
    assert loaded[layout][2] == saved[layout][2], f"{where} it goes on otherwise"


def trained(module: nn.Module, kind: str) -> Optimizer:
    optimizer = KINDS[kind](list(module.parameters()))
    for parameter in module.parameters():
        parameter.grad = torch.arange(1.0, parameter.numel() + 1).reshape(parameter.shape)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["nested", "in lists", "LBFGS"])
def test_what_lies_in_lists_goes_over_with_its_parameter(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = trained(model, kind)
    live.save(tmp_path / "a", step=1, model=model, optimizer=optimizer)
    changes = ckptkit.Selection(rename=(("^0\\.", "first."),))
    ckptkit.reshard(tmp_path / "a", tmp_path / "b", to="fsdp:2", selection=changes)
    assert ckptkit.verify(tmp_path / "b") == []
    renamed = nn.Module()
    renamed.first = nn.Linear(3, 4)
    again = KINDS[kind](list(renamed.parameters()))
    live.load(tmp_path / "b", model=renamed, optimizer=again)
    for mine, theirs in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert repr(sorted(mine.items())) == repr(sorted(theirs.items()))
    # Once more, into what is there by now: containers stay the same ones.
    state = again.state[renamed.first.weight]
    kept = {key: id(value) for key, value in state.items() if type(value) is list and value}
    for tensor in tensors_in(list(again.state.values()), "").values():
        tensor.fill_(-7)
    live.load(tmp_path / "b", model=renamed, optimizer=again)
    assert kind == "LBFGS" or kept == {key: id(state[key]) for key in kept}
    for mine, theirs in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert repr(sorted(mine.items())) == repr(sorted(theirs.items()))


def into_flat(location: str) -> list[str]:
    messages = []
    for is_saved in (True, False):
        model = FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu"))
        optimizer = KINDS["in lists"](list(model.parameters()))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "timeout": 20}
        call: Any = partial(live.load, location, **state)
        if is_saved:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            call = partial(live.save, f"{location}/new", step=1, **state)
        with pytest.raises((UnsupportedTypeError, PeerError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_flat_parameters_take_no_lists_of_tensors(gloo: Pool, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    live.save(tmp_path, step=1, model=model, optimizer=trained(model, "in lists"))
    for messages in gloo.run(2, into_flat, str(tmp_path)):
        for message in messages:
            assert "a container with tensors" in message
            assert "moments" in message


class Fused(nn.Module):
    """One projection, which a state dict shows as three."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(6, 4))
        untyped: Any = self
        untyped.register_state_dict_post_hook(self._split)
        untyped.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(_module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name, rows in zip("qkv", state.pop(f"{prefix}fused").chunk(3), strict=True):
            state[f"{prefix}{name}"] = rows.clone()

    @staticmethod
    def _merge(_module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        if f"{prefix}q" in state:
            state[f"{prefix}fused"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ self.fused.T


def test_a_parameter_that_a_state_dict_shows_as_others_keeps_what_its_optimizer_had(
    tmp_path: Path,
) -> None:
    def job() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), Fused())
        return model, AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Optimizer, batches: range) -> float:
        loss = torch.zeros(())
        for batch in batches:
            optimizer.zero_grad()
            loss = model(torch.full((2, 3), float(batch))).square().sum()
            loss.backward()
            optimizer.step()
        return loss.item()

    model, optimizer = job()
    train(model, optimizer, FIRST)
    live.save(tmp_path, step=3, model=model, optimizer=optimizer)
    resumed = job()
    live.load(tmp_path, model=resumed[0], optimizer=resumed[1])
    assert {"model/1.q", "optimizer/1.fused/exp_avg"} < set(ckptkit.open(tmp_path).arrays)
    assert train(*resumed, REST) == train(model, optimizer, REST)


def resume_what_one_rank_owns(location: str) -> None:
    """One weight for two ranks of ZeRO-1, whose optimizer alone can make what it keeps of it."""

    def made(rate: float) -> tuple[nn.Parameter, ZeroRedundancyOptimizer]:
        weight = nn.Parameter(torch.ones(4, 8))
        return weight, ZeroRedundancyOptimizer([weight], EightBit, lr=rate)

    def train(weight: nn.Parameter, optimizer: ZeroRedundancyOptimizer) -> None:
        weight.grad = torch.full_like(weight, 2.0)
        optimizer.step()

    weight, optimizer = made(0.5)
    model = nn.ParameterDict({"weight": weight})
    train(weight, optimizer)
    live.save(location, step=1, model=model, optimizer=optimizer)
    again, other = made(0.25)
    live.load(location, model=nn.ParameterDict({"weight": again}), optimizer=other)
    assert torch.equal(weight, again)
    for each in ((weight, optimizer), (again, other)):
        train(*each)
    assert torch.equal(weight, again)


def test_a_rank_that_owns_nothing_need_not_make_state(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, resume_what_one_rank_owns, str(tmp_path), timeout=60)
