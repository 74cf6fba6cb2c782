"""What nothing ever cuts by columns has chunks of whole rows: by the names of the model, by rules,
or by how this job itself cuts.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptkit
from ckptkit.live import load, save
from tests.live.pool import Pool

WIDTH, INNER, CHUNK = 512, 1024, 1 << 16
KNOWN = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (WIDTH, INNER),
    "mlp.down_proj": (INNER, WIDTH),
}
UNKNOWN = {"first": (WIDTH, INNER), "second": (INNER, WIDTH)}
RULES = {
    "rules": [
        {"match": "*first.weight", "tp": "shard(0)"},
        {"match": "*second*", "tp": "shard(1)"},
    ]
}


def model_of(shapes: dict[str, tuple[int, int]], seed: int) -> nn.Module:
    """Two layers that name their modules so."""
    torch.manual_seed(seed)
    model = nn.Module()
    for number in range(2):
        for path, shape in shapes.items():
            *above, name = f"layers.{number}.{path}".split(".")
            parent = model
            for step in above:
                if not hasattr(parent, step):
                    parent.add_module(step, nn.Module())
                parent = parent.get_submodule(step)
            parent.add_module(name, nn.Linear(*shape, bias=False))
        layer = model.get_submodule(f"layers.{number}")
        layer.add_module("input_layernorm", nn.RMSNorm(WIDTH))
    return model


def trained(shapes: Any, how: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(how,))
    model = model_of(shapes, seed)
    if how == "tp":
        plan = {"layers.*.first": ColwiseParallel(), "layers.*.second": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_rows(shapes: Any, how: str, place: str, rules: Any) -> dict[str, bool]:
    """Whether chunks have whole rows, by the array; and what was saved comes back."""
    model, optimizer = trained(shapes, how, 0)
    save(place, step=1, model=model, optimizer=optimizer, rules=rules, chunk_bytes=CHUNK)
    fresh, other = trained(shapes, how, 1)
    load(place, model=fresh, optimizer=other, rules=rules)
    for mine, saved in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(saved))
        for key, value in optimizer.state[saved].items():
            assert torch.equal(local_of(other.state[mine][key]), local_of(value)), key
    with ckptkit.open(place) as step:
        matrices = [array for array in step.arrays.values() if len(array.shape) == 2]
        assert len(matrices) == 2 * 3 * len(shapes)
        return {array.name: array.grid.chunk_shape[1] == array.shape[1] for array in matrices}


@pytest.mark.parametrize(
    ("shapes", "how", "rules", "cut"),
    [
        pytest.param(KNOWN, "fsdp", None, ("o_proj", "down_proj"), id="a Llama's names"),
        pytest.param(UNKNOWN, "fsdp", None, ("first", "second"), id="names that nobody knows"),
        pytest.param(UNKNOWN, "fsdp", RULES, ("second",), id="rules"),
        pytest.param(UNKNOWN, "tp", None, ("second",), id="cut so"),
    ],
)
def test_only_what_may_be_cut_by_columns_is(
    gloo: Pool, tmp_path: Path, shapes: Any, how: str, rules: Any, cut: tuple[str, ...]
) -> None:
    for found in gloo.run(2, whole_rows, shapes, how, str(tmp_path), rules):
        for name, is_whole in found.items():
            assert is_whole != any(each in name for each in cut), name


def test_large_tensors_alone_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> list[str]:
        raise AssertionError

    module = import_module("ckptkit.live.save")
    monkeypatch.setattr(module, "fitting_presets", nobody)
    save(tmp_path, step=1, model=model_of(KNOWN, 0), chunk_bytes=1 << 27)
