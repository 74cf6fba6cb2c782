"""A step as nested dictionaries, without the job that saved it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.errors import NotFoundError, UsageError
from ckptkit.live import PerRank, Sum, load_state, save


class Counting(nn.Linear):
    """A module with a state of its own."""

    def get_extra_state(self) -> dict[str, int]:
        """How often it was called."""
        return {"calls": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Nothing is to be done."""


APP: dict[Any, Any] = {
    "deep": {"list": [torch.arange(3.0), {"x": torch.tensor(5)}, "text"], "none": None},
    "pair": (torch.ones(2, 2), 3),
    4: {"a/b": torch.zeros(1)},
    "empty": {},
    "kinds": {1, 2},
    "milestones": Counter({4: 1, 9: 2}),
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    """A step with all that there is."""
    model = nn.Sequential(Counting(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    save(
        tmp_path,
        step=3,
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        dataloader={"at": torch.tensor([2])},
        state={"app": APP, "loose": [torch.ones(2)]},
        extra={"note": "x", "tokens": Sum(3), "rng": PerRank([1]), "kinds": {1}},
    )
    return tmp_path, model, optimizer


Saved = tuple[Path, nn.Module, torch.optim.Optimizer]


def test_all_of_a_step_comes_as_dictionaries(saved: Saved) -> None:
    location, model, optimizer = saved
    found = load_state(location, nested=True)
    assert repr(found["app"]) == repr(APP)
    assert repr(found["loose"]) == repr([torch.ones(2)])
    assert repr(found["dataloader"]) == repr([{"at": torch.tensor([2])}])
    assert found["extra"] == {"note": "x", "tokens": 3, "rng": [[1]], "kinds": {1}}
    assert found["scheduler"]["step_size"] == 2
    assert found.keys() == {"app", "loose", "dataloader", "extra", "scheduler", "model"} | {
        "optimizer"
    }
    again = nn.Sequential(Counting(2, 3), nn.Linear(3, 2))
    again.load_state_dict(found["model"])
    assert repr(dict(again.state_dict())) == repr(dict(model.state_dict()))
    names = dict(model.named_parameters())
    assert found["optimizer"]["param_groups"][0]["params"] == list(names)
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.25
    for name, parameter in names.items():
        kept = found["optimizer"]["state"][name]
        assert kept.keys() == optimizer.state[parameter].keys()
        assert all(torch.equal(kept[key], optimizer.state[parameter][key]) for key in kept)


def test_patterns_pick_what_is_wanted(saved: Saved) -> None:
    location, model, _ = saved
    weights = load_state(location, nested=True, names=["*.weight"])
    assert weights["model"].keys() == {"0.weight", "1.weight"}
    assert weights["optimizer"]["state"].keys() == {"0.weight", "1.weight"}
    assert weights.keys() == {"model", "optimizer"}
    whole = load_state(location, nested=True, names=["model", "app", "note"])
    assert repr(whole["app"]) == repr(APP)
    assert whole["model"].keys() == model.state_dict().keys()
    assert whole.keys() == {"model", "app", "extra"}
    part = load_state(location, nested=True, names=["app/deep/list/1/*"])
    assert part["app"]["deep"]["list"] == [{"x": torch.tensor(5)}, "text"]
    assert part["app"]["pair"] == (3,)
    flat = load_state(location, names=["app/pair/*", "model/0.*"])
    assert list(flat) == ["app/pair/0", "model/0.bias", "model/0.weight"]
    for nested in (True, False):
        with pytest.raises(UsageError, match="nothing of this name"):
            load_state(location, nested=nested, names=["*.weight", "gone.*"])
    with pytest.raises(UsageError, match="nothing of this name"):
        load_state(location, nested=True, names=["gone"])
    with pytest.raises(NotFoundError):
        load_state(location, names=["gone"])


def test_what_no_job_has_saved_is_nested_by_its_names(tmp_path: Path) -> None:
    with ckptkit.Writer(tmp_path, step=1, strategy="single") as writer:
        writer.add("a/b/c", torch.ones(2).numpy())
        writer.add("d", torch.ones(1).numpy())
        writer.add_object("note", {"x": 1})
    found = load_state(tmp_path, nested=True)
    assert repr(found) == repr({"note": {"x": 1}, **{k: found[k] for k in found if k != "note"}})
    assert found["a"]["b"]["c"].tolist() == [1, 1]
    assert found["d"].tolist() == [1]
