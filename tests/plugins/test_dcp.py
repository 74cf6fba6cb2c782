"""Under DCP: what its planners plan becomes a step, and they read any step, whoever wrote it."""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import ckptkit
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.live import Checkpointer
from ckptkit.live.state.tensors import bytes_of, local_of
from ckptkit.plugins.dcp import Reader, Writer
from tests.live import strategies
from tests.live.pool import Died, Pool
from tests.live.strategies import Job, adamw
from tests.plugins.planners import Half, Rows, ThroughOneBuffer, Turns
from tests.servers.s3_server import Bucket

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

State = dict[str, Any]


def build(layout: str, seed: int) -> Job:
    """A job that is spread in this way."""
    job: Job = getattr(strategies, layout)(seed, adamw)
    return job


def state_of(job: Job, **options: Any) -> State:
    """What a loop over DCP passes to it."""
    model, optimizer = get_state_dict(job.modules[0], job.optimizer, **options)
    return {"model": model, "optim": optimizer}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The values of nested dictionaries, by the keys that lead to them; tensors are copied."""
    if isinstance(tree, Mapping):
        return {k: v for key, each in tree.items() for k, v in leaves(each, (*path, key)).items()}
    if isinstance(tree, list):
        return {k: v for n, each in enumerate(tree) for k, v in leaves(each, (*path, n)).items()}
    return {path: local_of(tree).clone() if isinstance(tree, torch.Tensor) else tree}


def emptied(state: State) -> State:
    """The same state dictionary with nothing in it: zeros for tensors, None for all else."""

    def without(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return {key: without(value) for key, value in leaf.items()}
        if isinstance(leaf, list):
            return [without(value) for value in leaf]
        return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else None

    found: State = without(state)
    return found


def differing(one: State, other: State) -> list[str]:
    """The keys of what is not the same to the bit, in tensors or in plain values."""
    ours, theirs = leaves(one), leaves(other)
    wrong = [str(key) for key in ours.keys() ^ theirs.keys()]
    for key, mine in ours.items():
        value = theirs.get(key)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
            if not torch.equal(bytes_of(mine), bytes_of(value)):
                wrong.append(f"{key}: {mine} {value}")
        elif type(mine) is not type(value) or mine != value:
            wrong.append(f"{key}: {mine} {value}")
    return sorted(wrong)


# Jobs of several ranks.


def save_in_the_middle(layout: str, folder: str, options: Mapping[str, Any]) -> list[float]:
    """Train 3 steps, save, train 3 more; the losses of these."""
    job = build(layout, seed=3)
    job.train(range(3))
    buffers = {n: b for m in job.modules for n, b in m.named_buffers() if n.endswith("seen")}
    for buffer in buffers.values():
        dist.broadcast(buffer, 0)  # of what ranks disagree about DCP takes anyone's
    state = state_of(job) | {"step": 3, "note": {"betas": (0.9, 0.95), "of": [1, 2], "set": {1}}}
    save(state, storage_writer=Writer(folder, step=3, **options))
    found = emptied(state)
    load(found, storage_reader=Reader(folder))
    assert not differing(state, found)
    return job.train(range(3, 6))


def go_on(layout: str, folder: str) -> list[float]:
    """The losses of the last 3 steps of a job that loads."""
    job = build(layout, seed=9)
    state = state_of(job) | {"step": 0}
    load(state, storage_reader=Reader(folder))
    set_state_dict(
        job.modules[0],
        job.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    return job.train(range(state["step"], 6))


@pytest.mark.parametrize(
    ("layout", "ranks", "strategy", "others"),
    [
        ("fsdp2", 2, "fsdp:2", {"fsdp2": 2, "tp": 2}),
        ("tp", 2, "tp:2", {"fsdp2": 2}),
        ("ddp", 2, "ddp:2", {"ddp": 2}),
        ("hsdp", 4, "replicate=ddp:2,shard=fsdp:2", {"hsdp": 4, "fsdp2": 2}),
        ("fsdp_tp", 4, "fsdp:2,tp:2", {"tp": 2}),
    ],
)
def test_a_job_goes_on_as_if_it_had_not_been_interrupted(
    gloo: Pool, tmp_path: Path, layout: str, ranks: int, strategy: str, others: dict[str, int]
) -> None:
    losses, *_ = gloo.run(ranks, save_in_the_middle, layout, str(tmp_path), {})
    with ckptkit.open(tmp_path) as step:
        assert str(step.strategy) == strategy
        assert step["model/layers.0.up.weight"].info.role == "param"
        assert step.info("optimizer/layers.0.up.weight/exp_avg").of == "model/layers.0.up.weight"
        assert step.objects["extra/step"] == 3
    assert ckptkit.verify(tmp_path) == []
    for other, count in others.items():
        (again, *_) = gloo.run(count, go_on, other, str(tmp_path))
        assert again == pytest.approx(losses, abs=1e-6)
        assert other != layout or again == losses


def restore_and_save(folder: str) -> None:
    """A Checkpointer goes on with what DCP saved, and DCP with what that saves."""
    job = build("fsdp2", seed=5)
    job.train([0])
    save(state_of(job) | {"seen": 7}, storage_writer=Writer(folder, step=1))
    other = build("tp", seed=6)
    with Checkpointer(folder, differing=["*seen"]) as checkpointer:
        restored = checkpointer.restore(model=other.model, optimizer=other.optimizer)
        assert restored is not None
        assert restored.extra["seen"] == 7
        checkpointer.save(2, model=other.model, optimizer=other.optimizer)
    again = build("fsdp2", seed=7)
    state = state_of(again)
    load(state, storage_reader=Reader(folder))
    mine = state_of(job)
    assert not [each for each in differing(state, mine) if "seen" not in each]
    flat = state_of(again, options=None)["model"]  # under other keys: those of the model alone
    load(flat, storage_reader=Reader(folder, step=2))


def test_a_checkpointer_and_dcp_go_on_with_what_the_other_saved(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, restore_and_save, str(tmp_path))
    found = ckptkit.diff(tmp_path / "step-0000000001", tmp_path / "step-0000000002")
    assert [array.name for array in found.arrays if not array.name.endswith("seen")] == []
    ckptkit.reshard(tmp_path, tmp_path / "again", to="fsdp:3")
    assert ckptkit.verify(tmp_path / "again") == []


def save_twice_in_the_background(folder: str) -> None:
    job = build("fsdp2", seed=1)
    writer = Writer(folder, keep_last=1)
    group = dist.new_group()  # DCP's collectives, while the training has its own
    for step in (1, 2):
        job.train([step])
        state = state_of(job)
        before = leaves(state)
        done: Any = async_save(
            state, storage_writer=writer, checkpoint_id=str(step), process_group=group
        )
        job.train([7])  # changes what was staged
        done.result()
        found = emptied(state)
        load(found, storage_reader=Reader(folder, step=step))
        after = leaves(found)
        assert after.keys() == before.keys()
        for key, value in before.items():
            if isinstance(value, torch.Tensor) and "seen" not in str(key):
                assert torch.equal(bytes_of(value), bytes_of(after[key])), key


def test_saves_in_the_background_are_those_of_their_moment(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_twice_in_the_background, str(tmp_path))
    assert ckptkit.Run(tmp_path).steps() == [2]


def save_by_turns(folder: str) -> None:
    writer = Writer(folder)
    for step, writing in enumerate((0, 0, 1, 1, 0)):
        state = {"model": {"v": torch.full((3,), 1.0 + step), "w": torch.full((5, 2), 7.0 + step)}}
        save(state, storage_writer=writer, checkpoint_id=str(step), planner=Turns(writing))
        found = emptied(state)
        load(found, storage_reader=Reader(folder, step=step))
        assert not differing(state, found)


def test_a_writer_saves_again_what_other_ranks_wrote_before(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_by_turns, str(tmp_path))
    for step, writing in ((1, 0), (2, 1), (4, 0)):
        folder = tmp_path / f"step-{step:010d}"
        sizes = [pack.stat().st_size for pack in sorted(folder.rglob("*.zip"))]
        assert sizes[writing] == max(sizes)
        assert ckptkit.verify(folder) == []


def save_from_some_ranks(folder: str) -> None:
    """Ranks that do not have the same keys, and a process group that is not that of all."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = {"model": {f"w{rank}": torch.full((3,), float(rank)), "both": torch.ones(2)}}
    state = {**mine, "of": {str(rank): rank}, "all": "same"}
    save(
        state,
        storage_writer=Writer(f"{folder}/{rank // 2}", step=1),
        process_group=groups[rank // 2],
    )
    dist.barrier()
    for half in (0, 1):
        found = {
            "model": {f"w{r}": torch.zeros(3) for r in (2 * half, 2 * half + 1)},
            "of": {str(r): None for r in (2 * half, 2 * half + 1)},
            "all": None,
        }
        load(found, storage_reader=Reader(f"{folder}/{half}"))
        for r in (2 * half, 2 * half + 1):
            assert found["model"][f"w{r}"].tolist() == [r] * 3  # type: ignore[index]
            assert found["of"][str(r)] == r  # type: ignore[index]
        assert found["all"] == "same"


def test_keys_of_some_ranks_and_groups_of_some_are_saved(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, save_from_some_ranks, str(tmp_path))
    assert str(ckptkit.open(tmp_path / "1").strategy) == "ddp:2"


def die_while_saving(folder: str) -> object:
    state = {"model": {"w": torch.ones(4, 4)}}
    save(state, storage_writer=Writer(folder, step=1))

    def die(*_: object, **__: object) -> None:
        if dist.get_rank() == 1:
            os._exit(9)

    with patch.object(Pack, "_finish", die), pytest.raises(Exception) as caught:  # noqa: PT011
        save(state, storage_writer=Writer(folder, step=2, timeout=1.0))
    return type(caught.value).__name__


def test_a_rank_that_dies_leaves_no_step(gloo: Pool, tmp_path: Path) -> None:
    _, died = gloo.run(2, die_while_saving, str(tmp_path), may_die=[1])
    assert isinstance(died, Died)
    assert ckptkit.Run(tmp_path).steps() == [1]


# In one process, without ranks.


def a_state() -> State:
    torch.manual_seed(0)
    names = ("layers.0.up.weight", "layers.0.up.bias")
    return {
        "model": {name: torch.rand(4, 3) for name in names},
        "optim": {
            "state": {
                name: {"exp_avg": torch.rand(4, 3), "step": torch.tensor(2.0)} for name in names
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(names)}],
        },
        "step": 4,
    }


