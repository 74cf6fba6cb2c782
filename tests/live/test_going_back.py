"""Jobs that go back, end early, or mean different things: nothing is lost without a word."""

from __future__ import annotations

import math
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import ckptkit
from ckptkit.checkpoint.places import step_name
from ckptkit.checkpoint.write.damage import REPLACEABLE
from ckptkit.errors import (
    CorruptionError,
    InvalidNameError,
    PeerError,
    StepExistsError,
    StorageError,
    UsageError,
)
from ckptkit.live import Checkpointer, save
from ckptkit.live.restore import load_into
from tests.live.pool import Pool
from tests.live.test_tiers import damage, loaded, refusing, save_two, steps, value


def test_a_job_that_went_back_keeps_the_steps_it_saves_then(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step, model=model)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.restore(model=model, step=100)
        checkpointer.save(150, model=model)
        assert ckptkit.Run(tmp_path).steps() == [150, 200, 300]
        checkpointer.save(160, model=model)
        assert ckptkit.Run(tmp_path).steps() == [160, 200, 300]
        checkpointer.save(400, model=model)
    assert ckptkit.Run(tmp_path).steps() == [400]


def test_a_damaged_step_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    """The last good one went in its place."""
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        for step in (100, 200):
            checkpointer.save(step, state=value(step))
        damage(tmp_path, 200)
        assert loaded(checkpointer, fallback=True) == (100, 100.0)
        for step, stay in ((250, [100, 200, 250]), (300, [200, 250, 300])):
            checkpointer.save(step, state=value(step))
            assert checkpointer.run.steps() == stay


@pytest.mark.parametrize("local", [None, "local"])
def test_the_best_step_stays_until_another_is_named(local: str | None, tmp_path: Path) -> None:
    near = local and tmp_path / local
    with Checkpointer(tmp_path / "run", keep_last=1, local=near) as checkpointer:
        for step, best in enumerate([1, 1, 3, 3, 4], start=1):
            checkpointer.keep([best])
            checkpointer.save(step, model=nn.Linear(2, 2))
            checkpointer.wait()
            assert checkpointer.run.steps() == sorted({best, step})


@pytest.mark.parametrize("local", [None, "local"])
def test_the_best_step_stays_until_the_one_that_is_named_then_is_committed(
    local: str | None, tmp_path: Path
) -> None:
    near = local and tmp_path / local
    with Checkpointer(tmp_path / "run", keep_last=1, local=near) as checkpointer:
        for step, best, stay in [(1, 1, [1]), (2, 3, [1, 2]), (3, 5, [3]), (4, 6, [3, 4])]:
            checkpointer.keep([best])
            checkpointer.save(step, model=nn.Linear(2, 2))
            checkpointer.wait()
            assert checkpointer.run.steps() == stay


