"""What runs the programs of `docs/frameworks.md`, by the heading that they stand under."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ckptkit import Run
from tests.live.pool import Pool


def run_sections(page: str, gloo: Pool) -> None:
    """The programs of a page, those of each section in a folder of their own."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        programs = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        if programs:
            Path(heading).mkdir()
            with chdir(heading), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what frameworks import
                SECTIONS[heading](programs, gloo)


def transformers_trainer(programs: list[str], _: Pool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    row = torch.arange(4)
    names: dict[str, Any] = {
        "model": LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes)),
        "dataset": [{"input_ids": row, "labels": row}] * 32,
    }
    begin, resume, remote = programs
    exec(begin, names)
    assert Run("runs/7b").steps() == [8, 12]
    exec(resume, names)
    assert names["trainer"].state.global_step == 12
    exec(remote, names)
    assert names["checkpoints"].run.steps() == [4, 8, 12]


def accelerate(programs: list[str], _: Pool) -> None:
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415

    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "loader": DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=2, shuffle=True),
        "loss_of": lambda model, batch: model(*batch).square().mean(),
    }
    (program,) = programs
    try:
        exec(program, names)
        assert Run("runs/7b").steps() == [20, 30]
        names["loss_of"] = None  # a second time there is nothing to do
        exec(program, names)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def train_by_lightning(programs: list[str], folder: str) -> None:
    from lightning.pytorch import Trainer  # noqa: PLC0415

    from tests.plugins.lightning_job import PoolEnvironment, Samples, Small  # noqa: PLC0415

    def trainer(*, plugins: list[Any] | None = None, **arguments: Any) -> Trainer:
        """One for the ranks that are there, and that prints nothing."""
        quiet: Any = {"logger": False, "enable_progress_bar": False}
        more = [*(plugins or ()), PoolEnvironment()]
        return Trainer(accelerator="cpu", devices=2, plugins=more, **quiet, **arguments)

    names: dict[str, Any] = {"module": Small(), "loader": DataLoader(Samples(), 4)}
    with chdir(folder), patch("lightning.pytorch.Trainer", trainer), redirect_stdout(StringIO()):
        for program, steps in zip(programs, (16, 20, 24), strict=True):
            exec(program, names)
            assert names["trainer"].global_step == steps


def lightning(programs: list[str], gloo: Pool) -> None:
    *training, reading = programs
    gloo.run(2, train_by_lightning, training, str(Path.cwd()))
    assert Run("runs/7b").latest() == 24
    from tests.plugins.lightning_job import Small  # noqa: PLC0415

    names: dict[str, Any] = {"module": Small()}
    with redirect_stdout(StringIO()) as printed:
        exec(reading, names)
    assert printed.getvalue() == "{'width': 12}\n"


def read_elastically(program: str, folder: str) -> list[int]:
    model = nn.Linear(1, 1)
    given: list[int] = []
    names: dict[str, Any] = {
        "dataset": list(range(48)),
        "model": DistributedDataParallel(model),
        "optimizer": torch.optim.SGD(model.parameters()),
        "train": lambda batch: given.extend(batch.tolist()),
    }
    with chdir(folder):
        # The ranks of the pool may start no processes of their own.
        exec(program.replace("num_workers=1", "num_workers=0"), names)
    return given


def loaders(programs: list[str], gloo: Pool) -> None:
    (program,) = programs
    first = gloo.run(2, read_elastically, program, str(Path.cwd()))
    assert sorted(chain(*first)) == sorted([*range(48)] * 2)
    assert Run("runs/7b").steps() == [3, 6]
    Run("runs/7b").delete([6])
    # In the second epoch nobody had read anything yet.
    assert sorted(chain(*gloo.run(3, read_elastically, program, str(Path.cwd())))) == [*range(48)]


def save_by_dcp(programs: list[str], folder: str) -> None:
    torch.manual_seed(0)  # the same on all ranks, as DDP sees to
    model = nn.Linear(4, 2)
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    old = model.weight.detach().clone()
    with chdir(folder):
        for program in programs:
            exec(program, names)
    assert names["state"]["step"] == 1000
    assert torch.equal(model.weight, old)


def dcp(programs: list[str], gloo: Pool) -> None:
    gloo.run(2, save_by_dcp, programs, str(Path.cwd()))
    assert Run("runs/dcp").steps() == [1000]


def read_only(programs: list[str], _: Pool) -> None:
    """Their own tests run these, where there is the framework."""
    for program in programs:
        compile(program, "frameworks.md", "exec")


def torch_checkpointing(programs: list[str], _: Pool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    names: dict[str, Any] = {"model": model, "optimizer": optimizer}
    (program,) = programs
    exec(program, names)
    names["manager"].close()
    assert names["newest"] == "step-1000"
    assert torch.equal(names["state"]["model"]["weight"], model.weight)


SECTIONS: dict[str, Callable[[list[str], Pool], None]] = {
    "accelerate": accelerate,
    "Data loaders at another size": loaders,
    "DeepSpeed": read_only,
    "Lightning": lightning,
    "Megatron-Core": read_only,
    "torch.distributed.checkpoint": dcp,
    "torch_checkpointing": torch_checkpointing,
    "The Trainer of transformers": transformers_trainer,
    "torchtitan": read_only,
}
