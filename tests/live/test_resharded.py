"""What is resharded offline is what a job of that strategy would have saved, and loads there."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptkit
from ckptkit.live import Checkpointer
from ckptkit.model import Owner, Shard, Stage, Strided
from tests.live.gathering import Arrays
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS
from tests.live.test_matrix import load, save

RULES: dict[str, Any] = {
    "rules": [
        {"match": "embed.weight", "tp": "shard(0)"},
        {"match": "re:.*(up\\.weight|up\\.bias)", "tp": "shard(0)", "ep": "shard(0)"},
        {"match": "*head.weight", "tp": "shard(0)"},
        {"match": "*.down.weight", "tp": "shard(1)", "ep": "shard(1)"},
        {"match": "*", "tp": "replicate"},
    ],
    "pipeline": {
        "layers": "layers\\.(\\d+)",
        "split": "balanced",
        "first": ["embed*"],
        "last": ["norm*", "head*", "scale"],
    },
}
SOURCES = (
    "fsdp2:4",
    "tp:2",
    "zero1:3",
    "pp:2",
    "fsdp1:2",
    "fsdp1:2, tp:2",
    "fsdp:4, experts on ep:2",
)
# Between them, these are cut in every way and share out moments; a target alone loads from all, and
# the others from all in long tests.
FEW = ("zero1:3", "pp:2", "fsdp1:2, tp:2")
TARGETS = (
    "plain",
    "ddp:2",
    "fsdp2:3",
    "hsdp:2x2",
    "zero1:2",
    "tp:2",
    "tp:4",
    "fsdp:2,tp:2",
    "fsdp1:2, tp:2",
    "ddp:2,tp:2",
    "pp:2",
    "pp:2,fsdp:2",
)

# Made of what the others are cut by, or as many replicas; the rest is for long tests.
ALIKE = ("ddp:2", "tp:4", "ddp:2,tp:2", "pp:2,fsdp:2")
EACH_TARGET = [
    pytest.param(target, marks=pytest.mark.long if target in ALIKE else ()) for target in TARGETS
]

Saved = Callable[[str], tuple[str, Arrays]]


@pytest.fixture(scope="module")
def saved(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Where a job has saved, and what it held."""
    folder = tmp_path_factory.mktemp("saved")

    @functools.cache
    def found(layout: str) -> tuple[str, Arrays]:
        location = str(folder / str(list(LAYOUTS).index(layout)))
        whole: dict[str, Any] = {}
        for rank in gloo.run(LAYOUTS[layout].ranks, save, layout, location):
            whole = dict(rank) | whole
        return location, whole

    return found


# Offline, rules alone say what ep cuts; the job cuts its dense weights along that axis too.
@pytest.mark.parametrize(
    ("target", "sources"),
    [
        *((target, FEW) for target in TARGETS if target not in ("plain", *ALIKE)),
        *(("plain", SOURCES), ("fsdp:4, experts on ep:2", SOURCES)),
        *(pytest.param(target, SOURCES, marks=pytest.mark.long) for target in TARGETS[1:]),
    ],
    ids=lambda value: value if isinstance(value, str) else f"of {len(value)}",
)
def test_a_job_loads_what_was_resharded_for_it(
    gloo: Pool, saved: Saved, tmp_path: Path, target: str, sources: tuple[str, ...]
) -> None:
    steps = {}
    for number, source in enumerate(sources):
        location, whole = saved(source)
        new = str(tmp_path / str(number))
        ckptkit.reshard(location, new, to=LAYOUTS[target].written, rules=RULES)
        steps[source] = (new, whole)
    for rank, problems in enumerate(gloo.run(LAYOUTS[target].ranks, load, target, steps)):
        assert not {k: v for k, v in problems.items() if v}, f"rank {rank}"


@pytest.mark.parametrize("target", EACH_TARGET)
def test_it_is_cut_as_the_job_would_have_cut_it(
    gloo: Pool, saved: Saved, tmp_path: Path, target: str
) -> None:
    location, _ = saved("fsdp2:4")
    to = LAYOUTS[target].written
    ckptkit.reshard(location, tmp_path, to=to, rules=RULES)
    with ckptkit.open(tmp_path) as resharded, ckptkit.open(saved(target)[0]) as own:
        assert resharded.strategy == own.strategy
        found = {array.name: cuts(array, to) for array in resharded.manifest.arrays}
        assert found == {array.name: cuts(array, to) for array in own.manifest.arrays}


def cuts(array: Any, strategy: str) -> list[Any]:
    """The placements that cut, and with ZeRO-1 who owns moments; what all ranks hold a job has its
    first rank write where nobody can be sure that it is the same.
    """
    kinds: tuple[type, ...] = (Shard, Strided, Stage)
    if "zero1" in strategy and "exp_avg" in array.name:
        kinds = (Owner,)
    return [placement for placement in array.placements if isinstance(placement, kinds)]


def of_lists(first: float) -> dict[str, Any]:
    tensors = [torch.full((2,), first + at) for at in range(5)]
    kept = deque(tensors[2:4], maxlen=3)
    return {"list": tensors[:2], "deque": kept, "pair": (tensors[4], first)}


@pytest.mark.parametrize("item", ["list/0", "deque/0/0", "pair/0"])
def test_of_a_list_that_an_item_was_left_out_of_the_others_load_in_their_places(
    tmp_path: Path, item: str
) -> None:
    names = ["list/0", "list/1", "deque/0/0", "deque/0/1", "pair/0"]
    with Checkpointer(tmp_path / "whole") as checkpointer:
        checkpointer.save(1, state={"x": of_lists(1)})
    selection = ckptkit.Selection(exclude=(f"x/{item}",))
    ckptkit.reshard(tmp_path / "whole", tmp_path / "part", to="single", selection=selection)
    mine = of_lists(11)
    with Checkpointer(tmp_path / "part") as checkpointer:
        restored = checkpointer.restore(state={"x": mine}, partial=True)
    assert restored is not None
    assert restored.report.missing == [f"x/{item}"]
    tensors = [*mine["list"], *mine["deque"], mine["pair"][0]]
    for name, tensor, value in zip(names, tensors, (1, 2, 3, 4, 5), strict=True):
        assert tensor[0] == value + 10 * (name == item)
    assert mine["deque"].maxlen == 3


def save_or_load_own(location: str, loads: bool) -> tuple[list[str], float]:
    """Each rank has a key of its own: what is missing then, and the value."""
    rank = dist.get_rank()
    model, own = torch.nn.Linear(2, 2), {f"r{rank}": torch.tensor(rank + 10.0 * loads)}
    with Checkpointer(location, timeout=20) as checkpointer:
        if not loads:
            checkpointer.save(1, model=model, state={"x": own})
            return [], 0
        restored = checkpointer.restore(model=model, state={"x": own}, partial=True)
    assert restored is not None
    return restored.report.missing, own[f"r{rank}"].item()


def test_what_only_some_ranks_had_may_be_left_out(gloo: Pool, tmp_path: Path) -> None:
    whole, part = (str(tmp_path / name) for name in ("whole", "part"))
    gloo.run(2, save_or_load_own, whole, False)
    selection = ckptkit.Selection(exclude=("x/r1",))
    ckptkit.reshard(whole, part, to="ddp:2", selection=selection)
    assert gloo.run(2, save_or_load_own, part, True) == [(["x/r1"], 0), (["x/r1"], 11)]
