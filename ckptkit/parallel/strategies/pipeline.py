"""A model cut into the stages of a pipeline, each of which runs the model's own `forward`: as
evenly as it works, which is tried out on an example. And torch's schedule that runs them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import LayoutError, UsageError
from ckptkit.live.wrappers.modules import CONTAINERS, keeping_buffers
from ckptkit.parallel.strategies.data_parallel import nbytes_of
from ckptkit.parallel.strategies.options import (
    StageByHand,
    StrategyOptions,
    mapped,
    opened,
    tensors_of,
)
from ckptkit.plan.place import balanced

LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]

_HOW = "pass split=, a function of the model and the names of a stage's layers; it makes the stage"

# Each trial runs the model, and one that so many find no place in can hardly be cut at all.
_TRIALS_FOR_A_STAGE = 4

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that lies on one stage as a whole."""

    name: str
    nbytes: int
    seconds: float = 0.0
    outputs: int = 0
    """How many values it returns in a tuple; 0 for one that is not in a tuple."""
    given: Sequence[torch.Tensor] = field(default=(), compare=False, repr=False)
    """The first tensor that each of its runs on an example takes."""


@dataclass(frozen=True, slots=True, eq=False)
class StageSplit:
    """The layers of each stage, and how a stage goes without those of the others."""

    model: nn.Module
    stages: Sequence[Sequence[Layer]]
    loose: int | None = None
    """The stage that has parameters which no layer has: the first or the last, once it is known."""
    drops: bool = False
    """Whether modules outside of lists are set to None rather than passed by."""

    def compared(self) -> list[str]:
        """What ranks compare to know that they split alike."""
        return [*(str(_names(stage)) for stage in self.stages), f"{self.drops} {self.loose}"]

    def made(self, numbers: Sequence[int], by_hand: StageByHand | None) -> list[nn.Module]:
        """Stages by their numbers, with the names of the whole model, which is left with what they
        have.
        """
        if by_hand is not None:
            models = [self.model, *(copy.deepcopy(self.model) for _ in numbers[1:])]
            names = [tuple(_names(self.stages[number])) for number in numbers]
            return [by_hand(*each) for each in zip(models, names, strict=True)]
        made = [self.stage(number) for number in numbers]
        # The caller may keep the model, and with it the memory of all other stages.
        for number, layers in enumerate(self.stages):
            for layer in layers if number not in numbers else ():
                _replace(self.model, layer, drops=False)
        return made

    def stage(self, number: int) -> nn.Module:
        """A copy of the model's frame around the very modules that the stage has."""
        layers = [layer for stage in self.stages for layer in stage]
        frame = _frame(self.model, "", set(_names(layers)))
        for layer in layers:
            if layer not in self.stages[number]:
                _replace(frame, layer, drops=self.drops)
        if self.loose != number:
            for name in self.loose_parameters():
                path, _, own = name.rpartition(".")
                setattr(frame.get_submodule(path), own, None)
        return frame

    def stages_of_parameters(self) -> Iterator[tuple[str, int]]:
        """The parameters by all of their names, and the number of the stage of each."""
        for number, stage in enumerate(self.stages):
            for layer in stage:
                module = self.model.get_submodule(layer.name)
                for name, _ in module.named_parameters(layer.name, remove_duplicate=False):
                    yield name, number
        if self.loose is not None:
            for name in self.loose_parameters():
                yield name, self.loose

    def loose_parameters(self) -> list[str]:
        """The parameters that no layer has, by all of their names."""
        prefixes = tuple(f"{layer.name}." for stage in self.stages for layer in stage)
        names = (name for name, _ in self.model.named_parameters(remove_duplicate=False))
        return [name for name in names if not name.startswith(prefixes)]

    def check_tied(self) -> None:
        """Refuse weights that two stages would have: nobody would keep them alike."""
        first: dict[int, tuple[int, str]] = {}
        for name, stage in self.stages_of_parameters():
            known, other = first.setdefault(id(self.model.get_parameter(name)), (stage, name))
            if known != stage:
                raise LayoutError(
                    "tied weights on two stages, which torch's pipelines do not keep alike",
                    value=(other, name),
                    hint="untie them, or use fsdp",
                )


