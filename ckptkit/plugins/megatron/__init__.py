"""Megatron-Core with its steps in ckptkit: `SaveStrategy` and `LoadStrategy` are what its
`dist_checkpointing.save` and `load` take as `sharded_strategy`; `load` finds the newest step.
"""

from __future__ import annotations

from ckptkit.plugins.framework import Framework

_GROUPS = (
    *("pipeline_model_parallel", "tensor_model_parallel", "data_parallel", "context_parallel"),
    *("expert_model_parallel", "expert_tensor_parallel", "expert_data_parallel"),
)
_CHECKPOINTS = "megatron.core.dist_checkpointing"
_SAVE, _LOAD = "TorchDistSaveShardedStrategy", "TorchDistLoadShardedStrategy"
Framework("megatron-core", "0.16", "megatron").check(
    {
        f"{_CHECKPOINTS}.dict_utils": ["dict_list_map_outplace", "nested_values"],
        f"{_CHECKPOINTS}.mapping": ["ShardedObject", "ShardedTensor", "is_main_replica"],
        f"{_CHECKPOINTS}.strategies.async_utils": ["AsyncRequest"],
        "megatron.core.parallel_state": [
            "model_parallel_is_initialized",
            *(f"get_{group}_{what}" for group in _GROUPS for what in ("rank", "world_size")),
        ],
        # What it calls otherwise would save and load without us, unnoticed.
        f"{_CHECKPOINTS}.strategies.torch": [
            *(
                f"{_SAVE}.{name}(sharded_state_dict, checkpoint_dir)"
                for name in ("save", "async_save")
            ),
            f"{_LOAD}.load(sharded_state_dict, checkpoint_dir)",
            f"{_LOAD}.load_tensors_metadata(checkpoint_dir, metadata)",
            f"{_LOAD}.load_sharded_metadata(checkpoint_dir)",
            f"{_LOAD}.check_backend_compatibility(loaded_version)",
        ],
    }
)

# Only what is known to be there is imported.
from ckptkit.plugins.megatron.load import LoadStrategy, load  # noqa: E402
from ckptkit.plugins.megatron.save import SaveStrategy  # noqa: E402

__all__ = ["LoadStrategy", "SaveStrategy", "load"]
