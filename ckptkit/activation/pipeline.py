"""What the micro-batches in flight of a pipeline's stages keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ckptkit.activation.memory import MemoryStats, storages_in
from ckptkit.activation.offload import OffloadedForward, OwnedMemory, SavedTensor
from ckptkit.activation.store import ActivationStore, DistributedActivationStore
from ckptkit.errors import UsageError
from ckptkit.live.wrappers import Model
from ckptkit.storage.base.store import Closing


class PipelineActivations(Closing):
    """Activations by stage and micro-batch, held from its forward to the end of its backward.

    `attach` lets the stages of `torch.distributed.pipelining` tell it of their micro-batches: what
    a stage hands on is its boundary. In a distributed store other ranks may fetch it, under the
    name `<stage>/<micro-batch>/<name>`.

    >>> with PipelineActivations() as kept:
    ...     kept.register(0, 3, torch.ones(2), is_boundary=True)
    ...     print(kept.in_flight(0), kept.boundaries(0))
    [3] {3: (tensor([1., 1.]),)}
    """

    def __init__(self, store: ActivationStore | DistributedActivationStore | None = None) -> None:
        local = store.local if isinstance(store, DistributedActivationStore) else store
        self._store = ActivationStore() if local is None else local
        # By stage and micro-batch: what was registered, and whether that is a boundary.
        self._names: dict[tuple[int, int], dict[str, bool]] = {}
        # The places in the store of what autograd saved, in the order of the forward.
        self._saved: dict[tuple[int, int], list[str]] = {}
        self._peaks: defaultdict[int, int] = defaultdict(int)
        self._attached = ExitStack()

    def register(
        self,
        stage: int,
        microbatch: int,
        tensor: torch.Tensor,
        *,
        name: str = "output",
        is_boundary: bool = False,
    ) -> None:
        """Keep an activation of a micro-batch; a boundary is what the next stage gets."""
        for what, number in (("stage", stage), ("microbatch", microbatch)):
            if type(number) is not int or number < 0:
                raise UsageError("is no number from 0", where=what, value=number)
        self._store.register(f"{stage}/{microbatch}/{name}", tensor)
        self._begin(stage, microbatch)
        self._names[stage, microbatch][name] = is_boundary

    @overload
    def get(self, stage: int, microbatch: int) -> dict[str, torch.Tensor]: ...

    @overload
    def get(self, stage: int) -> dict[int, dict[str, torch.Tensor]]: ...

    def get(self, stage: int, microbatch: int | None = None) -> dict[Any, Any]:
        """What was registered of a micro-batch in a stage, by name; nothing for one not in flight.

        Of a stage alone: of each micro-batch in flight, by its number.
        """
        if microbatch is None:
            return {number: self.get(stage, number) for number in self.in_flight(stage)}
        names = self._names.get((stage, microbatch), {})
        return {name: self._store.retrieve(f"{stage}/{microbatch}/{name}") for name in names}

    def boundaries(self, stage: int) -> dict[int, tuple[torch.Tensor, ...]]:
        """What the stage after this one gets, by micro-batch in flight."""
        found = {
            microbatch: tuple(
                self._store.retrieve(f"{stage}/{microbatch}/{name}")
                for name, is_boundary in self._names[stage, microbatch].items()
                if is_boundary
            )
            for microbatch in self.in_flight(stage)
        }
        return {microbatch: tensors for microbatch, tensors in found.items() if tensors}

    def in_flight(self, stage: int) -> list[int]:
        """The micro-batches whose backward has not ended."""
        return sorted(microbatch for at, microbatch in self._names if at == stage)

    def most_in_flight(self, stage: int) -> int:
        """How many there were at once, at most."""
        return self._peaks[stage]

    def clear(self, microbatch: int | None = None, *, stage: int | None = None) -> None:
        """Forget a micro-batch, of one stage or of all; or everything."""
        for at, number in list(self._names):
            if microbatch in (None, number) and stage in (None, at):
                kept = [f"{at}/{number}/{name}" for name in self._names.pop((at, number))]
                for key in kept + self._saved.pop((at, number), []):
                    self._store.clear(key)

    def close(self) -> None:
        """Forget everything, and follow no stage any more; the store stays open."""
        self._attached.close()
        self.clear()

    def memory_stats(self) -> MemoryStats:
        return self._store.memory_stats()

    def attach(self, stages: Any, *, keep_saved: bool = False) -> Callable[[], None]:
        """Follow a stage, a schedule, or a list of stages; gives what ends that.

        `keep_saved` also puts all that autograd saves into the store, which may offload it (what
        is smaller than 4 KiB stays then). What a step leaves that fails outside its stages, as in
        the loss, is forgotten when the next one begins.
        """
        if keep_saved and self._store._budget is not None:
            raise UsageError(
                "what autograd saves cannot be evicted",
                hint="use a store without a budget, and checkpoint_activations to recompute",
            )
        found = Model(stages)._stages
        if not found:
            raise UsageError("no stage of a pipeline", value=type(stages).__name__)
        undo = ExitStack()
        for stage in found:
            follower = _Follower(self, stage, keep_saved=keep_saved)
            for name in (
                "clear_runtime_states",
                "forward_one_chunk",
                "backward_one_chunk",
                "backward_weight_one_chunk",
            ):
                # On the instance: when that goes, the class's own method is there again.
                setattr(stage, name, getattr(follower, name))
                undo.callback(vars(stage).pop, name, None)
        self._attached.callback(undo.close)
        return undo.close

    def _begin(self, stage: int, microbatch: int) -> None:
        self._names.setdefault((stage, microbatch), {})
        self._peaks[stage] = max(self._peaks[stage], len(self.in_flight(stage)))


class _Follower:
    """Stands before the methods of a stage that schedules call, under their names."""

    def __init__(self, kept: PipelineActivations, stage: Any, *, keep_saved: bool) -> None:
        self._kept = kept
        self._stage = stage
        self._number: int = stage.stage_index
        self._keep_saved = keep_saved
        self._forward = stage.forward_one_chunk
        self._backward = stage.backward_one_chunk
        self._weights = stage.backward_weight_one_chunk
        self._clear = stage.clear_runtime_states

    def clear_runtime_states(self) -> None:
        """Forget what a step that failed has left: the next one begins."""
        self._kept.clear(stage=self._number)
        self._clear()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Keep what it hands on."""
        if not self._stage.has_backward or not torch.is_grad_enabled():
            return self._forward(fwd_chunk_id, *args, **kwargs)
        with self._clean():
            # Also where nothing will be registered, as on the last stage: it is in flight.
            self._kept._begin(self._number, fwd_chunk_id)
            with self._saving(fwd_chunk_id, (args, kwargs)) if self._keep_saved else nullcontext():
                output = self._forward(fwd_chunk_id, *args, **kwargs)
            if not self._stage.is_last:
                given = output if isinstance(output, (tuple, list)) else (output,)
                tensors = [each for each in given if isinstance(each, torch.Tensor)]
                for place, tensor in enumerate(tensors):
                    self._kept.register(
                        self._number, fwd_chunk_id, tensor, name=f"output.{place}", is_boundary=True
                    )
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forget the micro-batch, unless its weights come later."""
        # What was moved begins to come back, in the order of backward.
        for key in reversed(self._kept._saved.get((self._number, bwd_chunk_id), [])):
            self._kept._store.prefetch(key)
        with self._clean():
            result = self._backward(bwd_chunk_id, *args, **kwargs)
        # A schedule that leaves gradients of weights for later needs what was saved until then; it
        # may say so by position. One that says nothing computes all.
        if kwargs.get("full_backward", args[1] if len(args) > 1 else True):
            self._kept.clear(bwd_chunk_id, stage=self._number)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._clean():
            result = self._weights(bwd_chunk_id, *args, **kwargs)
        self._kept.clear(bwd_chunk_id, stage=self._number)
        return result

    @contextmanager
    def _clean(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._kept.clear(stage=self._number)
            raise

    def _saving(self, microbatch: int, given: Any) -> saved_tensors_hooks:
        """Hooks that put what autograd saves of a micro-batch into the store until it is cleared,
        for a forward of what is given.
        """
        store, name = self._kept._store, f"saved {self._number}/{microbatch}"
        keys = self._kept._saved[self._number, microbatch] = []
        # Whoever gives the inputs holds them anyway, all micro-batches in one memory.
        stays = {storage._cdata for storage in storages_in(given)}
        owned = OwnedMemory(self._stage.submod)

        def next_key() -> str:
            keys.append(f"{name}/{len(keys)}")
            return keys[-1]

        moving = None
        if store._host is not None:
            store._host.next_forward()
            moving = OffloadedForward(
                self._stage.submod,
                store._host,
                keep=lambda moved, size: store.register_moved(next_key(), moved, size),
            )

        def pack(tensor: torch.Tensor) -> Any:
            # What somebody holds anyway, inputs and parameters, is not counted and not moved.
            memories = {storage._cdata for storage in storages_in(tensor)}
            if memories & stays:
                return SavedTensor.of(tensor)
            if moving is not None:
                return moving.pack(tensor)
            if isinstance(tensor._base, nn.Parameter) or memories & owned.storages():
                return SavedTensor.of(tensor)
            key = next_key()
            store.register(key, tensor)
            return key, tensor._version

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, tuple):
                key, version = packed
                packed = SavedTensor(store.retrieve(key), version)
            return moving.unpack(packed) if moving is not None else packed.get()

        return saved_tensors_hooks(pack, unpack)
