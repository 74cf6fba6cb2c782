"""Write checkpoints with Megatron-Core: `python write_megatron.py OUT`.

Jobs of four ranks train tiny models on a CPU with Megatron's own classes: GPTModel,
DistributedDataParallel, DistributedOptimizer. These ask for CUDA in a few places, which get a CPU
here. What is wanted of each checkpoint is what Megatron itself loads from it on one rank, into a
model that is not spread. Buckets of the distributed optimizer it loads only as they were saved: so
they are loaded by four ranks, and saved once more as Megatron's `fully_reshardable`.
"""

from __future__ import annotations

import io
import os
import random
import socket
import sys
import tempfile
import warnings
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing.spawn import start_processes

STEPS = 2
# Few numbers, so that the files are small when they are zipped.
LEVELS = torch.tensor([-5, -3, -2, -1, 1, 2, 4, 7]) / 16


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any] = field(default_factory=dict)
    sharding: str = "dp_reshardable"
    metadata: dict[str, Any] = field(default_factory=dict)
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    is_tied: bool = False
    dtype: torch.dtype = torch.bfloat16
    lr: float = 0.01
    bucket_size: int | None = None
    is_parallel: bool = True
    """Whether the ranks of a data-parallel group share out what they write, as is the default."""


LLAMA = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
EXPERTS = LLAMA | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 4}
CASES = (
    Case("reshardable", LLAMA, "fully_reshardable", tensor=2),
    # In bfloat16 norms are still ones after such steps: nothing tells one from the other.
    Case("buckets", LLAMA, tensor=2, lr=1e-4, bucket_size=400),
    Case(
        "pipeline",
        {"add_bias_linear": True, "qk_layernorm": True},
        tensor=2,
        pipeline=2,
        is_tied=True,
        dtype=torch.float32,
        metadata={"singleton_local_shards": True},
        is_parallel=False,
    ),
    Case("experts", EXPERTS, expert=2, lr=1e-4),
    Case(
        "singletons",
        EXPERTS,
        "fully_reshardable",
        metadata={"singleton_local_shards": True},
        expert=2,
    ),
)


def on_cpu() -> None:
    """Let Megatron take a CPU for a GPU."""
    library: Any = torch
    of_tensors: Any = torch.Tensor
    kind = of_tensors.type
    loaded = DistributedOptimizer._set_main_param_and_optimizer_states

    def placed(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    def typed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    def with_steps(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(parameter)
        loaded(self, parameter, {**own, **tensors})

    for name in ("tensor", "zeros", "ones", "empty"):
        setattr(library, name, placed(getattr(library, name)))
    # Without Transformer Engine it is looked for all the same.
    library_of_experts: Any = moe_utils
    library_of_experts.te_general_gemm = None
    library.cuda.current_device = lambda: "cpu"
    library.cuda.synchronize = lambda *_: None
    # No random numbers are drawn where nothing is dropped out.
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    of_tensors.cuda = lambda self, *_, **__: self
    of_tensors.type = typed
    # Adam of torch counts steps in a tensor for each parameter, which is in no file, and which
    # Megatron misses there.
    DistributedOptimizer._set_main_param_and_optimizer_states = with_steps


def made(case: Case, ranks: int) -> tuple[Any, Any]:
    """A model as Megatron wraps it, and its optimizer: spread over four ranks, or on one."""
    tensor, pipeline, expert = (
        size if ranks > 1 else 1 for size in (case.tensor, case.pipeline, case.expert)
    )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor, pipeline, expert_model_parallel_size=expert, expert_tensor_parallel_size=1
    )
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=12,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=1,
        bf16=case.dtype == torch.bfloat16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        **case.model,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.is_tied,
    ).to(case.dtype)
    for name, parameter in model.named_parameters():
        if case.expert > 1 and ".experts." in name:
            # On one rank Megatron would have one optimizer for these and all others, and not load
            # what two have saved.
            parameter.allreduce = False
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=case.bucket_size
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=case.lr,
            bf16=case.dtype == torch.bfloat16,
            params_dtype=case.dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        ),
        [wrapped],
    )
    return wrapped, optimizer


