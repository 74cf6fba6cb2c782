"""Steps written as the files of other programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptkit
from ckptkit.checkpoint.export import files, formats
from ckptkit.errors import AlreadyExistsError, CorruptionError, UsageError
from ckptkit.model.dtype import DTYPES
from tests.checkpoint.saving import Tensor, add, random_values, save, save_by
from tests.cli.programs import ckpt, document
from tests.live.pool import Pool
from tests.servers.s3_server import Bucket


def llama(*, tied: bool) -> transformers.LlamaForCausalLM:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=11,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def step_of(model: transformers.LlamaForCausalLM, run: Path) -> Path:
    """A step of the model's weights, cut over ranks, and of optimizer state."""
    cut = {"fsdp": "shard(0)"}

    def fill(writer: ckptkit.Writer) -> None:
        for name, value in model.named_parameters():
            # As it may be: tied ones have the name that transformers leave out.
            is_tied = model.config.tie_word_embeddings and "embed" in name
            ours = "model/lm_head.weight" if is_tied else f"model/{name}"
            tensor = Tensor(value.detach().numpy(), cut)
            add(writer, ours, tensor)
            state = Tensor(tensor.whole * 2, cut)
            add(writer, f"optimizer/{name}/exp_avg", state, role="optimizer", of=ours)
            if is_tied:
                writer.add_alias(f"model/{name}", ours)

    save_by(run, fill, strategy="fsdp:4", step=7)
    return run


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(9)[None]).logits
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_opens_the_folder_and_computes_the_same(tied: bool, tmp_path: Path) -> None:
    model = llama(tied=tied)
    run = step_of(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    (tmp_path / "first" / "training_args.bin").write_bytes(b"x")
    (tmp_path / "first" / "LICENSES").mkdir()
    out = tmp_path / "out"
    found = document(
        "export", run, out, "--to-format", "hf", "--with", tmp_path / "first",
        "--max-file-size", "40KB",
    )  # fmt: skip
    other = {"name": "lm_head.weight", "written_as": "model.embed_tokens.weight"}
    assert found["tied"] == ([other] if tied else [])
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    again, said = loaded
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert torch.equal(logits(again), logits(model))
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2
    assert [path.name for path in shards] == [
        f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)
    ]
    assert all(path.stat().st_size < 48_000 for path in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    unique = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert index["metadata"]["total_size"] == sum(unique.values())
    assert {name: path.name for path in shards for name in load_file(path)} == index["weight_map"]
    assert sorted(found["files"]) == sorted(path.name for path in out.iterdir())
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "training_args.bin").exists()
    assert list(tmp_path.glob(".*")) == []


def test_a_step_with_other_names_opens_in_transformers_too(tmp_path: Path) -> None:
    model = llama(tied=False)
    run, megatron, out = step_of(model, tmp_path / "run"), tmp_path / "megatron", tmp_path / "out"
    model.save_pretrained(tmp_path / "first")
    names = "--names", "llama-megatron"
    config = "--config", tmp_path / "first" / "config.json"
    ckpt("reshard", "--to", "fsdp:2", *names, *config, run, megatron)
    with ckptkit.open(megatron) as checkpoint:
        assert "model/decoder.layers.10.self_attention.linear_qkv.weight" in checkpoint
    ckpt("export", megatron, out, "--to-format", "hf", "--with", tmp_path / "first", *names)
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("says", [{"tie_word_embeddings": False}, {}, None])
def test_what_transformers_will_not_tie_is_written_under_both_names(
    says: dict[str, bool] | None, tmp_path: Path
) -> None:
    model = llama(tied=True)
    run = step_of(model, tmp_path / "run")
    config = model.config.to_dict()
    del config["tie_word_embeddings"]
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text(json.dumps(config | (says or {})))
    beside = () if says is None else ("--with", tmp_path / "first")
    found = document("export", run, tmp_path / "out", "--to-format", "hf", *beside)
    assert found["tied"] == []
    if says is None:
        shutil.copy(tmp_path / "first" / "config.json", tmp_path / "out")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    again, said = loaded
    assert not said["missing_keys"]
    assert not again.config.tie_word_embeddings
    assert torch.equal(logits(again), logits(model))


