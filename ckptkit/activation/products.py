"""What "selective" keeps of a forward, although the forward may go on to change it in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckptkit.activation.memory import storages_of
from ckptkit.errors import UsageError


class CopyOnWrite(TorchDispatchMode):
    """Within the context in which torch keeps results: what an operation is about to change in
    place is kept as a copy.

    Versions do not tell: pieces of a result, and its `data`, count their changes for themselves.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._copy({each._cdata for each in _written(schema.arguments, args, kwargs)})
        return func(*args, **kwargs)

    def _copy(self, changing: set[int]) -> None:
        for kept in list(_entries(self._kept.storage)):
            tensor = kept.val
            if any(each._cdata in changing for each in storages_of(tensor)):
                kept.val = tensor.clone()
                kept.version = kept.val._version


def _written(
    arguments: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.UntypedStorage]:
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    for each in arguments:
        if each.alias_info is not None and each.alias_info.is_write:
            for leaf in tree_leaves(given.get(each.name)):
                if isinstance(leaf, torch.Tensor):
                    yield from storages_of(leaf)


def _entries(storage: dict[Any, Any]) -> Iterator[Any]:
    for found in storage.values():
        for entry in tree_leaves(list(found.values()) if isinstance(found, dict) else found):
            if isinstance(getattr(entry, "val", None), torch.Tensor):
                yield entry


class Explained(AbstractContextManager[None]):
    """What is said of a result that was changed in place when the forward had ended."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise UsageError(
                "a product that 'selective' keeps of a block was changed in place after its "
                "forward",
                hint="compute out of place there, or use 'full'",
            ) from error
