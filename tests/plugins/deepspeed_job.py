"""DeepSpeed's engines, on a CPU: run as a program by ranks, with the interpreter of an environment
that has it. Its argument is a list of tasks, one after the other; it prints what came of each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

warnings.simplefilter("ignore")  # of what it imports
os.environ |= {"DS_ACCELERATOR": "cpu", "DEEPSPEED_LOG_LEVEL": "error"}

import deepspeed  # noqa: E402 — after the above
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from ckptkit.errors import CkptkitError  # noqa: E402
from ckptkit.live import Checkpointer, load, save  # noqa: E402
from ckptkit.plugins.deepspeed import load_checkpoint, save_checkpoint  # noqa: E402

_accelerator = deepspeed.get_accelerator()
_accelerator.is_fp16_supported = lambda: True  # it runs there, slowly
deepspeed.ops.__compatible_ops__.clear()  # which it would compile
_ROWS = 12  # of a batch, shared out between one, two or three ranks


class Model(nn.Module):
    """Odd sizes, a parameter of one element, a frozen one, a tied one and a buffer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width)
        self.heat = nn.Parameter(torch.tensor([0.7]))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(x)) * self.get_buffer("scale")[0]
        found: torch.Tensor = self.head(self.norm(x + self.down(torch.relu(self.up(x)))))
        return found * self.heat


class Embedding(nn.Embedding):
    """The first layer of a pipeline, and the last."""


def logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embedding.weight)


