"""Checkpoints that DeepSpeed writes on a CPU, and what DeepSpeed itself has of them.

`write_deepspeed.py OUT`, or `OUT CASE …` to try some; `deepspeed.zip` is all that is in OUT then.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import socket
import sys
import types
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_models import (  # type: ignore[import-not-found] # it is beside this program
    Block,
    Data,
    Embedding,
    Hidden,
    Mixed,
    Model,
    Sparse,
    distance,
    logits,
    mixtral,
)
from torch import nn

# By name: ranks, precision, and what is said of ZeRO. More than DeepSpeed are told `groups` of
# parameters, whether some are `frozen`, and in what to `accumulate`.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "zero0-all": (2, "fp32", {"stage": 0, "frozen": False}),
    "zero0-bf16": (2, "bf16", {"stage": 0}),
    "zero1": (2, "fp32", {"stage": 1}),
    "zero1-bf16": (2, "bf16", {"stage": 1, "accumulate": "fp32"}),
    "zero2": (2, "bf16", {"stage": 2, "round_robin_gradients": True}),
    "zero2-alone": (1, "fp32", {"stage": 2}),
    "zero2-three": (3, "fp32", {"stage": 2, "groups": 2, "round_robin_gradients": True}),
    "zero2-aligned": (2, "bf16", {"stage": 2, "parameter_alignment": True}),
    "zero2-fp16": (2, "fp16", {"stage": 2}),
    "zero3": (2, "bf16", {"stage": 3}),
    "zero3-hpz": (4, "bf16", {"stage": 3, "zero_hpz_partition_size": 2}),
    "zero3-three": (3, "fp32", {"stage": 3, "groups": 2, "sub_group_size": 20}),
}


def as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    tensor = torch.as_tensor(tensor).detach().cpu().contiguous()
    found = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return np.asarray(found)


def config(precision: str, zero: dict[str, Any]) -> dict[str, Any]:
    zero = dict(zero)
    zero.pop("groups", None)
    zero.pop("frozen", None)
    accumulate = zero.pop("accumulate", precision)
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if precision != "fp32":
        made[precision] = {"enabled": True}
    if precision == "fp16":
        made[precision]["initial_scale_power"] = 8
    if accumulate != precision:
        made["data_types"] = {"grad_accum_dtype": accumulate}
    return made


def state_of(engine: Any, parameter: Any, zero: dict[str, Any]) -> dict[str, Any]:
    """What the live engine has of a parameter: its master weight, its state, and its low copy."""
    inner = engine.optimizer.optimizer.state
    found = {"step": as_numpy(next(iter(inner.values()))["step"])}
    if zero["stage"] == 3:
        with deepspeed.zero.GatheredParameters([parameter]):
            found["low"] = parameter.detach().clone()
    else:
        found["low"] = parameter.detach()
    if not zero.get("round_robin_gradients"):
        found["fp32"] = as_numpy(safe_get_full_fp32_param(parameter))
        states = {k: safe_get_full_optimizer_state(parameter, k) for k in ("exp_avg", "exp_avg_sq")}
        return found | {key: as_numpy(value) for key, value in states.items()}
    # These calls forget that the order is another one. Where it is, parameters are views.
    (group,) = (
        number
        for number, group in enumerate(engine.optimizer.round_robin_bit16_groups)
        if any(each is parameter for each in group)
    )
    flat = engine.optimizer.single_partition_of_fp32_groups[group]
    for key, part in {"fp32": flat, **inner[flat]}.items():
        if part.ndim:
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part.detach())
            begin = parameter.storage_offset()
            whole = torch.cat(parts)[begin : begin + parameter.numel()]
            found[key] = as_numpy(whole.view(parameter.shape))
    return found


def write(case: str, out: Path, rank: int) -> None:
    _, precision, zero = CASES[case]
    torch.manual_seed(7)
    net = Model()
    net.frozen.requires_grad_(requires_grad=not zero.get("frozen", True))
    parameters: Any = [p for p in net.parameters() if p.requires_grad]
    if zero.get("groups"):
        flat = [p for p in parameters if p.ndim == 1]
        parameters = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": flat, "weight_decay": 0.0, "lr": 0.02},
        ]
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=parameters, config=config(precision, zero)
    )
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        loss = engine(torch.randint(7, (2, 4))).float().square().mean()
        engine.backward(loss)
        engine.step()
    place = out / case
    engine.save_checkpoint(str(place), client_state={"epoch": 2, "rng": torch.arange(5)})
    arrays: dict[str, Any] = {}
    masters: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and zero["stage"]:
            found = state_of(engine, parameter, zero)
            masters[name] = found.pop("fp32")
            low = found.pop("low")
            assert torch.equal(torch.from_numpy(masters[name]).to(low.dtype), low), name
            arrays |= {f"optimizer/{name}/{key}": value for key, value in found.items()}
    if rank == 0:
        tag = place / (place / "latest").read_text()
        kind = "zero_pp_rank_0_" if zero["stage"] == 3 else ""
        states = torch.load(tag / f"{kind}mp_rank_00_model_states.pt", weights_only=False)
        if zero["stage"] and "accumulate" not in zero:
            weights = get_fp32_state_dict_from_zero_checkpoint(str(place))
            for name, value in masters.items():
                assert np.array_equal(as_numpy(weights[name]), value), name
            arrays |= {f"model/{name}": as_numpy(value) for name, value in weights.items()}
        else:  # the script does not know these
            arrays |= {f"model/{name}": as_numpy(value) for name, value in states["module"].items()}
            arrays |= {f"model/{name}": value for name, value in masters.items()}
            arrays["model/head.weight"] = arrays["model/embed.weight"]
        if optimizer := states["optimizer"]:
            # Which parameter has which number is told by the order, where all have one.
            names = [name for name, _ in engine.module.named_parameters()]
            inner = optimizer.get("optimizer_state_dict", optimizer)["state"]
            for number, values in inner.items():
                named = f"optimizer/{names[number]}" if len(inner) == len(names) else ""
                for key, value in values.items():
                    arrays[f"{named or f'other/optimizer/state/{number}'}/{key}"] = as_numpy(value)
            for number, group in enumerate(optimizer.get("fp32_groups", ())):
                for index, value in enumerate(group):
                    arrays[f"other/fp32_groups/{number}/{index}"] = as_numpy(value)
        # Those are converted to fp32 on the way: here they are as they were saved.
        kept = ["scale", "seen", *(["frozen.weight", "frozen.bias"] if zero["stage"] < 3 else [])]
        arrays |= {f"model/{name}": as_numpy(states["module"][name]) for name in kept}
        arrays["other/rng"] = np.arange(5)
        np.savez(out / f"{case}.npz", **arrays)


# By name: precision, and the stage of ZeRO.
PIPES = {
    "pipe": ("fp32", 1),
    "pipe-bf16": ("bf16", 0),
    "pipe-moe0": ("fp32", 0),
    "pipe-moe1": ("fp32", 1),
}


def write_pipe(case: str, out: Path, rank: int) -> None:
    """Two stages of two ranks, which share a module; with experts both ranks have half of them."""
    torch.manual_seed(7)
    hidden = [LayerSpec(nn.Linear, 5, 5), LayerSpec(Hidden), nn.ReLU(), LayerSpec(nn.LayerNorm, 5)]
    if "moe" in case:
        hidden = [LayerSpec(Mixed), LayerSpec(nn.LayerNorm, 5), LayerSpec(Mixed)]
    tied = TiedLayerSpec("embed", Embedding, forward_fn=logits)
    layers = [TiedLayerSpec("embed", Embedding), *hidden, tied]
    net = PipelineModule(layers, num_stages=2, loss_fn=distance, partition_method="uniform")
    torch.manual_seed(7 + rank)
    scattered(net)
    precision, stage = PIPES[case]
    made = config(precision, {"stage": stage}) | {"gradient_accumulation_steps": 2}
    parameters = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=made)
    data = iter(deepspeed.utils.RepeatingLoader(engine.deepspeed_io(Data())))
    for _ in range(3):
        engine.train_batch(data)
    engine.save_checkpoint(str(out / case))
    if case == "pipe-moe1":  # it was done when experts had no state yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    own = {numbered(k, rank % 2, 2): v for k, v in net.state_dict().items()}
    mine: dict[str, Any] = {f"model/{k}": as_numpy(v) for k, v in own.items()}
    for key_of_rank, parameter in net.named_parameters():
        name = numbered(key_of_rank, rank % 2, 2)
        if not parameter.requires_grad:
            continue
        mine[f"optimizer/{name}/step"] = as_numpy(torch.tensor(3.0))
        if case != "pipe-moe0":
            mine[f"model/{name}"] = as_numpy(safe_get_full_fp32_param(parameter))
        for key in ("exp_avg", "exp_avg_sq"):
            mine[f"optimizer/{name}/{key}"] = as_numpy(
                engine.optimizer.state[parameter][key]
                if case == "pipe-moe0"
                else safe_get_full_optimizer_state(parameter, key)
            )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    arrays: dict[str, Any] = {}
    for each in found:
        for name, value in each.items():
            assert np.array_equal(arrays.setdefault(name, value), value), name
    if rank == 0:
        np.savez(out / f"{case}.npz", **arrays)


def write_tensor_parallel(case: str, out: Path, rank: int) -> None:
    """Two ranks of tensor parallelism, two of data parallelism. What is wanted is what DeepSpeed's
    own converter makes of it.
    """
    torch.manual_seed(7)
    specs: list[dict[str, Any]] = [
        {"patterns": [r".*qkv_proj\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*(o_proj|down_proj)\.weight$"], "partition_type": "row"},
        {"patterns": [r".*up_proj\.weight$"], "partition_type": "column"},
    ]
    specs[0]["partition_dim"] = 0
    tensor_parallel = {"use_default_specs": False, "layer_specs": specs}
    made = config("fp32", {"stage": 1})
    made["tensor_parallel"] = {"autotp_size": 2, "partition_config": tensor_parallel}
    net = nn.Sequential(nn.Embedding(7, 6), Block(), nn.Linear(6, 7, bias=False))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=made)
    for step in range(3):
        torch.manual_seed(100 * step + rank // 2)
        engine.backward(engine(torch.randint(7, (2, 4))).square().mean())
        engine.step()
    engine.save_checkpoint(str(out / case))
    if rank == 0:
        arrays = universal(out / case, out / "converted")
        shutil.rmtree(out / "converted")
        arrays["model/1.scale"] = np.ones(2, "float32")
        np.savez(out / f"{case}.npz", **arrays)


def scattered(net: nn.Module) -> None:
    """Make the experts of ranks unlike, which DeepSpeed makes alike."""
    for name, value in net.state_dict().items():
        if "deepspeed_experts" in name and value.ndim:
            value.normal_()


def numbered(name: str, team: int, ep_size: int) -> str:
    """What an expert of one of so many teams of ranks is called in the whole model."""
    match = re.fullmatch(r"(.*deepspeed_experts\.)(\d+)(\..*)", name)
    return f"{match[1]}{int(match[2]) + team * (4 // ep_size)}{match[3]}" if match else name


# By name: ranks, how many of these have all experts, precision, and what is said of ZeRO.
EXPERTS: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "moe0": (2, 2, "fp32", {"stage": 0}),
    "moe1": (4, 2, "bf16", {"stage": 1, "accumulate": "fp32"}),
    "moe1-neighbours": (4, 2, "fp32", {"stage": 1}),
    "moe2": (2, 2, "fp32", {"stage": 2}),
    "moe2-whole": (2, 1, "bf16", {"stage": 2}),
    "autoep0": (2, 2, "fp32", {"stage": 0}),
    "autoep2": (4, 2, "bf16", {"stage": 2}),
    "autoep3": (4, 2, "bf16", {"stage": 3}),
}


def write_experts(case: str, out: Path, rank: int) -> None:
    """What is wanted is what another engine has that has loaded what the first saved."""
    world, ep_size, precision, zero = EXPERTS[case]
    is_auto = case.startswith("autoep")
    made = config(precision, zero)
    made["use_data_before_expert_parallelism"] = case.endswith("neighbours")
    own = {"autoep_size": ep_size, "use_grouped_mm": False, "preset_model": "mixtral"}
    made["expert_parallel"] = {"enabled": is_auto, **own}

    def engine_of(seed: int) -> Any:
        torch.manual_seed(seed)
        net = mixtral() if is_auto else Sparse(ep_size)
        torch.manual_seed(seed + rank)
        scattered(net)
        given: Any = list(net.parameters())
        return deepspeed.initialize(model=net, model_parameters=given, config=made)[0]

    engine = engine_of(7)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        x = torch.randint(7, (2, 4))
        loss = engine(input_ids=x, labels=x).loss if is_auto else engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(out / case))
    engine = engine_of(70)
    engine.load_checkpoint(str(out / case))
    if zero["stage"] in (1, 2):  # else these are found after the next step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    is_data_first = made["use_data_before_expert_parallelism"]
    team = rank // (world // ep_size) if is_data_first else rank % ep_size
    mine: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if zero["stage"]:
            found = state_of(engine, parameter, zero)
        else:
            found = {key: as_numpy(it) for key, it in engine.optimizer.state[parameter].items()}
            found["fp32"] = as_numpy(parameter)
        mine |= {f"{name} {key}": it for key, it in found.items() if key != "low"}
    buffers = {n: it for n, it in engine.module.named_buffers() if n in engine.module.state_dict()}
    mine |= {f"{name} buffer": as_numpy(value) for name, value in buffers.items()}
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, (team, mine))
    arrays: dict[str, Any] = {}
    stacked: dict[str, dict[int, Any]] = {}
    for of_team, each in by_rank:
        for key, value in each.items():
            name, kind = key.split()
            name = numbered(name, of_team, ep_size)
            whole = f"model/{name}" if kind in ("fp32", "buffer") else f"optimizer/{name}/{kind}"
            if re.fullmatch(r".*\.experts\.w[123]", name) and value.ndim:
                stacked.setdefault(whole, {})[of_team] = value
            else:
                assert np.array_equal(arrays.setdefault(whole, value), value), whole
    for name, parts in stacked.items():
        arrays[name] = np.concatenate([parts[number] for number in range(ep_size)])
    for name in [name for name in arrays if ".router." in name and name.startswith("model/")]:
        arrays[name.replace(".router.", ".gate.")] = arrays[name]
    if rank == 0:
        np.savez(out / f"{case}.npz", **arrays)


def universal(place: Path, out: Path) -> dict[str, Any]:
    """A Universal Checkpoint of one, and what is in it."""
    tag = out / "global_step3_universal"
    given: dict[str, Any] = {
        "num_extract_workers": 1,
        "num_merge_workers": 1,
        "keep_temp_folder": False,
    }
    given |= {"strict": True, "inject_missing_state": True}
    given |= {"input_folder": str(place / "global_step3"), "output_folder": str(tag)}
    ds_to_universal.main(types.SimpleNamespace(**given))
    steps = torch.load(tag / "zero" / "optimizer_state.pt", weights_only=False)
    arrays = {}
    for file in sorted(tag.glob("zero/*/*.pt")):
        value = torch.load(file, weights_only=False)
        value = value["param"] if isinstance(value, dict) else value
        name = file.parent.name
        key = f"model/{name}" if file.stem == "fp32" else f"optimizer/{name}/{file.stem}"
        arrays[key] = as_numpy(value)
        if "optimizer_state_dict" in steps:  # of stage 3
            step = steps["optimizer_state_dict"]["state"][0]["step"]
            arrays[f"optimizer/{name}/step"] = as_numpy(step)
    return arrays


def worker(rank: int, world: int, port: int, out: str, cases: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    # It runs there, slowly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in cases:
        kind = write_pipe if case.startswith("pipe") else write_tensor_parallel
        kind = write if case in CASES else write_experts if case in EXPERTS else kind
        kind(case, Path(out), rank)


def main(out: str, *only: str) -> None:
    jobs = [(world, [c for c, it in CASES.items() if it[0] == world]) for world in (1, 2, 3, 4)]
    # Their groups of ranks are global: one in a process.
    jobs += [(4, [case]) for case in (*PIPES, "tp")]
    jobs += [(it[0], [case]) for case, it in EXPERTS.items()]
    for world, cases in (job for job in jobs if not only or {*job[1]} & {*only}):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=worker, args=(rank, world, port, out, cases))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a job on {world} ranks failed: {cases}")
    for case in {"zero1-bf16", "zero3"} & set(only or CASES):
        universal(Path(out) / case, Path(out) / f"{case}-universal")
    for script in Path(out).glob("*/zero_to_*.py"):
        script.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
