"""Lightning saves and goes on through ckptkit, under every strategy, by the paths it thinks in."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

import ckptkit
from ckptkit.errors import (
    CorruptionError,
    FormatError,
    NotFoundError,
    UnsupportedTypeError,
    UsageError,
)
from ckptkit.live import StateMismatchError, load, save
from ckptkit.plugins.lightning import CkptkitCheckpointIO, CkptkitDDPStrategy, step_at
from tests.live.pool import Pool
from tests.plugins.lightning_job import Samples, Small, given, loader_of, train, trainer_of
from tests.servers.s3_server import Bucket

LAYOUTS = {"single": 1, "ddp": 2, "io": 2, "fsdp1": 2, "fsdp2": 2, "tp": 2}
# Each goes on in itself and in DDP, and one process under what is cut and by the other plugin.
CORE = [
    (one, other)
    for one in LAYOUTS
    for other in LAYOUTS
    if other in (one, "ddp") or (one == "single" and other in ("tp", "io"))
]
PAIRS = [
    pytest.param(one, other, marks=() if (one, other) in CORE else pytest.mark.long)
    for one in LAYOUTS
    for other in LAYOUTS
    if other in (one, "ddp", "tp", "io")
]


# Lightning warns of much, and so does torch of what Lightning uses.
pytestmark = [pytest.mark.filterwarnings("ignore", "error:::ckptkit")]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Lightning prints which devices it has found."""
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)


def fit(
    folder: Path | str,
    steps: int = 3,
    resume: Path | str | None = None,
    module: Small | None = None,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> pl.Trainer:
    """One process that trains."""
    trainer = trainer_of("single", folder, steps, options, **more)
    trainer.fit(module or Small(), loader_of("single"), ckpt_path=resume)
    return trainer


def there(folder: Path) -> dict[str, tuple[str, int]]:
    """The runs and steps that the files in a folder stand for."""
    found = {}
    for path in folder.glob("*.ckpt"):
        run, _, step = step_at(path).rpartition("/step-")
        found[path.name] = (os.path.relpath(run, folder), int(step))
    return found


# To go on.


@pytest.fixture(scope="module")
def saved(
    gloo: Pool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, list[float]]]:
    """By layout, where it saved in the middle of an epoch, and the losses of a whole training."""
    found = {}
    for layout, ranks in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(layout)
        whole = gloo.run(ranks, train, layout, str(folder / "whole"), 6)[0]
        gloo.run(ranks, train, layout, str(folder / "run"), 3)
        found[layout] = (str(folder / "run" / "epoch=0-step=3.ckpt"), whole)
    return found


@pytest.mark.parametrize(("layout", "here"), PAIRS)
def test_a_training_goes_on_as_if_it_had_not_stopped(
    layout: str,
    here: str,
    saved: dict[str, tuple[str, list[float]]],
    gloo: Pool,
    tmp_path: Path,
) -> None:
    path, whole = saved[layout]
    rest = gloo.run(LAYOUTS[here], train, here, str(tmp_path), 6, path)[0]
    assert len(rest) == 3
    if here == layout:
        assert rest == whole[3:]
    assert rest == pytest.approx(whole[3:], rel=0, abs=1e-6)


def test_an_asynchronous_save_is_named_once_it_is_committed(gloo: Pool, tmp_path: Path) -> None:
    path, options = tmp_path / "epoch=0-step=3.ckpt", {"checkpointer": {"asynchronous": True}}
    gloo.run(2, train, "fsdp2", str(tmp_path), 6, None, options, {"save_top_k": 1})
    assert there(tmp_path) == {"epoch=1-step=6.ckpt": (".", 6)}
    assert ckptkit.Run(tmp_path).steps() == [6]
    assert not path.exists()
    assert ckptkit.verify(tmp_path) == []


def test_each_sample_is_read_once_in_an_epoch_that_goes_on_at_another_size(
    gloo: Pool, tmp_path: Path
) -> None:
    """Two ranks stop after three of four steps; one has two steps left, and eight in the next."""
    first = gloo.run(2, given, "ddp", str(tmp_path / "a"), 3)
    path = str(tmp_path / "a" / "epoch=0-step=3.ckpt")
    (rest,) = gloo.run(1, given, "ddp", str(tmp_path / "b"), 13, path)
    epoch, following = rest[:8], rest[8:]
    assert sorted([*first[0], *first[1], *epoch]) == list(range(32))
    assert sorted(following) == list(range(32))


def test_a_loader_that_cannot_go_on_at_another_size_is_refused(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, given, "ddp", str(tmp_path / "a"), 3, None, "StatefulDataLoader")
    path = str(tmp_path / "a" / "epoch=0-step=3.ckpt")
    for layout in ("ddp", "io"):
        with pytest.raises(Exception, match="ElasticDataLoader goes on at any size"):
            gloo.run(1, given, layout, str(tmp_path / "b"), 6, path, "StatefulDataLoader")


