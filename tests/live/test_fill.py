"""What only torch can put in place: of other dtypes, in other orders, on devices. Here the CPU also
stands for a device, which brings what is sent to it in place; `test_cuda.py` has a real one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import ckptkit
from ckptkit.checkpoint.read import reader
from ckptkit.errors import CorruptionError
from ckptkit.live import PerRank, fill, load, load_state, save
from ckptkit.live.comparison import LoadOptions
from ckptkit.live.state import tensors
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.model import Box
from tests.live.test_tensors import DTYPES, MEMORY, bits

WAYS = ["copied", "sent"]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How torch brings it in place; always torch, and in many runs."""

    def is_sent_along(values: torch.Tensor, target: torch.Tensor) -> bool:
        return values.dtype == target.dtype or {values.dtype, target.dtype} <= set(FLOATS)

    found: list[int] = []
    send = fill._send

    def noting(device: torch.device, memory: torch.Tensor, pairs: Any) -> None:
        found.append(len(pairs))
        send(device, memory, pairs)

    with (
        patch.object(fill, "dtype_of", lambda *_: None),
        patch.object(fill, "_RUN_BYTES", 3000),
        patch.object(fill, "_send", noting),
    ):
        if request.param == "copied":
            yield request.param
            assert not found
            return
        with patch.object(fill, "_is_sent_along", is_sent_along):
            yield request.param
        assert found


