"""A writer uses the plan of the last save again where it holds the same, and only there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ckptkit
from ckptkit.checkpoint.write.plan import PackPlan

Arrays = Mapping[str, tuple[npt.NDArray[Any], dict[str, Any]]]


def arrays(seed: int) -> dict[str, tuple[npt.NDArray[Any], dict[str, Any]]]:
    """Three arrays with values of their own."""
    values = np.random.default_rng(seed)
    return {
        "model/a": (values.random((8, 4), np.float32), {"role": "param"}),
        "model/b": (values.random((4, 8), np.float32), {"role": "param"}),
        "optimizer/a/m": (values.random((8, 4), np.float32), {"of": "model/a"}),
    }


def saved(run: Path, step: int, what: Arrays, plan: PackPlan | None, **options: Any) -> PackPlan:
    """Save, and read all of it back."""
    aliases = options.pop("aliases", ())
    with ckptkit.Writer(run, step=step, **options) as writer:
        writer.like = plan
        for name, (data, said) in what.items():
            writer.add(name, data, **said)
        for alias in aliases:
            writer.add_alias(*alias)
    assert not ckptkit.verify(run)
    with ckptkit.open(run) as step_:
        assert set(step_.arrays) == {*what, *(alias for alias, _ in aliases)}
        for name, (data, said) in what.items():
            np.testing.assert_array_equal(step_.read(name), data)
            assert step_[name].info.of == said.get("of")
            assert step_[name].info.role == said.get("role", "other")
    assert writer.plan is not None
    return writer.plan


def test_the_same_arrays_are_laid_out_once(tmp_path: Path) -> None:
    first = saved(tmp_path, 1, arrays(1), None)
    for step in (2, 3):
        assert saved(tmp_path, step, arrays(step), first) is first


def changed(how: str) -> tuple[Arrays, dict[str, Any]]:
    """The same but for one thing, and with what a writer of it is made."""
    what = arrays(2)
    data, said = what["model/b"]
    options: dict[str, Any] = {}
    match how:
        case "shape":
            what["model/b"] = data.reshape(8, 4), said
        case "dtype":
            what["model/b"] = data.view(np.int32), said
        case "role":
            what["model/b"] = data, {"role": "buffer"}
        case "name":
            what["model/c"] = what.pop("model/b")
        case "order":
            what = dict(reversed(what.items()))
        case "more":
            what["model/c"] = data, {}
        case "fewer":
            del what["model/b"]
        case "of":
            what["optimizer/a/m"] = what["optimizer/a/m"][0], {"of": "model/b"}
        case "chunks":
            options["chunk_bytes"] = 16
        case "alias":
            options["aliases"] = [("model/tied", "model/a")]
        case "strategy":
            options["strategy"] = "fsdp:1"
        case "placement":
            options["strategy"] = "fsdp:1"
            what["model/b"] = data, {**said, "placements": {"fsdp": "shard(0)"}}
    return what, options


@pytest.mark.parametrize(
    "how",
    [
        *("shape", "dtype", "role", "name", "order", "more", "fewer", "of", "chunks", "alias"),
        *("strategy", "placement"),
    ],
)
def test_what_is_not_the_same_is_laid_out_anew(tmp_path: Path, how: str) -> None:
    first = saved(tmp_path, 1, arrays(1), None)
    what, options = changed(how)
    second = saved(tmp_path, 2, what, first, **options)
    assert second is not first
    assert saved(tmp_path, 3, what, second, **options) is second


def test_another_strategy_of_as_many_axes_is_not_the_same(tmp_path: Path) -> None:
    first = saved(tmp_path, 1, arrays(1), None, strategy="ddp:1")
    assert saved(tmp_path, 2, arrays(2), first, strategy="fsdp:1") is not first