@pytest.mark.parametrize("named", [torch.tensor([1]), [torch.tensor(1)], [np.int64(1)], {1: 0.5}])
def test_a_step_to_keep_may_be_any_whole_number(named: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.keep(named)
        for step in (1, 2, 3):
            checkpointer.save(step, model=nn.Linear(2, 2))
        assert checkpointer.run.steps() == [1, 3]


@pytest.mark.parametrize("named", ["1", ["1"], 1, None, [torch.tensor(1.0)]])
def test_what_is_no_step_to_keep_is_refused(named: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="steps to keep"):
        checkpointer.keep(named)


@pytest.mark.parametrize("step", ["1", 1.0, np.int64(1), torch.tensor(1)])
def test_what_is_no_number_of_a_step_is_refused_as_that(step: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=nn.Linear(2, 2))
        with pytest.raises(UsageError, match="a step is an integer"):
            checkpointer.save(step, model=nn.Linear(2, 2))
        for fallback in (True, False):
            with pytest.raises(UsageError, match="a step is an integer"):
                checkpointer.restore(model=nn.Linear(2, 2), step=step, fallback=fallback)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"timeout": None}, "a number of seconds"),
        ({"timeout": -1}, "above 0"),
        ({"timeout": math.nan}, "above 0"),
        ({"chunk_bytes": "some"}, "no size"),
        ({"chunk_bytes": 0}, "less than one byte"),
        ({"threads": 0}, "threads is a whole number"),
        ({"threads": "2"}, "threads is a whole number"),
    ],
)
def test_an_option_of_no_sense_is_refused_at_once(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        Checkpointer(tmp_path, **options)


@pytest.mark.parametrize("local", [None, "local"])
def test_a_step_is_not_taken_for_a_run_without_steps(local: str | None, tmp_path: Path) -> None:
    """The training began anew, and saved into the step."""
    model, step = nn.Linear(2, 2), Path(save(tmp_path / "run", step=3, model=nn.Linear(2, 2)))
    copy = shutil.copytree(step, tmp_path / "best")
    near = local and tmp_path / local
    for place in (step, copy):
        with Checkpointer(place, local=near) as ckpt, pytest.raises(UsageError, match="a step, wh"):
            ckpt.restore(model=model)
    with Checkpointer(step, local=near) as ckpt, pytest.raises(UsageError, match="a step, wh"):
        ckpt.save(4, model=model)
    # A run may have such a name.
    with Checkpointer(tmp_path / "runs" / step.name, local=near and near / "other") as ckpt:
        assert ckpt.restore(model=model) is None
        ckpt.save(4, model=model)
        assert ckpt.restore(model=model) is not None


def test_sizes_and_times_may_be_written_as_people_do(tmp_path: Path) -> None:
    minute = timedelta(minutes=1)
    with Checkpointer(tmp_path, chunk_bytes="1MiB", timeout=minute) as checkpointer:
        checkpointer.save(1, extra={"epoch": 1})


@pytest.mark.parametrize("what", ["extra", "state"])
@pytest.mark.parametrize("given", [{1: [2]}, [torch.zeros(2)], torch.zeros(2)])
def test_what_has_no_names_is_refused_plainly(tmp_path: Path, what: str, given: object) -> None:
    """Names that are no text came back as text."""
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match=what):
        checkpointer.save(1, **{what: given})  # type: ignore[arg-type]


def save_stages_of_one_name(location: str, tied: bool) -> str:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0 if tied else rank)
    stage = PipelineStage(nn.Sequential(nn.Linear(3, 3)), rank, 2, torch.device("cpu"))
    try:
        with Checkpointer(location, timeout=30) as checkpointer:
            checkpointer.save(1, model=stage)
    except (InvalidNameError, PeerError) as error:
        return str(error)
    return ""


def test_stages_with_different_tensors_of_one_name_are_refused(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, save_stages_of_one_name, str(tmp_path), False):
        assert "two pipeline stages have different tensors" in message
        assert "model/0." in message
    assert ckptkit.Run(tmp_path).steps() == []


def test_stages_may_share_a_tensor(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, save_stages_of_one_name, str(tmp_path), True) == ["", ""]
    with ckptkit.open(tmp_path) as step:
        assert sorted(step.arrays) == ["model/0.bias", "model/0.weight"]


def restore_other_steps(location: str) -> str:
    model = nn.Linear(2, 2)
    with Checkpointer(location, timeout=30) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model=model)
        with pytest.raises((UsageError, PeerError)) as caught:
            checkpointer.restore(model=model, step=1 + torch.distributed.get_rank())
    return str(caught.value)


def test_ranks_that_restore_different_steps_are_told(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, restore_other_steps, str(tmp_path)):
        assert "rank 0 restores step 1, rank 1 another one" in message


def save_slices(location: str, same: bool) -> str:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = torch.full((3,), 0.0 if same else float(torch.distributed.get_rank()))
    optimizer.state[model.weight] = {"rows": kept}
    try:
        with Checkpointer(location, timeout=30) as checkpointer:
            checkpointer.save(1, model=model, optimizer=optimizer)
    except PeerError as error:
        return str(error)
    return ""


def test_plain_state_of_a_cut_parameter_has_to_be_the_same_on_all_ranks(
    gloo: Pool, tmp_path: Path
) -> None:
    assert gloo.run(2, save_slices, str(tmp_path / "same"), True) == ["", ""]
    for message in gloo.run(2, save_slices, str(tmp_path / "apart"), False):
        assert "the values of rank 1 are not those of the first rank" in message
        assert "optimizer/weight/rows" in message


@pytest.mark.parametrize("value", [7, "text", (1, 2)])
def test_what_could_not_be_given_back_is_refused(tmp_path: Path, value: object) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="extra="):
        checkpointer.save(1, state={"epoch": value})