def distance(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(x.float().flatten(0, 1), target.flatten())


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def engine_of(task: dict[str, Any]) -> Any:
    precision, zero = task["precision"], {"stage": task["stage"], **task.get("zero", {})}
    if zero["stage"] == 3:
        zero.setdefault("stage3_param_persistence_threshold", 0)
    config: dict[str, Any] = {
        "train_batch_size": _ROWS,
        "train_micro_batch_size_per_gpu": _ROWS // dist.get_world_size(),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision] |= {"initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    if accumulate := task.get("accumulate"):
        config["data_types"] = {"grad_accum_dtype": accumulate}
    torch.manual_seed(7 + task.get("seed", 0))
    if stages := task.get("stages"):
        layers = [
            TiedLayerSpec("embed", Embedding, 7, 5),
            LayerSpec(nn.Linear, 5, 5),
            nn.ReLU(),
            LayerSpec(nn.LayerNorm, 5),
            TiedLayerSpec("embed", Embedding, 7, 5, forward_fn=logits),
        ]
        net: Any = PipelineModule(
            layers, num_stages=stages, loss_fn=distance, partition_method="uniform"
        )
        micro = _ROWS // 2 * stages // dist.get_world_size()
        config["train_micro_batch_size_per_gpu"] = micro
    else:
        net = Model(task.get("width", 5))
    kind = torch.optim.SGD if task.get("optimizer") == "SGD" else torch.optim.AdamW
    optimizer = kind(groups_of(net), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine


def by_torch(task: dict[str, Any]) -> dict[str, Any]:
    """What torch alone has of the loss of the next step, after it has loaded what an engine saved;
    it is saved again.
    """
    net = Model()
    fully_shard(net)
    optimizer = torch.optim.AdamW(groups_of(net), lr=0.01)
    restored = load(task["by_torch"], model=net, optimizer=optimizer)
    if task.get("is_uneven"):  # as if one of them had been frozen for a while
        optimizer.state[net.up.weight]["step"] -= 1
    save(task["again"], step=restored.step, model=net, optimizer=optimizer)
    x = batch(restored.step)
    return {"losses": [float(distance(net(x), x.flip(1)))], "lr": optimizer.param_groups[1]["lr"]}


def batch(step: int) -> torch.Tensor:
    return torch.randint(7, (_ROWS, 4), generator=torch.Generator().manual_seed(step))


def loss_of_step(engine: Any, step: int, *, is_pipeline: bool) -> float:
    """One step of the training, on the same batch whatever the number of ranks."""
    size = engine.train_micro_batch_size_per_gpu()
    if is_pipeline:
        rank = engine.grid.get_data_parallel_rank()
        mine = batch(step)[rank * 2 * size :][: 2 * size]
        return float(engine.train_batch(iter([(x, x.flip(1)) for x in mine.split(size)])))
    x = batch(step)[dist.get_rank() * size :][:size]
    loss = distance(engine(x), x.flip(1))
    engine.backward(loss)
    engine.step()
    whole = loss.detach().double()
    dist.all_reduce(whole)
    return float(whole / dist.get_world_size())


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Resume where asked to, train, save after a step where asked to."""
    engine = engine_of(task)
    said: dict[str, Any] = {"losses": [], "lr": []}
    first, note = 0, None
    stores = task.get("storage_options")
    if source := task.get("resume"):
        there = Checkpointer(source, storage_options=stores) if stores else source
        restored = load_checkpoint(engine, there, **task.get("how", {}))
        if restored is not None:
            first, note = restored.step, restored.extra.get("note")
    said |= {"note": note, "begun": [first, engine.global_steps, engine.global_samples]}
    checkpoints = None
    if "save" in task:
        checkpoints = Checkpointer(task["save"], asynchronous=True, storage_options=stores)
    for step in range(first, task["steps"]):
        loss = loss_of_step(engine, step, is_pipeline="stages" in task)
        said["losses"].append(loss)
        said["lr"].append(engine.get_lr())
        if checkpoints is not None and step + 1 == task["save_after"]:
            save_checkpoint(engine, checkpoints, step + 1, extra={"note": "warm"})
    if checkpoints is not None:
        checkpoints.wait()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    said |= {"scale": getattr(scaler, "cur_scale", None), "skipped": engine.skipped_steps}
    if folder := task.get("theirs"):
        engine.save_checkpoint(folder)
    return said


def refusals(task: dict[str, Any]) -> dict[str, Any]:
    """Why engines that no run can keep are refused, by what it is about them; where no CPU has
    such an engine, one that says that it is so.
    """
    engine = engine_of(task)
    loss_of_step(engine, 0, is_pipeline=False)
    inner, kind = engine.optimizer.optimizer, type(engine.optimizer)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    on_nvme = SimpleNamespace(offload_param=None, offload_optimizer=SimpleNamespace(device="nvme"))
    said: dict[str, Any] = {}

    def attempt(about: str, of: Any = engine, **more: Any) -> None:
        try:
            save_checkpoint(of, task["refusals"], 3, **more)
        except CkptkitError as error:
            said[about] = str(error)

    attempt("no engine", nn.Linear(2, 2))
    attempt("extra", extra={"deepspeed": 1})
    for name, value in {
        "has_moe_layers": True,
        "mp_world_size": 2,
        "zenflow": True,
        "curriculum_learning_enabled": lambda: True,
        "random_ltd_enabled": lambda: True,
        "optimizer": SimpleNamespace(),
        "seq_data_parallel_group": alone,
    }.items():
        with patch.object(engine, name, value):
            attempt(name)
    with patch.object(engine._config, "zero_config", on_nvme):
        attempt("offload_optimizer")
    with patch.object(engine.optimizer, "offloaded_states", {"optim_states"}, create=True):
        attempt("offloaded_states")
    engine.optimizer.__class__ = type("MiCS_Optimizer", (kind,), {})
    attempt("MiCS_Optimizer")
    engine.optimizer.__class__ = kind
    row = next(iter(inner.state))
    inner.state[row]["seen"] = torch.ones(2, 3)
    attempt("not cut")
    del inner.state[row]["seen"]
    return said


def main(tasks: list[dict[str, Any]]) -> None:
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for task in tasks:
        try:
            kind = by_torch if "by_torch" in task else refusals if "refusals" in task else run
            said = kind(task)
        except CkptkitError as error:
            said = {"refused": str(error)}
        if dist.get_rank() == 0:
            sys.stdout.write(f"said {json.dumps(said)}\n")
            sys.stdout.flush()
        if task.get("killed"):
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