def test_what_was_exported_is_the_model_of_the_step(tmp_path: Path) -> None:
    run = step_of(llama(tied=False), tmp_path / "run")
    result = ckpt("export", run, tmp_path / "out", "--to-format", "hf")
    assert result.exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert "of optimizer\n" in result.stderr
    assert "no config.json" in result.stderr
    assert ckptkit.diff(run, tmp_path / "out", include=("model/*",)).same
    back = ckpt("import", tmp_path / "out", tmp_path / "back", "--step", 12, "--to", "fsdp:2")
    assert back.exit_code == 0
    with ckptkit.open(tmp_path / "back") as checkpoint:
        assert checkpoint.step == 12
        assert str(checkpoint.strategy) == "fsdp:2"
        assert checkpoint.details["digest"]["step"] == ckptkit.digest(tmp_path / "out").step
    assert ckptkit.diff(run, tmp_path / "back", include=("model/*",)).same


def test_every_type_and_odd_shape_is_there_to_the_bit(tmp_path: Path) -> None:
    shapes = {"float32": (7, 5), "bfloat16": (3, 3), "int8": (5,), "bool": (3,), "float64": (),
              "float8_e4m3fn": (2, 3), "uint16": (0, 4), "complex64": (2,)}  # fmt: skip
    tensors = {
        f"model/{dtype}.w": Tensor(
            random_values(shape, dtype), {"fsdp": "shard(0)"} if shape else {}
        )
        for dtype, shape in shapes.items()
    }
    save(tmp_path / "run", tensors, strategy="fsdp:2")
    out = tmp_path / "new" / "model.safetensors"
    assert document("export", tmp_path / "run", out, "--to-format", "safetensors")["files"] == [
        "model.safetensors"
    ]
    assert ckptkit.diff(tmp_path / "run", out).same
    found = load_file(out)
    assert {str(t.dtype).removeprefix("torch.") for t in found.values()} == shapes.keys()
    for dtype, shape in shapes.items():
        assert tuple(found[f"{dtype}.w"].shape) == shape


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_torch_loads_the_weights(
    tied: bool, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:  # as members beyond 4 GiB are described
        monkeypatch.setattr(formats, "_LARGE", 3000)
    # Several bands of one tensor, by several threads.
    monkeypatch.setattr(files, "_SEGMENT", 1500)
    model = llama(tied=tied)
    run, out = step_of(model, tmp_path / "run"), tmp_path / "model.pt"
    ckptkit.export(run, out, to_format="torch", workers=4)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert ckptkit.diff(run, out, include=("model/*",)).same
    for weights in (
        torch.load(out, weights_only=True),
        torch.load(out, weights_only=True, mmap=True),
    ):
        again = llama(tied=tied)
        for parameter in again.parameters():
            parameter.data.zero_()
        again.load_state_dict(weights)
        assert torch.equal(logits(again), logits(model))
        first, second = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        assert (first.data_ptr() == second.data_ptr()) == tied


def test_torch_and_dcp_load_every_type(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        dtype: (5, 3) for dtype in DTYPES if dtype != "complex_float16"
    }
    shapes |= {"float64": (), "uint16": (0, 4), "int16": (1, 2, 3)}
    tensors = {f"model/{d}": Tensor(random_values(shape, d)) for d, shape in shapes.items()}

    def fill(writer: ckptkit.Writer) -> None:
        for name, tensor in tensors.items():
            add(writer, name, tensor)
        writer.add_alias("model/tied", "model/bool")

    save_by(tmp_path / "run", fill)
    ckptkit.export(tmp_path / "run", tmp_path / "x.pt", to_format="torch")
    ckptkit.export(tmp_path / "run", tmp_path / "dcp", to_format="dcp")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    again = {name: torch.empty_like(value) for name, value in found.items()}
    with pytest.warns(UserWarning, match="in a single process"):
        load_dcp({"model": again}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, value in found.items():
        assert bytes(again[name].untyped_storage()) == bytes(value.untyped_storage()), name
    assert torch.equal(found.pop("tied"), found["bool"])
    assert sorted(found) == sorted(shapes)
    for dtype, shape in shapes.items():
        assert tuple(found[dtype].shape) == shape
        assert str(found[dtype].dtype) == f"torch.{dtype}"
        assert found[dtype].is_contiguous()
        wanted = np.ascontiguousarray(tensors[f"model/{dtype}"].whole).tobytes()
        assert bytes(found[dtype].untyped_storage()) == wanted


def load_with_dcp(folder: str, how: str) -> None:
    """A rank whose model lies over all of them."""
    model = llama(tied=False)
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    if how == "fsdp":
        fully_shard(model, mesh=mesh)
    else:
        columns = {"model.layers.*.mlp.up_proj": ColwiseParallel()}
        parallelize_module(
            model, mesh, {**columns, "model.layers.*.mlp.down_proj": RowwiseParallel()}
        )
    for parameter in model.parameters():
        parameter.detach().zero_()
    weights = model.state_dict()
    load_dcp({"model": weights}, checkpoint_id=folder)
    model.load_state_dict(weights)
    spread = 0
    for name, value in model.named_parameters():
        whole: torch.Tensor = value
        if isinstance(value, DTensor):
            whole, spread = value.full_tensor(), spread + 1
        assert torch.equal(whole, wanted[name]), name
    assert spread >= 22


def test_dcp_loads_the_folder_under_any_layout(gloo: Pool, tmp_path: Path) -> None:
    run = step_of(llama(tied=False), tmp_path / "run")
    out = tmp_path / "out"
    found = document("export", run, out, "--to-format", "dcp", "--max-file-size", "100KB")
    assert found["files"][-1] == ".metadata"
    assert len(found["files"]) > 3
    assert ckptkit.diff(run, out, include=("model/*",)).same
    for how in ("fsdp", "tp"):
        gloo.run(2, load_with_dcp, str(out), how)


def test_a_thread_that_fails_keeps_no_other_waiting(tmp_path: Path) -> None:
    run = step_of(llama(tied=False), tmp_path / "run")
    for pack in run.glob("*/data/*/*.zip"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 3] ^= 1
        pack.write_bytes(data)
    with pytest.raises(CorruptionError):
        ckptkit.export(run, tmp_path / "x.pt", to_format="torch", workers=4)
    assert not (tmp_path / "x.pt").exists()


def test_arrays_are_converted_renamed_and_left_out(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 30_000, dtype=np.float32).reshape(300, 100)
    tensors = {"model/a.w": Tensor(values), "model/b.w": Tensor(values), "model/n": Tensor(values)}
    save(tmp_path / "run", tensors)
    out = tmp_path / "x.safetensors"
    found = document("export", tmp_path / "run", out, "--to-format", "safetensors", "--cast",
                     "*=bf16", "--rename", r"^a\.=>first.", "--exclude", "b.*")  # fmt: skip
    assert found["left_out"] == ["model/b.w"]
    loaded = load_file(out)
    assert sorted(loaded) == ["first.w", "n"]
    assert torch.equal(loaded["first.w"], torch.from_numpy(values).to(torch.bfloat16))


def test_ties_to_other_groups_lose_nothing(tmp_path: Path) -> None:
    values = {name: random_values((3, 2), seed=seed) for seed, name in enumerate("abc")}

    def fill(writer: ckptkit.Writer) -> None:
        add(writer, "ema/a", Tensor(values["a"]))
        writer.add_alias("model/a", "ema/a")
        add(writer, "model/b", Tensor(values["b"]))
        writer.add_alias("shadow/b2", "model/b")
        for name in "ab":
            writer.add_alias(f"optimizer/{name}/exp_avg", "ema/c")
        add(writer, "ema/c", Tensor(values["c"]), role="optimizer", of="model/a")
        writer.add_object("optimizer", [{"groups": [{"params": ["a", "b"]}]}])

    save_by(tmp_path / "run", fill)
    for include in ((), ("--include", "*")):
        out = tmp_path / f"{len(include)}.safetensors"
        found = document("export", tmp_path / "run", out, "--to-format", "safetensors", *include)
        assert found["tied"] == []
        assert {"ema/a", "shadow/b2", "ema/c"} <= {*found["left_out"]}
        loaded = load_numpy(out)
        assert sorted(loaded) == ["a", "b"]
        assert all(loaded[name].tobytes() == values[name].tobytes() for name in loaded)
        whole = tmp_path / f"{len(include)}.pt"
        ckpt("export", tmp_path / "run", whole, "--to-format", "torch", "--optimizer", *include)
        state = torch.load(whole, weights_only=True)["optimizer"]["state"]
        assert sorted(state) == ["a", "b"]
        assert all(bytes(state[n]["exp_avg"].numpy()) == values["c"].tobytes() for n in state)


def test_little_memory_and_large_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of arrays, chunks that are read a little at a time, headers in pieces."""
    monkeypatch.setattr(files, "_SEGMENT", 1000)
    values = {"a": random_values((64, 33)), "b": random_values((2000,)), "c": random_values((1, 9))}
    tensors = {f"model/{name}": Tensor(v, {"fsdp": "shard(0)"}) for name, v in values.items()}
    save(tmp_path / "run", tensors, strategy="fsdp:3", chunk_bytes=512)
    out = tmp_path / "x.safetensors"
    ckptkit.export(tmp_path / "run", out, to_format="safetensors", memory="100MiB", workers=3)
    loaded = load_numpy(out)
    for name, value in values.items():
        assert loaded[name].tobytes() == value.tobytes()


def test_what_is_there_is_never_touched(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model/w": Tensor(random_values((3,)))})
    for to_format in ("hf", "safetensors"):
        out = tmp_path / to_format
        out.mkdir()
        (out / "mine").write_text("x")
        result = ckpt("export", tmp_path / "run", out, "--to-format", to_format)
        assert result.exit_code == 2
        assert "there is something already" in result.stderr
        assert [path.name for path in out.iterdir()] == ["mine"]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlreadyExistsError):
        ckptkit.export(tmp_path / "run", link, to_format="safetensors")
    # What comes while it is written, neither.
    late = tmp_path / "late.safetensors"

    def appear(_: int) -> None:
        late.write_text("mine")

    with pytest.raises(AlreadyExistsError):
        ckptkit.export(tmp_path / "run", late, to_format="safetensors", progress=appear)
    assert late.read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".late")]


def test_a_damaged_step_leaves_nothing(tmp_path: Path) -> None:
    run = step_of(llama(tied=False), tmp_path / "run")
    (pack, *_) = sorted(run.glob("*/data/*/*.zip"))
    data = bytearray(pack.read_bytes())
    with ckptkit.open(run) as checkpoint:
        row = checkpoint.first_row("model/model.layers.3.mlp.up_proj.weight")
        data[int(checkpoint.manifest.offset[row])] ^= 1
    pack.write_bytes(data)
    before = sorted(path.name for path in tmp_path.iterdir())
    for to_format in ("hf", "safetensors"):
        with pytest.raises(CorruptionError):
            ckptkit.export(run, tmp_path / "a" / "out", to_format=to_format, max_file_size="20KB")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_bucket_has_all_or_no_index(bucket: Bucket, tmp_path: Path) -> None:
    model = llama(tied=False)
    run = step_of(model, tmp_path / "run")
    model.config.save_pretrained(tmp_path / "first")
    options: Any = {"storage_options": bucket.options, "source_options": {}}
    out = f"{bucket.url}/llama"
    how: Any = {"to_format": "hf", "max_file_size": "60KB", "beside": tmp_path / "first"}
    done = ckptkit.export(run, out, **how, **options)
    assert done.files[-1] == "model.safetensors.index.json"
    assert ckptkit.diff(run, out, include=("model/*",), **options).same
    with pytest.raises(AlreadyExistsError):
        ckptkit.export(run, out, **how, **options)
    (pack, *_) = sorted(run.glob("*/data/*/*.zip"))
    pack.write_bytes(pack.read_bytes()[:-1])
    with pytest.raises(CorruptionError):
        ckptkit.export(run, f"{bucket.url}/broken", **how, **options)
    assert ckptkit.open_store(f"{bucket.url}/broken", bucket.options).list() == []


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model/w": Tensor(random_values((3,))), "x": Tensor(random_values(()))})
    how: Any = {"to_format": "hf"}
    for wrong in (
        {"to_format": "gguf"},
        {"to_format": "safetensors", "beside": tmp_path},
        {"memory": "1MiB", **how},
        {"selection": ckptkit.Selection(include=("nothing*",)), **how},
        {"selection": ckptkit.Selection(include=("x",)), **how},
    ):
        with pytest.raises(UsageError):
            ckptkit.export(tmp_path / "run", tmp_path / "out", **wrong)
    result = ckpt("export", tmp_path / "run", tmp_path / "out", "--to-format", "hf", "--with", "/")
    assert result.exit_code == 4
    assert "no config.json" in result.stderr
    assert not (tmp_path / "out").exists()


def test_export_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model/w": Tensor(random_values((3,), "bfloat16"))})
    code = (
        "import sys, ckptkit\n"
        "ckptkit.export(sys.argv[1], sys.argv[2], to_format='hf')\n"
        "assert not {'torch', 'safetensors'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "out")]
    subprocess.run(command, check=True)


def test_a_step_is_not_imported_and_the_number_comes_from_the_name(tmp_path: Path) -> None:
    save(tmp_path / "run", {"model/w": Tensor(random_values((3, 4)))}, step=3)
    assert ckpt("import", tmp_path / "run", tmp_path / "other").exit_code == 2
    out = tmp_path / "trained" / "checkpoint-40"
    ckptkit.export(tmp_path / "run", out, to_format="hf")
    found = document("import", out, tmp_path / "back", "--rename", "^w$=>v")
    assert (found["step"], found["from"], found["to"]) == (40, None, "single")
    assert found["format"] == "safetensors"
    with ckptkit.open(tmp_path / "back") as checkpoint:
        assert list(checkpoint.arrays) == ["model/v"]
    assert ckpt("verify", tmp_path / "back", "--digest").exit_code == 0