def split_into_stages(
    model: nn.Module, count: int, options: StrategyOptions, ranks: Ranks
) -> StageSplit:
    """The most even split into stages that works, of which nothing is made yet.

    What is to be shared out evenly is bytes, or times of rank 0, as clocks differ.
    """
    layers, inputs, output = [*_layers_in("", model)], None, None
    if options.example is not None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        example = mapped(options.example, lambda tensor: tensor.to(device))
        inputs, _, _ = opened((example, None))
    if inputs is not None and options.split is None:
        if options.balance == "time":
            evaluated(model, inputs)  # the first is slower than those to come
        layers, output = _as_run(model, layers, inputs)

    # Another stage may begin anywhere but between layers that share weights.
    if len(layers) < count:
        raise LayoutError(
            f"the model has {len(layers)} layers, too few for {count} stages",
            value=_names(layers)[:20],
        )
    firsts, refused = dict[int, int](), set[int]()
    singles = StageSplit(model, [[layer] for layer in layers])
    for name, number in singles.stages_of_parameters():
        first = firsts.setdefault(id(model.get_parameter(name)), number)
        refused.update(range(first + 1, number + 1))
    places = [at for at in range(1, len(layers)) if at not in refused]
    if len(places) < count - 1:
        singles.check_tied()
    weights = [layer.nbytes for layer in layers]
    if options.balance == "time":
        if inputs is None:
            raise UsageError('balance="time" takes an example to measure', hint="pass example=")
        times = [round(layer.seconds * 1e9) for layer in layers]
        weights = ranks.share(lambda: times)

    def trial(begins: Sequence[int]) -> StageSplit:
        stages = [layers[a:b] for a, b in pairwise([*begins, len(layers)])]
        split = StageSplit(model, stages, loose=0)
        if options.split is None:
            if not isinstance(model, nn.Sequential):
                split = _found_way(split, inputs, output)
            split.check_tied()
        return split

    return most_even(weights, count, places, trial)


def most_even(
    weights: Sequence[int],
    count: int,
    places: Iterable[int],
    trial: Callable[[Sequence[int]], Found],
) -> Found:
    """What a trial returns for the most even split that it takes.

    Stages but the first begin at some of `places`, of which there are enough. The trial is given
    such beginnings, [0, 3, 5] for three stages, and raises LayoutError where there cannot be
    stages. The error raised is the one about the most even split of all.
    """
    begins = [0, *places]
    left, fine = count * _TRIALS_FOR_A_STAGE, set[int]()
    problem: LayoutError | None = None
    try:
        while len(begins) >= count and left > 0:
            together = [sum(weights[a:b]) for a, b in pairwise([*begins, len(weights)])]
            numbers = balanced(together, count)
            split = [begins[numbers.index(stage)] for stage in range(count)]
            try:
                return trial(split)
            except LayoutError as error:
                problem = problem or error
            left -= 1
            refused = set(split[1:])
            if count > 2:  # with two stages the split is its only place
                unknown = refused - fine
                left -= len(unknown)
                refused = set()
                # To find out which of the places is to blame, each is tried by itself.
                for at in unknown:
                    try:
                        trial([0, at])
                    except LayoutError:
                        refused.add(at)
                fine |= unknown - refused
            if not refused:
                break
            begins = [at for at in begins if at not in refused]
        assert problem is not None  # noqa: S101 — there are places enough for a first trial
        raise problem
    finally:
        problem = None  # what it holds would live on, and with it the stages that were tried


