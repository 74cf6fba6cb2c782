"""The Trainer of transformers keeps its checkpoints in a run, and goes on from one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit import Run
from ckptkit.errors import UsageError
from ckptkit.live import load_state, save
from ckptkit.plugins import transformers as plugin
from tests.live.pool import Pool
from tests.servers.s3_server import Bucket

DROPOUT = {"attention_dropout": 0.1}
Train = Callable[..., list[dict[str, Any]]]


def on_rank(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A job of `trained`, which imports transformers: where it is not needed that takes seconds."""
    from tests.plugins import trained  # noqa: PLC0415

    return getattr(trained, name)(*args, **options)


@pytest.fixture
def train(gloo: Pool) -> Train:
    """What each rank has seen of a training."""

    def run(folder: Path, strategy: str, **options: Any) -> list[dict[str, Any]]:
        kind, ranks = strategy.split(":")
        return gloo.run(int(ranks), on_rank, "train", (str(folder), kind), options)

    return run


@pytest.fixture
def refusal(gloo: Pool) -> Callable[..., str]:
    """What a training of one rank is refused with."""

    def run(folder: Path, *args: Any, **options: Any) -> str:
        (said,) = gloo.run(1, on_rank, "refusal", (str(folder), *args), options)
        return str(said)

    return run


