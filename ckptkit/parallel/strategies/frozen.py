"""Parameters that were not trained when a model was spread, and cannot be from then on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UsageError
from ckptkit.live.wrappers.entries import canonical_names


class Frozen:
    """Those of some modules; but for any that an optimizer of the caller's, for one rank alone, has
    nevertheless.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: Optimizer | None, *, is_spread: bool
    ) -> None:
        groups = optimizer.param_groups if optimizer is not None else ()
        stepped = {parameter for group in groups for parameter in group["params"]}
        names = [(canonical_names(module), module) for module in modules]
        self._parameters = [
            (canonical(name), parameter)
            for canonical, module in names
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
            and (is_spread or (optimizer is not None and parameter not in stepped))
        ]

    def check(self) -> None:
        """Refuse to train them, which neither engines nor optimizers would, and without a word."""
        late = [name for name, parameter in self._parameters if parameter.requires_grad]
        if late:
            raise UsageError(
                "parameters are to be trained that were frozen when the model was spread",
                value=late[:10],
                hint="save, make the model anew, unfreeze them, spread it, and load",
            )
