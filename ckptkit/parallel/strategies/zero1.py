"""ZeRO-1: an optimizer whose state ranks share out; its updated parameters may travel while the
training goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ckptkit.live.wrappers.modules import settled_by
from ckptkit.parallel.strategies.batches import tensors_of
from ckptkit.parallel.strategies.data_parallel import units_of
from ckptkit.parallel.strategies.options import StrategyOptions, optimizer_for


def zero1_optimizer(
    modules: Sequence[nn.Module],
    trained: Sequence[nn.Parameter],
    options: StrategyOptions,
    group: dist.ProcessGroup,
) -> Optimizer:
    """The optimizer of this rank's share of the parameters."""
    make: Any = options.optimizer
    settings, groups = dict(options.optimizer_options), cast("Sequence[Any]", trained)
    if not isinstance(make, type):
        # A function takes parameters, but torch would pass it groups. So it is called here, with
        # all parameters, and what it made is narrowed to the groups of the share.
        whole = optimizer_for(options, trained)

        def narrowed(groups: list[dict[str, Any]]) -> Optimizer:
            whole.param_groups = groups
            kept = {parameter for each in groups for parameter in each["params"]}
            for other in whole.state.keys() - kept:
                del whole.state[other]
            return whole

        groups, settings, make = [*whole.param_groups], {}, narrowed
    shared: ZeroRedundancyOptimizer
    if options.overlap:
        shared = OverlappingZero1(modules, groups, make, group, **settings)
    else:
        shared = ZeroRedundancyOptimizer(groups, make, process_group=group, **settings)
    # Schedulers look there for what they may change.
    shared.defaults = {**shared.optim.defaults, **shared.defaults}
    return shared


class OverlappingZero1(ZeroRedundancyOptimizer):
    """Returns from `step` with parameters still on their way from the ranks that updated them.

    The forward pass waits for each layer as it comes to it, and for what it uses of layers that it
    does not call; when it has ended all is here. `state_dict`, checkpoints and the next step wait
    for everything. Other code that reads parameters after a step calls `wait` before.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        make: Callable[..., Optimizer],
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        self._coming: dict[torch.Tensor, dist.Work] = {}
        super().__init__(parameters, cast("Any", make), process_group=group, **options)
        self.register_step_pre_hook(lambda *_: self.wait())
        for module in modules:
            self._watch(module.module if isinstance(module, DistributedDataParallel) else module)

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
        # In the order of the model: on all ranks the same, as broadcasts have to be, and about that
        # in which the next forward needs them.
        torch_knows = cast("Any", self)
        for parameter in torch_knows._index_to_param:
            rank = torch_knows._param_to_rank[parameter]
            source = dist.get_global_rank(self.process_group, rank)
            work = dist.broadcast(parameter.data, source, self.process_group, async_op=True)
            self._coming[parameter] = work

    def _watch(self, module: nn.Module) -> None:
        """Wait where parameters are used: in layers, by operations on what layers have that are not
        called, and by those who save or fill the module.
        """
        # The hooks live as long as the model, which may outlive the optimizer.
        optimizer = weakref.ref(self)

        def waiting_for(parameters: Iterable[torch.Tensor] | None) -> Callable[..., None]:
            wanted = None if parameters is None else list(parameters)

            def wait(*_: object) -> None:
                if (alive := optimizer()) is not None:
                    alive.wait(wanted)

            return wait

        for unit in units_of(module, 1):
            for layer in unit.modules:
                layer.register_forward_pre_hook(waiting_for(layer.parameters()))
        passes: list[Any] = []

        def begin(*_: object) -> None:
            alive = optimizer()
            if alive is None or not alive.on_their_way:
                return
            # What is compiled would be so anew, with the mode and without it.
            if torch.compiler.is_compiling() or any(
                each._compiled_call_impl is not None or hasattr(each, "_orig_mod")
                for each in module.modules()
            ):
                alive.wait()
            else:
                passes.append(_WaitingMode(alive))
                passes[-1].__enter__()

        at_its_end = waiting_for(module.parameters())

        def end(*_: object) -> None:
            if passes:
                passes.pop().__exit__(None, None, None)
            at_its_end()  # a loss may use the others

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        everything = waiting_for(None)
        module.register_state_dict_pre_hook(everything)
        module.register_load_state_dict_pre_hook(everything)
        settled_by(module, everything)


class _WaitingMode(TorchFunctionMode):
    """Has each of torch's operations wait for the parameters that it takes."""

    def __init__(self, optimizer: OverlappingZero1) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        self._optimizer.wait(tensors_of((*args, *named.values())))
        return func(*args, **named)
