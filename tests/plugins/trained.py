"""Jobs of the Trainer that ranks of a pool run: a tiny Llama, and what became of it."""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

from tests.plugins.launched import launched, whole

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_callback import PrinterCallback

from ckptkit.errors import CkptkitError, UsageError
from ckptkit.live import Checkpointer
from ckptkit.plugins.transformers import TrainerMixin

CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
STEPS = 6


class Killed(BaseException):
    """The end of a job that nobody expected."""


class Kill(TrainerCallback):
    """Ends the job when a step has been saved."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at:
            raise Killed


class Preempt(TrainerCallback):
    """Sends the first rank what a scheduler sends."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)


class Noting(Trainer):
    """Notes which examples each of its batches has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[int]] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append([int(row[0]) for row in inputs["input_ids"]])
        return super().training_step(model, inputs, *args, **kwargs)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Nobody answers here."""


class MyTrainer(TrainerMixin, Noting):
    """As a user has it."""


def examples() -> list[dict[str, torch.Tensor]]:
    """Sixteen, each of which begins with its own number."""
    rows = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(0))
    rows[:, 0] = torch.arange(16)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    folder: str,
    strategy: str = "ddp",
    *,
    plain: bool = False,
    model: dict[str, Any] | None = None,
    run: dict[str, Any] | str | None = None,
    scores: list[float] | None = None,
    **options: Any,
) -> Any:
    """A Trainer of this many ranks, whose batches have four examples in all. `run` is what its
    Checkpointer is made with, or a location, `scores` what its evaluations give; a plain one is
    without ckptkit.
    """
    torch.manual_seed(7)
    if strategy == "fsdp":
        wrapped = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
        options |= {"fsdp": True, "fsdp_config": {"version": 2, **wrapped}}
    else:
        options["use_cpu"] = True
    if scores is not None:
        options |= {"eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "score"}
    arguments = {
        "output_dir": folder,
        "per_device_train_batch_size": 4 // dist.get_world_size(),
        "max_steps": STEPS,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "seed": 3,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
    }
    more: dict[str, Any] = {}
    if run is not None:
        more["checkpoints"] = run if isinstance(run, str) else Checkpointer(**run)
    if scores is not None:
        left = iter(scores)
        more |= {"eval_dataset": examples()[:2], "compute_metrics": lambda _: {"score": next(left)}}
    job = (Noting if plain else MyTrainer)(
        LlamaForCausalLM(LlamaConfig(**{**CONFIG, **(model or {})})),
        TrainingArguments(**{**arguments, **options}),
        train_dataset=examples(),
        **more,
    )
    job.remove_callback(PrinterCallback)
    return job


def train(
    folder: str,
    strategy: str,
    *,
    killed_after: int | None = None,
    preempted: bool = False,
    resume: bool | str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, all steps or until the job is killed; what was seen on the way."""
    with launched(strategy):
        job = trainer(folder, strategy, **options)
        if killed_after is not None:
            job.add_callback(Kill(killed_after))
        if preempted:
            job.add_callback(Preempt())
        with suppress(Killed):
            job.train(resume_from_checkpoint=resume)
        return found(job)


def calls_at_the_end() -> list[str]:
    """What a step asks of a Checkpointer that is to stop."""
    with launched("ddp"):
        job, checkpointer = trainer("/nowhere"), Mock()
        with job._stopping(checkpointer):
            checkpointer.reset_mock()
            control = job.callback_handler.on_step_end(job.args, job.state, job.control)
        saves = control.should_save and control.should_training_stop
        return [call[0] for call in checkpointer.method_calls] + ["save"] * saves


def refusal(folder: str, resume: bool | str | None = None, **options: Any) -> str:
    """What a training is refused with."""
    with launched("ddp"):
        try:
            trainer(folder, **options).train(resume_from_checkpoint=resume)
        except CkptkitError as error:
            return str(error)
    return "it was not refused"


def behind() -> str:
    """The way out for who names the mixin last."""
    try:
        type("Behind", (Trainer, TrainerMixin), {})
    except UsageError as error:
        return error.hint
    return "it was not refused"


def found(job: Any) -> dict[str, Any]:
    """What became of a training."""
    logged = [each for each in job.state.log_history if "loss" in each]
    return {
        "losses": [each["loss"] for each in logged],
        "rates": [each["learning_rate"] for each in logged],
        "seen": job.seen,
        "model": {name: whole(p) for name, p in job.model.named_parameters()},
        "moments": [
            whole(state["exp_avg"])
            for state in (job.optimizer.state[p] for p in job.model_wrapped.parameters())
            if state
        ],
        "best": job.state.best_model_checkpoint,
    }
