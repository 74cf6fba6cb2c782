"""Forwards that drop their activations, all or some, and compute them again in backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ckptkit.activation.copies import Copies
from ckptkit.activation.products import CopyOnWrite, Explained
from ckptkit.activation.state import StateGuard
from ckptkit.errors import UsageError

Context = AbstractContextManager[Any]
Contexts = Callable[[], tuple[Context, Context]]

# What costs much to compute, per byte of its result.
_KEPT = {
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "convolution",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
} | {f"_c10d_functional::{name}" for name in ("all_reduce", "reduce_scatter_tensor")}


class Recomputed:
    """The forward of a block that keeps its inputs only.

    It stands in the place of the method, on the instance: no module is added, so no name changes,
    and hooks on the block (FSDP2's, tensor parallelism's) run once, around it.
    """

    def __init__(
        self,
        block: nn.Module,
        plain: Callable[..., Any],
        *,
        contexts: Contexts | None = None,
        around: Callable[[], Context] = nullcontext,
        copies: Copies | None = None,
    ) -> None:
        self.plain_forward = plain
        self._block = block
        self._contexts = contexts
        self._around = around
        self._copies = Copies() if copies is None else copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        leaves, run = _flat(self.plain_forward, args, kwargs)
        with self._around():
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=self._own)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        if self._around is not nullcontext:
            raise UsageError(
                "hooks on what is kept of a block cannot be compiled",
                hint="compile the blocks themselves, and partition them then",
            )
        # Contexts that are not dispatch modes cannot be compiled.
        own: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
        return checkpoint(self.plain_forward, *args, use_reentrant=False, **own, **kwargs)

    def _own(self) -> tuple[Context, Context]:
        guard = StateGuard(self._block, self._copies)
        if self._contexts is None:
            return guard.watching(), guard
        forward, again = self._contexts()
        return (
            _All(guard.watching(), forward, CopyOnWrite(forward)),
            _All(guard, Explained(), again),
        )


def _flat(
    plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Callable[..., Any]]:
    """All that a forward is called with in one line, as `checkpoint` looks for tensors nowhere
    else, and the forward that takes it so.
    """
    leaves, spec = tree_flatten((args, kwargs))
    given = [(args, kwargs)]

    def run(*same: Any) -> Any:
        # First the caller's own lists, to which the block may add; later what was in them.
        positional, named = given.pop() if given else tree_unflatten(same, spec)
        return plain(*positional, **named)

    return leaves, run


def selective() -> tuple[Context, Context]:
    """Contexts in which results of matrix products, attention and collectives are kept."""
    forward, again = create_selective_checkpoint_contexts(_keep_costly)
    return forward, again


def _keep_costly(
    _: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = getattr(op, "name", lambda: "")().partition(".")[0]
    if name in _KEPT and not _draws(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers: what comes after it would get its numbers when it
    does not run again.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return float(given.get("dropout_p", 0.0)) > 0


class _All(AbstractContextManager[None]):
    """Contexts one within another, entered again for each backward."""

    def __init__(self, *contexts: Context) -> None:
        self._contexts = contexts
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for each in self._contexts:
                stack.enter_context(each)
            self._entered = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.__exit__(kind, error, trace)