class Expert(nn.Module):
    """A shared layer, and one that is this rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.full((512, 1024), float(rank)))


def save_what_ddp_ignores(location: str) -> None:
    model = Expert(torch.distributed.get_rank())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own"])
    with Checkpointer(location, timeout=30) as checkpointer:
        checkpointer.save(1, model=DistributedDataParallel(model))


def test_what_ddp_does_not_keep_alike_is_never_mixed(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_what_ddp_ignores, str(tmp_path))
    with ckptkit.open(tmp_path) as step:
        assert not step.read("model/own").any()  # the first rank's, all of it


def test_what_another_job_saved_while_a_load_went_past_the_step_stays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, state=value(step))
    damage(tmp_path, 2)

    def slow(training: Any, store: Any, number: int, *rest: Any) -> Any:
        if number == 1:
            step = step_name(2)
            store.delete([entry.key for entry in store.list(step)])
            save(tmp_path, step=2, state=value(7))
        return load_into(training, store, number, *rest)

    with patch("ckptkit.live.checkpointer.load_into", slow), Checkpointer(tmp_path) as saver:
        assert loaded(saver, fallback=True) == (1, 1.0)
        with pytest.raises(StepExistsError):
            saver.save(2, state=value(20))
    with Checkpointer(tmp_path) as saver:
        assert loaded(saver) == (2, 7.0)


def test_the_next_job_replaces_a_damaged_step_that_the_last_one_went_past(tmp_path: Path) -> None:
    local, kept = tmp_path / "local", tmp_path / "kept"
    save_two(kept, local)
    shutil.rmtree(local)
    damage(kept, 2)
    saver = Checkpointer(kept, local=local)
    with refusing(0):
        assert loaded(saver, fallback=True) == (1, 1.0)
        saver.save(2, state=value(20))
        with pytest.raises(StorageError):
            saver.close()
    with patch.dict(REPLACEABLE, clear=True), Checkpointer(kept, local=local) as saver:
        assert loaded(saver) == (2, 20.0)
    assert (local / "replacing.json").read_text() == "{}"
    with Checkpointer(kept, local=tmp_path / "fresh") as saver:
        assert loaded(saver) == (2, 20.0)


def test_the_next_job_replaces_no_step_that_was_not_saved_anew(tmp_path: Path) -> None:
    local, kept = tmp_path / "local", tmp_path / "kept"
    save_two(kept, local)
    shutil.rmtree(local)
    packs = {pack: pack.read_bytes() for pack in kept.rglob("*.zip")}
    damage(kept, 2)
    with Checkpointer(kept, local=local) as saver:
        assert loaded(saver, fallback=True) == (1, 1.0)
    for pack, data in packs.items():  # put back from a backup
        pack.write_bytes(data)
    saver = Checkpointer(kept, local=local)
    with patch.dict(REPLACEABLE, clear=True):
        saver.save(2, state=value(20))
        with pytest.raises(StepExistsError):
            saver.close()
    with Checkpointer(kept, local=tmp_path / "fresh") as saver:
        assert loaded(saver) == (2, 2.0)


@pytest.mark.parametrize("told", [b"", b"[1]", b'{"step-0000000001": 1}', b"\xff", b"[" * 100000])
def test_what_the_last_job_wrote_down_may_be_damaged(tmp_path: Path, told: bytes) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "replacing.json").write_bytes(told)
    save(tmp_path / "kept", step=1, state=value(7))
    saver = Checkpointer(tmp_path / "kept", local=local)
    saver.save(1, state=value(1))
    with pytest.raises(StepExistsError):
        saver.close()


def test_a_load_goes_well_where_nothing_can_be_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local, kept = tmp_path / "local", tmp_path / "kept"
    save_two(kept, local)
    damage(local, 2)
    damage(kept, 2)
    (local / "replacing.json").mkdir()
    with Checkpointer(kept, local=local) as saver:
        assert loaded(saver, fallback=True) == (1, 1.0)
        saver.save(2, state=value(20))
    assert "a later job may not copy it" in caplog.text
    assert steps(local, kept) == [[1, 2], [1, 2]]


def test_values_of_a_damaged_step_never_stay_beside_those_of_an_older_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state={"s": {"x": torch.ones(300)}})
        saver.save(2, state={"s": {"x": torch.ones(300), "y": torch.ones(300)}})
    damage(tmp_path, 2)
    state = {"s": {"x": torch.zeros(300), "y": torch.zeros(300)}}
    with Checkpointer(tmp_path) as saver, pytest.raises(CorruptionError, match="does not have"):
        saver.restore(state=state, partial=True, fallback=True)
