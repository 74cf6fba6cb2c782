"""Tensors have the names that the model's author gave them, whatever wraps the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ckptkit
from ckptkit.errors import InvalidNameError
from ckptkit.live import Checkpointer, StateMismatchError, load, save
from tests.live.pool import Pool


class Net(nn.Module):
    """Its weights at both ends are one; a child has the name that DDP uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.module = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of the next tokens."""
        return self.head(self.layers(self.module(self.embed(tokens))))  # type: ignore[no-any-return]


NAMES = {
    "embed.weight",
    "head.weight",
    "module.weight",
    "module.bias",
    *(f"layers.{n}.{kind}" for n in (0, 1, 2) for kind in ("weight", "bias")),
    "layers.1.running_mean",
    "layers.1.running_var",
    "layers.1.num_batches_tracked",
}
TRAINED = NAMES - {"head.weight", *(n for n in NAMES if "running" in n or "num_batches" in n)}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def each_layer(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Net], Net]:
    def wrapped(model: Net) -> Net:
        for number, layer in enumerate(model.layers):
            model.layers[number] = wrap(layer)
        return model

    return wrapped


def sharded(model: Net) -> nn.Module:
    for layer in model.layers:
        if not isinstance(layer, nn.BatchNorm1d):
            fully_shard(layer)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "nothing": lambda model: model,
    "compile": compiled,
    "compiled layers": each_layer(compiled),
    "checkpointed layers": each_layer(checkpoint_wrapper),
    "checkpointed and compiled layers": each_layer(lambda m: compiled(checkpoint_wrapper(m))),
    "DDP": DistributedDataParallel,
    "DDP of compile": lambda model: DistributedDataParallel(compiled(model)),
    "compile of DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of checkpointed layers": lambda m: DistributedDataParallel(
        each_layer(checkpoint_wrapper)(m)
    ),
    "fully_shard": sharded,
    "fully_shard of checkpointed layers": lambda m: sharded(each_layer(checkpoint_wrapper)(m)),
    "compile of fully_shard": lambda model: compiled(sharded(model)),
}


def save_and_load(kind: str, location: str) -> list[str]:
    """Save a wrapped model, load it into a plain one, and that into another wrapped one."""
    torch.manual_seed(1)
    model = WRAPPERS[kind](Net())
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(location, step=1, model=model, optimizer=optimizer)
    plain = Net()
    plain_optimizer = AdamW(plain.parameters())
    assert load(location, model=plain, optimizer=plain_optimizer).report.is_exact
    assert plain.head.weight is plain.embed.weight
    assert len(plain_optimizer.state) == len(TRAINED)
    save(location, step=2, model=plain, optimizer=plain_optimizer)
    other = WRAPPERS[kind](Net())
    assert load(location, model=other, optimizer=AdamW(other.parameters())).report.is_exact
    save(location, step=3, model=other)
    with ckptkit.open(location) as step:
        return list(step.arrays)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_leave_no_trace_in_names(gloo: Pool, tmp_path: Path, kind: str) -> None:
    assert set(gloo.run(2, save_and_load, kind, str(tmp_path))[0]) == {
        f"model/{name}" for name in NAMES
    }
    run = ckptkit.Run(tmp_path)
    with run.open(1) as one, run.open(2) as two, run.open(3) as three:
        keys = ("step", "exp_avg", "exp_avg_sq")
        trained = {f"optimizer/{name}/{key}" for name in TRAINED for key in keys}
        assert {name for name in one.arrays if name.startswith("optimizer/")} == trained
        assert [alias.name for alias in one.manifest.aliases] == ["model/head.weight"]
        for name in NAMES:
            values = one.read(f"model/{name}")
            assert values.tobytes() == two.read(f"model/{name}").tobytes()
            assert values.tobytes() == three.read(f"model/{name}").tobytes()


def test_untied_weights_load_what_was_tied_with_its_optimizer_state(tmp_path: Path) -> None:
    tied, untied = Net(), Net()
    untied.head.weight = nn.Parameter(torch.zeros(7, 4))
    optimizers = [AdamW(model.parameters()) for model in (tied, untied)]
    tied(torch.arange(6)).sum().backward()
    optimizers[0].step()
    save(tmp_path, step=1, model=tied, optimizer=optimizers[0])
    assert load(tmp_path, model=untied, optimizer=optimizers[1]).report.is_exact
    assert torch.equal(untied.head.weight, tied.embed.weight)
    for parameter in (untied.head.weight, untied.embed.weight):
        moments = optimizers[1].state[parameter]["exp_avg"]
        assert torch.equal(moments, optimizers[0].state[tied.embed.weight]["exp_avg"])
    save(tmp_path, step=2, model=untied, optimizer=optimizers[1])
    assert load(tmp_path, model=tied, optimizer=optimizers[0]).report.is_exact


class Adapted(nn.Module):
    """A frozen layer and two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(4, 2, bias=False)
        self.lora_b = nn.Linear(2, 4, bias=False)