def _found_way(split: StageSplit, inputs: tuple[Any, ...] | None, output: Any) -> StageSplit:
    """The way in which the stages, one after another, give what the whole model gives."""
    if inputs is None:
        raise UsageError(
            "a pipeline of a model that is no nn.Sequential is tried out before it is used",
            hint=f"pass example=, the inputs of a small batch; or {_HOW}",
        )
    if not torch.is_tensor(output):
        raise UsageError(
            "the model of a pipeline returns one tensor",
            value=type(output).__name__,
            hint="wrap it in a module that returns, say, the logits",
        )
    last = len(split.stages) - 1
    ways = [replace(split, drops=True, loose=last), replace(split, drops=True)]
    if not split.loose_parameters():
        ways = [split, ways[0]]
    # A head of zeros gives the same whatever comes before it: what layers are given tells more.
    wanted = [t for stage in split.stages for layer in stage for t in layer.given] + [output]
    problem: Exception | None = None
    try:
        for way in ways:
            try:
                found: Any = inputs
                got = list[torch.Tensor]()
                for number, stage in enumerate(split.stages):
                    ran, result = _as_run(way.stage(number), stage, found)
                    found = (result,)
                    got += [tensor for layer in ran for tensor in layer.given]
                pairs = zip([*got, *found], wanted, strict=True)
                if all(a.shape == b.shape and torch.allclose(a, b, 1e-4) for a, b in pairs):
                    return way
            except Exception as error:  # noqa: BLE001 — the model's own, of any kind
                problem = error
        raise LayoutError(
            "the stages, one after another, do not give what the whole model gives",
            value=[_names(stage) for stage in split.stages],
            hint=f"the model may do more to its hidden state than run its layers; {_HOW}",
        ) from problem
    finally:
        problem = None  # what it holds would live on, and with it the stages that were tried


class PassedOn(nn.Module):
    """Stands where another stage has the layer: what comes in goes on."""

    def __init__(self, outputs: int = 0) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first input; nothing to be added, for positions and other whole numbers."""
        hidden = next(v for v in (*args, *kwargs.values()) if torch.is_tensor(v))
        if not hidden.is_floating_point():
            hidden = torch.zeros((), device=hidden.device)
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden


def _replace(frame: nn.Module, layer: Layer, *, drops: bool) -> None:
    path, _, own = layer.name.rpartition(".")
    parent = frame.get_submodule(path)
    is_listed = isinstance(parent, CONTAINERS)
    parent._modules[own] = None if drops and not is_listed else PassedOn(layer.outputs)


def _frame(module: nn.Module, path: str, layers: set[str]) -> nn.Module:
    """A copy of a module down to its layers, which are shared with it.

    Also of modules without layers: what a stage does not have is taken from them.
    """
    if path in layers:
        return module
    clone = copy.copy(module)
    # Its tensors, modules and hooks, of which the copy has others from now on.
    own = {key: copy.copy(value) for key, value in vars(module).items() if isinstance(value, dict)}
    vars(clone).update(own)
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = _frame(child, f"{path}.{name}" if path else name, layers)
    return clone


def _names(stage: Sequence[Layer]) -> list[str]:
    return [layer.name for layer in stage]


def _layers_in(prefix: str, module: nn.Module) -> Iterator[Layer]:
    """What a pipeline can cut a model between, in the order in which it is defined."""
    is_container = isinstance(module, CONTAINERS)
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}{name}"
        holds_layers = any(isinstance(each, CONTAINERS) for each in child.modules())
        # Modules that compute positions and masks have no parameters, are not on the way of the
        # data, and run on every stage.
        changes_its_input = type(child).__module__.startswith("torch.nn.") or any(
            True for _ in child.parameters()
        )
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (holds_layers and not is_container):
            yield from _layers_in(f"{path}.", child)
        elif is_container or changes_its_input:
            yield Layer(path, nbytes_of(child.parameters()))


def _as_run(
    model: nn.Module, layers: Iterable[Layer], inputs: tuple[Any, ...]
) -> tuple[list[Layer], Any]:
    """The layers in the order in which the model runs them on an example, without those that never
    ran, and what the model returns.
    """
    known, order = {layer.name: layer for layer in layers}, dict[str, Layer]()
    started, given = dict[str, float](), dict[str, list[torch.Tensor]]()

    def now() -> float:
        if any(p.is_cuda for p in model.parameters()):
            torch.cuda.synchronize()
        return time.perf_counter()

    def before(name: str, _module: nn.Module, args: Any, named: Mapping[str, Any]) -> None:
        tensors = [v for v in (*args, *named.values()) if torch.is_tensor(v)]
        given.setdefault(name, []).extend(v.clone() for v in tensors[:1])
        started[name] = now()

    def after(name: str, _module: nn.Module, _inputs: Any, result: Any) -> None:
        seconds = now() - started[name] + (order[name].seconds if name in order else 0.0)
        outputs = len(result) if isinstance(result, tuple) else 0
        order[name] = replace(known[name], seconds=seconds, outputs=outputs, given=given[name])

    with ExitStack() as hooks:
        for name, module in ((each, model.get_submodule(each)) for each in known):
            noting = module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
            hooks.enter_context(noting)
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        output = evaluated(model, inputs)
    return list(order.values()), output


def evaluated(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """What a model returns in evaluation mode, without a trace in buffers or in random numbers."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices), keeping_buffers(model.modules()):
        model.eval()
        try:
            return model(*inputs)
        finally:
            for module, is_training in modes:
                module.training = is_training