def save_and_load(state: State, folder: Path, **planners: Any) -> State:
    save(state, storage_writer=Writer(folder, step=1), planner=planners.get("save"))
    found = emptied(state)
    load(found, storage_reader=Reader(folder), planner=planners.get("load"))
    return found


def flat_optimizer(state: State) -> State:
    """As `flatten_optimizer_state_dict` makes it."""
    optimizer = {
        f"state.{name}.{key}": value
        for name, kept in state["optim"]["state"].items()
        for key, value in kept.items()
    }
    (group,) = state["optim"]["param_groups"]
    optimizer |= {
        f"param_groups.{name}.{key}": group[key] for name in group["params"] for key in ("lr",)
    }
    return {**state, "optim": optimizer}


MODEL = {"model/layers.0.up.weight", "model/layers.0.up.bias"}
EXP_AVG = {f"optimizer/{name.removeprefix('model/')}/exp_avg" for name in MODEL}

SPELLINGS: dict[str, tuple[Callable[[State], State], set[str]]] = {
    "as torch makes it": (dict, MODEL | EXP_AVG),
    "flat": (flat_optimizer, MODEL | EXP_AVG),
    "around all": (lambda s: {"app": s, "more": {"x": torch.ones(1)}}, MODEL | EXP_AVG),
    "wrapped": (lambda s: {"model": {f"module.{k}": v for k, v in s["model"].items()}}, MODEL),
    "the model alone": (lambda s: s["model"], MODEL),
    "numbers": (
        lambda s: {
            **s,
            "optim": {
                "state": dict(enumerate(s["optim"]["state"].values())),
                "param_groups": [{"params": [0, 1]}],
            },
        },
        MODEL | {"other/optim/state/0/exp_avg"},
    ),
    "lists": (lambda s: {"queue": [torch.ones(2), {"a": torch.zeros(0, 3)}], "e": {}}, set()),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_arrays_have_the_usual_names_and_keys_are_given_back(spelling: str, tmp_path: Path) -> None:
    spell, names = SPELLINGS[spelling]
    state = spell(a_state())
    assert not differing(state, save_and_load(state, tmp_path))
    with ckptkit.open(tmp_path) as step:
        assert names <= set(step.names)
    # A state dictionary is made of the keys alone, too.
    whole: State = {}
    _load_state_dict(whole, Reader(tmp_path), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    if spelling != "numbers":  # a number as a key is a text to DCP
        there, made = ({k: v for k, v in each.items() if v != {}} for each in (state, whole))
        assert not differing(there, made)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    large = bytes(1 << 20)
    state = {
        "w": torch.tensor([1.0, float("nan"), -0.0]).to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "complex": torch.tensor([1 + 2j]),
        "strided": torch.rand(6, 4).t()[1:],
        "values": {"big": 1 << 70, "t": (1, None, True), "set": {3}, "blob": large, "tens": 0},
        "mixed": (1, torch.ones(2)),
        "file": io.BytesIO(b"losses"),
    }
    found = save_and_load(state, tmp_path)
    assert found.pop("file").read() == b"losses"
    assert torch.equal(found.pop("mixed")[1], torch.ones(2))
    del state["mixed"], state["file"]
    assert not differing(state, found)
    pack = next(tmp_path.rglob("rank-00000.zip"))
    assert pack.stat().st_size < 1.5 * len(large)  # once


def test_a_rank_may_have_several_pieces_of_a_tensor(tmp_path: Path) -> None:
    state = {"model": {"w": torch.rand(5, 3), "v": torch.rand(4), "s": torch.tensor(1.0)}}
    assert not differing(state, save_and_load(state, tmp_path, save=Rows()))
    assert ckptkit.verify(tmp_path) == []


def test_planners_may_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "more": torch.zeros(1)}
    found = save_and_load(state, tmp_path, save=Half())
    assert ckptkit.open(tmp_path)["model/w"].dtype.name == "float16"
    assert not differing(state, found)  # converted back, as torch does
    some: State = {"model": {"w": torch.zeros(3)}, "absent": torch.ones(1)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(some, storage_reader=Reader(tmp_path), planner=planner)
    assert some["model"]["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("verify", [True, False])
def test_a_planner_may_load_through_one_buffer(tmp_path: Path, verify: bool) -> None:
    state = a_state()
    save(state, storage_writer=Writer(tmp_path, step=1))
    found = emptied(state)
    reader = Reader(tmp_path, verify=verify)
    load(found, storage_reader=reader, planner=ThroughOneBuffer())
    assert not differing(state, found)


def test_plans_that_a_planner_has_cached_are_of_a_new_save_each_time(tmp_path: Path) -> None:
    state = a_state()
    for step in (1, 2, 3):
        state["model"]["layers.0.up.weight"] += 1
        state["step"] = step
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, storage_writer=Writer(tmp_path, step=step), planner=planner)
        found = emptied(state)
        load(found, storage_reader=Reader(tmp_path, step=step))
        assert not differing(state, found)


def test_a_reader_takes_what_others_wrote(tmp_path: Path) -> None:
    state = a_state()
    save(state, checkpoint_id=tmp_path / "dcp")
    found = emptied(state)
    load(found, storage_reader=Reader(tmp_path / "dcp"))
    assert not differing(state, found)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "none"}))
    save_file(state["model"], tmp_path / "hf" / "model.safetensors")
    for keys in (lambda model: {"model": model}, lambda model: model):
        found = emptied(keys(state["model"]))
        load(found, storage_reader=Reader(tmp_path / "hf"))
        assert not differing(keys(state["model"]), found)


