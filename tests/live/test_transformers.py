"""A real Llama, resharded offline and then run by torch's own tensor parallelism."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import ckptkit
from ckptkit.live import load, save
from tests.live.pool import Pool

CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
TOKENS = torch.arange(12).reshape(2, 6)


def llama(seed: int) -> Any:
    """The model of the `transformers` package, from a tiny config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
        return model.eval()


def save_whole(location: str) -> torch.Tensor:
    """Save on one rank; the logits."""
    model = llama(1)
    save(location, step=3, model=model)
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


def run_parallel(location: str) -> tuple[torch.Tensor, list[str]]:
    """Load on the ranks of a tensor-parallel job; the logits, and the names of the parameters that
    torch cuts in another way than the step is cut.
    """
    model = llama(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rowwise = ("o_proj", "down_proj")
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if name.endswith(rowwise) else ColwiseParallel()
        for name, module in model.named_modules()
        if name.endswith("_proj") and isinstance(module, torch.nn.Linear)
    }
    parallelize_module(model, mesh, plan)
    load(location, model=model)
    with ckptkit.open(location) as step:
        other = [
            name
            for name, parameter in model.named_parameters()
            if isinstance(parameter, DTensor)
            and not np.array_equal(parameter.to_local().detach().numpy(), own(step, name))
        ]
    with torch.no_grad():
        return model(TOKENS).logits, other


def own(step: ckptkit.Checkpoint, name: str) -> Any:
    """What the step says that this rank holds."""
    array = step[f"model/{name}"]
    (box,) = array.part(dist.get_rank()).boxes
    return array.read(box)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_a_resharded_llama_gives_the_logits_of_the_whole_one(
    gloo: Pool, tmp_path: Path, ranks: int
) -> None:
    (expected,) = gloo.run(1, save_whole, str(tmp_path / "whole"))
    new = tmp_path / "parallel"
    ckptkit.reshard(tmp_path / "whole", new, to=f"tp:{ranks}", sizes=CONFIG)
    for logits, other in gloo.run(ranks, run_parallel, str(new)):
        assert other == []
        assert torch.allclose(logits, expected, atol=1e-5)