def test_adapters_start_from_a_step_that_has_none_and_are_saved_with_it(tmp_path: Path) -> None:
    base = nn.ModuleDict({"layer": nn.ModuleDict({"base": nn.Linear(4, 4)})})
    save(tmp_path, step=1, model=base)
    model = nn.ModuleDict({"layer": Adapted(nn.Linear(4, 4))})
    adapters = [p for p in model.parameters() if p.requires_grad]
    report = load(tmp_path, model=model, partial=True).report
    assert report.missing == ["model/layer.lora_a.weight", "model/layer.lora_b.weight"]
    assert not report.unexpected
    optimizer = AdamW(adapters)
    for parameter in adapters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    again = nn.ModuleDict({"layer": Adapted(nn.Linear(4, 4))})
    load(tmp_path, model=again, optimizer=AdamW(p for p in again.parameters() if p.requires_grad))
    for name, value in base.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


class Counting(nn.Module):
    """Has state that is no tensor."""

    def __init__(self, count: int, scale: float) -> None:
        super().__init__()
        self.count, self.scale = count, torch.tensor(scale)

    def get_extra_state(self) -> Any:
        """A dictionary with a tensor in it."""
        return {"count": self.count, "history": [self.count, {"scale": self.scale}]}

    def set_extra_state(self, state: Any) -> None:
        """Take it over."""
        self.count, (_, inner) = state["count"], state["history"]
        self.scale = inner["scale"]


class Scaled(nn.Module):
    """Has state that is one tensor, as the layers of fp8 libraries do."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.full((3,), scale)

    def get_extra_state(self) -> torch.Tensor:
        """A copy."""
        return self.scale.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take it over."""
        self.scale = state


def test_extra_state_comes_back_through_the_module(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(Counting(5, 2.0)), Scaled(3.0))
    save(tmp_path, step=1, model=saved)
    counting, scaled = Counting(0, 0.0), Scaled(0.0)
    model = nn.Sequential(nn.Linear(2, 2), counting, scaled)
    assert load(tmp_path, model=model).report.is_exact
    assert (counting.count, float(counting.scale)) == (5, 2.0)
    assert scaled.scale.tolist() == [3.0] * 3
    with ckptkit.open(tmp_path) as step:
        assert set(step.arrays) == {"model/0.weight", "model/0.bias", "model/2._extra_state"}
        assert set(step.objects["model"]) == {"1._extra_state"}


