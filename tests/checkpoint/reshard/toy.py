"""A small model of awkward shapes, saved under any strategy, and the rules that cut it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import ckptkit
from ckptkit import Checkpoint, PerRank, Replicated, Split, Strategy, Sum, Writer
from ckptkit.model import layout_of
from ckptkit.model.rules import Rules
from ckptkit.plan.cuts import Tensor as Facts
from ckptkit.plan.place import place
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Values, random_values, same, save_by, take

STRATEGIES = (
    "single",
    "ddp:2",
    "fsdp:3",
    "fsdp:8",
    "ddp:2,fsdp:2",
    "zero1:3",
    "zero2:2",
    "zero3:4",
    "tp:2",
    "tp:4",
    "pp:2",
    "tp:2,fsdp:2",
    "fsdp:2,tp:3",
    "pp:2,tp:2",
    "pp:2,tp:2,fsdp:2",
)

RULES: dict[str, Any] = {
    "rules": [
        {"match": "*.qkv", "tp": {"shard": 0, "blocks": [16, 4, 4], "unit": 4}},
        {"match": "*.up", "tp": "shard(0)"},
        {"match": "*.down", "tp": "shard(1)"},
        {"match": "embed", "tp": "shard(0)"},
        {"match": "re:.*(norm|bias|none|counter|mask)", "tp": "replicate"},
    ],
    "pipeline": {
        "layers": "layers\\.(\\d+)",
        "split": "balanced",
        "first": ["embed", "mask"],
        "last": ["norm", "head"],
    },
    "default": "error",
}


@dataclass(frozen=True)
class Toy:
    """One array of the model."""

    values: Values
    role: str
    of: str | None = None


@cache
def toy() -> Mapping[str, Toy]:
    """Parameters of odd shapes, an empty one, a buffer, optimizer state of several kinds."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (13, 6), "norm": (6,)}
    for layer in range(3):
        shapes |= {
            f"layers.{layer}.qkv": (24, 6),
            f"layers.{layer}.up": (11, 6),
            f"layers.{layer}.down": (6, 11),
            f"layers.{layer}.norm": (6,),
        }
    shapes["layers.1.none"] = (0, 3)
    found: dict[str, Toy] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        of = f"model/{name}"
        found[of] = Toy(random_values(shape, "bfloat16", seed), "param")
        for moment in ("exp_avg", "exp_avg_sq"):
            values = random_values(shape, "float32", seed + 100 + len(moment))
            found[f"optimizer/{name}/{moment}"] = Toy(values, "optimizer", of)
        found[f"optimizer/{name}/step"] = Toy(random_values((), "float32", seed), "optimizer", of)
    found["model/mask"] = Toy(random_values((5, 5), "bool", 7), "buffer")
    found["model/layers.2.counter"] = Toy(random_values((), "int64", 8), "buffer")
    found["optimizer/embed/row"] = Toy(
        random_values((13,), "float32", 9), "optimizer", "model/embed"
    )
    return found


TIED = ("model/head", "model/embed")


def placed(strategy: Strategy) -> dict[str, tuple[Any, ...]]:
    """How the rules cut each array under a strategy."""
    facts = [
        Facts(name, each.values.shape, each.values.dtype.itemsize, each.role, each.of, ())
        for name, each in sorted(toy().items())
    ]
    rules = Rules.from_doc(RULES, where="rules")
    found = place(facts, source=Strategy.parse("single"), target=strategy, rules=rules)
    return {each.name: each.placements for each in found}


@cache
def placed_once(strategy: str) -> dict[str, tuple[Any, ...]]:
    """The same, remembered."""
    return placed(Strategy.parse(strategy))


@cache
def saved(strategy: str) -> MemoryStore:
    """A run with the model at step 7, written by the ranks of a strategy."""
    store = MemoryStore()
    save_toy(store, strategy)
    return store


def save_toy(store: Any, strategy: str, *, chunk_bytes: int = 256) -> None:
    """Save the model; ranks are threads."""
    known = Strategy.parse(strategy)
    rows = placed_once(strategy)
    axes = [axis.name for axis in known.mesh.axes]

    def fill(writer: Writer) -> None:
        for name, each in toy().items():
            placements = dict(zip(axes, rows[name], strict=True))
            local = take(
                layout_of(each.values.shape, known, rows[name]).part(writer.rank), each.values
            )
            writer.add(
                name,
                local,
                shape=each.values.shape,
                placements=placements,
                role=each.role,
                of=each.of,
            )
        writer.add_alias(*TIED)
        rank, count = writer.rank, known.world_size
        writer.add_object("extra/lr", 0.125)
        writer.add_object("extra/note", Replicated({"a": [1, 2], "b": None}))
        writer.add_object("extra/tokens", Sum(1000 + rank))
        writer.add_object("extra/loss", Sum(0.1 * (rank + 1)))
        writer.add_object(
            "extra/cursor", Split(list(range(rank * 12 // count, (rank + 1) * 12 // count)))
        )
        writer.add_object("extra/rng", PerRank(bytes([rank])))

    save_by(
        store,
        fill,
        strategy=strategy,
        step=7,
        chunk_bytes=chunk_bytes,
        details={"precision": "bf16"},
    )


def assert_same_state(checkpoint: Checkpoint) -> None:
    """Every array of the model is there, whole and bit for bit."""
    assert set(checkpoint.arrays) == {*toy(), TIED[0]}
    assert checkpoint[TIED[0]].alias_of == TIED[1]
    for name, each in toy().items():
        array = checkpoint[name]
        assert (array.role, array.info.of) == (each.role, each.of), name
        assert same(array.read(), each.values), name


def assert_packs_fit_ranks(checkpoint: Checkpoint) -> None:
    """The pack of a rank holds nothing that the rank does not, and what one rank alone holds is in
    its own pack.
    """
    manifest, strategy = checkpoint.manifest, checkpoint.strategy
    for number, array in enumerate(manifest.arrays):
        layout = layout_of(array.shape, strategy, array.placements)
        first = int(manifest.starts[number])
        for chunk in range(array.grid.chunk_count):
            box = array.grid.box(array.grid.index(chunk))
            pack = int(manifest.pack[first + chunk])
            holders = [
                rank
                for rank in range(strategy.world_size)
                if any(held.contains(box) for held in layout.part(rank).boxes)
            ]
            assert pack in holders, (array.name, chunk)


def reshard(store: Any, destination: Any, to: str, **options: Any) -> ckptkit.Resharded:
    """With the rules of the model."""
    return ckptkit.reshard(store, destination, to=to, rules=RULES, **options)
