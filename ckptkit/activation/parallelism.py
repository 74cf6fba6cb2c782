"""Activations of a model that ranks share: of what tensor-parallel ranks hold alike each keeps its
piece, or one keeps all; a stage of a pipeline has those of its micro-batches in flight.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ckptkit.activation.memory import LayerId, MemoryStats, metered, storages_in
from ckptkit.activation.offload import OffloadedForward, OwnedMemory, SavedTensor
from ckptkit.activation.store import ActivationStore, DistributedActivationStore
from ckptkit.activation.transport import meeting_of
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from ckptkit.errors import LayoutError, NotFoundError, UsageError
from ckptkit.live.state.ranks import all_gather_single, ranks_of
from ckptkit.live.state.tensors import bytes_of
from ckptkit.live.wrappers import Model
from ckptkit.storage.base.store import Closing

_LEAST = 1024  # elements: what is smaller stays whole


class Partition:
    """Hooks that keep pieces of what checkpointed blocks save: their inputs."""

    def __init__(self, group: dist.ProcessGroup, ranks: Ranks | None = None) -> None:
        self._group = group
        self._ranks = ranks or ranks_of(
            *meeting_of(group), DEFAULT_TIMEOUT, "the ranks do not go on"
        )
        self._seen: Counter[str] = Counter()

    @classmethod
    def of(cls, model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None) -> Partition:
        """By the tensor-parallel group: as given, or as the model's DTensors say."""
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise UsageError(
                    "a mesh of several axes is no group", value=group, hint="pass mesh['tp']"
                )
            return cls(group.get_group())
        if group is not None:
            return cls(group)
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        for mesh in meshes:
            if "tp" in (mesh.mesh_dim_names or ()):
                return cls(mesh.get_group("tp"))
        raise UsageError(
            "nothing says which ranks hold the same activations",
            hint="pass group=: the process group of tensor parallelism, or mesh['tp']",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        # A copy of the model is cut by the same ranks: groups themselves cannot be copied. Its
        # ranks meet where those of the model do, as one of them alone may have made a copy.
        return Partition(self._group, self._ranks)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "blocks whose inputs are shared by ranks cannot be pickled",
            hint="call undo first, or save the state_dict",
        )

    def around(self, name: str) -> saved_tensors_hooks:
        """Hooks for one forward of a block."""
        place = 0

        def pack(tensor: torch.Tensor) -> SavedTensor | _CutTensor:
            nonlocal place
            is_alike = tensor.is_floating_point() and tensor.layout is torch.strided
            if isinstance(tensor, DTensor):
                is_alike = all(isinstance(placement, Replicate) for placement in tensor.placements)
            if isinstance(tensor, nn.Parameter) or tensor.numel() < _LEAST or not is_alike:
                return SavedTensor.of(tensor)
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            # In the order of memory; where that has gaps in the order of the indices, without
            # strides.
            order = sorted(range(local.dim()), key=local.stride().__getitem__, reverse=True)
            in_order = local.permute(order)
            stride = local.stride() if in_order.is_contiguous() else None
            flat = (local if stride is None else in_order).reshape(-1)
            self._check(f"input {place} of {name}", flat, tuple(local.shape), stride)
            place += 1
            mine = share_of(flat, self._group.rank(), self._group.size())
            # Padded, as the ranks gather as many from each; and of its own memory, as a view would
            # keep the whole tensor alive.
            own = mine.new_zeros(-(-flat.numel() // self._group.size()))
            own[: mine.numel()] = mine
            spread = tensor._spec if isinstance(tensor, DTensor) else None
            return _CutTensor(own, local.shape, self._group, stride, spread)

        return saved_tensors_hooks(pack, lambda packed: packed.get())

    def _check(self, what: str, flat: torch.Tensor, *form: object) -> None:
        """Refuse a tensor of which the ranks hold different ones: put together of their pieces, it
        would silently make wrong gradients.
        """
        # A hash of the whole takes time: forwards 1, 2, 4, 8, … are enough to find a mistake.
        self._seen[what] += 1
        if self._seen[what].bit_count() > 1:
            return
        data = bytes_of(flat).cpu().numpy().tobytes()
        said = hashlib.blake2b(data, digest_size=16).digest(), *form
        if not self._ranks.agree(said, lambda heard: all(each == heard[0] for each in heard)):
            raise LayoutError(
                "the ranks of the tensor-parallel group hold different activations here",
                where=what,
                hint="sequence parallelism cuts them already: use 'full'; if dropout differs "
                "between the ranks, give them the same seed",
            )


@dataclass(frozen=True, slots=True)
class _CutTensor:
    """What a rank keeps of a tensor that all of its group hold."""

    own: torch.Tensor
    """Its elements, flat; each rank's as many, the last ones padded."""
    shape: torch.Size
    group: dist.ProcessGroup
    stride: tuple[int, ...] | None
    """The tensor's strides where `own` has the order of its memory; None: that of the indices."""
    spread: DTensorSpec | None
    """How a DTensor lies; None for other tensors."""

    def get(self) -> torch.Tensor:
        """The whole tensor again; all ranks of the group do so in the same order."""
        with metered():
            whole = self.own.new_empty(self.own.numel() * self.group.size())
        all_gather_single(whole, self.own, group=self.group)
        tensor = whole[: self.shape.numel()].view(self.shape)
        if self.stride is not None:
            tensor = tensor.as_strided(self.shape, self.stride)
        if self.spread is None:
            return tensor
        # Not with the strides that it had: where its memory had gaps, this has none.
        spec = self.spread
        return DTensor.from_local(tensor, spec.mesh, spec.placements, run_check=False)


def share_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The elements of a rank, flat; the last ranks may have fewer."""
    flat = tensor.detach().reshape(-1)
    length = -(-flat.numel() // ranks)
    return flat[rank * length : (rank + 1) * length]


@dataclass(slots=True)
class TensorParallelPolicy:
    """What the ranks of a group keep of an activation that all of them hold alike.

    `owners` says which rank keeps which layer, where the layer's name is not to decide that.

    "once": one rank keeps it, the others fetch it from there; "cut": each keeps a piece. What
    differs between the ranks (`is_sharded`) each keeps for itself. All ranks register the same
    layers, so that each knows alone what the others keep.

    >>> policy = TensorParallelPolicy(rank=0, world_size=2, owners={"layers.0": 1})
    >>> policy.owner("layers.0"), policy.keeps("layers.0")
    (1, False)
    """

    rank: int
    world_size: int
    replicated: Literal["once", "cut"] = "once"
    owners: dict[LayerId, int] = field(default_factory=dict)
    _sharded: set[LayerId] = field(default_factory=set)
    _shapes: dict[LayerId, torch.Size] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owners = dict(self.owners)  # the caller's map may be that of all ranks
        for rank in (self.rank, *self.owners.values()):
            self._check(rank)
        if self.replicated not in ("once", "cut"):
            raise UsageError(
                "no way to keep what is replicated", value=self.replicated, hint="'once' or 'cut'"
            )

    def register(
        self, layer_id: LayerId, rank: int | None = None, *, is_sharded: bool = False
    ) -> None:
        """Say which rank keeps a layer (None: as the layer's name decides), or that each does."""
        if rank is not None:
            self._check(rank)
            self.owners[layer_id] = rank
        if is_sharded:
            self._sharded.add(layer_id)

    def kind(self, layer_id: LayerId) -> Literal["once", "cut", "each"]:
        """How a layer is kept."""
        if layer_id in self._sharded:
            return "each"
        # Who says which rank keeps it wants it whole.
        return "once" if layer_id in self.owners else self.replicated

    def owner(self, layer_id: LayerId) -> int | None:
        """The rank that keeps a layer; None where each keeps something of it."""
        if self.kind(layer_id) != "once":
            return None
        # All ranks have to say the same: `hash` of a text differs from process to process.
        return self.owners.get(layer_id, zlib.crc32(str(layer_id).encode()) % self.world_size)

    def keeps(self, layer_id: LayerId) -> bool:
        """Whether this rank keeps a layer, or a part of it."""
        return self.owner(layer_id) in (None, self.rank)

    def keep(
        self, store: DistributedActivationStore, layer_id: LayerId, tensor: torch.Tensor
    ) -> None:
        """Register this rank's part of an activation, if it has one."""
        self._check_store(store)
        self._shapes[layer_id] = tensor.shape
        if self.kind(layer_id) == "cut":
            share = share_of(tensor, self.rank, self.world_size).clone()
            store.register(layer_id, share.requires_grad_(tensor.requires_grad))
        elif self.keeps(layer_id):
            store.register(layer_id, tensor)

    def get(
        self, store: DistributedActivationStore, layer_id: LayerId, *, wait: float = 10.0
    ) -> torch.Tensor:
        """The whole activation again, from whichever ranks keep it."""
        self._check_store(store)
        if layer_id not in self._shapes:
            raise NotFoundError("no activation of this layer was kept", value=layer_id)
        owner = self.owner(layer_id)
        if owner is not None:
            return store.retrieve_or_fetch(layer_id, owner, wait=wait)
        if self.kind(layer_id) == "each":
            return store.retrieve(layer_id)
        shares = [store.fetch(layer_id, rank, wait=wait) for rank in range(self.world_size)]
        whole = torch.cat(shares).detach().view(self._shapes[layer_id])
        return whole.requires_grad_(shares[0].requires_grad)

    def _check(self, rank: int) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise UsageError("no rank of the tensor-parallel group", value=rank)

    def _check_store(self, store: DistributedActivationStore) -> None:
        if (store.rank, store.world_size) != (self.rank, self.world_size):
            raise UsageError(
                f"the policy of rank {self.rank} of {self.world_size} with the store of rank "
                f"{store.rank} of {store.world_size}",
                hint="make the store for the tensor-parallel group: "
                "DistributedActivationStore(mesh['tp'].get_group())",
            )


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