# Paths.


def test_the_best_the_last_and_a_path_are_found_and_others_are_removed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"monitor": "left", "save_top_k": 2, "mode": "max", "save_last": True}
    trainer = fit(tmp_path, 12, **how)
    callback: Any = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    best = [f"epoch={(step - 1) // 4}-step={step}.ckpt" for step in (3, 6)]
    assert {Path(path).name for path in callback.best_k_models} == set(best)
    assert there(tmp_path) == {best[0]: (".", 3), best[1]: (".", 6), "last.ckpt": (".", 12)}
    assert ckptkit.Run(tmp_path).steps() == [3, 6, 12]
    assert [ckptkit.verify(tmp_path / f"step-{step:010}") for step in (3, 6, 12)] == [[], [], []]
    validated, expected = Small(), Small()
    trainer.validate(validated, DataLoader(Samples(), 8), ckpt_path="best", verbose=False)
    load(step_at(callback.best_model_path), model=expected)
    for name, value in expected.state_dict().items():
        assert torch.equal(validated.state_dict()[name], value)
    again = fit(tmp_path, 15, "last", **how)
    assert again.global_step == 15
    assert there(tmp_path)["last.ckpt"] == (".", 15)
    assert ckptkit.Run(tmp_path).steps() == [3, 6, 15]


def test_files_of_one_step_have_a_step_each(tmp_path: Path) -> None:
    trainer = fit(tmp_path, 3)
    for name in ("a.ckpt", "b.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
    kept = {"epoch=0-step=3.ckpt": (".", 3), "a.ckpt": ("v1", 3), "b.ckpt": ("v2", 3)}
    assert there(tmp_path) == kept
    trainer.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert ckptkit.Run(tmp_path / "v1").steps() == []
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    assert there(tmp_path) == {"epoch=0-step=3.ckpt": (".", 3), "b.ckpt": ("v1", 3)}
    assert ckptkit.Run(tmp_path / "v2").steps() == []
    # Another attempt in the same folder harms nothing of the first one.
    before = step_at(tmp_path / "epoch=0-step=3.ckpt")
    digest = ckptkit.digest(before)
    fit(tmp_path, 3, module=Small(12, attempt=2))
    assert there(tmp_path)["epoch=0-step=3-v1.ckpt"] == ("v2", 3)
    assert ckptkit.digest(before) == digest


def test_a_link_is_removed_without_what_it_leads_to(tmp_path: Path) -> None:
    trainer = fit(tmp_path, 3, save_last="link")
    assert (tmp_path / "last.ckpt").is_symlink()
    assert ckptkit.Run(tmp_path).steps() == [3]
    assert fit(tmp_path / "b", 4, tmp_path / "last.ckpt").global_step == 4
    trainer.strategy.remove_checkpoint(tmp_path / "last.ckpt")
    assert there(tmp_path) == {"epoch=0-step=3.ckpt": (".", 3)}
    (tmp_path / "last.ckpt").symlink_to("epoch=0-step=3.ckpt")
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert there(tmp_path) == {"epoch=0-step=3.ckpt": (".", 3), "last.ckpt": ("v1", 3)}


def test_a_run_goes_on_after_it_was_resharded(tmp_path: Path) -> None:
    module = Small()
    fit(tmp_path / "a", 6)
    ckptkit.reshard(tmp_path / "a", tmp_path / "b", to="fsdp:4")
    assert fit(tmp_path / "c", 7, tmp_path / "b", module).global_step == 7
    assert len(module.losses) == 1


def test_a_bucket_is_as_good_as_a_folder(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"endpoint": "ENDPOINT_URL", "access_key": "ACCESS_KEY_ID", "region": "REGION"}
    for option, name in {**names, "secret_key": "SECRET_ACCESS_KEY"}.items():
        monkeypatch.setenv(f"AWS_{name}", str(bucket.options[option]))
    run = f"{bucket.url}/lightning"
    trainer = fit(run, 6, monitor="left", save_top_k=1, mode="max", save_last=True)
    callback: Any = trainer.checkpoint_callback
    assert callback.best_model_path == f"{run}/epoch=0-step=3.ckpt"
    assert ckptkit.Run(run).steps() == [3, 6]
    assert fit(run, 7, f"{run}/last.ckpt").global_step == 7


# What else there is.


def test_damage_is_an_error_or_with_fallback_the_step_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, 6)
    pack = next((tmp_path / "step-0000000006" / "data").rglob("*.zip"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 8 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 8)
    pack.write_bytes(data)
    newest = tmp_path / "epoch=1-step=6.ckpt"
    with pytest.raises(CorruptionError):
        fit(tmp_path / "b", 7, newest)
    module = Small()
    fit(tmp_path / "b", 7, newest, module, {"restore": {"fallback": True}})
    assert len(module.losses) == 4
    assert "step 6 is damaged in " in caplog.text
    assert ", trying step 3 in " in caplog.text


def test_weights_alone_are_not_taken_for_a_whole_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path / "a", save_weights_only=True)
    path = tmp_path / "a" / "epoch=0-step=3.ckpt"
    assert "optimizer" not in ckptkit.open(step_at(path)).objects
    with pytest.raises(KeyError, match="save_weights_only"):
        fit(tmp_path / "b", 6, path)
    trainer = trainer_of("single", tmp_path / "b", 3)
    trainer.validate(Small(), DataLoader(Samples(), 8), ckpt_path=path, verbose=False)


