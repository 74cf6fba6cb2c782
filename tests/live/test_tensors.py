"""Tensors of every dtype and in any memory come back as they were."""

from __future__ import annotations

import errno
import mmap
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.masked import masked_tensor

import ckptkit
from ckptkit.errors import LayoutError, UnsupportedTypeError, UsageError
from ckptkit.live import load, load_state, save
from ckptkit.live.state import tensors
from tests.live.pool import Pool

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous().flatten()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
def test_a_dtype_and_a_shape_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    saved = torch.randint(0, 2, shape).to(dtype)
    save(tmp_path, step=1, state={"s": {"x": saved}})
    state = {"x": torch.zeros(shape).to(dtype)}
    load(tmp_path, state={"s": state})
    alone = load_state(tmp_path)["s/x"]
    for found in (state["x"], alone):
        assert (found.dtype, found.shape) == (dtype, saved.shape)
        assert bits(found) == bits(saved)


MEMORY = {
    "a transpose": lambda: torch.arange(12.0).reshape(3, 4).T,
    "columns": lambda: torch.arange(20.0).reshape(4, 5)[:, 1:4],
    "every second": lambda: torch.arange(20.0)[::2],
    "channels last": lambda: (
        torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
    ),
    "one value for all": lambda: torch.tensor([7.0]).expand(6),
    "conjugate": lambda: torch.arange(6).to(torch.complex64).mul(1j).conj(),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_of_any_order_is_saved_and_filled(tmp_path: Path, kind: str) -> None:
    saved = MEMORY[kind]()
    save(tmp_path, step=1, state={"s": {"x": saved}})
    with ckptkit.open(tmp_path) as step:
        assert step.read("s/x").tolist() == saved.tolist()
    if kind != "one value for all":  # not for writing to
        target = MEMORY[kind]().zero_()
        load(tmp_path, state={"s": {"x": target}})
        assert target.tolist() == saved.tolist()


def cut_columns(location: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved = torch.arange(35.0).reshape(5, 7)
    save(location, step=1, state={"s": {"x": distribute_tensor(saved, mesh, [Shard(1)])}})
    target: Any = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)]).T
    assert dist.get_rank() or not target.to_local().is_contiguous()
    load(location, state={"s": {"x": target}})
    assert target.full_tensor().tolist() == saved.tolist()


def test_parts_of_any_order_are_filled(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(3, cut_columns, str(tmp_path))


def save_partial(location: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    sums = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(LayoutError) as caught:
        save(location, step=1, state={"s": {"x": sums}}, timeout=20)
    return str(caught.value)


def test_sums_that_are_not_added_up_are_refused(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, save_partial, str(tmp_path)):
        assert message.startswith("s/x: a DTensor of partial sums")


def oddities() -> dict[str, tuple[Any, type[Exception], str]]:
    """Tensors without elements of their own, and what is said of them."""
    with FakeTensorMode():
        fake = torch.ones(2, 2)
    with warnings.catch_warnings():  # torch calls them prototypes, and deprecated
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        masked = masked_tensor(torch.ones(2, 2), torch.ones(2, 2).bool())
        quantised = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
        rows = torch.eye(2).to_sparse_csr()
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {
        "meta": (torch.empty(2, 2, device="meta"), UsageError, "meta device"),
        "sparse": (torch.eye(2).to_sparse(), UnsupportedTypeError, "dense"),
        "csr": (rows, UnsupportedTypeError, "dense"),
        "nested": (nested, UnsupportedTypeError, "nested tensor"),
        "jagged": (ragged, UnsupportedTypeError, "nested tensor"),
        "quantised": (quantised, UnsupportedTypeError, "quantised"),
        "lazy": (nn.UninitializedParameter(), UsageError, "lazy"),
        "lazy buffer": (nn.UninitializedBuffer(), UsageError, "lazy"),
        "fake": (fake, UnsupportedTypeError, "a FakeTensor has no memory"),
        "masked": (masked, UnsupportedTypeError, "a MaskedTensor has no memory"),
    }


def test_what_has_no_elements_is_refused_by_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    save(whole, step=1, state={"s": {"x": torch.ones(2, 2)}})
    for name, (tensor, kind, words) in oddities().items():
        with pytest.raises(kind, match=rf"s/x: .*{words}"):
            save(tmp_path / name, step=1, state={"s": {"x": tensor}})
        with pytest.raises(kind, match=rf"s/x: .*{words}"):
            load(whole, state={"s": {"x": tensor}})
        model = nn.Module()
        model.register_buffer("x", tensor)
        with pytest.raises(kind, match=rf"model/x: .*{words}"):
            save(tmp_path / name, step=1, model=model)
        with pytest.raises(kind, match=rf"model/x: .*{words}"):
            load(whole, model=model)


def test_models_that_are_not_there_yet_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, step=1, model=nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"model/weight.*meta device"):
        load(tmp_path, model=nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"model/weight.*lazy"):
        load(tmp_path, model=nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"model/running_mean.*lazy|model/weight.*lazy"):
        save(tmp_path, step=2, model=nn.LazyBatchNorm1d())


class Patched(nn.Linear):
    """As some libraries patch it."""

    def state_dict(self) -> Any:  # type: ignore[override]
        """Without the arguments that torch passes."""
        return {"weight": self.weight}


def test_a_patched_state_dict_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, step=1, model=nn.Linear(2, 2))
    for model, name in ((Patched(2, 2), "the model"), (nn.Sequential(Patched(2, 2)), "0")):
        with pytest.raises(UnsupportedTypeError, match=rf"^{name}: the state_dict.*Patched"):
            save(tmp_path / "new", step=1, model=model)
        with pytest.raises(UnsupportedTypeError, match=rf"^{name}: the state_dict.*Patched"):
            load(tmp_path, model=model)


def save_sharded(location: str) -> str:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    with pytest.raises(UnsupportedTypeError) as caught:
        save(location, step=1, state={"s": {"x": sharded_tensor.zeros(spec, 4)}}, timeout=20)
    return str(caught.value)


def test_a_sharded_tensor_of_the_older_kind_is_refused_by_name(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, save_sharded, str(tmp_path)):
        assert message.startswith("s/x: a ShardedTensor")
        assert "DTensor" in message


def test_a_system_without_huge_pages_has_pinned_memory_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class WithoutHugePages(tensors._Pinned):
        def madvise(self, option: int, *_: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "no such advice")

    cuda = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    monkeypatch.setattr(tensors, "_Pinned", WithoutHugePages)
    assert tensors.pinned_memory(100).tolist() == [0] * 100
