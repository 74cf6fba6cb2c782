"""Which pipeline stage a tensor lies on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ckptkit.errors import RulesError
from ckptkit.model import Pipeline, Replicate, Rules, Stage, Strategy
from ckptkit.model.rules import matches
from ckptkit.plan.cuts import AS_IN_SOURCE, Said, Subject

_HINT = (
    "say it in the rules, such as pipeline: {layers: 'layers\\.(\\d+)', split: balanced,"
    " first: [...], last: [...]}"
)


class Stager:
    """Knows the stage of every layer, and of what is outside of them.

    Several pp axes make one pipeline of as many stages as their product, the last axis the fastest.
    """

    def __init__(
        self, subjects: Sequence[Subject], target: Strategy, source: Strategy, rules: Rules | None
    ) -> None:
        self._sizes = [axis.size for axis in target.mesh.axes if axis.kind == "pp"]
        count = math.prod(self._sizes)
        self._pipeline = rules.pipeline if rules else None
        self._name = rules.name if rules else ""
        self._replicates = rules is not None and rules.default == "replicate"
        self._last = count - 1
        self._stages: dict[tuple[int, int], int] = {}
        # The pp axes of the source, where nothing but its own pipeline says what lies where.
        axes = enumerate(source.mesh.axes)
        pipes = {index: axis.size for index, axis in axes if axis.kind == "pp"}
        is_same = bool(pipes) and math.prod(pipes.values()) == count
        self._source = pipes if is_same and self._pipeline is None else None
        if self._pipeline is not None:
            self._stages = _stages(subjects, self._pipeline, count, self._name)
        elif self._source is None and count > 1:
            raise RulesError(
                f"nothing says how layers are split into {count} stages",
                where=str(target),
                hint=_HINT,
            )

    def along(self, subject: Subject) -> list[Said | None]:
        """Where a tensor lies along each of the pp axes; None where nobody knows."""
        said = self._said(subject)
        if said is None or not isinstance(said.placement, Stage):
            return [said] * len(self._sizes)
        stage, found = said.placement.coord, list[Said | None]()
        for size in reversed(self._sizes):
            stage, coord = divmod(stage, size)
            found.insert(0, Said(Stage(coord), said.why))
        return found

    def _said(self, subject: Subject) -> Said | None:
        if self._source is not None:
            return _as_in_source(subject, self._source)
        if self._pipeline is None:
            return Said(Stage(0), "the only stage")
        layer = self._pipeline.layer(subject.inner)
        if layer is not None:
            return Said(Stage(self._stages[layer]), f"{self._name}: layer {layer[1]}")
        first, last = Stage(0), Stage(self._last)
        for placement, patterns in (
            (first, self._pipeline.first),
            (last, self._pipeline.last),
            (Replicate(), self._pipeline.every),
        ):
            pattern = next((each for each in patterns if matches(each, subject.inner)), None)
            if pattern is not None:
                return Said(placement, f"{self._name}: {pattern}")
        if self._replicates:
            return Said(Replicate(), f"{self._name}: default")
        if not subject.is_of_model or subject.lead.role == "buffer" or not subject.lead.shape:
            return Said(Replicate(), "outside of the layers")
        return None


def balanced(layers: Sequence[int], stages: int, first: int = 0, last: int = 0) -> list[int]:
    """The stage of each layer: contiguous, none empty, and the largest stage as small as it can be;
    of all such splits the evenest.

    `first` and `last` are bytes that lie on the first and the last stage in any case.
    """
    totals = [0]
    for nbytes in layers:
        totals.append(totals[-1] + nbytes)
    totals = [0, *(total + first for total in totals[1:])]
    totals[-1] += last
    least = _best(totals, stages, None)[0]
    cuts = _best(totals, stages, least)[1]
    return [stage for stage, (a, b) in enumerate(pairwise(cuts)) for _ in range(a, b)]


def _best(totals: list[int], stages: int, limit: int | None) -> tuple[int, list[int]]:
    """Without a limit, the least largest stage; with one, the split of least squares within it."""
    count = len(totals) - 1
    best: list[tuple[int, list[int]] | None] = [(0, [0])] + [None] * count
    for stage in range(1, stages + 1):
        now: list[tuple[int, list[int]] | None] = [None] * (count + 1)
        for stop in range(stage, count - (stages - stage) + 1):
            for start in range(stop - 1, stage - 2, -1):
                before = best[start]
                size = totals[stop] - totals[start]
                if limit is not None and size > limit:
                    break
                if before is None:
                    continue
                cost = max(before[0], size) if limit is None else before[0] + size * size
                known = now[stop]
                if known is None or cost < known[0]:
                    now[stop] = (cost, [*before[1], stop])
        best = now
    found = best[count]
    assert found is not None  # noqa: S101 — there are as many layers as stages, and the limit was reached before
    return found


def _stages(
    subjects: Sequence[Subject], pipeline: Pipeline, size: int, name: str
) -> dict[tuple[int, int], int]:
    """The stage of each layer, as the pipeline splits them."""
    nbytes: dict[tuple[int, int], int] = {}
    ends = [0, 0]
    for subject in subjects:
        mine = subject.tensor.elements * subject.tensor.itemsize
        layer = pipeline.layer(subject.inner)
        if layer is not None:
            nbytes[layer] = nbytes.get(layer, 0) + mine
        elif any(matches(pattern, subject.inner) for pattern in pipeline.first):
            ends[0] += mine
        elif any(matches(pattern, subject.inner) for pattern in pipeline.last):
            ends[1] += mine
    layers = sorted(nbytes)
    if len(layers) < size:
        raise RulesError(
            f"{len(layers)} {'layer' if len(layers) == 1 else 'layers'} cannot be split into {size}"
            " stages",
            where=f"{name}: pipeline",
            value=" ".join(pipeline.layers),
            hint="layers is a regular expression that finds the number of a layer in a name",
        )
    if pipeline.split == "balanced":
        found = balanced([nbytes[layer] for layer in layers], size, ends[0], ends[1])
        return dict(zip(layers, found, strict=True))
    split = pipeline.split
    if len(split) != size - 1 or split[-1:] >= (len(layers),):
        raise RulesError(
            f"{size} stages of {len(layers)} layers are split at {size - 1} of them",
            where=f"{name}: pipeline.split",
            value=list(split),
            hint="the numbers are those of the first layer of each stage but the first",
        )
    return {layer: sum(at <= i for at in split) for i, layer in enumerate(layers)}


def _as_in_source(subject: Subject, axes: dict[int, int]) -> Said | None:
    stage, placements = 0, [subject.tensor.placements[index] for index in axes]
    if all(isinstance(placement, Replicate) for placement in placements):
        return Said(Replicate(), AS_IN_SOURCE)
    for placement, size in zip(placements, axes.values(), strict=True):
        if not isinstance(placement, Stage):
            return None
        stage = stage * size + placement.coord
    return Said(Stage(stage), AS_IN_SOURCE)