def test_averaged_weights_are_kept_beside_those_that_train(tmp_path: Path) -> None:
    def averaged(folder: str, steps: int, resume: Path | None = None) -> tuple[Any, Small]:
        module, callback = Small(), WeightAveraging()
        trainer: Any = trainer_of("single", tmp_path / folder, steps)
        trainer.callbacks.insert(0, callback)
        trainer.fit(module, loader_of("single"), ckpt_path=resume)
        return callback._average_model, module

    model, _ = averaged("whole", 6)
    averaged("a", 3)
    again, _ = averaged("b", 6, tmp_path / "a" / "epoch=0-step=3.ckpt")
    assert model is not None
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_what_a_step_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"hyper_parameters\.act: ") as caught:
        fit(tmp_path, module=Small(act=torch.nn.GELU()))
    assert "save_hyperparameters(ignore=[…])" in caught.value.hint
    assert list(tmp_path.glob("*.ckpt")) == []


def test_what_is_no_checkpoint_of_ours_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint is there"):
        fit(tmp_path / "b", 6, tmp_path / "nothing.ckpt")
    save(tmp_path / "plain", step=1, model=Small())
    torch.save({"state_dict": Small().state_dict()}, tmp_path / "own.ckpt")
    for other in ("plain", "own.ckpt"):
        with pytest.raises(UsageError, match=r"not saved through ckptkit\.plugins\.lightning"):
            fit(tmp_path / "b", 6, tmp_path / other)
        trainer = trainer_of("single", tmp_path / "b", 3)
        trainer.validate(
            Small(), DataLoader(Samples(), 8), ckpt_path=tmp_path / other, verbose=False
        )
    (tmp_path / "bad.ckpt").write_text('{"ckptkit": "lightning", "run": "../a", "step": 3}')
    with pytest.raises(FormatError, match="not a file that says which step it is"):
        fit(tmp_path / "b", 6, tmp_path / "bad.ckpt")
    fit(tmp_path / "a")
    with pytest.raises(StateMismatchError, match=r"model/net\.0\.weight: \(12, 6\) in the step"):
        fit(tmp_path / "b", 6, tmp_path / "a" / "epoch=0-step=3.ckpt", Small(16))


def test_a_file_of_another_program_is_never_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(tmp_path / "a")
    (tmp_path / "own.ckpt").write_bytes(b"PK")
    trainer.strategy.remove_checkpoint(tmp_path / "own.ckpt")
    assert (tmp_path / "own.ckpt").exists()
    assert "ckptkit did not write it" in caplog.text


def test_a_save_that_failed_keeps_no_later_ones_from_being_removed(tmp_path: Path) -> None:
    trainer = fit(tmp_path, 3)
    strategy: Any = trainer.strategy
    strategy._runs._name(str(tmp_path / "gone.ckpt"), str(tmp_path), 99)  # was not committed
    first = tmp_path / "epoch=0-step=3.ckpt"
    strategy.remove_checkpoint(first)
    assert first.exists()
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    strategy.remove_checkpoint(first)
    assert not first.exists()


def test_misuse_is_told_before_anything_is_lost(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not an option of checkpointer= here") as caught:
        CkptkitDDPStrategy(checkpointer={"keep_last": 2})
    assert "ModelCheckpoint" in caught.value.hint
    io = CkptkitCheckpointIO()
    with pytest.raises(UsageError, match="does not know the model"):
        io.save_checkpoint({"global_step": 1}, tmp_path / "x.ckpt")
    trainer = fit(tmp_path / "a")
    trainer.strategy.checkpoint_io = io
    with pytest.raises(UsageError, match="saves by itself"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()


def test_a_thread_that_saves_while_the_training_goes_on_is_refused(tmp_path: Path) -> None:
    io = CkptkitCheckpointIO()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[AsyncCheckpointIO(io)],
        callbacks=[io, ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)],
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(UsageError, match="while the optimizers go on") as caught:
        trainer.fit(Small(), loader_of("single"))
    assert 'checkpointer={"asynchronous": True}' in caught.value.hint
    assert list(tmp_path.glob("*.ckpt")) == []


def test_the_strategies_are_found_by_name() -> None:
    for kind in ("single", "ddp", "fsdp", "model_parallel"):
        assert f"ckptkit_{kind}" in StrategyRegistry
