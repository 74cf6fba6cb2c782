"""Tensors that were cut by hand, or whose cuts DTensor cannot say: rules say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptkit
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import CkptkitError, LayoutError, PeerError, RulesError
from ckptkit.live import Checkpointer
from ckptkit.live.state.parts import HandCuts
from ckptkit.model import Shard as Cut
from ckptkit.model.rules import Rules
from tests.live.pool import Pool

ROWS, COLUMNS = (6, 4, 4), 3
FUSED = {"*wqkv.weight": {"tp": "shard(0, blocks=[6,4,4])"}}
AS_IN_A_FILE: dict[str, Any] = {
    "rules": [
        {"match": "model/*", "tp": "replicate"},
        {
            "match": "re:wqkv\\.(weight|bias)",
            "tp": {"shard": 0, "blocks": ["heads + 2", "heads", 4]},
            "ep": {"expert": "experts\\.(\\d+)"},
        },
    ],
    "sizes": {"heads": 4},
}


def whole() -> torch.Tensor:
    return torch.arange(sum(ROWS) * COLUMNS, dtype=torch.float32).reshape(-1, COLUMNS)


def mine(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Each of the fused blocks is cut in two."""
    return torch.cat([block.chunk(2)[rank] for block in tensor.split(ROWS)])


class Attention(nn.Module):
    """A fused projection of which this rank holds its heads."""

    def __init__(self, local: torch.Tensor) -> None:
        super().__init__()
        self.wqkv = nn.Linear(COLUMNS, local.shape[0], bias=False)
        self.wqkv.weight = nn.Parameter(local)


def save_fused(location: str, as_dtensor: bool, rules: RulesLike) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = mine(whole(), mesh.get_local_rank())
    if as_dtensor:
        local = DTensor.from_local(local, mesh, [Shard(0)])
    model = Attention(local)
    optimizer = torch.optim.AdamW(model.parameters())
    model.wqkv.weight.grad = torch.ones_like(model.wqkv.weight)
    optimizer.step()
    with Checkpointer(location, mesh=mesh, rules=rules, timeout=30) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
    fresh = Attention(torch.zeros_like(model.wqkv.weight))
    other = torch.optim.AdamW(fresh.parameters())
    with Checkpointer(location, mesh=mesh, rules=rules, timeout=30) as checkpointer:
        checkpointer.restore(model=fresh, optimizer=other)
    assert torch.equal(local_of(fresh.wqkv.weight), local_of(model.wqkv.weight))
    for key, value in optimizer.state[model.wqkv.weight].items():
        loaded = other.state[fresh.wqkv.weight][key]
        assert torch.equal(local_of(loaded), local_of(value)), key


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("as_dtensor", "rules"),
    [
        (False, FUSED),
        (True, FUSED),
        (False, AS_IN_A_FILE),
        (True, Rules.from_doc(AS_IN_A_FILE)),
    ],
    ids=["plain", "dtensor", "plain, as in a file", "dtensor, as in a file"],
)
def test_a_fused_projection_is_stored_whole_and_in_order(
    gloo: Pool, tmp_path: Path, as_dtensor: bool, rules: RulesLike
) -> None:
    gloo.run(2, save_fused, str(tmp_path), as_dtensor, rules)
    with ckptkit.open(tmp_path) as step:
        found = step["model/wqkv.weight"][...]
        assert found.shape == (sum(ROWS), COLUMNS)
        # One step of AdamW moves every element by almost nothing.
        np.testing.assert_allclose(found, whole().numpy(), atol=2e-1)
        assert step["optimizer/wqkv.weight/exp_avg"].shape == found.shape
        assert step["optimizer/wqkv.weight/step"].shape == ()


