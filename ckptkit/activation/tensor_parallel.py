"""Which rank of a tensor-parallel group keeps which activation."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from ckptkit.activation.distributed import DistributedActivationStore
from ckptkit.activation.partition import Piece, cut, gather, share_of
from ckptkit.activation.store import ActivationStore, LayerId
from ckptkit.errors import NotFoundError, UsageError

Kind = Literal["once", "cut", "each"]


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
        self._check(self.rank)
        self.owners = dict(self.owners)  # the caller's map may be that of all ranks
        for rank in self.owners.values():
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

    def kind(self, layer_id: LayerId) -> Kind:
        """How a layer is kept."""
        if layer_id in self._sharded:
            return "each"
        # Who says which rank keeps it wants it whole.
        return "once" if layer_id in self.owners else self.replicated

    def owner(self, layer_id: LayerId) -> int | None:
        """The rank that keeps a layer; None where each keeps something of it."""
        if self.kind(layer_id) != "once":
            return None
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


class PartitionedActivations:
    """Activations that all ranks of a group hold alike, of which each keeps its piece.

    `register` is each rank's own affair; `retrieve` is a collective of the group.

    >>> init().backend
    'gloo'
    >>> kept = PartitionedActivations(torch.distributed.group.WORLD)
    >>> kept.register("layers.0", torch.ones(2))
    >>> kept.retrieve("layers.0")
    tensor([1., 1.])
    """

    def __init__(self, group: dist.ProcessGroup, store: ActivationStore | None = None) -> None:
        self._group = group
        self._store = ActivationStore() if store is None else store
        self._pieces: dict[LayerId, Piece] = {}

    def register(self, layer_id: LayerId, tensor: torch.Tensor) -> None:
        """Keep this rank's piece."""
        piece = cut(tensor, self._group)
        self._store.register(layer_id, piece.own)
        # The store may move it: nothing else may hold it.
        self._pieces[layer_id] = replace(piece, own=piece.own.new_empty(0))

    def retrieve(self, layer_id: LayerId) -> torch.Tensor:
        """The whole activation, gathered from all."""
        own = self._store.retrieve(layer_id)
        piece = replace(self._pieces[layer_id], own=own)
        return gather(piece).requires_grad_(piece.requires_grad)

    def clear(self, layer_id: LayerId | None = None) -> None:
        """Forget one activation, or all."""
        for each in [layer_id] if layer_id is not None else list(self._pieces):
            self._pieces.pop(each, None)
        self._store.clear(layer_id)
