"""Values that Megatron saves beside tensors, and what its older versions saved, written by hand."""

from __future__ import annotations

import json
import pickle
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

import ckptkit
from ckptkit.errors import FormatError
from tests.cli.programs import ckpt
from tests.foreign.contract import same
from tests.foreign.test_torch_file import rewritten


def saved(place: Path, state: dict[str, Any], common: dict[str, Any]) -> None:
    """A checkpoint as Megatron writes one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(state, checkpoint_id=place, planner=planner, no_dist=True)
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (place / "metadata.json").write_text(json.dumps(said))
    torch.save(common, place / "common.pt")


def test_values_of_all_ranks_may_be_an_object(tmp_path: Path) -> None:
    """As later versions of Megatron have them."""
    common = {"args": Namespace(vocab_size=5), "iteration": 7, "checkpoint_version": 3.0}
    state = {"output_layer.weight": torch.ones(6, 2), "common_state/shard_0_1": [common]}
    saved(tmp_path, state, {})
    (tmp_path / "common.pt").unlink()
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.step == 7
        assert checkpoint.details["vocab_size"] == 5
        names = {item.name for item in checkpoint.manifest.objects}
        assert names == {"extra/args", "extra/iteration", "extra/checkpoint_version"}
    # An older version saved into the same folder before.
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    with pytest.raises(FormatError, match="is of an older save into the same folder") as caught:
        ckptkit.open(tmp_path)
    assert "common.pt" in str(caught.value)
    assert "common_state" in str(caught.value)


def test_what_megatron_says_of_the_optimizer_is_beside_what_is_there_by_this_name(
    tmp_path: Path,
) -> None:
    """Else a step that was imported would have two objects of one name, and not be opened."""
    said = {"optimizer": {"count": 3}, "iteration": 7}
    state = {"output_layer.weight": torch.ones(6, 2), "optimizer/shard_0_1": [{"kind": "own"}]}
    saved(tmp_path / "theirs", state, said)
    assert ckpt("import", tmp_path / "theirs", tmp_path / "ours").exit_code == 0
    with ckptkit.open(tmp_path / "ours") as checkpoint:
        found = {item.name: item.value for item in checkpoint.manifest.objects}
    assert found["extra/optimizer"] == {"kind": "own"}
    assert found["extra/optimizer.said"] == [{"count": 3}]


def test_namespaces_without_an_end_are_refused(tmp_path: Path) -> None:
    """One that is in itself; and forty, each of them twice in the next."""
    endless = Namespace()
    endless.me = endless
    saved(tmp_path, {"output_layer.weight": torch.ones(6, 2)}, {"args": endless})
    with pytest.raises(FormatError, match="too many levels") as caught:
        ckptkit.open(tmp_path)
    assert "common.pt" in str(caught.value)
    made = b"".join(b"cargparse\nNamespace\n)\x81q%c" % n for n in range(1, 41))
    twice = b"".join(b"h%c}(U\1ah%cU\1bh%cub0" % (n, n - 1, n - 1) for n in range(2, 41))
    data = b"\x80\2]q\0(" + made + b"e" + twice + b"0}U\4argsh(s."
    torch.save({}, tmp_path / "common.pt")
    rewritten(tmp_path / "common.pt", "data.pkl", data)
    with pytest.raises(FormatError, match="or too many") as caught:
        ckptkit.open(tmp_path)


def test_options_are_kept_where_the_states_beside_them_are_nobodys(tmp_path: Path) -> None:
    """As `dp_zero_gather_scatter` saves them: rows of all parameters of a bucket, of rank 0."""
    row = {"param": torch.ones(12), "exp_avg": torch.ones(12), "numel_unpadded": 12}
    states = {0: {(torch.bfloat16, torch.float32): row}, "buckets_coalesced": True}
    groups = {"param_groups": [{"lr": 0.5, "step": 7}]}
    state: dict[str, Any] = {"output_layer.weight": torch.ones(6, 2)}
    for number in range(2):
        of_rank = f"optimizer.distributed.dp_group_idx_{number}"
        state[f"{of_rank}.param_state/shard_0_1"] = [states]
        state[f"{of_rank}.optimizer/shard_0_1"] = [groups]
    own = {"param_state": {0: {"step": torch.tensor(7.0)}}, "kind": "own"}
    saved(tmp_path, state, {"optimizer": {0: own}})
    with ckptkit.open(tmp_path) as checkpoint:
        found = {item.name: item.value for item in checkpoint.manifest.objects}
        assert found["extra/optimizer"] == [{0: {"kind": "own"}}, {"optimizer": groups}]
        lost = checkpoint.details["left_out"]["optimizer.param_state"]
    assert "--dist-ckpt-optim-fully-reshardable" in lost


def joined(place: Path, of: dict[str, torch.Size]) -> None:
    """Make one tensor of those in a checkpoint that are called as it is, with their places."""
    file = place / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    entries, items = metadata.state_dict_metadata, metadata.storage_data
    for key, shape in of.items():
        parts = {name: entries.pop(name) for name in list(entries) if name.startswith(f"{key}@")}
        chunks = []
        for part, entry in parts.items():
            offset = torch.Size(map(int, part.partition("@")[2].split(",")))
            chunks.append(ChunkStorageMetadata(offset, entry.size))
            items[MetadataIndex(key, offset)] = items.pop(MetadataIndex(part, [0] * len(offset)))
        entries[key] = replace(next(iter(parts.values())), size=shape, chunks=chunks)
    file.write_bytes(pickle.dumps(metadata))


def test_states_in_rows_get_the_shapes_of_their_parameters(tmp_path: Path) -> None:
    """Up to 0.14 Megatron has a row for what each rank of tensor parallelism has of a parameter,
    cut anywhere by those of data parallelism.
    """
    columns, norm = torch.arange(24.0).reshape(6, 4), torch.arange(5.0)
    stacked = torch.arange(32.0).reshape(2, 8, 2)
    model = {
        "output_layer.weight": columns,
        "decoder.layers.mlp.linear_fc1.weight": stacked,
        "decoder.final_layernorm.weight": norm,
    }
    rows = {
        "output_layer.weight": torch.stack(columns.split(2, dim=1)).reshape(1, 2, 12),
        "decoder.layers.mlp.linear_fc1.weight": stacked.reshape(2, 2, 1, 8),
        "decoder.final_layernorm.weight": norm.reshape(1, 5),
    }
    state: dict[str, Any] = dict(model)
    shapes: dict[str, torch.Size] = {}
    for key, grid in rows.items():
        for kind in ("fp32_param", "exp_avg"):
            stored = f"optimizer.state.{kind}.{key}"
            shapes[stored] = grid.shape
            for place in np.ndindex(grid.shape[:-1]):
                for begin, part in zip((0, 3), grid[place].tensor_split((3,)), strict=True):
                    at = ",".join(map(str, (*place, begin)))
                    state[f"{stored}@{at}"] = part.clone().reshape(*[1] * len(place), -1)
    state["optimizer.state.exp_avg_sq.output_layer.weight"] = torch.ones(1, 2, 10)
    saved(tmp_path, state, {"optimizer": {"param_groups": [{"lr": 0.5, "step": 7}]}})
    joined(tmp_path, shapes)
    with ckptkit.open(tmp_path) as checkpoint:
        arrays = {name: array[...] for name, array in checkpoint.arrays.items()}
        assert len(arrays) == 3 * 4
        for name, value in arrays.items():
            of = name.replace("optimizer/", "model/").split("/")[1]
            assert same(value, arrays[f"model/{of}"]), name
        (told,) = (it.value for it in checkpoint.manifest.objects if it.name == "optimizer")
        assert told[0]["values"]["output_layer.weight"] == {"step": 7}
        lost = checkpoint.details["left_out"]
    (reason,) = lost.values()
    assert reason == "its shape is (1, 2, 10), the parameter's (6, 4)"