def shares(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """Which ranks have other elements of a parameter: of all others the same are drawn."""
    tensor = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if getattr(parameter, "shared_embedding", False):
        stage = 0
    expert = parallel_state.get_expert_model_parallel_rank()
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return stage, tensor if is_cut else 0, 0 if getattr(parameter, "allreduce", True) else expert


def trained(case: Case, model: Any, optimizer: Any) -> None:
    """Give a model numbers, and train it some steps with gradients of few numbers."""

    def drawn(number: int, step: int, like: torch.Tensor, where: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((number, step, *where)))
        picked = torch.randint(len(LEVELS), like.shape, generator=generator)
        return LEVELS[picked] if step == 0 else 1.0 - picked % 2 * 3.0

    # Tied parameters are the first of one stage and the last of the other.
    named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
    numbers = {
        name: 99 if getattr(p, "shared_embedding", False) else number
        for number, (name, p) in enumerate(named)
    }
    for name, parameter in named:
        if not name.endswith(("norm.weight", "norm.bias")):
            parameter.data.copy_(drawn(numbers[name], 0, parameter, shares(parameter)))
    optimizer.reload_model_params()
    for step in range(1, STEPS + 1):
        for name, parameter in named:
            parameter.main_grad.copy_(drawn(numbers[name], step, parameter, shares(parameter)))
        optimizer.step()


def metadata_of(case: Case, sharding: str) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # As Megatron-LM has it.
    told = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
    return {**told, "dp_cp_group": group, **case.metadata}


def states(
    case: Case, model: Any, optimizer: Any, sharding: str, is_loading: bool = False
) -> dict[str, Any]:
    metadata = metadata_of(case, sharding)
    of_model = model.module.sharded_state_dict(metadata=metadata)
    found = {"model": of_model}
    found["optimizer"] = optimizer.sharded_state_dict(of_model, is_loading, metadata=metadata)
    return found


def besides(case: Case) -> dict[str, Any]:
    """What a training run of Megatron-LM saves beside model and optimizer."""
    place = parallel_state.get_pipeline_model_parallel_rank()
    place = place, parallel_state.get_tensor_model_parallel_rank()
    of_ranks = {"random_rng_state": random.Random(3).getstate()[1][:4], "seed": place}
    opaque = io.BytesIO(b"as Transformer Engine has it")
    replica = dist.get_rank() if sum(place) == 0 else 1
    args = Namespace(
        attention_backend=AttnBackend.auto,
        betas=(0.9, 0.95),
        group_query_attention=True,
        hidden_size=8,
        kv_channels=2,
        num_attention_heads=4,
        num_layers=2,
        num_query_groups=2,
        padded_vocab_size=32,
        params_dtype=case.dtype,
        pipeline_model_parallel_size=case.pipeline,
        tensor_model_parallel_size=case.tensor,
        vocab_size=30,
    )
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 12},
        "rng_state": ShardedObject(
            "rng_state",
            [of_ranks],
            (case.pipeline, case.tensor),
            place,
            parallel_state.get_data_parallel_rank(),
        ),
        "extra": ShardedObject("decoder.final_layernorm._extra_state", opaque, (1,), (0,), replica),
    }


def save(case: Case, folder: Path, state: dict[str, Any], sharding: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    if case.is_parallel:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    content = {k: v for k, v in metadata_of(case, sharding).items() if k != "dp_cp_group"}
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=content)


def load(case: Case, folder: Path, model: Any, optimizer: Any, sharding: str) -> None:
    optimizer.step()  # a new one has no state yet that could be loaded into
    state = states(case, model, optimizer, sharding, is_loading=True)
    found = dist_checkpointing.load(state, str(folder))
    with torch.no_grad():
        model.module.load_state_dict(found["model"], strict=False)
        optimizer.load_state_dict(found["optimizer"])


