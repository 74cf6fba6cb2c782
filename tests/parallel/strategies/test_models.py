"""Models that are not simple: tied, frozen, uneven, of Hugging Face, or different on each rank."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from torch import nn
from torch.nn.functional import cross_entropy

import ckptkit
from ckptkit.errors import LayoutError
from ckptkit.live.state.entries import canonical_names, every_module
from ckptkit.live.state.tensors import local_of
from ckptkit.parallel import Distributed, as_distributed
from tests.live.network import batch, loss_of, network
from tests.live.pool import Pool
from tests.live.test_shards import kept
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import RULES, STEPS, Layered, spread, train, values

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "vocab_size": 41,
    "max_position_embeddings": 16,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


class Logits(nn.Module):
    """A model of Hugging Face that returns one tensor."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        self.lm = transformers.LlamaForCausalLM(config)
        self.config = config

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scores of the next tokens."""
        logits: torch.Tensor = self.lm(tokens).logits
        return logits


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def words() -> tuple[torch.Tensor, torch.Tensor]:
    """Passages and their next tokens."""
    tokens = torch.randint(0, 41, (8, 12), generator=torch.Generator().manual_seed(3))
    return tokens, tokens.roll(-1, 1)


def llama(spec: str, tied: bool, rules: Any) -> tuple[float, float]:
    """How far two steps take losses and parameters from those of one process."""
    alone = Logits(tied=tied)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    wanted = []
    for _ in range(2):
        optimizer.zero_grad()
        wanted.append(loss(alone(words()[0]), words()[1]))
        wanted[-1].backward()
        optimizer.step()
    options: dict[str, Any] = {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.5}}
    if "pp" in spec:
        options |= {"example": words()[0][:1], "microbatches": 4 if "pp:3" in spec else 2}
    made = as_distributed(Logits(tied=tied), spec, rules=rules, group_below=4096, **options)
    losses = [float(made.step(loss, made.share(words()))) for _ in range(2)]
    known = dict(alone.named_parameters(remove_duplicate=False))
    mine = values(made)
    apart = max(abs(a - float(b.detach())) for a, b in zip(losses, wanted, strict=True))
    return apart, max(float((mine[n] - known[n]).detach().abs().max()) for n in mine)


# Rules are a preset's name, a file or a document; by default the preset that the names call for.
FILE = Path(ckptkit.__file__).parent / "presets" / "llama.yaml"


@pytest.mark.parametrize(
    ("spec", "tied", "rules"),
    [
        ("tp:2", False, None),
        ("tp:2", False, "llama"),
        ("tp:2", True, FILE),
        ("fsdp:2", True, None),
        ("tp:2,fsdp:2", True, yaml.safe_load(FILE.read_text())),
        pytest.param("ddp:2,tp:2", False, None, marks=pytest.mark.long),
        pytest.param("tp:4", False, "llama", marks=pytest.mark.long),
        ("pp:3", False, None),
        ("pp:2,tp:2", False, None),
    ],
    ids=["auto", "preset", "file", "fsdp", "document", "ddp-tp", "tp-4", "pp", "pp-tp"],
)
def test_a_llama_is_cut_by_the_preset_that_its_names_call_for(
    gloo: Pool, spec: str, tied: bool, rules: Any
) -> None:
    for losses, parameters in gloo.run(ranks_of(spec), llama, spec, tied, rules):
        assert losses < 1e-5
        assert parameters < 1e-5


def too_many() -> str:
    """How heads that cannot be cut are refused."""
    try:
        as_distributed(Logits(), "tp:3")
    except LayoutError as error:
        return str(error)
    return ""


def test_heads_are_never_cut(gloo: Pool) -> None:
    (said, *_) = gloo.run(3, too_many)
    assert "8 heads cannot be cut evenly over 3 ranks" in said
    assert "self_attn.q_proj.weight" in said


def frozen(spec: str) -> dict[str, bool]:
    """Which parameters a step has changed, where embeddings are frozen."""
    model = network(0)
    assert model.embed is not None
    model.embed.requires_grad_(requires_grad=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"microbatches": 2, "example": batch(0)[0]} if "pp" in spec else {}
    made = as_distributed(model, spec, optimizer=torch.optim.AdamW, group_below=300, **options)
    made.step(loss_of, made.share(batch(0)))
    return {name: not value.equal(before[name]) for name, value in values(made).items()}


@pytest.mark.parametrize("spec", ["ddp:2", "zero1:2", "zero2:2", "fsdp:2", "pp:2"])
def test_what_is_frozen_stays(gloo: Pool, spec: str) -> None:
    for changed in gloo.run(2, frozen, spec):
        assert changed.pop("embed.weight", False) is False
        assert all(changed.values())


def all_frozen(spec: str) -> list[list[float]]:
    """The values of a model that no rank trains, where each rank came with its own."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(dist.get_rank()))
    model.requires_grad_(requires_grad=False)
    as_distributed(model, spec)
    return [parameter.reshape(-1).tolist() for parameter in model.parameters()]