@pytest.fixture(scope="module")
def uninterrupted(
    gloo: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """What a training of this strategy comes to that nobody disturbs."""

    @cache
    def run(strategy: str) -> list[dict[str, Any]]:
        kind, ranks = strategy.split(":")
        place = str(tmp_path_factory.mktemp("whole"))
        options = {"save_strategy": "no", "model": DROPOUT if ranks == "2" else {}}
        return gloo.run(int(ranks), on_rank, "train", (place, kind), options)

    return run


def assert_same(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """To the bit, on each rank: losses, rates, the model, the optimizer, the last examples."""
    for mine, theirs in zip(resumed, whole, strict=True):
        assert mine["seen"] == theirs["seen"][-len(mine["seen"]) :]
        for key in ("losses", "rates", "model", "moments"):
            assert pickle.dumps(mine[key]) == pickle.dumps(theirs[key]), key


def damage(run: Path, step: int) -> None:
    """A bit of a value that rank 0 has saved."""
    with Run(run).open(step) as opened:
        manifest = opened.manifest
    (pack,) = (run / f"step-{step:010d}").rglob(manifest.packs[0].name)
    data = bytearray(pack.read_bytes())
    data[int(manifest.offset[manifest.pack == 0][0])] ^= 1
    pack.write_bytes(data)


@pytest.mark.parametrize("strategy", ["ddp:2", "fsdp:2"])
def test_a_training_that_was_killed_goes_on_to_the_bit(
    strategy: str, train: Train, uninterrupted: Callable[[str], Any], tmp_path: Path
) -> None:
    train(tmp_path, strategy, model=DROPOUT, killed_after=3)
    assert str(ckptkit.open(tmp_path).strategy) == strategy
    resumed = train(tmp_path, strategy, model=DROPOUT, resume=True)
    assert [len(rank["seen"]) for rank in resumed] == [3, 3]
    assert_same(resumed, uninterrupted(strategy))


@pytest.mark.parametrize(
    ("before", "after"), [("fsdp:2", "ddp:1"), ("fsdp:2", "ddp:2"), ("ddp:1", "fsdp:2")]
)
def test_it_goes_on_under_another_strategy_and_size(
    before: str, after: str, train: Train, uninterrupted: Callable[[str], Any], tmp_path: Path
) -> None:
    train(tmp_path, before, killed_after=3)
    resumed = train(tmp_path, after, resume=True)
    (whole,) = uninterrupted("ddp:1")
    examples = zip(*(rank["seen"] for rank in resumed), strict=True)
    together = [sorted(chain(*step)) for step in examples]
    assert together == [sorted(step) for step in whole["seen"][3:]]
    for rank in resumed:
        assert rank["losses"] == pytest.approx(whole["losses"], abs=1e-6)
        assert rank["rates"] == whole["rates"]
        for name, value in whole["model"].items():
            assert np.allclose(rank["model"][name], value, atol=1e-5)


def test_a_step_that_is_damaged_is_left_for_the_one_before(
    train: Train, uninterrupted: Callable[[str], Any], tmp_path: Path
) -> None:
    train(tmp_path, "fsdp:2", model=DROPOUT, killed_after=4)
    damage(tmp_path, 4)
    resumed = train(tmp_path, "fsdp:2", model=DROPOUT, resume=True)
    assert [len(rank["seen"]) for rank in resumed] == [3, 3]
    assert_same(resumed, uninterrupted("fsdp:2"))


def test_saves_in_the_background_to_s3_have_ended_when_train_returns(
    train: Train, bucket: Bucket
) -> None:
    run: dict[str, Any] = {
        "location": f"{bucket.url}/run",
        "storage_options": bucket.options,
        "asynchronous": True,
        "keep_last": 2,
    }
    (whole,) = train(Path("/nowhere"), "ddp:1", run=run)
    steps = Run(run["location"], storage_options=bucket.options)
    assert steps.steps() == [5, 6]
    state = load_state(run["location"], storage_options=bucket.options)
    for name, value in whole["model"].items():
        assert np.array_equal(state[f"model/{name}"].numpy(), value)


def test_what_has_to_make_room_saves_once_more_and_leaves(
    train: Train, uninterrupted: Callable[[str], Any], tmp_path: Path
) -> None:
    run = {"location": str(tmp_path), "asynchronous": True, "on_sigterm": "save"}
    options = {"model": DROPOUT, "save_steps": 100}
    both = train(tmp_path, "ddp:2", run=run, preempted=True, **options)
    (step,) = Run(tmp_path).steps()
    assert 2 <= step < 6
    assert {len(rank["losses"]) for rank in both} == {step}
    assert_same(train(tmp_path, "ddp:2", run=run, resume=True, **options), uninterrupted("ddp:2"))


def test_the_last_save_waits_for_the_one_under_way(gloo: Pool) -> None:
    assert gloo.run(1, on_rank, "calls_at_the_end", (), {}) == [["should_stop", "wait", "save"]]


def test_the_best_step_stays_and_is_what_the_training_ends_with(
    train: Train, tmp_path: Path
) -> None:
    scores = [1.0, 5.0, 2.0, 4.0, 3.0, 2.0]
    options = {"save_total_limit": 2, "model": DROPOUT}
    train(tmp_path, "ddp:2", scores=scores, killed_after=4, **options)
    assert Run(tmp_path).steps() == [2, 3, 4]
    both = train(tmp_path, "ddp:2", scores=scores[4:], resume=True, **options)
    assert Run(tmp_path).steps() == [2, 5, 6]
    best = tmp_path / "step-0000000002"
    for rank in both:
        assert rank["best"] == str(best)
        assert all(
            np.array_equal(load_state(best)[f"model/{name}"].numpy(), value)
            for name, value in rank["model"].items()
        )


def test_a_best_step_elsewhere_is_not_compared_with_folders_of_the_trainer(
    train: Train, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-500").mkdir()
    scores = [1.0, 5.0, 2.0, 4.0, 3.0, 2.0]
    options = {"scores": scores, "save_total_limit": 1}
    (rank,) = train(tmp_path, "ddp:1", run="memory://trainer/best", **options)
    assert rank["best"] == "memory://trainer/best/step-0000000002"
    assert (tmp_path / "checkpoint-500").exists()


def test_the_best_step_of_the_job_before_stays_while_a_new_one_is_not_there(
    train: Train, refusal: Callable[..., str], tmp_path: Path
) -> None:
    run, local = tmp_path / "run", tmp_path / "local"
    train(run, "ddp:1", scores=[1.0, 5.0, 2.0, 3.0], killed_after=4, save_total_limit=1)
    assert Run(run).steps() == [2, 4]
    (run / "step-0000000005").touch()  # so that it cannot be copied
    places = {"location": str(run), "local": str(local), "keep_last": 1, "overwrite": True}
    assert "step-0000000005" in refusal(run, True, run=places, scores=[9.0, 1.0])
    assert Run(local).steps()[0] == 5
    assert 2 in Run(run).steps()


def test_the_state_of_the_trainer_is_an_object_of_the_step(train: Train, tmp_path: Path) -> None:
    train(tmp_path, "ddp:2", killed_after=3)
    with ckptkit.open(tmp_path) as step:
        state, nothing = step.objects["extra/trainer_state"]
        assert (state["global_step"], state["epoch"], nothing) == (3, 0.75, None)
        assert [each["step"] for each in state["log_history"]] == [1, 2, 3]
        assert "TrainerControl" in state["stateful_callbacks"]


def test_a_step_of_only_the_model_begins_its_optimizer_anew(train: Train, tmp_path: Path) -> None:
    train(tmp_path, "ddp:1", save_only_model=True, killed_after=3)
    with ckptkit.open(tmp_path) as step:
        assert {name.partition("/")[0] for name in step.arrays} == {"model"}
    (resumed,) = train(tmp_path, "ddp:1", resume=True)
    assert len(resumed["losses"]) == 6
    assert resumed["rates"][3] == resumed["rates"][0]


def test_what_the_trainer_wrote_itself_is_gone_on_from_in_a_run(
    train: Train, uninterrupted: Callable[[str], Any], tmp_path: Path
) -> None:
    train(tmp_path, "ddp:1", killed_after=3, plain=True)
    resumed = train(tmp_path, "ddp:1", resume=str(tmp_path / "checkpoint-3"))
    assert_same(resumed, uninterrupted("ddp:1"))
    assert Run(tmp_path).steps() == [4, 5, 6]


def test_what_cannot_be_resumed_is_refused_with_a_way_out(
    train: Train, refusal: Callable[..., str], tmp_path: Path
) -> None:
    empty, run, loop = (tmp_path / name for name in ("empty", "run", "loop"))
    assert "checkpoint-500" in refusal(empty, True)
    assert "nothing there" in refusal(empty, str(tmp_path / "lost"))
    train(run, "ddp:1", killed_after=2)
    begun = refusal(run)
    assert "up to 2" in begun
    assert "resume_from_checkpoint=True" in begun
    said = refusal(run, True, model={"hidden_size": 16})
    assert "model.embed_tokens.weight" in said
    assert "(32, 8)" in said
    save(loop, step=5, model=nn.Linear(2, 2))
    assert "no Trainer saved this" in refusal(loop, True)
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    said = refusal(empty, str(tmp_path / "weights.pt"))
    assert "no Trainer saved this" in said
    assert "ckptkit.live.load(" in said


def test_what_would_not_be_done_is_refused_before_training(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    run = {"location": str(tmp_path)}
    assert "keep_last" in refusal(tmp_path, run=run, save_total_limit=2)
    assert 'hub_strategy="end"' in refusal(tmp_path, push_to_hub=True)


def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def _save_checkpoint(self, model: object) -> None:
            """It lost an argument."""

    with pytest.raises(UsageError, match=r"made for transformers 5\.23, this is .*: it has no "):
        plugin._TRANSFORMERS.private(Trainer, "_save_checkpoint", ["model", "trial"])


def test_a_mixin_that_nobody_would_ask_is_refused(gloo: Pool) -> None:
    assert gloo.run(1, on_rank, "behind", (), {}) == ["class Behind(TrainerMixin, Trainer)"]


def test_the_mixin_alone_says_what_it_is_for() -> None:
    with pytest.raises(UsageError, match="for a Trainer") as caught:
        plugin.TrainerMixin()
    assert "class MyTrainer(TrainerMixin, Trainer)" in caught.value.hint
