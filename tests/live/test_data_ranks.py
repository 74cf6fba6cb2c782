"""Where a job is in its data goes back to the ranks that read the same share of it, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptkit
from ckptkit.live import (
    PerDataRank,
    PerRank,
    StateMismatchError,
    WorldSizeError,
    load,
    save,
)
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, build
from tests.live.test_resharded import RULES


class Loader:
    """A data loader that knows where it is, with a tensor, as torch's stateful one has."""

    data_share: tuple[int, int] | None = None

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"at": self.at, "generator": torch.full((4,), self.at, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        assert state["generator"].tolist() == [state["at"]] * 4
        self.at = state["at"]


class Elastic(Loader):
    """One that can go on from any number of others."""

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Go to where the slowest was."""
        self.at = 100 + min(state["at"] for state in states)


def save_job(location: str, layout: str, *, older: bool = False, apart: bool = False) -> None:
    job = build(layout)
    rank = dist.get_rank()
    at = 10 + job.replica + (rank if apart else 0)
    loader: Any = [Loader(at), Loader(at)]
    if older:  # what earlier versions made of dataloader=
        save(location, step=1, model=job.model, state={"dataloader": PerRank(loader)})
        return
    extra = {"rng": PerDataRank({"seed": at})}
    save(location, step=1, model=job.model, dataloader=loader, extra=extra, timeout=30)


def load_job(location: str, layout: str) -> list[Any]:
    """The position, that of the random numbers, and what was said where they are not known."""
    job = build(layout, 9)
    loaders = [Loader(), Loader()]
    load_all = partial(load, location, model=job.model, timeout=30)
    try:
        restored = load_all(dataloader=loaders)
    except StateMismatchError as error:
        with pytest.raises(StateMismatchError):
            load_all(dataloader=loaders, partial=True)
        assert [each.at for each in loaders] == [0, 0]
        restored = load_all(dataloader=loaders, skip=["data*"])
        assert restored.report.is_exact
        if "rng" in restored.extra:
            with pytest.raises(WorldSizeError, match=r"extra\.get\('rng', fallback\)"):
                restored.extra["rng"]
            assert len(restored.extra.of_ranks("rng")) in (2, 4)
        return [0, str(error)]
    assert loaders[0].at == loaders[1].at
    assert restored.extra.get("rng", {"seed": loaders[0].at}) == {"seed": loaders[0].at}
    return [loaders[0].at - 10, build(layout).replica]


@pytest.fixture(scope="module")
def saved(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    folder, known = tmp_path_factory.mktemp("data-ranks"), dict[str, str]()

    def found(layout: str, **how: bool) -> str:
        key = f"{layout} {how}"
        if key not in known:
            known[key] = str(folder / str(len(known)))
            job: Callable[..., None] = partial(save_job, **how)  # type: ignore[arg-type]
            gloo.run(LAYOUTS[layout].ranks, job, known[key], layout)
        return known[key]

    return found


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp2:2", "fsdp2:2"),
        ("fsdp2:2", "ddp:2,tp:2"),
        ("fsdp:2,tp:2", "pp:2,fsdp:2"),
        ("ddp:2,tp:2", "fsdp2:2"),
        ("tp:2", "plain"),
    ],
)
def test_each_share_of_the_data_goes_on_where_it_was(
    gloo: Pool, saved: Callable[..., str], source: str, target: str, older: bool
) -> None:
    location = saved(source, older=older)
    for at, replica in gloo.run(LAYOUTS[target].ranks, load_job, location, target):
        assert at == replica


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    ("source", "target", "sizes"), [("fsdp2:2", "tp:2", (2, 1)), ("tp:2", "fsdp2:2", (1, 2))]
)
def test_another_number_of_shares_is_refused_with_a_way_out_of_its_own(
    gloo: Pool,
    saved: Callable[..., str],
    source: str,
    target: str,
    sizes: tuple[int, int],
    older: bool,
) -> None:
    found = gloo.run(2, load_job, saved(source, older=older), target)
    assert found == [found[0]] * 2
    assert f"its data between {sizes[0]}, this one does between {sizes[1]}" in found[0][1]
    assert 'skip=["dataloader"]' in found[0][1]


def test_a_reshard_does_not_make_one_share_another(
    gloo: Pool, saved: Callable[..., str], tmp_path: Path
) -> None:
    for older in (False, True):
        for to in ("tp:2",) if older else ("tp:2", "ddp:2,tp:2"):
            new = str(tmp_path / f"{to} {older}")
            ckptkit.reshard(saved("fsdp2:2", older=older), new, to=to, rules=RULES)
            for at, said in gloo.run(LAYOUTS[to].ranks, load_job, new, to):
                if to == "tp:2":
                    assert "shares out its data" in said or "its data between 2" in said
                else:
                    assert at == said


def test_ranks_of_one_share_at_different_places_only_go_on_as_they_were(
    gloo: Pool, saved: Callable[..., str]
) -> None:
    location = saved("ddp:2,tp:2", apart=True)
    found = gloo.run(4, load_job, location, "fsdp:2,tp:2")
    assert [at for at, _ in found] == [0, 1, 3, 4]
    for _, said in gloo.run(2, load_job, location, "fsdp2:2"):
        assert "rank 0, 1 read one share" in said or "rank 2, 3 read one share" in said


def load_elastic(location: str, layout: str) -> list[int]:
    job = build(layout)
    loaders = [Elastic(), Elastic()]
    load(location, model=job.model, dataloader=loaders)
    return [each.at for each in loaders]


def test_a_loader_that_can_takes_the_states_of_all(gloo: Pool, saved: Callable[..., str]) -> None:
    assert gloo.run(2, load_elastic, saved("fsdp2:2"), "tp:2") == [[110, 110]] * 2
    assert gloo.run(2, load_elastic, saved("fsdp2:2"), "fsdp2:2") == [[10, 10], [11, 11]]


def load_share(location: str, degree: int) -> Any:
    """The position of a rank of `fsdp2:4` where this many read one share, or why it is refused."""
    job, loader = build("fsdp2:4", 9), Loader()
    loader.data_share = dist.get_rank() // degree, 4 // degree
    try:
        load(location, model=job.model, dataloader=loader, timeout=30)
    except StateMismatchError as error:
        assert loader.at == 0
        return str(error)
    return loader.at


def save_share(location: str, degree: int) -> None:
    rank = dist.get_rank()
    loader = Loader(10 + rank // degree)
    loader.data_share = rank // degree, 4 // degree
    save(location, step=1, model=build("fsdp2:4").model, dataloader=loader, timeout=30)


def test_a_loader_that_says_its_share_is_believed(gloo: Pool, tmp_path: Path) -> None:
    # As under context parallelism, which FSDP takes for more ranks of its own.
    gloo.run(4, save_share, str(tmp_path), 2)
    assert gloo.run(4, load_share, str(tmp_path), 2) == [10, 10, 11, 11]
    for said in gloo.run(4, load_share, str(tmp_path), 1):
        assert "shared out its data between 2, this one does between 4" in said


def load_alone(location: str) -> str:
    with pytest.raises(StateMismatchError) as caught:
        load(location, dataloader=[Loader(), Loader()])
    return str(caught.value)


def test_without_a_model_nobody_knows_who_reads_what(gloo: Pool, saved: Callable[..., str]) -> None:
    for older in (False, True):
        for said in gloo.run(2, load_alone, saved("fsdp2:2", older=older)):
            assert "pass model=… or mesh=…" in said


def test_only_groups_that_there_are_can_be_skipped(tmp_path: Path) -> None:
    save(tmp_path, step=1, dataloader=Loader(3), state={"mine": {"x": 1}})
    with pytest.raises(ckptkit.errors.UsageError, match="these can: dataloader, mine, optimizer"):
        load(tmp_path, dataloader=Loader(), state={"mine": {}}, skip=["datalaoder"])
    with pytest.raises(ckptkit.errors.UsageError, match="not one text"):
        load(tmp_path, dataloader=Loader(), skip="dataloader")
    for wrong in (3, [None]):
        with pytest.raises(ckptkit.errors.UsageError, match="skip takes patterns"):
            load(tmp_path, dataloader=Loader(), skip=wrong)  # type: ignore[arg-type]
    loader, mine = Loader(), {"x": 0}
    load(tmp_path, dataloader=loader, state={"mine": mine}, skip=["mi*"])
    assert (loader.at, mine) == (3, {"x": 0})
