"""Load an export with another framework: `python load_back.py FRAMEWORK PLACE OUT.npz`.

What the framework has then is written by our names.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

Arrays = dict[str, np.ndarray[Any, Any]]


def alone() -> None:
    """Be the only rank of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")


def accelerate(place: Path) -> Arrays:
    """A folder of a Hugging Face model."""
    from accelerate import load_checkpoint_in_model  # noqa: PLC0415 — one of several frameworks

    model: Any = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))
    load_checkpoint_in_model(model, place)
    return {f"model/{name}": tensor.numpy() for name, tensor in model.state_dict().items()}


def lightning(place: Path) -> Arrays:
    """A file of torch, as the weights of a checkpoint."""
    import lightning as pl  # noqa: PLC0415

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))

    with tempfile.NamedTemporaryFile(suffix=".ckpt") as file:
        weights = torch.load(place, weights_only=True)
        said = {"state_dict": weights, "pytorch-lightning_version": pl.__version__}
        torch.save(said, file.name)
        module = Module.load_from_checkpoint(file.name, map_location="cpu")
    return {f"model/{name}": tensor.numpy() for name, tensor in module.state_dict().items()}


def megatron(place: Path) -> Arrays:
    """A folder of DCP, with the optimizer, which Megatron takes for one of its own."""
    from megatron.core import dist_checkpointing  # noqa: PLC0415
    from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415

    alone()
    metadata: Any = FileSystemReader(place).read_metadata()
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place / "metadata.json").write_text(json.dumps(said))
    torch.save({}, place / "common.pt")
    wanted = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "size"):
            empty = torch.full(tuple(entry.size), 7, dtype=entry.properties.dtype)
            wanted[name] = ShardedTensor.from_rank_offsets(name, empty)
    found = dist_checkpointing.load({"all": wanted}, str(place))["all"]
    arrays: Arrays = {}
    for name, tensor in found.items():
        path = metadata.planner_data[name]
        ours = path[:1] + path[1 + (path[0] == "optimizer") :]
        is_brain = tensor.dtype == torch.bfloat16
        arrays["/".join(ours)] = (tensor.view(torch.uint16) if is_brain else tensor).numpy()
    return arrays


def deepspeed(place: Path) -> Arrays:
    """A file of torch, in a model that ZeRO-3 takes apart and saves: as DeepSpeed reads that."""
    import deepspeed as ds  # noqa: PLC0415
    from deepspeed.utils import zero_to_fp32  # noqa: PLC0415

    alone()
    weights = torch.load(place, weights_only=True)
    model: Any = nn.Module()
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            model.register_parameter(name.replace(".", "/"), nn.Parameter(tensor))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    said: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    said["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=said)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    return {
        f"model/{name.replace('/', '.')}": tensor.detach().numpy() for name, tensor in found.items()
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    loaders = {each.__name__: each for each in (accelerate, lightning, megatron, deepspeed)}
    np.savez(sys.argv[3], **loaders[sys.argv[1]](Path(sys.argv[2])))  # type: ignore[arg-type]