@pytest.fixture(params=["warm", "cold"])
def _cache(request: pytest.FixtureRequest) -> Iterator[None]:
    is_cold = request.param == "cold"
    with patch.object(reader, "_are_cold", lambda *_: is_cold):
        yield


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.usefixtures("way", "_cache")
@pytest.mark.parametrize("verify", [True, False])
def test_every_dtype_comes_back_among_others(tmp_path: Path, verify: bool) -> None:
    # One after another at any address that their chunks may have.
    shapes = [(), (7,), (33, 41), (5, 3, 2)]
    saved = {f"{dtype}/{shape}": values(dtype, *shape) for dtype in DTYPES for shape in shapes}
    save(tmp_path, step=1, state={"s": saved}, chunk_bytes=500)
    found = {name: torch.zeros_like(each) for name, each in saved.items()}
    load(tmp_path, state={"s": found}, verify=verify)
    assert {name: bits(each) for name, each in found.items()} == {
        name: bits(each) for name, each in saved.items()
    }


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", [kind for kind in MEMORY if kind != "one value for all"])
def test_memory_of_any_order_is_filled(tmp_path: Path, kind: str) -> None:
    saved = MEMORY[kind]()
    save(tmp_path, step=1, state={"s": {"x": saved}}, chunk_bytes=16)
    target = MEMORY[kind]().zero_()
    load(tmp_path, state={"s": {"x": target}})
    assert target.tolist() == saved.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_elements_that_share_memory_have_to_be_alike_in_the_step(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    alike = torch.tensor([[torch.nan], [2.0]]).expand(2, 3)
    save(tmp_path, step=1, state={"s": {"x": alike}})
    target = torch.zeros(2, 1, dtype=dtype).expand(2, 3)
    load(tmp_path, state={"s": {"x": target}}, cast=True)
    assert bits(target.clone()) == bits(alike.clone().to(dtype))
    save(tmp_path, step=2, state={"s": {"x": torch.arange(6.0).view(2, 3)}})
    with pytest.raises(StateMismatchError, match="share memory") as caught:
        load(tmp_path, state={"s": {"x": target}}, cast=True)
    assert caught.value.where == "s/x"


@pytest.mark.usefixtures("way", "_cache")
@pytest.mark.parametrize("verify", [True, False])
def test_parts_of_chunks_are_filled(tmp_path: Path, verify: bool) -> None:
    saved = torch.randn(40, 50)
    save(tmp_path, step=1, state={"s": {"x": saved}}, chunk_bytes=1000)
    target = torch.zeros(34, 34)
    with ckptkit.open(tmp_path) as step:
        wanted = [(step["s/x"], Box((3, 7), (34, 34)), target)]
        fill._fill_by_torch(step, wanted, LoadOptions(verify=verify), alone=True)
    assert torch.equal(target, saved[3:37, 7:41])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("wanted", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_are_converted_as_torch_does_it(
    tmp_path: Path, dtype: torch.dtype, wanted: torch.dtype
) -> None:
    saved = torch.cat([torch.randn(1000), torch.tensor([1e30, -1e-30, torch.inf, torch.nan])])
    save(tmp_path, step=1, state={"s": {"x": saved.to(dtype)}}, chunk_bytes=500)
    found = torch.zeros(1004, dtype=wanted)
    load(tmp_path, state={"s": {"x": found}}, cast=True)
    assert bits(found) == bits(saved.to(dtype).to(wanted))


def test_elements_at_odd_addresses_are_copied_first(tmp_path: Path) -> None:
    saved = torch.arange(300.0)
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"F32","shape":[300],'
    )
    header += b'"data_offsets":[3,1203]}}'
    data = struct.pack("<Q", len(header)) + header + b"abc" + saved.numpy().tobytes()
    place = tmp_path / "x.safetensors"
    place.write_bytes(data)
    assert torch.equal(load_state(place)["model/w"], saved)
    model = torch.nn.Module()
    model.register_buffer("a", torch.zeros(3, dtype=torch.uint8))
    model.register_buffer("w", torch.zeros(300, dtype=torch.float64))
    load(place, model=model, cast=True)
    assert torch.equal(model.get_buffer("w"), saved.double())


@pytest.mark.usefixtures("way", "_cache")
def test_no_flipped_bit_is_missed(tmp_path: Path) -> None:
    saved = {name: torch.randn(50, 60) for name in "abc"}
    save(tmp_path, step=1, state={"s": saved}, chunk_bytes=1000)
    with ckptkit.open(tmp_path) as step:
        offsets, lengths = step.manifest.offset.tolist(), step.manifest.length.tolist()
    (path,) = tmp_path.rglob("*.zip")
    data = path.read_bytes()
    load(tmp_path, state={"s": {name: torch.zeros(50, 60) for name in saved}})
    for place in (0, len(offsets) // 2, -1):
        damaged = bytearray(data)
        damaged[offsets[place] + lengths[place] - 1] ^= 128
        path.write_bytes(damaged)
        found = {name: torch.zeros(50, 60) for name in saved}
        with pytest.raises(CorruptionError, match="has the checksum"):
            load(tmp_path, state={"s": found})


@pytest.mark.usefixtures("way")
def test_tensors_of_inference_mode_are_filled_in_it(tmp_path: Path) -> None:
    saved = torch.randn(100, 50)
    save(tmp_path, step=1, state={"s": {"x": saved}}, chunk_bytes=500)
    with torch.inference_mode():
        found = torch.zeros(100, 50)
        load(tmp_path, state={"s": {"x": found}})
    assert torch.equal(found, saved)
    plain = torch.zeros(100, 50, requires_grad=True)
    load(tmp_path, state={"s": {"x": plain}})
    assert torch.equal(plain, saved)
    assert plain.requires_grad


class Told:
    """An object that says what it is told."""

    def __init__(self, told: dict[str, torch.Tensor]) -> None:
        self.told = told

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.told

    def load_state_dict(self, told: dict[str, torch.Tensor]) -> None:
        self.told = told


@pytest.mark.usefixtures("way")
def test_a_default_device_is_not_where_bytes_are_read_to(tmp_path: Path) -> None:
    saved, found = torch.randn(100, 50), torch.zeros(100, 50)
    save(tmp_path, step=1, state={"s": {"x": saved}})
    with torch.device("meta"):
        load(tmp_path, state={"s": {"x": found}})
    assert torch.equal(found, saved)


def test_tensors_in_what_objects_say_lie_on_the_host_whatever_the_default_device(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(3)
    told = {"random": generator.get_state(), "large": torch.randn(500)}
    save(tmp_path, step=1, state={"loader": Told(told), "each": PerRank({"t": told["random"]})})
    loader, each = Told({}), Told({})
    with torch.device("meta"):
        load(tmp_path, state={"loader": loader, "each": PerRank(each)})
    assert torch.equal(loader.told["random"], told["random"])
    assert torch.equal(loader.told["large"], told["large"])
    assert torch.equal(each.told["t"], told["random"])


def test_many_small_runs_need_little_memory(tmp_path: Path) -> None:
    saved = {f"{number}": torch.randn(2000) for number in range(200)}
    save(tmp_path, step=1, state={"s": saved})
    found = {f"{number}": torch.zeros(2000, dtype=torch.float64) for number in range(0, 200, 2)}
    made: list[int] = []
    host_memory = tensors.host_memory

    def noting(size: int, devices: Any) -> torch.Tensor:
        made.append(size)
        return host_memory(size, devices)

    with patch.object(fill, "host_memory", noting):
        load(tmp_path, state={"s": found}, cast=True, partial=True)
    assert all(torch.equal(each, saved[name].double()) for name, each in found.items())
    assert sum(made) < 4 << 20