class Told(nn.Module):
    """Has state that is bytes, more or fewer each time, as the layers of TransformerEngine do: none
    before the first step.
    """

    def __init__(self, said: bytes = b"") -> None:
        super().__init__()
        self.said = said

    def get_extra_state(self) -> torch.Tensor:
        """The bytes."""
        return torch.tensor(list(self.said), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take them over."""
        self.said = bytes(state.tolist())


def save_and_load_bytes(location: str, way: str) -> list[bytes]:
    def made(*said: bytes) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), *map(Told, said))
        if way == "ddp":
            return DistributedDataParallel(model)
        if way == "fsdp1":
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        return fully_shard(model) if way == "fsdp2" else model  # type: ignore[return-value]

    found: list[bytes] = []
    with Checkpointer(location, timeout=30) as checkpointer:
        for step, said in enumerate([(b"12", b"3"), (b"1", b"345"), (b"", b"")]):
            checkpointer.save(step, model=made(*said))
        for step in range(3):
            model = made(b"", b"some")
            restored = checkpointer.restore(step=step, model=model)
            assert restored is not None
            assert restored.report.is_exact
            found += [each.said for each in model.modules() if isinstance(each, Told)]
    return found


@pytest.mark.parametrize("way", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_extra_state_may_have_another_size_in_each_step(
    gloo: Pool, tmp_path: Path, way: str
) -> None:
    for found in gloo.run(2, save_and_load_bytes, str(tmp_path), way):
        assert found == [b"12", b"3", b"1", b"345", b"", b""]


def test_names_may_hold_any_character(tmp_path: Path) -> None:
    odd = "a/b %c d..é\n"
    model = nn.Module()
    model.weights = nn.ParameterDict({odd.replace(".", "_"): torch.ones(2)})
    save(tmp_path, step=1, model=model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load(tmp_path, model=model)
    assert all(bool(parameter.all()) for parameter in model.parameters())


def test_a_list_of_modules_is_a_model_and_keeps_its_numbers(tmp_path: Path) -> None:
    save(tmp_path, step=1, model=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)]))
    with ckptkit.open(tmp_path) as step:
        assert {"model/0.weight", "model/1.weight"} < set(step.arrays)
    with pytest.raises(InvalidNameError, match="two stages"):
        save(tmp_path, step=2, model=[nn.Linear(2, 2), nn.Linear(2, 3)])


def tied(*, sharded: bool = False) -> tuple[nn.Module, AdamW]:
    return trained_once(Net(), sharded=sharded)


def untied(*, same: bool, sharded: bool = False, decay: float = 0.01) -> tuple[nn.Module, AdamW]:
    """Two weights of which another model has one, and what an optimizer keeps for each."""
    model = Net()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    made, optimizer = trained_once(model, sharded=sharded, decay=decay)
    if not same:
        with torch.no_grad():
            made.get_parameter("head.weight").mul_(2)
    return made, optimizer


def trained_once(
    model: Net, *, sharded: bool = False, decay: float = 0.01
) -> tuple[nn.Module, AdamW]:
    if sharded:
        fully_shard(model)
    head = [p for p in (model.head.weight,) if p is not model.embed.weight]
    rest: list[Any] = [p for p in model.parameters() if all(p is not each for each in head)]
    groups: list[dict[str, Any]] = [{"params": rest}, *([{"params": head}] if head else [])]
    optimizer = AdamW(groups, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[-1]["weight_decay"] = decay
    return model, optimizer


def load_into_tied(location: str, sharded: bool) -> list[Any]:
    """What a step of two weights becomes in a model that ties them."""
    torch.manual_seed(3)
    ways = [{"same": True}, {"same": False}, {"same": True, "decay": 0.5}]
    messages = []
    model, optimizer = tied(sharded=sharded)
    source, source_optimizer = untied(same=True, sharded=sharded)
    for step, way in enumerate(ways, 1):
        source, source_optimizer = untied(sharded=sharded, **way)  # type: ignore[arg-type]
        save(location, step=step, model=source, optimizer=source_optimizer)
        model, optimizer = tied(sharded=sharded)
        try:
            report = load(location, model=model, optimizer=optimizer).report
        except StateMismatchError as error:
            messages.append(str(error))
            report = load(location, model=model, optimizer=optimizer, partial=True).report
        messages.append(str(report))
        mine, theirs = (m.get_parameter("embed.weight") for m in (model, source))
        assert torch.equal(whole(mine), whole(theirs))
    with torch.no_grad():
        source.get_parameter("head.weight").copy_(source.get_parameter("embed.weight"))
    moments = source_optimizer.state[source.get_parameter("head.weight")]["exp_avg"]
    whole(moments).view(-1)[:1] += 1
    save(location, step=4, model=source)
    load(location, model=model)
    save(location, step=5, model=source, optimizer=source_optimizer)
    with pytest.raises(StateMismatchError, match=r"optimizer/head\.weight/exp_avg: not what"):
        load(location, model=model, optimizer=optimizer)
    return messages


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (3, False), (3, True)])
def test_weights_that_were_not_tied_may_be_if_they_are_the_same(
    gloo: Pool, tmp_path: Path, ranks: int, sharded: bool
) -> None:
    different = "model/head.weight: not what model/embed.weight is in the step, and one tensor here"
    options = "optimizer/head.weight: not what optimizer/embed.weight is in the step"
    found = gloo.run(ranks, load_into_tied, str(tmp_path), sharded)
    assert found == [found[0]] * ranks
    same, *values = found[0][:3]
    assert same == "nothing differs"
    assert all(f"untied: {different}" in said for said in values)
    assert all(options in said and "model/" not in said for said in found[0][3:])
