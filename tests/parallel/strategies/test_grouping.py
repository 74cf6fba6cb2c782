"""Which modules are gathered together, seen without any process."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from ckptkit.parallel import as_distributed
from ckptkit.parallel.strategies.data_parallel import Unit, units_of
from tests.live.pool import Pool
from tests.parallel.strategies.training import Layered, spread

KIB = 1024


def names(units: list[Unit]) -> list[tuple[str, ...]]:
    """Of the modules of each unit."""
    return [unit.names for unit in units]


class Block(nn.Module):
    """A layer of a transformer, as far as names go; its parts are 16 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, bias=False)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)


class Language(nn.Module):
    """A language model of some blocks."""

    def __init__(self, blocks: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Wrapper(nn.Module):
    """A model in a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


def test_a_thousand_tiny_layers_are_a_few_units() -> None:
    units = units_of(Layered(1000, 64), 1024 * KIB)
    assert [len(unit.modules) for unit in units] == [64] * 15  # of 16 KiB each
    assert units[0].names[:2] == ("layers.0", "layers.1")
    assert units[0].nbytes == 1024 * KIB


def test_what_is_left_over_comes_with_the_model() -> None:
    grouped = {name for unit in units_of(Layered(1000, 64), 1024 * KIB) for name in unit.names}
    assert grouped == {f"layers.{n}" for n in range(960)}


def test_large_layers_are_alone() -> None:
    assert names(units_of(Layered(3, 512), 1024 * KIB)) == [
        ("layers.0",),
        ("layers.1",),
        ("layers.2",),
    ]


def test_a_small_model_is_one_unit_of_its_own() -> None:
    assert units_of(Layered(10, 64), 1024 * KIB) == []


def test_blocks_are_gathered_whole() -> None:
    model = Language(4)
    assert names(units_of(model, 32 * KIB)) == [
        ("embed",),
        *((f"blocks.{n}",) for n in range(4)),
        ("norm", "head"),
    ]
    assert names(units_of(Wrapper(model), 32 * KIB))[1] == ("model.blocks.0",)


def test_small_blocks_share_a_unit_and_large_neighbours_do_not_part_them() -> None:
    assert names(units_of(Language(4), 150 * KIB)) == [
        ("embed",),
        ("blocks.0", "blocks.1"),
        ("blocks.2", "blocks.3"),
        ("norm", "head"),
    ]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256), nn.Linear(16, 200))
    assert names(units_of(model, 14 * KIB)) == [("1",), ("0", "2")]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256), nn.Linear(256, 256))
    assert names(units_of(model, 14 * KIB)) == [("1",), ("2",)]


def test_a_norm_goes_with_a_head_of_its_own_dtype_only() -> None:
    model = Language(1).bfloat16()
    model.head.float()
    assert names(units_of(model, 32 * KIB)) == [("embed",), ("blocks.0",), ("head",)]
    model.norm.requires_grad_(requires_grad=False)
    assert names(units_of(model, 32 * KIB))[2] == ("norm", "head")


def test_tied_weights_stay_with_the_model() -> None:
    assert names(units_of(Language(2, tied=True), 32 * KIB)) == [("blocks.0",), ("blocks.1",)]


def test_parameters_of_the_model_itself_that_a_module_shares_stay_with_it() -> None:
    model = Layered(3, 64)
    model.register_parameter("shared", model.get_parameter("layers.1.weight"))
    assert names(units_of(model, 16 * KIB)) == [("layers.0",), ("layers.2",)]


def test_a_module_at_two_places_is_in_no_unit() -> None:
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.Linear(64, 64), shared, nn.Linear(64, 64))
    assert names(units_of(model, 16 * KIB)) == [("1",), ("3",)]


def test_nested_containers_are_opened_and_modules_without_parameters_are_nowhere() -> None:
    inner = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = nn.Sequential(nn.Sequential(inner, nn.Dropout()), nn.ModuleList([nn.Linear(64, 64)]))
    assert names(units_of(model, 16 * KIB)) == [("0.0.0",), ("0.0.2",), ("1.0",)]


def test_experts_are_gathered_with_their_block() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    model = nn.Sequential(Mixture(), nn.Linear(64, 64))
    assert names(units_of(model, 8 * KIB)) == [("0",), ("1",)]


def test_what_holds_most_of_a_model_is_taken_apart() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), nn.Linear(64, 16)

    assert names(units_of(Model(), 8 * KIB)) == [("body.first",), ("body.second",)]


def test_modules_of_torch_that_use_what_they_do_not_call_stay_whole() -> None:
    model = nn.Sequential(nn.MultiheadAttention(64, 4), nn.Linear(8, 8))
    assert names(units_of(model, 4 * KIB)) == [("0",)]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 64), 3, enable_nested_tensor=False
    )
    assert names(units_of(encoder, 4 * KIB)) == [(f"layers.{n}",) for n in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_is_measured_in_bytes(dtype: torch.dtype) -> None:
    units = units_of(Layered(64, 64).to(dtype), 128 * KIB)
    assert len(units[0].modules) == 128 * KIB // (64 * 64 * dtype.itemsize)


class Heard(logging.Handler):
    """What is logged, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def spread_many() -> tuple[list[tuple[str, ...]], list[int], list[str]]:
    heard, log = Heard(), logging.getLogger("ckptkit.parallel")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    try:
        dist = as_distributed(Layered(1000, 16), "fsdp", group_below="20KiB")
    finally:
        log.removeHandler(heard)
        log.setLevel(logging.NOTSET)
    return [u.names for u in dist.units], [u.nbytes for u in dist.units], heard.lines


def test_what_is_gathered_together_can_be_seen(gloo: Pool) -> None:
    (names, sizes, said), (others, _, unsaid) = gloo.run(2, spread_many)
    assert said == [f"INFO: 1,000 layers in {len(names)} units"]
    assert unsaid == []
    assert names == others
    assert [name for unit in names for name in unit] == [f"layers.{n}" for n in range(1000)]
    assert len(set(sizes[:-1])) == 1
    assert 20 * KIB <= sizes[0] < 22 * KIB


def units_under(spec: str) -> int:
    return len(spread(spec).units)


def test_replicas_and_stages_show_what_they_gather(gloo: Pool) -> None:
    assert gloo.run(2, units_under, "ddp:2") == [0, 0]
    assert all(count > 1 for count in gloo.run(4, units_under, "ddp:2,tp:2"))
    assert all(gloo.run(4, units_under, "pp:2,fsdp:2"))
