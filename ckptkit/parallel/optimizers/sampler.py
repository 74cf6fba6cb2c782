"""The order of the samples of a whole training, whatever the number of ranks."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import torch

from ckptkit.errors import UsageError


class GlobalSampler:
    """Gives each sample once an epoch, to one rank, also when the number of ranks changes.

    Its position is how many samples all ranks together have taken. An epoch's order follows from
    the seed and the number of the epoch; a batch may reach into the next epoch.

    >>> sampler = GlobalSampler(10, shuffle=False)
    >>> sampler.share(4, rank=1, ranks=2)
    [2, 3]
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if size < 1:
            raise UsageError("a number of samples", where="size", value=size)
        self.position = 0
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._orders: dict[int, list[int]] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self._size

    def share(self, count: int, rank: int = 0, ranks: int = 1) -> list[int]:
        """What a rank has of the next samples; all ranks ask for the same number of them."""
        first = self.position
        mine = range(first + count * rank // ranks, first + count * (rank + 1) // ranks)
        return [self._sample(place) for place in mine]

    def advance(self, count: int) -> None:
        """The next samples are done with."""
        self.position += count

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position in the same order."""
        mine = self.state_dict()
        for key in ("size", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise UsageError(
                    f"the order was made with {key}={state[key]!r}: here samples would be lost "
                    "or come again",
                    where=f"sampler.{key}",
                    value=mine[key],
                )
        self.position = state["position"]

    def _sample(self, place: int) -> int:
        epoch, at = divmod(place, self._size)
        if not self._shuffle:
            return at
        if epoch not in self._orders:
            if len(self._orders) > 1:
                del self._orders[min(self._orders)]
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
            self._orders[epoch] = torch.randperm(self._size, generator=generator).tolist()
        return self._orders[epoch][at]


def seed_of(*numbers: int) -> int:
    """A seed made of several numbers; of 32 bits, as torch's generator on CPUs ignores more."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(sha256(text.encode()).digest()[:4], "big")
