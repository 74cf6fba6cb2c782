"""Megatron-Core with its steps in ckptkit: `SaveStrategy` and `LoadStrategy` are what its
`dist_checkpointing.save` and `load` take as `sharded_strategy`; `load` finds the newest step.
"""

from __future__ import annotations

from ckptkit.plugins.framework import Framework

_FRAMEWORK = Framework("megatron-core", "0.16", "megatron")
_CHECKPOINTS = "megatron.core.dist_checkpointing"
_GROUPS = (
    *("pipeline_model_parallel", "tensor_model_parallel", "data_parallel", "context_parallel"),
    *("expert_model_parallel", "expert_tensor_parallel", "expert_data_parallel"),
)
for _module, *_names in (
    (f"{_CHECKPOINTS}.dict_utils", "dict_list_map_outplace", "nested_values"),
    (f"{_CHECKPOINTS}.mapping", "ShardedObject", "ShardedTensor", "is_main_replica"),
    (f"{_CHECKPOINTS}.strategies.async_utils", "AsyncRequest"),
    ("megatron.core.parallel_state", "model_parallel_is_initialized"),
    *(("megatron.core.parallel_state", f"get_{group}_rank") for group in _GROUPS),
    *(("megatron.core.parallel_state", f"get_{group}_world_size") for group in _GROUPS),
):
    for _name in _names:
        _FRAMEWORK.private(_FRAMEWORK.module(_module), _name)
_strategies = _FRAMEWORK.module(f"{_CHECKPOINTS}.strategies.torch")
# What it calls otherwise would save and load without us, unnoticed.
for _class, _name, *_takes in (
    ("TorchDistSaveShardedStrategy", "async_save", "sharded_state_dict", "checkpoint_dir"),
    ("TorchDistSaveShardedStrategy", "save", "sharded_state_dict", "checkpoint_dir"),
    ("TorchDistLoadShardedStrategy", "load", "sharded_state_dict", "checkpoint_dir"),
    ("TorchDistLoadShardedStrategy", "load_tensors_metadata", "checkpoint_dir", "metadata"),
    ("TorchDistLoadShardedStrategy", "load_sharded_metadata", "checkpoint_dir"),
    ("TorchDistLoadShardedStrategy", "check_backend_compatibility", "loaded_version"),
):
    _FRAMEWORK.private(_FRAMEWORK.private(_strategies, _class), _name, _takes)

# Only what is known to be there is imported.
from ckptkit.plugins.megatron.load import LoadStrategy, load  # noqa: E402
from ckptkit.plugins.megatron.save import SaveStrategy  # noqa: E402

__all__ = ["LoadStrategy", "SaveStrategy", "load"]
