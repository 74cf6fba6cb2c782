"""Forwards that drop their activations, all or some, and compute them again in backward.

`torch.utils.checkpoint` does the dropping and the computing. What is added here are the promises
that it does not make: a block that runs again finds its buffers, its mode and its own arguments as
its forward found them, changes nothing twice, and says so where it cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.weak import WeakTensorKeyDictionary

from ckptkit.activation.memory import is_plain, storages_in, storages_of, unmetered
from ckptkit.errors import UsageError
from ckptkit.live.state.extra import rng_state, set_rng_state
from ckptkit.live.state.tensors import bytes_of
from ckptkit.live.wrappers.modules import buffers_of, keeping_buffers, put_buffers

Context = AbstractContextManager[Any]
Contexts = Callable[[], tuple[Context, Context]]

_SMALL = 4096  # bytes: counters and the like, which may change seldom
_TRIES = 3  # how often a copy is made for all forwards, before the buffer counts as changing


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
        copies: BufferCopies | None = None,
    ) -> None:
        self.plain_forward = plain
        self._block = block
        self._contexts = contexts
        self._around = around
        self._copies = BufferCopies() if copies is None else copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self._around is not nullcontext:
                raise UsageError(
                    "hooks on what is kept of a block cannot be compiled",
                    hint="compile the blocks themselves, and partition them then",
                )
            # Contexts that are not dispatch modes cannot be compiled: here torch's promises hold.
            own: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
            return checkpoint(self.plain_forward, *args, use_reentrant=False, **own, **kwargs)
        # All arguments in one line, as `checkpoint` looks for tensors nowhere else.
        leaves, spec = tree_flatten((args, kwargs))
        given = [(args, kwargs)]

        def run(*same: Any) -> Any:
            # First the caller's own lists, to which the block may add; later what was in them.
            positional, named = given.pop() if given else tree_unflatten(same, spec)
            return self.plain_forward(*positional, **named)

        with self._around():
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=self._own_contexts)

    def _own_contexts(self) -> tuple[Context, Context]:
        """What one forward runs in, and what each of its recomputations runs in."""
        state = _ForwardState(self._block, self._copies)
        plain = nullcontext(), nullcontext()
        keeping, using = plain if self._contexts is None else self._contexts()

        @contextmanager
        def forward() -> Iterator[None]:
            with keeping, nullcontext() if self._contexts is None else CopyOnWrite(keeping):
                yield
            state.learn()

        @contextmanager
        def again() -> Iterator[None]:
            try:
                with state.restored(), using:
                    yield
            except RuntimeError as error:
                if "has been mutated" not in str(error):
                    raise
                raise UsageError(
                    "a product that 'selective' keeps of a block was changed in place after its "
                    "forward",
                    hint="compute out of place there, or use 'full'",
                ) from error

        return forward(), _EachTime(again)


class _EachTime(ExitStack):
    """A context that is made anew whenever it is entered: there may be several backwards."""

    def __init__(self, make: Callable[[], Context]) -> None:
        super().__init__()
        self._make = make

    def __enter__(self) -> Self:
        self.enter_context(self._make())
        return self


@dataclass(eq=False, repr=False)
class Undo:
    """Gives the blocks their own forwards back, when it is called.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> _, undo = checkpoint_activations(model, "full", blocks=nn.Linear)
    >>> undo.blocks
    ('0', '1')
    >>> undo()
    >>> undo.blocks
    ()
    """

    # The block, the forward that was its own (None: that of its class), and ours.
    _blocks: dict[str, tuple[nn.Module, Any, Any]] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks whose forward is another now."""
        return tuple(self._blocks)

    def put(
        self,
        blocks: Mapping[str, nn.Module],
        other: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        """Let blocks have other forwards, made of a block's name, the block and its own forward."""
        for name, block in blocks.items():
            ours = other(name, block, block.forward)
            self._blocks[name] = block, vars(block).get("forward"), ours
            # Not setattr: a compiled module passes that on to what it compiles.
            vars(block)["forward"] = ours

    def __call__(self) -> None:
        """Safe to call twice."""
        foreign = {}
        for name, (block, own, ours) in reversed(self._blocks.items()):
            if vars(block).get("forward") is not ours:
                foreign[name] = block, own, ours
            elif own is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = own
        self._blocks = foreign
        if foreign:
            raise UsageError(
                "the forward of a block was changed again after it was checkpointed",
                where=", ".join(reversed(foreign)),
                hint="take that back first, and call undo again; the other blocks are undone",
            )


# What "selective" keeps: what costs much to compute, per byte of its result.
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


def _keep_costly(
    _: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = getattr(op, "name", lambda: "")().partition(".")[0]
    if name not in _KEPT:
        return CheckpointPolicy.PREFER_RECOMPUTE
    given = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    # What draws random numbers runs again: what comes after it would get its numbers otherwise.
    if float(given.get("dropout_p", 0.0)) > 0:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


# Makes contexts in which results of matrix products, attention and collectives are kept.
selective = partial(create_selective_checkpoint_contexts, _keep_costly)


class CopyOnWrite(TorchDispatchMode):
    """Within the context in which torch keeps results: what an operation is about to change in
    place is kept as a copy.

    Versions do not tell: pieces of a result, and its `data`, count their changes for themselves.
    """

    supports_higher_order_operators = True

    def __init__(self, keeping: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeping = keeping

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        # Collectives write into what they are given, of which their schemas say nothing.
        is_collective = getattr(func, "namespace", "") == "c10d"
        if schema is not None and (schema.is_mutable or is_collective):
            names = (each.name for each in schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            written = [
                given.get(each.name)
                for each in schema.arguments
                if is_collective or (each.alias_info is not None and each.alias_info.is_write)
            ]
            changing = {each._cdata for each in storages_in(written)}
            for kept in tree_leaves(list(self._keeping.storage.values())):
                value = getattr(kept, "val", None)
                if isinstance(value, torch.Tensor) and any(
                    each._cdata in changing for each in storages_of(value)
                ):
                    kept.val = value.clone()
                    kept.version = kept.val._version
        return func(*args, **kwargs)


class _ForwardState:
    """What a block has beside its inputs when a forward begins: parameters, buffers, a mode.

    Of parameters there are no copies: that they have changed is an error.
    """

    def __init__(self, block: nn.Module, copies: BufferCopies) -> None:
        modules = list(block.modules())
        self._block = block
        self._weights = versions_of(modules)
        self._modes = [(module, module.training) for module in modules]
        self._buffers = buffers_of(modules)
        self._copies = copies
        self._is_lesson = bool(self._buffers) and copies.is_lesson(
            block, tuple(module.training for module, _ in self._buffers)
        )
        self._copied = [
            (module, name, buffer, copies.of(module, name, buffer, is_lesson=self._is_lesson))
            for module, buffers in self._buffers
            for name, buffer in buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]

    def learn(self) -> None:
        """Look, after some forwards, whether they change buffers that seem not to change."""
        if self._is_lesson:
            for copied in self._copied:
                self._copies.learn(*copied)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The block as the forward found it; afterwards it has its own mode and buffers again."""
        for weight, version in self._weights:
            if version_of(weight) != version:
                names = [name for name, each in self._block.named_parameters() if each is weight]
                raise UsageError(
                    "a parameter of a block was changed in place after its forward began, and "
                    "before its backward, which computes the block again",
                    where=", ".join(names),
                    hint="change parameters only after the backward; what the forward itself "
                    "changes belongs in a buffer",
                )
        needed = {
            id(each): (each, copy) for _, _, each, copy in self._copied if copy.is_needed(each)
        }
        versions = [(buffer, version_of(buffer)) for buffer, _ in needed.values()]
        changed = [each for each, copy in needed.values() if version_of(each) != copy.version]
        # Buffers that are views of one memory would become copies, each with changes of its own.
        memories = [storage._cdata for storage in storages_in(changed)]
        if len(memories) > len(set(memories)):
            raise _known_otherwise()
        # A copy of the copy: this recomputation may change it, and there may be another one.
        fresh = {
            key: copy.tensor.to(each.device, copy=True) for key, (each, copy) in needed.items()
        }
        modes = [(module, module.training) for module, _ in self._modes]
        buffers = [(module, dict(module._buffers)) for module, _ in self._buffers]
        _put_modes(self._modes)
        put_buffers(
            [
                (module, {name: fresh.get(id(each), each) for name, each in named.items()})
                for module, named in self._buffers
            ]
        )
        try:
            yield
        finally:
            _put_modes(modes)
            put_buffers(buffers)
            # A recomputation finds copies under the buffers' names, and changes those. If a buffer
            # itself has changed, the block knows it by something else. Looked at here and not
            # below: once a recomputation has given all it needs, torch ends it by an exception.
            if any(version_of(each) != version for each, version in versions):
                raise _known_otherwise()


def _known_otherwise() -> UsageError:
    return UsageError(
        "a block changes a buffer that is known to it by something else than its name",
        hint="let no other buffer or attribute view its memory, or leave the block out",
    )


def _put_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:
            module.training = training


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(modules: Iterable[nn.Module]) -> list[tuple[torch.Tensor, int]]:
    """The parameters of modules, and how often each was changed in place."""
    # Not those of DTensors: FSDP2 exchanges them meanwhile.
    return [
        (weight, version_of(weight))
        for module in modules
        for weight in module._parameters.values()
        if weight is not None and type(weight) in (torch.Tensor, nn.Parameter)
    ]


@contextmanager
def traceless(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gradients, buffers and random numbers are afterwards what they were; what changes parameters
    is refused.
    """
    inner = {id(each): each for module in modules for each in module.modules()}.values()
    parameters = [each for module in modules for each in module.parameters()]
    versions = versions_of(inner)
    gradients = [each.grad for each in parameters]
    # Gradients of DDP lie in its buckets, which it goes on writing to.
    copies = [None if each is None else each.detach().clone() for each in gradients]
    random = rng_state()
    for weight in parameters:
        weight.grad = None
    try:
        with keeping_buffers(inner):
            yield
    finally:
        set_rng_state(random)
        with torch.no_grad():
            for weight, gradient, before in zip(parameters, gradients, copies, strict=True):
                weight.grad = gradient
                if gradient is not None and before is not None:
                    gradient.copy_(before)
    if any(version_of(weight) != version for weight, version in versions):
        raise UsageError(
            "the step that a budget measures has changed parameters",
            hint="pass a forward and a backward alone, and let no hook run the optimizer; load "
            "the parameters again",
        )


@dataclass(slots=True)
class _BufferCopy:
    """What a buffer held."""

    tensor: torch.Tensor
    version: int
    is_shared: bool
    """Whether it is for all forwards until the buffer changes; so it is in host memory."""
    is_stale: bool = False
    """Whether the buffer has changed without saying so in its version."""

    def is_needed(self, buffer: torch.Tensor) -> bool:
        """Whether the buffer may hold something else now."""
        if not self.is_shared or self.is_stale or version_of(buffer) != self.version:
            return True
        return _is_small(buffer) and self.differs(buffer)

    def differs(self, buffer: torch.Tensor) -> bool:
        """Whether it does; where the buffer is on an accelerator, that is waited for."""
        return not torch.equal(bytes_of(self.tensor.to("cpu")), bytes_of(buffer.to("cpu")))


@dataclass(eq=False, repr=False)
class BufferCopies:
    """Copies of the buffers of blocks from before a forward, made as rarely as can be.

    A buffer that does not change has one copy in host memory, which costs forwards nothing. One
    that changes is copied where it is, for each forward. Its version tells that it changed. Where
    it does not (a change through `.data`), bytes are compared: those of small buffers always,
    those of others in some forwards.
    """

    _shared: MutableMapping[torch.Tensor, _BufferCopy] = field(
        default_factory=WeakTensorKeyDictionary
    )
    _made: WeakKeyDictionary[nn.Module, Counter[str]] = field(default_factory=WeakKeyDictionary)
    _forwards: WeakKeyDictionary[nn.Module, Counter[tuple[bool, ...]]] = field(
        default_factory=WeakKeyDictionary
    )

    def __reduce__(self) -> tuple[type[BufferCopies], tuple[()]]:
        # A copy of a model, or a pickle of it, has buffers of its own.
        return BufferCopies, ()

    def is_lesson(self, block: nn.Module, modes: tuple[bool, ...]) -> bool:
        """Whether to look at all buffers in this forward: in the first, the second, the fourth ...
        of those in which the same modules are in training.
        """
        counts = self._forwards.setdefault(block, Counter())
        counts[modes] += 1
        return counts[modes].bit_count() == 1

    def of(
        self, module: nn.Module, name: str, buffer: torch.Tensor, *, is_lesson: bool
    ) -> _BufferCopy:
        """A copy of a buffer, as it is now."""
        version, is_small = version_of(buffer), _is_small(buffer)
        shared = self._shared.get(buffer)
        if shared is not None and shared.version == version:
            looks = is_lesson or is_small
            shared.is_stale = shared.is_stale or (looks and shared.differs(buffer))
            if not shared.is_stale:
                return shared
        made = self._made.setdefault(module, Counter())
        made[name] += 1
        # On an accelerator, to look at a small buffer takes longer than to copy it.
        is_copied_sooner = is_small and buffer.device.type != "cpu"
        can_be_looked_at = is_plain(buffer) and not is_functorch_wrapped_tensor(buffer)
        if made[name] > _TRIES or is_copied_sooner or not can_be_looked_at:
            return _BufferCopy(buffer.detach().clone(), version, is_shared=False)
        with nullcontext() if is_small else unmetered():
            copied = buffer.detach().to("cpu", copy=True)
        self._shared[buffer] = _BufferCopy(copied, version, is_shared=True)
        return self._shared[buffer]

    def learn(self, module: nn.Module, name: str, buffer: torch.Tensor, copy: _BufferCopy) -> None:
        """Look whether a forward has changed a buffer and said nothing."""
        if copy.is_shared and version_of(buffer) == copy.version and copy.differs(buffer):
            copy.is_stale = True
            self._made[module][name] = _TRIES


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.numel() * buffer.itemsize <= _SMALL
