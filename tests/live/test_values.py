"""What a training has besides tensors: counters, cursors, schedulers, scalers, random numbers."""

from __future__ import annotations

import datetime
import enum
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, lr_scheduler

import ckptkit
from ckptkit.errors import InvalidNameError, PeerError, UnsupportedTypeError, UsageError
from ckptkit.live import (
    Checkpointer,
    Extra,
    PerDataRank,
    PerRank,
    Replicated,
    Split,
    StateMismatchError,
    Sum,
    WorldSizeError,
    load,
    load_state,
    rng_state,
    save,
    set_rng_state,
)
from ckptkit.storage import LocalStore
from tests.live.pool import Pool
from tests.storage.counting import CountingStore


def save_values(location: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    items = list(range(10 * rank, 10 * rank + rank + 2))
    extra = {
        "note": "x",
        "nested": Replicated({"a": [1, (2, None)], "array": np.arange(3)}),
        "mine": PerRank({"rank": rank}),
        "tokens": Sum(100 + rank),
        "loss": Sum(0.5),
        "counts": Sum(np.array([rank, 1])),
        "items": Split(items),
        "left": Split(5 * ranks),
    }
    with Checkpointer(location, timeout=20) as checkpointer:
        checkpointer.save(1, extra=extra)


def load_values(location: str) -> dict[str, Any]:
    extra = load(location).extra
    found = {name: extra[name] for name in extra if name != "mine"}
    found["counts"], found["nested"]["array"] = found["counts"].tolist(), 0
    found["mine"] = extra.get("mine", "fallback")
    found["total"] = extra.total("tokens")
    found["of ranks"] = extra.of_ranks("mine")
    if len(extra.of_ranks("mine")) != dist.get_world_size():
        with pytest.raises(WorldSizeError, match="a job of 3, this one has"):
            extra["mine"]
    return found


@pytest.fixture(scope="module")
def of_three(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    location = str(tmp_path_factory.mktemp("of-three"))
    gloo.run(3, save_values, location)
    return location


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_values_come_back_to_any_number_of_ranks(gloo: Pool, of_three: str, ranks: int) -> None:
    found = gloo.run(ranks, load_values, of_three)
    for rank in found:
        assert (rank["note"], rank["total"]) == ("x", 303)
        assert rank["nested"] == {"a": [1, (2, None)], "array": 0}
        assert rank["of ranks"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert sum(rank["tokens"] for rank in found) == 303
    assert sum(rank["loss"] for rank in found) == pytest.approx(1.5)
    assert [sum(c) for c in zip(*(rank["counts"] for rank in found), strict=True)] == [3, 3]
    items = [item for rank in found for item in rank["items"]]
    assert items == [0, 1, 10, 11, 12, 20, 21, 22, 23]
    assert sum(rank["left"] for rank in found) == 45
    if ranks == 3:
        assert [rank["mine"] for rank in found] == [{"rank": rank} for rank in range(3)]
        assert [rank["tokens"] for rank in found] == [100, 101, 102]
    else:
        assert [rank["mine"] for rank in found] == ["fallback"] * ranks


def disagree(location: str) -> str:
    with pytest.raises(PeerError if dist.get_rank() else Exception) as caught:
        save(location, step=1, extra={"note": dist.get_rank()}, timeout=20)
    return str(caught.value)


def test_a_value_that_ranks_disagree_about_is_refused(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, disagree, str(tmp_path)):
        assert "note" in message
    assert not ckptkit.Run(tmp_path).steps()


def test_values_that_no_checkpoint_can_hold_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"extra/odd.*x: a _thread\.lock"):
        save(tmp_path, step=1, extra={"odd": {"x": __import__("threading").Lock()}})
    with pytest.raises(UsageError, match=r"extra"):
        save(tmp_path, step=1, state={"extra": {}})
    with pytest.raises(UsageError, match="Sum and Split"):
        save(tmp_path, step=1, state={"mine": Sum(3)})


ODD: dict[str, Any] = {
    "set": {3, 1, ("b", frozenset({2}))},
    "nothing": set(),
    "frozenset": frozenset({"x", b"y", None}),
    "deque": deque([1, [{2}]], maxlen=3),
    "endless": deque(),
    "date": datetime.date(2024, 2, 29),
    "size": torch.Size([2, 3]),
    "counter": Counter({"a": 2}),
    "inside": [({"when": datetime.date(1, 1, 1)},)],
}


def test_a_keyword_that_no_step_has_is_refused_rather_than_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="unexpected keyword argument 'optimiser'"):
            checkpointer.save(1, model=model, optimiser=SGD(model.parameters()))  # type: ignore[call-arg]
        checkpointer.save(1, model=model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        load(tmp_path, modle=model)  # type: ignore[call-arg]


def test_sets_and_dates_come_back_as_what_they_were(tmp_path: Path) -> None:
    each = {"replicated": ODD, "ranks": PerRank(ODD), "items": Split([ODD["set"], ODD["date"]])}
    save(tmp_path / "a", step=1, extra=each, state={"mine": ODD, "own": PerRank(ODD)})
    ckptkit.reshard(tmp_path / "a", tmp_path / "b", to="fsdp:2")
    assert ckptkit.diff(tmp_path / "a", tmp_path / "b").same
    assert ckptkit.digest(tmp_path / "a").step == ckptkit.digest(tmp_path / "b").step
    for folder in ("a", "b"):
        mine: dict[str, Any] = {}
        extra = load(tmp_path / folder, state={"mine": mine}).extra
        for found in (mine, extra["replicated"], extra.of_ranks("ranks")[0]):
            assert found == ODD
            assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in ODD.items()}
            assert found["deque"].maxlen == 3
        assert extra["items"] == [ODD["set"], ODD["date"]]
    own: dict[str, Any] = {}
    load(tmp_path / "a", state={"mine": {}, "own": PerRank(own)})
    assert own == ODD
    with ckptkit.open(tmp_path / "a") as step:  # to those who know no torch they are maps
        assert step.objects["extra/replicated"]["set"]["ckptkit.set"][:2] == [1, 3]


INSTEAD: dict[str, tuple[object, str]] = {
    "an Enum": (enum.Enum("Phase", "WARM").WARM, "write x.name"),  # type: ignore[attr-defined]
    "a path": (Path("a"), "write str(x)"),
    "numpy's text": (np.str_("a"), "write str(x)"),
    "a complex number": (1j, "write numpy.complex128(x)"),
    "a duration": (datetime.timedelta(1), "write x.total_seconds()"),
    "a defaultdict": (defaultdict(int), "write dict(x)"),
    "a range": (range(3), "write list(x)"),
    "a named tuple": (time.gmtime(), "write tuple(x)"),
    "a dtype": (torch.float32, "write str(x)"),
}


@pytest.mark.parametrize("kind", INSTEAD)
def test_of_what_is_refused_it_is_said_what_to_write(tmp_path: Path, kind: str) -> None:
    value, words = INSTEAD[kind]
    with pytest.raises(UnsupportedTypeError) as caught:
        save(tmp_path, step=1, extra={"odd": {"x": value}})
    assert words in caught.value.hint
    assert "extra/odd" in caught.value.where
    for mark in ("ckptkit.set", "ckptkit.array", "ckptkit.data_rank"):
        with pytest.raises(UnsupportedTypeError, match="ckptkit's own"):
            save(tmp_path, step=1, extra={"odd": {"x": {mark: 1}}})


class Loader:
    """A data loader that knows where it is."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        """With a tensor, as torch's stateful loader has."""
        return {"at": self.at, "generator": torch.full((4,), self.at, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        assert state["generator"].tolist() == [state["at"]] * 4
        self.at = state["at"]


def save_loader(location: str) -> None:
    save(location, step=1, dataloader=Loader(10 + dist.get_rank()))


def load_loader(location: str) -> list[Any]:
    loader = Loader()
    try:
        load(location, dataloader=loader)
    except StateMismatchError as error:
        load(location, dataloader=loader, skip=["dataloader"])
        return [loader.at, str(error)]
    return [loader.at]


def test_a_loader_goes_on_where_its_rank_was(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_loader, str(tmp_path))
    assert gloo.run(2, load_loader, str(tmp_path)) == [[10], [11]]
    for at, message in gloo.run(3, load_loader, str(tmp_path)):
        assert at == 0
        assert "shared out its data between 2, this one does between 3" in message


class Titan:
    """As torchtitan's loader: a state of its rank, beside what all have."""

    def __init__(self, at: int = 0) -> None:
        self.key, self.at, self.seen = f"dp_rank_{dist.get_rank()}", at, [""]

    def state_dict(self) -> dict[str, Any]:
        """With a tensor, which only this rank has."""
        mine = {"at": self.at, "generator": torch.tensor([self.at])}
        return {self.key: mine, "world_size": dist.get_world_size(), "deep": {"in": {self.key: 1}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take its own out."""
        self.seen = sorted(state)
        if self.key in state:
            assert state[self.key]["generator"].tolist() == [state[self.key]["at"]]
            assert state["deep"] == {"in": {self.key: 1}}
            self.at = state[self.key]["at"]


def save_titans(location: str) -> None:
    rank = dist.get_rank()
    plain = {f"of_{rank // 2}": [torch.full((2,), rank // 2)], "all": 1}
    state: dict[str, object] = {"loader": Titan(10 + rank), "plain": plain}
    if rank == 1:
        state["single"] = {"x": torch.ones(3), "y": 2}
    save(location, step=1, state=state, timeout=30)


def load_titans(location: str) -> tuple[int, list[str], dict[str, Any]]:
    titan, plain = Titan(), {f"of_{dist.get_rank() // 2}": [torch.zeros(2, dtype=torch.int64)]}
    load(location, state={"loader": titan, "plain": plain}, partial=True)
    return titan.at, titan.seen, plain


def test_keys_that_only_some_ranks_have_are_theirs(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(3, save_titans, str(tmp_path / "a"))
    assert ckptkit.verify(tmp_path / "a") == []
    ckptkit.reshard(tmp_path / "a", tmp_path / "b", to="fsdp:2")
    for folder in ("a", "b"):
        for rank, (at, seen, plain) in enumerate(gloo.run(3, load_titans, str(tmp_path / folder))):
            assert (at, seen) == (10 + rank, ["deep", f"dp_rank_{rank}", "world_size"])
            mine = f"of_{rank // 2}"
            assert plain[mine][0].tolist() == [rank // 2] * 2
            assert sorted(plain) == ["all", mine]
        everything = load_state(tmp_path / folder, nested=True)
        ranks = [everything["loader"][f"dp_rank_{rank}"]["at"] for rank in range(3)]
        assert ranks == [10, 11, 12]
        assert everything["loader"]["deep"]["in"] == {f"dp_rank_{rank}": 1 for rank in range(3)}
        assert repr(everything["single"]) == repr({"x": torch.ones(3), "y": 2})
    assert [rank[0] for rank in gloo.run(2, load_titans, str(tmp_path / "a"))] == [10, 11]


def save_clashing(location: str) -> str:
    state = {"loader": {f"of_{dist.get_rank() // 2}": dist.get_rank()}}
    with pytest.raises(PeerError) as caught:
        save(location, step=1, state=state, timeout=20)
    return str(caught.value)


def test_ranks_that_share_a_key_have_to_agree(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(3, save_clashing, str(tmp_path)):
        assert "own/loader/of_0" in message
        assert "disagree" in message


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_with_its_optimizer(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Module, SGD, Any]:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def rates(optimizer: SGD, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = made()
    rates(optimizer, scheduler, 3)
    save(tmp_path, step=3, model=model, optimizer=optimizer, scheduler=scheduler)
    model, again, resumed = made()
    load(tmp_path, model=model, optimizer=again, scheduler=resumed)
    assert type(resumed.state_dict()) is type(scheduler.state_dict())
    assert plain(resumed.state_dict()) == plain(scheduler.state_dict())
    assert rates(again, resumed, 4) == rates(optimizer, scheduler, 4)


def plain(state: dict[str, Any]) -> str:
    return repr({k: v for k, v in state.items() if "0x" not in repr(v)})


def test_a_scaler_goes_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    save(tmp_path, step=1, scaler=scaler)
    again = torch.amp.GradScaler("cpu")
    load(tmp_path, scaler=again)
    assert again.state_dict() == scaler.state_dict()


def test_random_numbers_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]  # noqa: NPY002

    np.random.randn()  # noqa: NPY002 — leaves half a pair behind
    save(tmp_path, step=1, extra={"rng": PerRank(rng_state())})
    expected = draw()
    extra: Extra = load(tmp_path).extra
    set_rng_state(extra.get("rng"))
    assert draw() == expected
    count = torch.cuda.device_count() + 1
    set_rng_state(rng_state() | {"cuda": [np.zeros(16, np.uint8)] * count})
    assert f"the state is of {count} devices, this process sees {count - 1}" in caplog.text
    set_rng_state(None)
    with pytest.raises(UsageError):
        set_rng_state({"torch": 1})


@pytest.mark.parametrize(
    "given", [{}, {"model": None, "optimizer": None}, {"extra": {}}, {"state": {}, "extra": {}}]
)
def test_a_save_of_nothing_is_refused(given: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UsageError, match="nothing to save"):
            checkpointer.save(1, **given)
        assert checkpointer.save(1, extra={"n": 1}) is not None


@pytest.mark.parametrize("name", ["model", "extra", "extra/tokens", "alike/x", "wrapped/model/w"])
def test_state_has_no_names_of_ckptkit_s_own_values(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidNameError, match="this group is ckptkit's own"):
        save(tmp_path, step=1, extra={"tokens": 5}, state={name: {"a": 1}})


def test_a_restore_of_the_newest_step_asks_about_no_other(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step, extra={"n": step})
    store = CountingStore(LocalStore(tmp_path))
    with Checkpointer(store) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 8
    assert store.operations["size"] == 1


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("kind", [PerRank, PerDataRank])
def test_tensors_of_each_rank_are_filled_themselves(tmp_path: Path, kind: Any, count: int) -> None:
    def tensors(dtype: torch.dtype = torch.float32, count: int = count) -> list[torch.Tensor]:
        return [torch.zeros(count, dtype=dtype) for _ in range(3)]

    def state(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> dict[str, object]:
        return {"alone": kind(x), "inside": kind({"a": y, "b": [z, 1]})}

    wanted = torch.arange(count, dtype=torch.float32)
    save(tmp_path, step=1, state=state(wanted, wanted + 1, wanted + 2))
    mine = tensors()
    mine[0].requires_grad_()
    assert load(tmp_path, state=state(*mine)).report.is_exact
    assert [each.tolist() for each in mine] == [(wanted + n).tolist() for n in range(3)]
    mine = tensors(torch.float64)
    with pytest.raises(StateMismatchError, match="inside/b/0: float32 in the step, float64 here"):
        load(tmp_path, state=state(*mine))
    assert not any(each.any() for each in mine)
    load(tmp_path, state=state(*mine), cast=True)
    assert [each.tolist() for each in mine] == [(wanted + n).tolist() for n in range(3)]
    mine = [*tensors()[:2], *tensors(count=2)[:1]]
    with pytest.raises(StateMismatchError, match=r"inside/b/0: .* in the step, \(2,\) here"):
        load(tmp_path, state=state(*mine))
    assert not any(each.any() for each in mine)
    load(tmp_path, state=state(*mine), partial=True)
    assert [bool(each.any()) for each in mine] == [True, True, False]


class Pair(NamedTuple):
    """Two values by name."""

    first: object
    second: int


@pytest.mark.parametrize("kind", [PerRank, PerDataRank, Replicated])
def test_tensors_in_tuples_and_ordered_dictionaries_are_filled_themselves(
    tmp_path: Path, kind: Any
) -> None:
    def state(tensors: Sequence[torch.Tensor], count: int) -> dict[str, Any]:
        x, y, z = tensors
        return {"tuple": (x, [{"in": y}], count), "pair": Pair(z, count), "order": OrderedDict(x=x)}

    save(tmp_path, step=1, state={"s": kind(state(list(torch.ones(3, 4)), 2))})
    tensors = list(torch.zeros(3, 4))
    mine = state(tensors, 0)
    ordered = mine["order"]
    assert load(tmp_path, state={"s": kind(mine)}).report.is_exact
    assert all(each.tolist() == [1.0] * 4 for each in tensors)
    assert mine["tuple"] == (tensors[0], [{"in": tensors[1]}], 2)
    assert mine["pair"] == (tensors[2], 2)
    assert mine["order"] is ordered
    assert ordered["x"] is tensors[0]
    wrong = state(list(torch.zeros(3, 4, dtype=torch.float64)), 0)
    with pytest.raises(StateMismatchError, match="s/tuple/0: float32 in the step, float64 here"):
        load(tmp_path, state={"s": kind(wrong)})


@pytest.mark.parametrize("kind", [dict, PerRank, Replicated])
def test_a_key_that_the_step_lacks_is_missing(tmp_path: Path, kind: Any) -> None:
    save(tmp_path, step=1, state={"p": kind({"a": 1, "in": [{"c": {1}}]})})
    mine: dict[str, Any] = {"a": 0, "b": 5, "in": [{"c": set(), "d": None}]}
    with pytest.raises(StateMismatchError, match=r"missing: p/b, p/in/0/d\n"):
        load(tmp_path, state={"p": kind(mine) if kind is not dict else mine})
    assert mine == {"a": 0, "b": 5, "in": [{"c": set(), "d": None}]}
    report = load(tmp_path, state={"p": kind(mine) if kind is not dict else mine}, partial=True)
    assert report.report.missing == ["p/b", "p/in/0/d"]
    assert mine == {"a": 1, "b": 5, "in": [{"c": {1}, "d": None}]}


@pytest.mark.parametrize("given", [1, 3, None])
@pytest.mark.parametrize("group", ["scheduler", "dataloader"])
def test_objects_of_another_number_are_refused_in_time(
    tmp_path: Path, group: str, given: int | None
) -> None:
    model = nn.Linear(2, 2)
    saved: dict[str, Any] = {group: [Loader(1), Loader(2)]}
    save(tmp_path, step=1, model=model, **saved)
    other = nn.Linear(2, 2)
    before = other.weight.tolist()
    loaders = [Loader() for _ in range(given or 1)]
    mine: dict[str, Any] = {group: loaders[0] if given is None else loaders}
    with pytest.raises(StateMismatchError, match="a list of 2 in the step"):
        load(tmp_path, model=other, **mine)
    assert other.weight.tolist() == before
    load(tmp_path, model=other, skip=[group], **mine)
    assert other.weight.tolist() == model.weight.tolist()