def test_what_is_only_used_has_the_values_of_rank_0_too(gloo: Pool) -> None:
    assert gloo.run(2, all_frozen, "ddp:2") == [[[0.0] * 4, [0.0] * 2]] * 2


def by_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Decays what has several dims."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 0.5},
        ],
        lr=0.03,
    )


def of_a_function(spec: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """What some steps of an optimizer that a function makes give, and its groups."""
    dist = spread(spec, optimizer=by_groups, optimizer_options={}, **options)
    train(dist, range(3))
    return values(dist), len(dist.optimizer.param_groups)


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_a_function_makes_the_optimizer_of_zero1_too(gloo: Pool, options: dict[str, Any]) -> None:
    (wanted, _), *_ = gloo.run(2, of_a_function, "ddp:2", {})
    for found, groups in gloo.run(2, of_a_function, "zero1:2", options):
        assert groups == 2
        assert all(found[name].equal(wanted[name]) for name in wanted)


class Forgetful(nn.Module):
    """A model with dropout in what tensor parallelism does not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.drop, self.norm = nn.Dropout(0.5), nn.LayerNorm(6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normed output, or what is left of it."""
        found: torch.Tensor = self.norm(self.drop(self.down(self.up(hidden))))
        return found


def dropping() -> dict[str, torch.Tensor]:
    """The parameters after some steps of ranks that were seeded differently."""
    torch.manual_seed(dist.get_rank())
    made = as_distributed(Forgetful(), "tp:2", rules=RULES, optimizer=torch.optim.SGD)
    for _ in range(3):
        made.step(nn.functional.mse_loss, (torch.ones(4, 6), torch.zeros(4, 6)))
    return values(made)


def test_ranks_with_cut_layers_forget_the_same(gloo: Pool) -> None:
    first, second = gloo.run(2, dropping)
    assert all(first[name].equal(second[name]) for name in first)


def dtypes_seen() -> set[torch.dtype]:
    """Those of a layer's weight while the model runs in half precision."""
    made = spread("pp:2,ddp:2", mixed_precision="bf16")
    seen: set[torch.dtype] = set()
    layer = next(m for m in made.modules[0].modules() if isinstance(m, nn.Linear))
    layer.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    train(made, [0])
    return seen


def test_precision_is_halved_once(gloo: Pool) -> None:
    assert gloo.run(4, dtypes_seen) == [{torch.float32}] * 4


def test_a_copy_of_a_model_in_half_precision_has_weights_of_its_own() -> None:
    """As an average of the weights that a training keeps beside them."""
    model = as_distributed(nn.Linear(3, 3), "single", mixed_precision="bf16").model
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        found = made(torch.ones(1, 3))
        assert not found.any()
        assert found.dtype == torch.bfloat16
        assert model(torch.ones(1, 3)).any()
        assert list(inspect.signature(made.forward).parameters) == ["input"]


def test_a_model_that_is_spread_anew_computes_as_it_is_told_then() -> None:
    model = as_distributed(nn.Linear(3, 3), "single", mixed_precision="bf16").model
    again = as_distributed(copy.deepcopy(model), "single").model
    assert again(torch.ones(1, 3)).dtype == torch.float32
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16


def uneven() -> list[tuple[int, ...]]:
    """What a rank has of layers that three ranks cannot share evenly."""
    made = as_distributed(Layered(4, 5), "fsdp", group_below=200, optimizer=torch.optim.SGD)
    made.step(nn.functional.mse_loss, (torch.ones(3, 5), torch.zeros(3, 5)))
    return [tuple(local_of(p).shape) for p in made.modules[0].parameters()]


def test_ranks_may_have_less_than_others(gloo: Pool) -> None:
    found = gloo.run(3, uneven)
    assert [shapes[0] for shapes in found] == [(2, 5), (2, 5), (1, 5)]


def differently(spec: str) -> dict[str, torch.Tensor]:
    """The values of a model that each rank has begun with values of its own."""
    return values(spread(spec, seed=dist.get_rank()))


@pytest.mark.parametrize("spec", ["ddp:2", "fsdp:2", "tp:2", "zero1:2"])
def test_all_ranks_begin_with_what_rank_0_has(gloo: Pool, spec: str) -> None:
    wanted = dict(network(0).named_parameters())
    for found in gloo.run(2, differently, spec):
        assert all(tensor.equal(wanted[name]) for name, tensor in found.items())


def never_moved(spec: str) -> bool:
    """Whether a model can be spread without ever being on the device as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(nn.Module, "to")
        return bool(values(spread(spec)))


@pytest.mark.parametrize("spec", ["fsdp:2", "zero2:2", "pp:2,fsdp:2", "tp:2,fsdp:2"])
def test_what_is_cut_never_is_on_a_device_as_a_whole(gloo: Pool, spec: str) -> None:
    assert all(gloo.run(ranks_of(spec), never_moved, spec))


def unit_of_two() -> bool:
    """Whether a unit of modules that do not follow each other trains as they do alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 256), nn.Linear(256, 10))
    inputs, targets = torch.randn(4, 16), torch.randn(4, 10)
    found = []
    for below in (14_000, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 256), nn.Linear(256, 10))
        made = as_distributed(model, "fsdp", group_below=below, optimizer=torch.optim.SGD)
        found.append([float(made.step(nn.functional.mse_loss, (inputs, targets))) for _ in "abc"])
    return found[0] == found[1]


