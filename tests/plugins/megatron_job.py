"""A small GPT of Megatron-Core trained by its own classes, on a CPU: run as a program, by the
interpreter of an environment that has it; it prints the loss of each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ckptkit.errors import CkptkitError  # noqa: E402 — this tree's
from ckptkit.plugins.megatron import LoadStrategy, SaveStrategy, load  # noqa: E402
from tests.foreign.frameworks.write_megatron import on_cpu  # noqa: E402

WORDS, LENGTH, BATCH = 32, 8, 4


class Job:
    """What a training script of Megatron has."""

    def __init__(self, task: dict[str, Any]) -> None:
        tensor, pipeline = task.get("tp", 1), task.get("pp", 1)
        parallel_state.initialize_model_parallel(tensor, pipeline)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=task.get("hidden", 16),
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=24,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            pipeline_dtype=torch.float32,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
            finalize_model_grads_func=finalize_model_grads,
            layernorm_zero_centered_gamma=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        torch.manual_seed(3)
        model = GPTModel(
            config,
            spec,
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        same_everywhere(model)
        kind = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, kind, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=0.02, min_lr=0.001, use_distributed_optimizer=True), [self.model]
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=0.02,
            min_lr=0.001,
            lr_warmup_steps=2,
            lr_decay_steps=6,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.1,
            wd_incr_steps=6,
            wd_incr_style="linear",
        )

    def state(self, step: int, *, is_loading: bool = False) -> dict[str, Any]:
        """As a script of Megatron makes it."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        told = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": group,
            "chained_optim_avoid_prefix": True,
        }
        of_model = self.model.module.sharded_state_dict(metadata=told)
        of_optimizer = self.optimizer.sharded_state_dict(of_model, is_loading, metadata=told)
        return {
            "model": of_model,
            "optimizer": of_optimizer,
            "opt_param_scheduler": self.scheduler.state_dict(),
            "iteration": step,
        }

    def take(self, found: dict[str, Any]) -> int:
        self.model.module.load_state_dict(found["model"], strict=False)
        self.optimizer.load_state_dict(found["optimizer"])
        # Megatron gives all parameters one count of steps, to which Adam of torch, which it takes
        # where there is no GPU, would add one for each of them.
        for each in self.optimizer.chained_optimizers:
            for state in each.optimizer.state.values():
                state["step"] = state["step"].clone()
        self.scheduler.load_state_dict(found["opt_param_scheduler"])
        return int(found["iteration"])

    def train(self, step: int) -> float:
        """The loss of a step, over a batch that is the same whatever the layout is."""
        made = torch.Generator().manual_seed(step)
        rows = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=made)
        ranks = parallel_state.get_data_parallel_world_size()
        mine = rows[parallel_state.get_data_parallel_rank() :: ranks].split(1)
        places = torch.arange(LENGTH)
        is_later = (places > places[:, None])[None, None]

        def forward(batches: Any, model: Any) -> Any:
            (row,) = next(batches)
            losses = model(row[None, :-1], places[None], is_later, labels=row[None, 1:])
            return losses, lambda out: (out.mean(), {"loss": out.detach().mean()})

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(mine),
            model=[self.model],
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        self.optimizer.step()
        self.scheduler.step(increment=1)
        total = torch.tensor(sum(float(each["loss"]) for each in found) / BATCH)
        # Only the last stage has a loss, on each rank of tensor parallelism the same.
        dist.all_reduce(total)
        copies: int = parallel_state.get_tensor_model_parallel_world_size()
        return float(total) / copies


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def same_everywhere(model: Any) -> None:
    """Weights that are the same under every layout: drawn whole, then cut."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_pipeline_model_parallel_rank() * len(model.decoder.layers)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            number = parts.index("layers") + 1
            parts[number] = str(int(parts[number]) + first)
        drawn = torch.Generator().manual_seed(sum(map(ord, ".".join(parts))))
        dim = getattr(parameter, "partition_dim", -1)
        shape = list(parameter.shape)
        if parameter.dim() == 1:
            continue
        cut = size if getattr(parameter, "tensor_model_parallel", False) else 1
        shape[dim] *= cut
        whole = torch.randn(shape, generator=drawn) * 0.2
        if name.endswith("linear_fc1.weight"):
            halves = [half.chunk(cut, dim)[rank % cut] for half in whole.chunk(2, dim)]
            mine = torch.cat(halves, dim)
        else:
            mine = whole.chunk(cut, dim)[rank % cut]
        parameter.data.copy_(mine)


def run(task: dict[str, Any]) -> None:
    job = Job(task)
    step, run = 0, task["run"]
    if task.get("resume"):
        # A new optimizer has no state yet that its state dictionary could tell of.
        job.optimizer.step()
        found = load(job.state(0, is_loading=True), run, fallback=True, **task.get("load", {}))
        step = 0 if found is None else job.take(found)
    if task.get("strategies"):
        job.optimizer.step()
        state, place = job.state(0, is_loading=True), task["strategies"]
        strategy = LoadStrategy(run, **task.get("load", {}))
        found = dist_checkpointing.load(state, place, strategy, strict="raise_all")
        step = job.take(found)
    saved = SaveStrategy(run, **task.get("save", {}))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(saved, group)
    queue = AsyncCallsQueue()
    while step < task["steps"]:
        step += 1
        loss = job.train(step)
        if dist.get_rank() == 0:
            say("loss", step, repr(loss))
        queue.maybe_finalize_async_calls(blocking=False)
        if step % task.get("every", 3) == 0:
            told = {"distrib_optim_sharding_type": "fully_reshardable"}
            folder = saved.folder(step)
            if "folders" in task:
                folder = f"{task['folders']}/iter_{step:07d}"
                Path(folder).mkdir(parents=True, exist_ok=True)
            if "beside" in task:
                place = f"{task['beside']}/iter_{step:07d}"
                Path(place).mkdir(parents=True, exist_ok=True)
                dist_checkpointing.save(job.state(step), place, content_metadata=told)
            state = job.state(step)
            is_async = bool(task.get("async"))
            request = dist_checkpointing.save(
                state, folder, strategy, async_sharded_save=is_async, content_metadata=told
            )
            if request is not None:
                queue.schedule_async_request(request)
        if step == task.get("killed_in"):
            os.kill(os.getpid(), signal.SIGKILL)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    on_cpu()
    dist.init_process_group("gloo")
    try:
        run(json.loads(sys.argv[1]))
    except CkptkitError as error:
        say("error", type(error).__name__, str(error).replace("\n", " | "))
    dist.barrier()
    dist.destroy_process_group()
