"""Forwards that drop their activations, all or some, and compute them again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ckptkit.activation.buffers import BufferGuard

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
    ) -> None:
        self.plain_forward = plain
        self._block = block
        self._contexts = contexts
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Contexts that are not dispatch modes cannot be compiled.
            own: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
            return checkpoint(self.plain_forward, *args, use_reentrant=False, **own, **kwargs)
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        # Bound before, as `checkpoint` has keywords of its own.
        run = partial(self.plain_forward, **kwargs) if kwargs else self.plain_forward
        with self._around():
            return checkpoint(run, *args, use_reentrant=False, **self._own())

    def _own(self) -> dict[str, Any]:
        if next(self._block.buffers(), None) is None:
            return {} if self._contexts is None else {"context_fn": self._contexts}
        guard = BufferGuard(self._block)
        if self._contexts is None:
            return {"context_fn": guard.contexts}
        return {"context_fn": partial(_nested, guard.contexts, self._contexts)}


def selective() -> tuple[Context, Context]:
    """Contexts in which results of matrix products, attention and collectives are kept."""
    forward, again = create_selective_checkpoint_contexts(_keep_costly)
    return forward, again


def _keep_costly(
    _: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    name = getattr(op, "name", lambda: "")().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _nested(outer: Contexts, inner: Contexts) -> tuple[Context, Context]:
    (forward, again), (inner_forward, inner_again) = outer(), inner()
    return _both(forward, inner_forward), _both(again, inner_again)


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(outer)
        stack.enter_context(inner)
        yield