def test_units_around_others_train_as_they_should(gloo: Pool) -> None:
    assert all(gloo.run(2, unit_of_two))


class Choosing(nn.Module):
    """A model that does not run all of its layers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.skipped = 3

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Through all but one."""
        for number, layer in enumerate(self.layers):
            hidden = hidden if number == self.skipped else layer(hidden)
        return hidden


def skipping() -> list[float]:
    """The losses of steps that leave out one layer or another."""
    torch.manual_seed(0)
    made = as_distributed(Choosing(), "fsdp", group_below=600, optimizer=torch.optim.SGD)
    found = []
    for skipped in (3, 1, 5):
        made.model.skipped = skipped
        pair = torch.ones(2, 8), torch.zeros(2, 8)
        found.append(float(made.step(nn.functional.mse_loss, pair)))
    return found


def test_layers_of_a_unit_may_be_left_out(gloo: Pool) -> None:
    torch.manual_seed(0)
    model = Choosing()
    optimizer = torch.optim.SGD(model.parameters())
    wanted = []
    for skipped in (3, 1, 5):
        model.skipped = skipped
        optimizer.zero_grad()
        found = nn.functional.mse_loss(model(torch.ones(2, 8)), torch.zeros(2, 8))
        found.backward()
        optimizer.step()
        wanted.append(float(found.detach()))
    for losses in gloo.run(2, skipping):
        assert losses == pytest.approx(wanted, abs=1e-6)


def named_inputs() -> float:
    """The loss of a model of Hugging Face as it is."""
    made = as_distributed(Logits().lm, "fsdp", optimizer=torch.optim.SGD)
    tokens, targets = made.share(words())
    return float(made.step(lambda out, t: loss(out.logits, t), ({"input_ids": tokens}, targets)))


def test_inputs_may_have_names(gloo: Pool) -> None:
    with torch.no_grad():
        wanted = float(loss(Logits()(words()[0]), words()[1]))
    assert gloo.run(2, named_inputs) == pytest.approx([wanted] * 2, abs=1e-5)


def kept_here(spec: str) -> bool:
    """Whether a rank's own state, put aside, brings a job back to the bit."""
    made = spread(spec)
    train(made, range(2))
    aside = kept(made.local_shard())
    first = train(made, range(2, STEPS))
    other = spread(spec, seed=7)
    other.load_local_shard(aside)
    made.load_local_shard(aside)
    return first == train(made, range(2, STEPS)) == train(other, range(2, STEPS))


@pytest.mark.parametrize("spec", ["ddp:2", "zero1:2", "zero2:2", "fsdp:2", "tp:2", "pp:2"])
def test_a_rank_can_put_its_own_state_aside(gloo: Pool, spec: str) -> None:
    assert all(gloo.run(2, kept_here, spec))


def back_to_the_start(spec: str) -> bool:
    """Whether a state from before the first step makes the next one the first again."""
    made = spread(spec)
    aside = kept(made.local_shard())
    first = train(made, range(STEPS))
    made.load_local_shard(aside)
    return first == train(made, range(STEPS))


@pytest.mark.parametrize("spec", ["ddp:2", "zero1:2", "fsdp:2"])
def test_a_rank_can_go_back_to_before_the_first_step(gloo: Pool, spec: str) -> None:
    assert all(gloo.run(2, back_to_the_start, spec))


class Counting(torch.optim.Optimizer):
    """Counts its steps in a plain number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1


def test_numbers_that_an_optimizer_keeps_go_back_too() -> None:
    made = as_distributed(nn.Linear(4, 2), "single", optimizer=Counting)
    made.optimizer.step()
    aside = kept(made.local_shard())
    made.optimizer.step()
    other = as_distributed(nn.Linear(4, 2), "single", optimizer=Counting)
    for each in (made, other):
        each.load_local_shard(aside)
        assert [kept["step"] for kept in each.optimizer.state.values()] == [1, 1]


def by_hand() -> list[str]:
    """The parameters of stages that the caller has made."""
    made: Distributed = spread("pp:2", split=lambda model, parts: model.keep(_grouped(parts)))
    train(made, range(2))
    canonical = canonical_names(every_module(made.modules[0]))
    return [canonical(name) for name, _ in made.modules[0].named_parameters()]


def _grouped(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("head" if part == "norm" else part for part in parts)


def test_stages_may_be_made_by_hand(gloo: Pool) -> None:
    first, last = gloo.run(2, by_hand)
    assert "embed.weight" in first
    assert {"norm.weight", "head.weight", "scale"} <= set(last)
    assert not set(first) & set(last)
