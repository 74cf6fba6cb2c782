"""ZeRO-1 whose updated parameters travel while the training goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ckptkit.live.pending import settled_by
from ckptkit.parallel.strategies.grouping import units_of


class OverlappingZero1(ZeroRedundancyOptimizer):
    """Returns from `step` with parameters still on their way from the ranks that updated them.

    The forward pass waits for each layer as it comes to it; `state_dict`, checkpoints and the next
    step wait for everything. Other code that reads parameters after a step calls `wait` before.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        make: Callable[..., torch.optim.Optimizer],
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        self._coming: dict[torch.Tensor, dist.Work] = {}
        super().__init__(parameters, cast("Any", make), process_group=group, **options)
        self.register_step_pre_hook(lambda *_: self.wait())
        for module in modules:
            self._watch(module)

    @property
    def on_their_way(self) -> frozenset[torch.Tensor]:
        """The parameters that nobody has waited for yet."""
        return frozenset(self._coming)

    def wait(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until these parameters, or all of them, are here."""
        for parameter in list(self._coming) if parameters is None else parameters:
            if work := self._coming.pop(parameter, None):
                work.wait()

    def _sync_params(self) -> None:
        # In the order of the model, which is about the one in which they are needed.
        torch_knows = cast("Any", self)
        for parameter in torch_knows._index_to_param:
            rank = torch_knows._param_to_rank[parameter]
            source = dist.get_global_rank(self.process_group, rank)
            work = dist.broadcast(parameter.data, source, self.process_group, async_op=True)
            self._coming[parameter] = work

    def _watch(self, module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        layers = [layer for unit in units_of(module, 1) for layer in unit.modules]
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        for layer in layers:
            layer.register_forward_pre_hook(self._waiting_for(layer.parameters()))
        others = (parameter for parameter in module.parameters() if parameter not in inside)
        module.register_forward_pre_hook(self._waiting_for(others))
        everything = self._waiting_for(None)
        module.register_state_dict_pre_hook(everything)
        module.register_load_state_dict_pre_hook(everything)
        settled_by(module, everything)

    def _waiting_for(self, parameters: Iterable[torch.Tensor] | None) -> Callable[..., None]:
        # The hooks live as long as the model, which may outlive the optimizer.
        optimizer = weakref.ref(self)
        wanted = None if parameters is None else list(parameters)

        def wait(*_: object) -> None:
            if (alive := optimizer()) is not None:
                alive.wait(wanted)

        return wait