def test_a_step_is_named_by_its_number_or_by_its_path(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}}
    writer = Writer(tmp_path, keep_last=2)
    with pytest.raises(CheckpointException, match="which step this is"):
        save(state, storage_writer=writer)
    for step in ("1", "2", "3"):
        save(state, storage_writer=writer, checkpoint_id=step)
    for step in ("step7", "step-8", "step_9", "step-0000000010/"):
        save(state, storage_writer=writer, checkpoint_id=f"{tmp_path}/other/{step}")
    assert ckptkit.Run(tmp_path).steps() == [2, 3]
    assert ckptkit.Run(tmp_path / "other").steps() == [9, 10]
    load(state, storage_reader=Reader(tmp_path), checkpoint_id="2")
    with pytest.raises(CheckpointException, match="committed already"):
        save(state, storage_writer=Writer(tmp_path, step=3))
    save(state, storage_writer=Writer(tmp_path, step=3, overwrite=True))


def test_a_folder_whose_name_only_ends_as_a_step_does_is_a_run(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}}
    place = tmp_path / "timestep100"
    with pytest.raises(CheckpointException, match=r"(?s)timestep100: nothing says which step"):
        save(state, storage_writer=Writer(tmp_path), checkpoint_id=place)
    save(state, storage_writer=Writer(tmp_path / "time", step=100))  # where it once went
    load(state, storage_reader=(reader := Reader(tmp_path)), checkpoint_id=place)
    assert reader.step == 100
    save(state, storage_writer=Writer(tmp_path, step=7), checkpoint_id=place)
    load(state, storage_reader=(reader := Reader(tmp_path)), checkpoint_id=place)
    assert reader.step == 7
    with pytest.raises(CheckpointException, match="laststep5: no checkpoint: nothing there"):
        load(state, storage_reader=Reader(tmp_path / "laststep5"))


