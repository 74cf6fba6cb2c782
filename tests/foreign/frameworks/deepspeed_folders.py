"""What the tests of DeepSpeed share: what it wrote, and what looks as if it had written it."""

# Not called deepspeed: the script beside it, which imports that, would find this one.
from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.foreign.jobs import Wanted


def wanted(written: Path, case: str) -> Wanted:
    with np.load(written / f"{case.removesuffix('-universal')}.npz") as file:
        return dict(file)


def tag_of(place: Path) -> Path:
    (latest,) = place.glob("latest*")
    return place / latest.read_text()


CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules with classes of DeepSpeed's names, so that torch loads its files and saves them."""
    modules: dict[str, types.ModuleType] = {}
    for full in CLASSES:
        module, _, name = full.rpartition(".")
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            inner = ".".join(parts[:end])
            modules.setdefault(inner, types.ModuleType(inner))
        bases = (int,) if name == "ZeroStageEnum" else ()
        setattr(modules[module], name, type(name, bases, {"__module__": module}))
    return modules


def imitated(place: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Wanted:
    """A folder as stage 3 writes it, of any size, and what is in it; with `stand_ins` in place."""
    dice = np.random.default_rng(7)
    wanted = {
        f"{group}/{name}{state}": dice.standard_normal(shape, dtype=np.float32)
        for group, state in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))
        for name, shape in shapes.items()
    }
    stage: Any = sys.modules["deepspeed.runtime.zero.config"]
    model = {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes},
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
        "buffer_names": [],
        "global_steps": 3,
        "dp_world_size": ranks,
    }
    place.mkdir(parents=True)
    for rank in range(ranks):
        rows: dict[str, list[Any]] = {}
        for name, value in wanted.items():
            part = -(-value.size // ranks)
            mine = np.zeros(part, np.float32)
            flat = value.reshape(-1)[rank * part : (rank + 1) * part]
            mine[: flat.size] = flat
            rows.setdefault(name.rpartition("/")[2] if "exp_avg" in name else "", []).append(mine)
        weights, *states = (torch.from_numpy(np.concatenate(row)) for row in rows.values())
        state = dict(zip(("exp_avg", "exp_avg_sq"), states, strict=True))
        inner = {
            "state": {0: {**state, "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.01, "betas": (0.9, 0.999), "params": [0]}],
        }
        said = {
            "zero_stage": stage.ZeroStageEnum(3),
            "partition_count": ranks,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": [weights],
        }
        torch.save(model, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": said}, place / name)
    steps = {f"optimizer/{name}/step": np.array(3.0, np.float32) for name in shapes}
    return wanted | steps


def written_as(file: Path, data: bytes, name: str) -> None:
    """Write a file of `name` as if it had been written by the name that it gets."""
    file.write_bytes(data.replace(name[:-3].encode(), file.name[:-3].encode()))
