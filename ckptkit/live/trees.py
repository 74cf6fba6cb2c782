"""Nested dictionaries and lists: their tensors become arrays, all else stays one plain value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ckptkit.errors import FormatError, UnsupportedTypeError
from ckptkit.format.names import escape
from ckptkit.format.reserved import REFERENCE
from ckptkit.live.tensors import as_bits, dtype_of, local_of, torch_dtype
from ckptkit.model import DType

_TENSOR = "ckptkit.tensor"
# Some schedulers keep one, and ask it for what a dictionary does not have.
_COUNTER = "ckptkit.counter"
_MAX_DEPTH = 28


def take_tensors(
    tree: object, name: str, array_at: Callable[[str], str] = str
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The tree with a mark for each tensor, and the tensors by their paths, which begin with
    `name`; the mark tells the name of the array, which is the path itself by default.
    """
    tensors: dict[str, torch.Tensor] = {}

    def taken(value: object, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise UnsupportedTypeError(
                f"more than {_MAX_DEPTH} levels deep (or it contains itself)", where=path
            )
        if isinstance(value, torch.Tensor):
            if path in tensors:
                raise UnsupportedTypeError("two keys are the same as text", where=path)
            tensors[path] = value
            return {REFERENCE: array_at(path)}
        if isinstance(value, Mapping):
            for mark in (REFERENCE, _TENSOR, _COUNTER):
                if mark in value:
                    raise UnsupportedTypeError("the key is ckptkit's own", where=path, value=mark)
            if isinstance(value, Counter):
                return {_COUNTER: dict(value)}
            return {k: taken(v, f"{path}/{escape(str(k))}", depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            items = [taken(v, f"{path}/{at}", depth + 1) for at, v in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    return taken(tree, name, 0), tensors


def put_tensors(tree: Any, tensor_of: Callable[[str], torch.Tensor], where: str) -> Any:
    """The tree that `take_tensors` took apart, with a tensor at each mark."""
    if isinstance(tree, dict):
        if REFERENCE in tree:
            if len(tree) != 1 or not isinstance(tree[REFERENCE], str):
                raise FormatError("not the mark of an array", where=where, value=tree)
            return tensor_of(tree[REFERENCE])
        if _TENSOR in tree:
            return _as_tensor(tree, where)
        if _COUNTER in tree:
            return _as_counter(tree, where)
        return {key: put_tensors(value, tensor_of, where) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [put_tensors(value, tensor_of, where) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def without_tensors(tree: Any) -> Any:
    """The tree with the values of its tensors in it, for small ones that each rank has its own
    of.
    """
    if isinstance(tree, torch.Tensor):
        dtype = dtype_of("", tree)
        return {_TENSOR: as_bits("", local_of(tree).cpu().contiguous()).view(dtype.numpy)}
    if isinstance(tree, Counter):
        return {_COUNTER: dict(tree)}
    if isinstance(tree, Mapping):
        return {key: without_tensors(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [without_tensors(value) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _as_tensor(tree: dict[str, Any], where: str) -> torch.Tensor:
    array = tree[_TENSOR]
    if len(tree) != 1 or not isinstance(array, np.ndarray):
        raise FormatError("not the values of a tensor", where=where, value=tree)
    dtype = DType.of(array.dtype)
    tensor = torch.empty(array.shape, dtype=torch_dtype(dtype))
    as_bits(where, tensor)[...] = array.view(dtype.bits)
    return tensor


def _as_counter(tree: dict[str, Any], where: str) -> Counter[Any]:
    counts = tree[_COUNTER]
    if len(tree) != 1 or not isinstance(counts, dict):
        raise FormatError("not the values of a Counter", where=where, value=tree)
    return Counter(counts)


def arrays_in(tree: Any, where: str) -> list[str]:
    """The names of the arrays that a tree marks."""
    found: list[str] = []

    def note(name: str) -> torch.Tensor:
        found.append(name)
        return torch.empty(0)

    put_tensors(tree, note, where)
    return found


def replace_leaves(target: Any, source: Any) -> None:
    """Give a tree of plain dictionaries and lists the values of another, in place; tensors that
    the target has already were filled and stay.
    """
    if isinstance(target, dict) and isinstance(source, dict):
        for key, value in source.items():
            if not _descend(target.get(key), value):
                target[key] = value
    elif isinstance(target, list) and isinstance(source, list):
        target[len(source) :] = []
        for at, value in enumerate(source):
            if at >= len(target):
                target.append(value)
            elif not _descend(target[at], value):
                target[at] = value


def _descend(mine: Any, theirs: Any) -> bool:
    """Whether the two are containers alike, whose leaves were then replaced, or one tensor."""
    if isinstance(mine, torch.Tensor) and mine is theirs:
        return True
    if type(mine) is type(theirs) and isinstance(mine, (dict, list)):
        replace_leaves(mine, theirs)
        return True
    return False
