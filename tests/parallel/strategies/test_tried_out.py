"""Tensor parallelism is right whatever lies between layers that are cut, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ckptkit.errors import LayoutError, PeerError
from ckptkit.parallel import as_distributed
from tests.live.pool import Pool

BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "softmax": lambda hidden: hidden.softmax(-1),
    "glu": functional.glu,
    "norm": lambda hidden: functional.normalize(hidden, dim=-1),
    "sum so far": lambda hidden: hidden.cumsum(-1),
}
RULES: dict[str, Any] = {
    "rules": [
        {"match": "*.up.*", "tp": "shard(0)"},
        {"match": "*.down.weight", "tp": "shard(1)"},
        {"match": "*", "tp": "replicate"},
    ]
}


class Blocks(nn.Module):
    """Two layers with something between the projections up and down."""

    def __init__(self, between: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        width = 4 if between == "glu" else 8
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(width, 4)}) for _ in range(2)
        )
        self.drop, self.norm = nn.Dropout(), nn.BatchNorm1d(4)

    def forward(self, hidden: torch.Tensor, is_kept: torch.Tensor | None = None) -> Any:
        """The hidden state, by its name."""
        layers: Any = self.layers
        for layer in layers:
            inner = BETWEEN[self.between](layer["up"](hidden))
            hidden = hidden + self.norm(self.drop(layer["down"](inner)))
        return {"hidden": hidden if is_kept is None else hidden.where(is_kept, 0)}


def rows() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def tried(between: str) -> str:
    """How a model with this between its layers is refused; its output is looked at otherwise."""
    model, wanted = Blocks(between), Blocks(between).eval()(rows())["hidden"]
    try:
        made = as_distributed(model, "tp:2", rules=RULES, example=rows())
    except LayoutError as error:
        return str(error)
    assert torch.allclose(made.model.eval()(rows())["hidden"], wanted, atol=1e-5)
    return ""


@pytest.mark.parametrize("between", BETWEEN)
def test_a_plan_is_tried_out_on_an_example(gloo: Pool, between: str) -> None:
    for said in gloo.run(2, tried, between):
        if between == "tanh":
            assert said == ""
        else:
            assert said.startswith("layers.0.down: cut by these rules, the model does not give")
            assert "let the rules replicate this layer" in said


class OnOneRank(Blocks):
    """Fails on one rank, as one whose memory is full does."""

    def forward(self, hidden: torch.Tensor, is_kept: torch.Tensor | None = None) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("nothing left")
        return super().forward(hidden, is_kept)


def tried_on_one() -> str:
    with pytest.raises((PeerError, MemoryError)) as caught:
        as_distributed(OnOneRank("tanh"), "tp:2", rules=RULES, example=rows())
    return type(caught.value).__name__


def test_what_one_rank_cannot_try_out_keeps_no_other_waiting(gloo: Pool) -> None:
    assert gloo.run(2, tried_on_one) == ["GivenUpError", "MemoryError"]


def traces() -> list[str]:
    """What a trial leaves behind in a model, or in random numbers."""
    model = Blocks("tanh")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # Each rank has an example of its own, and the trial is of one.
    example = {"hidden": rows() + dist.get_rank(), "is_kept": rows() > 0}
    as_distributed(model, "tp:2", rules=RULES)
    numbers = torch.get_rng_state()
    other = Blocks("tanh")
    torch.set_rng_state(numbers)
    as_distributed(other, "tp:2", rules=RULES, example=example)
    after = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in other.state_dict().items()
    }
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    changed += [name for name, module in other.named_modules() if not module.training]
    return changed if torch.equal(torch.get_rng_state(), numbers) else [*changed, "numbers"]


def test_a_trial_leaves_no_trace(gloo: Pool) -> None:
    assert gloo.run(2, traces) == [[], []]


class Lookalike(nn.Module):
    """Named as the layers of Llama are, and with a softmax where these have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        attention = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
        feed = nn.ModuleDict({n: nn.Linear(4, 8, bias=False) for n in ("gate_proj", "up_proj")})
        feed["down_proj"] = nn.Linear(8, 4, bias=False)
        parts: Mapping[str, nn.Module] = {
            "self_attn": attention,
            "mlp": feed,
            "input_layernorm": nn.LayerNorm(4, bias=False),
        }
        self.layers = nn.ModuleList([nn.ModuleDict(parts)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes out of the one layer."""
        parts: Any = self.layers[0]
        q, k, v = (parts.self_attn[f"{name}_proj"](hidden) for name in "qkv")
        hidden = parts.self_attn.o_proj(v * (q * k).softmax(-1))
        inner = parts.mlp.gate_proj(hidden).softmax(-1) * parts.mlp.up_proj(hidden)
        out: torch.Tensor = parts.input_layernorm(parts.mlp.down_proj(inner))
        return out


def lookalike() -> tuple[float, float, str]:
    """How far outputs and gradients are from those of one process, and what a trial says."""
    alone = Lookalike()
    wanted = alone(rows())
    wanted.pow(2).sum().backward()
    made = as_distributed(Lookalike(), "tp:2")
    found = made.model(rows())
    found.pow(2).sum().backward()
    gradients = {name: p.grad for name, p in made.model.named_parameters()}
    apart = max(
        float((gradients[name].full_tensor() - p.grad).abs().max())
        for name, p in alone.named_parameters()
        if p.grad is not None and "proj" in name
    )
    with pytest.raises(LayoutError) as refused:
        as_distributed(Lookalike(), "tp:2", example=rows())
    return float((found - wanted).abs().max().detach()), apart, str(refused.value)


def test_the_automatic_plan_trusts_no_block_by_its_names_alone(gloo: Pool) -> None:
    for outputs, gradients, said in gloo.run(2, lookalike):
        assert outputs < 1e-5
        assert gradients < 1e-5
        assert "self_attn.o_proj: cut by these rules" in said
