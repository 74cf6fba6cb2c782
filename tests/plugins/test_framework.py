"""A framework that is missing or another one is named in one sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.plugins import Framework


def test_a_missing_framework_names_the_extra_that_installs_it() -> None:
    framework = Framework("no-such-framework", "1.2", "none")
    with pytest.raises(UsageError, match="not installed") as caught:
        framework.module("no_such_framework")
    assert caught.value.hint == "pip install 'ckptkit[none]'"


def test_another_release_is_named_beside_the_one_that_the_plugin_was_made_for() -> None:
    framework = Framework("torch", "1.2", "torch")
    here = f"made for torch 1.2, this is torch {torch.__version__}".replace("+", r"\+")
    with pytest.raises(UsageError, match=f"{here}: it has no torch.gone"):
        framework.module("torch.gone")
    with pytest.raises(UsageError, match=f"{here}: it has no Linear.gone"):
        framework.private(nn.Linear, "gone")
    assert framework.private(nn.Linear, "forward") is nn.Linear.forward
