"""What an optimizer would keep for a parameter that it has not stepped yet."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Adagrad, Optimizer

from ckptkit.errors import UsageError


def fresh_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state after a step without gradient, its counter at zero; nothing for an optimizer that
    keeps none.

    Only the optimizer knows what it keeps, so a twin of it makes that step, on a twin of the
    parameter: neither of the two changes. For a DTensor the step may communicate.
    """
    group = _group_of(optimizer, parameter)
    twin = nn.Parameter(torch.zeros_like(parameter))
    if isinstance(optimizer, Adagrad):
        # Its state is there before the first step, which expects it.
        first = group["initial_accumulator_value"]
        return dict(Adagrad([twin], initial_accumulator_value=first).state[twin])
    twin.grad = torch.zeros_like(parameter)
    stepping = _twin(optimizer, {**group, "params": [twin]})
    type(stepping).step(stepping)
    state = dict(stepping.state.get(twin, {}))
    if torch.is_tensor(state.get("step")):
        state["step"].zero_()
    elif "step" in state:
        state["step"] = 0
    return state


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same kind, of one group; nobody is told when it steps."""
    twin = object.__new__(type(optimizer))
    # A scheduler puts a `step` of its own on the instance, which would step the original.
    twin.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    twin.param_groups = [{**options, "params": group["params"]}]
    return twin


def _group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            return group
    raise UsageError("the optimizer does not step this parameter", value=tuple(parameter.shape))