def test_what_does_not_fit_is_named_with_the_way_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    write = functools.partial(save, storage_writer=Writer(run, step=1))
    read = functools.partial(load, storage_reader=Reader(run))
    with pytest.raises(
        CheckpointException, match=r"(?s)note.thing: a .*object cannot be stored.*hint"
    ):
        write({"note": {"thing": object()}})
    with pytest.raises(CheckpointException, match="no checkpoint: nothing there"):
        read({"w": torch.ones(1)})
    write({"model": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointException, match="step-0000000000: no checkpoint"):
        load({"w": torch.ones(2)}, storage_reader=Reader(run, step=0, fallback=True))
    with pytest.raises(CheckpointException, match=r"Missing key .* model\.v"):
        read({"model": {"v": torch.ones(2)}})
    assert "has no model.v; it has model.w" in caplog.text
    with pytest.raises(CheckpointException, match="Size mismatch"):
        read({"model": {"w": torch.ones(3)}})
    next(run.rglob("manifest.msgpack")).unlink()
    with pytest.raises(CheckpointException, match=r"(?s)without a committed step.*hint: `ckpt ls"):
        read({"model": {"w": torch.ones(2)}})


def test_a_bucket_is_a_place_as_any_other(bucket: Bucket) -> None:
    state = a_state()
    url = f"{bucket.url}/run"
    for step in (1, 2):
        writer = Writer(url, step=step, keep_last=1, storage_options=bucket.options)
        save(state, storage_writer=writer)
    found = emptied(state)
    load(found, storage_reader=Reader(url, storage_options=bucket.options))
    assert not differing(state, found)
    assert ckptkit.Run(url, storage_options=bucket.options).steps() == [2]