def write(rank: int, port: int, out: str, between: str) -> None:
    started(rank, 4, port)
    for case in CASES:
        model, optimizer = made(case, 4)
        trained(case, model, optimizer)
        run = Path(out, case.name)
        place = run / f"iter_{STEPS:07}"
        state = states(case, model, optimizer, case.sharding) | besides(case)
        save(case, place, state, case.sharding)
        if rank == 0:
            (run / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        if case.sharding == "dp_reshardable":
            model, optimizer = made(case, 4)
            load(case, place, model, optimizer, case.sharding)
            again = states(case, model, optimizer, "fully_reshardable")
            for number, single in enumerate(optimizer.chained_optimizers):
                is_only = len(optimizer.chained_optimizers) == 1
                correct(single, again["optimizer"] if is_only else again["optimizer"][number])
            save(case, Path(between, case.name), again, "fully_reshardable")


def correct(optimizer: Any, told: dict[str, Any]) -> None:
    """Put an optimizer's states into what it tells of itself as `fully_reshardable`.

    Megatron takes them from one buffer without the padding between buckets, at the places that they
    have in one with padding: of several buckets it saves other elements.
    """
    parameters = [p for buffer in optimizer.buffers for p in buffer.param_index_map]
    for number, parameter in enumerate(parameters):
        mine: dict[str, Any] = {}
        if parameter in optimizer.model_param_group_index_map:
            mine = optimizer._get_main_param_and_optimizer_states(parameter)
            mine["range"] = optimizer._get_model_param_range_map(parameter)["param"]
        of_all: list[Any] = [None] * optimizer.data_parallel_group.size()
        dist.all_gather_object(of_all, mine, group=optimizer.data_parallel_group)
        for key, one in told["param_state"][number].items():
            whole = torch.full((parameter.numel(),), torch.nan)
            for part in of_all:
                if part:
                    whole[part["range"].start : part["range"].end] = part[key]
            assert not whole.isnan().any()
            told["param_state"][number][key] = replace(one, data=whole.view(parameter.shape))


def want(_: int, port: int, out: str, between: str) -> None:
    """Load what is written on one rank, and note it by the names in the checkpoint."""
    started(0, 1, port)
    for case in CASES:
        place = Path(out, case.name, f"iter_{STEPS:07}")
        if case.sharding == "dp_reshardable":
            place = Path(between, case.name)
        model, optimizer = made(case, 1)
        load(case, place, model, optimizer, "fully_reshardable")
        named = stored_names(model.module)
        wanted = {}
        for name, parameter in model.module.named_parameters():
            wanted[f"model/{named[name]}"] = as_numpy(parameter)
        for single in optimizer.chained_optimizers:
            for parameter in single.model_param_gbuf_map:
                name = next(n for n, p in model.module.named_parameters() if p is parameter)
                found = single._get_main_param_and_optimizer_states(parameter)
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    value = as_numpy(found[key]).reshape(parameter.shape)
                    wanted[f"optimizer/{named[name]}/{key}"] = value
        np.savez_compressed(Path(out, f"{case.name}.npz"), **wanted)
        if case.name in ("reshardable", "singletons"):
            logits = logits_of(case, model.module)
            np.savez_compressed(Path(out, f"{case.name}.logits.npz"), **logits)


def logits_of(case: Case, model: Any) -> dict[str, Any]:
    """Some words, and what a model says of them, computed in 32 bits."""
    wide, _ = made(replace(case, dtype=torch.float32), 1)
    for parameter, value in zip(wide.module.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(value.data)
    words = torch.tensor([[3, 1, 4, 1, 5, 29, 2, 6]])
    places = torch.arange(words.shape[1])[None]
    is_later = places[0] > places[0][:, None]
    with torch.no_grad():
        logits = wide.module.eval()(words, places, is_later[None, None])
    return {"words": words.numpy(), "logits": logits.numpy()}


def stored_names(model: Any) -> dict[str, str]:
    """The names in a checkpoint of layers and experts one by one, by those of the parameters."""
    of_one = {"singleton_local_shards": True}
    found = {}
    for name, sharded in model.sharded_state_dict(metadata=of_one).items():
        found[name] = sharded.key
    return found


def as_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def started(rank: int, ranks: int, port: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    on_cpu()
    dist.init_process_group("gloo", rank=rank, world_size=ranks)


def main(out: str) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with tempfile.TemporaryDirectory() as between:
        for job, ranks in ((write, 4), (want, 1)):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            start_processes(job, (port, out, between), nprocs=ranks, start_method="spawn")


if __name__ == "__main__":
    main(sys.argv[1])
