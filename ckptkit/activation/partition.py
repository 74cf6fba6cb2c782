"""What a tensor-parallel group holds alike, of which each rank keeps its piece or one keeps all."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ckptkit.activation.memory import LayerId, metered
from ckptkit.activation.offload import SavedTensor
from ckptkit.activation.store import DistributedActivationStore
from ckptkit.activation.transport import meeting_of
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks
from ckptkit.errors import LayoutError, NotFoundError, UsageError
from ckptkit.live.state.ranks import all_gather_single, ranks_of
from ckptkit.live.state.tensors import bytes_of

_LEAST = 1024  # elements: what is smaller stays whole


class Partition:
    """Hooks that keep pieces of what checkpointed blocks save: their inputs."""

    def __init__(self, group: dist.ProcessGroup, ranks: Ranks | None = None) -> None:
        self._group = group
        self._ranks = ranks or ranks_of(
            *meeting_of(group), DEFAULT_TIMEOUT, "the ranks do not go on"
        )
        self._seen: Counter[str] = Counter()

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
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            flat, stride = _as_it_lies(local)
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


def _as_it_lies(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The elements, flat, in the order of memory, and the strides that put them there again. Where
    memory has gaps they come in the order of the indices, without strides.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    in_order = tensor.detach().permute(order)
    if not in_order.is_contiguous():
        return tensor.detach().reshape(-1), None
    return in_order.reshape(-1), tensor.stride()


def group_for(model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The tensor-parallel group: as given, or as the model's DTensors say."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                "a mesh of several axes is no group", value=group, hint="pass mesh['tp']"
            )
        return group.get_group()
    if group is not None:
        return group
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh.get_group("tp")
    raise UsageError(
        "nothing says which ranks hold the same activations",
        hint="pass group=: the process group of tensor parallelism, or mesh['tp']",
    )


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