class _KeepingStage(PipelineStage):
    """A stage whose buffers stay as they are when torch runs it once more to see its shapes."""

    _keeping = ExitStack()

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(keeping_buffers(self.submod.modules()))
            found = super()._forward_metadata_inference(*args, **kwargs)
            self._keeping = stack.pop_all()
        return found

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        self._keeping.close()


class _OnlySteps:
    """Answers those who take a schedule for a module; Python looks for that in classes only."""

    def __call__(self, *_: object, **__: object) -> Any:
        raise UsageError(
            "the model of a pipeline cannot be called: no rank has all of it",
            hint="dist.step and dist.backward run it; to evaluate it, load its checkpoint into "
            "another strategy",
        )


class _GPipe(_OnlySteps, ScheduleGPipe): ...


class _OneForwardOneBackward(_OnlySteps, Schedule1F1B): ...


class _Interleaved(_OnlySteps, ScheduleInterleaved1F1B): ...


_SCHEDULES: dict[str, Any] = {
    "gpipe": _GPipe,
    "1f1b": _OneForwardOneBackward,
    "interleaved": _Interleaved,
}


class StagePipeline:
    """The stages of this rank, and the schedule that all ranks of the pipeline run together."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        options: StrategyOptions,
        *,
        numbers: Sequence[int],
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self.stages = [
            _KeepingStage(module, number, count, device, group=group)
            for module, number in zip(modules, numbers, strict=True)
        ]
        self._count = options.microbatches
        self._loss_function: LossFunction | None = None
        self._losses: list[torch.Tensor] = []
        self._shapes: list[tuple[int, ...]] = []
        # `_loss` divides each loss. Torch would divide the gradients at the end, those of earlier
        # passes too, where these add up.
        settings: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        given = [*self.stages] if options.schedule == "interleaved" else self.stages[0]
        self.schedule = _SCHEDULES[options.schedule](given, self._count, **settings)

    def run(
        self, loss_function: LossFunction, inputs: tuple[Any, ...], targets: Any
    ) -> list[torch.Tensor]:
        """Forward and backward of a batch; the losses of its micro-batches on the last stage."""
        # Torch would cut these into micro-batches of different sizes, and then hang.
        if not torch.is_tensor(targets):
            raise UsageError(
                "the targets of a pipeline are one tensor",
                value=type(targets).__name__,
                hint="put them together, and let loss_fn take them apart",
            )
        shapes = [tuple(tensor.shape) for tensor in tensors_of((inputs, targets))]
        for shape in shapes:
            if not shape or not shape[0] or shape[0] % self._count:
                raise UsageError(
                    f"a batch that {self._count} micro-batches cannot share evenly",
                    value=shape,
                    hint="choose microbatches= that divides the first dim",
                )
        # Neighbours do not expect others: torch would end the process.
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise UsageError(
                "batches of a pipeline have the same shape in every step",
                value=f"{shapes}, before {self._shapes}",
                hint="leave out the last batch of a pass over the data, or fill it up",
            )
        self._loss_function = loss_function
        self._losses.clear()
        given = inputs if any(stage.is_first for stage in self.stages) else ()
        is_last = any(stage.is_last for stage in self.stages)
        with ExitStack() as stack:
            # Only the last backward pass of a step sends gradients, as torch sees to, but for the
            # first step, in which a stage runs once more to see its shapes.
            for stage in self.stages:
                if isinstance(stage.submod, DistributedDataParallel):
                    stack.enter_context(stage.submod.no_sync())
            self.schedule.step(*given, target=targets if is_last else None, return_outputs=False)
        # The first step has one more, of the run in which a stage sees its shapes.
        return self._losses[-self._count :]

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        # A schedule is made before anybody has a loss.
        assert self._loss_function is not None  # noqa: S101 — set by `run`
        loss = self._loss_function(outputs, targets)
        self._losses.append(loss.detach())
        return loss / self._count