def save_unevenly(location: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Attention(torch.zeros(5, COLUMNS))
    with Checkpointer(location, mesh=mesh, rules=FUSED, timeout=30) as checkpointer:
        checkpointer.save(1, model=model)


def refused(location: str) -> str:
    with pytest.raises((LayoutError, PeerError)) as caught:
        save_unevenly(location)
    return str(caught.value)


def test_a_part_that_is_not_what_the_rules_say_is_refused(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, refused, str(tmp_path)):
        assert "model/wqkv.weight" in message
        assert "(5, 3)" in message
        assert "(7, 3)" in message


def make_without_the_file(location: str, rules: str) -> str:
    mine = rules if dist.get_rank() == 0 else f"{rules}.elsewhere.yaml"
    with pytest.raises(RulesError) as caught:
        Checkpointer(location, rules=mine, timeout=30)
    return str(caught.value)


def test_a_rules_file_that_one_rank_lacks_is_refused_on_all(gloo: Pool, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(AS_IN_A_FILE))
    first, second = gloo.run(2, make_without_the_file, str(tmp_path), str(rules))
    assert f"{rules}.elsewhere.yaml" in second
    assert f"{rules}.elsewhere.yaml" in first
    assert "because of rank 1" in first


def tp(rules: RulesLike, name: str, shape: tuple[int, ...], of: str | None = None) -> Any:
    """How two ranks cut a tensor of which each holds this much, and its whole shape."""
    cuts = HandCuts.of(rules)
    how = cuts.find(name, shape, of=of)
    return cuts.placement(name, how["tp"], shape, 2) if how else None


def test_short_patterns_match_whole_names_the_first_that_does() -> None:
    rules = {"model/a.*": {"tp": "shard(1)"}, "re:.*/a\\.w": {"tp": Cut(0)}, "b": {"tp": Cut(0)}}
    assert tp(rules, "model/a.w", (2, 3)) == (Cut(1), (2, 6))
    assert tp(rules, "optimizer/a.w/m", (2, 3), of="model/a.w") == (Cut(1), (2, 6))
    assert tp(rules, "app/a.w", (2, 3)) == (Cut(0), (4, 3))
    assert tp(rules, "model/b", (2, 3)) is None


def test_rules_of_a_file_match_names_inside_of_their_group() -> None:
    rules = {
        "rules": [
            {"match": "*.w", "ndim": 2, "tp": {"shard": 0, "blocks": 2}},
            {"match": "*.v", "tp": {"shard": 0, "unit": "head?"}},
            {"match": "*", "ep": "shard(0)"},
        ]
    }
    assert tp(rules, "model/a.w", (4, 3)) == (Cut(0, (4, 4)), (8, 3))
    assert tp(rules, "optimizer/a.w/m", (4, 3), of="model/a.w") == (Cut(0, (4, 4)), (8, 3))
    assert tp(rules, "optimizer/a.w/row", (4,)) is None, "not of the shape of its parameter"
    assert tp(rules, "model/a.v", (4,)) == (Cut(0), (8,))
    assert tp(rules, "model/a.v", ()) is None, "0-d"
    assert HandCuts.of(rules).find("model/c", (2,)).keys() == {"ep"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"rules": [{"match": "a"}]}, "rules=: not rules"),
        ({"rules": "a"}, "not placements by kind of axis"),
        ({"*.w": "shard(0)"}, "not placements by kind of axis"),
        ({"*.w": {"tp": "shrad(0)"}}, "not a placement"),
        ({"rules": [{"match": "a.w", "tp": "shard(2)"}]}, "model/a.w: there is no dim 2"),
        ({"rules": [{"match": "a.w", "tp": {"shard": 0, "unit": "head"}}]}, "needs to know head"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules: RulesLike, message: str) -> None:
    with pytest.raises(CkptkitError, match=message):
        tp(rules, "model/a.w", (2, 3))


def test_a_checkpointer_takes_the_name_of_a_preset(tmp_path: Path) -> None:
    state = {"x": torch.ones(2)}
    with Checkpointer(tmp_path, rules="llama") as checkpointer:
        checkpointer.save(1, state={"s": state})
        assert checkpointer.restore(state={"s": state})
    with pytest.raises(RulesError, match="did you mean llama"):
        Checkpointer(tmp_path, rules="lama")


def test_rules_may_be_a_preset_or_a_file(tmp_path: Path) -> None:
    name = "model/layers.0.self_attn.o_proj.weight"
    assert tp("llama", name, (8, 4)) == (Cut(1), (8, 8))
    (tmp_path / "mine.yaml").write_text("rules: [{match: '*.o_proj.weight', tp: shard(0)}]")
    assert tp(tmp_path / "mine.yaml", name, (8, 4)) == (Cut(0), (16, 4))
    assert tp(str(tmp_path / "mine.yaml"), name, (8, 4)) == (Cut(0), (16, 4))


@pytest.mark.parametrize(
    ("rules", "message"),
    [("lama", "did you mean llama"), ("auto", "not guessed"), ("no.yaml", "cannot be read")],
)
def test_rules_that_are_nowhere_are_refused(rules: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RulesError, match=message):
        Checkpointer(tmp_path, rules=rules)


def test_experts_that_are_tensors_of_their_own_are_refused() -> None:
    cuts = HandCuts.of(AS_IN_A_FILE)
    how = cuts.find("model/wqkv.weight", (7, 3))["ep"]
    with pytest.raises(RulesError, match="experts that are tensors of their own"):
        cuts.placement("model/wqkv.weight", how, (7, 3), 2)


@pytest.mark.parametrize("how", ["shard(2)", {"shard": 2}])
def test_a_cut_of_a_dim_that_a_tensor_lacks_is_refused(how: str | dict[str, int]) -> None:
    rules = {"*": {"tp": how}} if isinstance(how, str) else {"rules": [{"match": "*", "tp": how}]}
    cuts = HandCuts.of(rules)
    said = cuts.find("model/w", (4, 3))
    with pytest.raises(LayoutError, match=r"there is no dim 2 in a tensor of .*4, 3") as caught:
        cuts.placement("model/w", said["tp"], (4, 3), 2)
    assert caught.value.where == "model/w"
