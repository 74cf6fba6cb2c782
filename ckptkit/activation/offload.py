"""Forwards whose activations wait in host memory for backward.

Why not torch's `save_on_cpu`: of a step of a GPT with 8 blocks of width 256 it copies 193 MiB,
24 of them weights, and 24 more as tensors of one memory go each by themselves; this moves 145. On
CUDA it copies on the stream that computes, both ways, and begins to bring a tensor back when
backward asks for it; this copies beside the computing, and ahead. It does not say that a tensor
was changed while it waited, and nothing bounds its host memory; here both are so. What is on a CPU
it leaves there, so that nothing could be tested without a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ckptkit.activation.memory import metered, storages_in, unmetered
from ckptkit.errors import UsageError
from ckptkit.live.state.tensors import spread_as

_LEAST = 4096  # bytes: what is smaller stays
_AHEAD = 1  # forwards that are brought back before backward asks
_RANGES = 4  # of one memory, before all of it is moved
_Key = tuple[int, int, int]
_Range: TypeAlias = "tuple[int, int, weakref.ref[Moved]]"
_UsedBuffer = tuple[torch.Tensor, Sequence[torch.cuda.Event]]


@dataclass(eq=False, repr=False)
class Offloaded:
    """The forward of a block that leaves nothing on the device but its result.

    A closure would do, but a copy of the model copies this, with the block that it then belongs to.
    """

    _block: nn.Module
    plain_forward: Callable[..., Any]
    _memory: HostMemory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        forward = self._memory.begin(self._block)
        with saved_tensors_hooks(forward.pack, forward.unpack):
            return self.plain_forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor that stays where it is. Autograd no longer checks what hooks give it."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        """Hold a tensor that backward will need as it is now."""
        # A result would hold the graph that holds it.
        return cls(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def get(self) -> torch.Tensor:
        """The tensor, if nobody has changed it."""
        if self.tensor._version != self.version:
            raise UsageError(
                "a tensor that backward needs was changed in place after the forward",
                value=f"{self.tensor.dtype}{list(self.tensor.shape)}",
                hint="compute out of place, and change parameters only after the backward",
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _View:
    """How a saved tensor lies in what was moved."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    spread: DTensorSpec | None
    """How the whole lies, where this is the part of a DTensor."""


class OffloadedForward:
    """One forward of one block: hooks that move what it saves, each memory once."""

    def __init__(
        self,
        block: nn.Module,
        memory: HostMemory,
        *,
        before: Sequence[weakref.ref[OffloadedForward]] = (),
        keep: Callable[[Moved, int], None] | None = None,
    ) -> None:
        self._memory = memory
        self._before = tuple(before)
        self._keep = keep
        self._owned = OwnedMemory(block)
        self._moved: dict[_Key, tuple[weakref.ref[Any], weakref.ref[Any], list[_Range]]] = {}
        self._all: weakref.WeakSet[Moved] = weakref.WeakSet()
        self._back: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()

    def pack(self, tensor: torch.Tensor) -> SavedTensor | _View:
        """What autograd keeps in the place of a tensor."""
        if isinstance(tensor, DTensor):
            return self._view(tensor._local_tensor, tensor._spec) or SavedTensor.of(tensor)
        return self._view(tensor) or SavedTensor.of(tensor)

    def unpack(self, packed: SavedTensor | _View) -> torch.Tensor:
        if isinstance(packed, SavedTensor):
            return packed.get()
        before, self._before = self._before, ()  # once is enough
        for each in before:
            earlier = each()
            for moved in () if earlier is None else list(earlier._all):
                moved.prefetch()
        storage = self._back.get(id(packed.moved))
        if storage is None:
            storage = self._back[id(packed.moved)] = packed.moved.fetch().untyped_storage()
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        tensor = empty.set_(storage, packed.offset, packed.size, packed.stride)
        tensor = tensor.conj() if packed.is_conj else tensor
        tensor = torch._neg_view(tensor) if packed.is_neg else tensor
        return tensor if packed.spread is None else spread_as(tensor, packed.spread)

    def _view(self, tensor: torch.Tensor, spread: DTensorSpec | None = None) -> _View | None:
        """Move what a tensor lies in; None for what stays."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        if tensor.is_meta:  # it has a size, and no memory
            return None
        # Copies within forward derivatives crash, and within torch.func they are wrapped.
        if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < _LEAST or isinstance(tensor._base, nn.Parameter):
            return None
        # Tensors of one memory may count its changes each for itself; views count with their base.
        counter = tensor if tensor._base is None else tensor._base
        key = storage._cdata, id(counter), tensor._version
        known = self._moved.get(key)
        # The addresses alone may be those of others by now.
        if known is None or known[0]() is not storage or known[1]() is not counter:
            if storage._cdata in self._owned.storages():
                return None
            known = self._moved[key] = weakref.ref(storage), weakref.ref(counter), []
        start, moved = self._move(tensor, storage, known[2])
        return _View(
            moved,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()) - start // tensor.itemsize,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
            spread=spread,
        )

    def _move(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, ranges: list[_Range]
    ) -> tuple[int, Moved]:
        """What was moved that a tensor lies in, and where in the storage that begins. `ranges` of
        this have been moved so far.

        A few rows of much go without the rest, which may be nobody's: a cache of positions is for
        longer sequences. Where more and more are saved, all goes at once.
        """
        total, steps = storage.nbytes(), zip(tensor.size(), tensor.stride(), strict=True)
        begin = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((size - 1) * step for size, step in steps) if tensor.numel() else -1
        end = begin + (last + 1) * tensor.itemsize
        for start, stop, known in ranges:
            if start <= begin and end <= stop and (there := known()) is not None:
                return start, there
        begin -= begin % _LEAST  # of whatever dtype the next view is
        so_far = sum(stop - start for start, stop, _ in ranges) + end - begin
        if 2 * (end - begin) >= total or so_far > total or len(ranges) >= _RANGES:
            begin, end = 0, total
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)[begin:end]
        # The flat one counts its changes for itself.
        moved = Moved(flat, self._memory, watched=tensor.detach())
        if self._keep is not None:
            self._keep(moved, flat.numel())
        ranges.append((begin, end, weakref.ref(moved)))
        self._all.add(moved)
        return begin, moved


class OwnedMemory:
    """The memory of a block's parameters and buffers: it stays where it is.

    Looked up anew whenever it is asked for, as FSDP exchanges parameters during a forward.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = [each for each in block.modules() if each._parameters or each._buffers]
        self._tensors: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def storages(self) -> set[int]:
        """Their keys, as it is now."""
        tensors = [
            tensor
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._tensors = tensors
            self._storages = {each._cdata for each in storages_in(tensors)}
        return self._storages


class Moved:
    """A copy in host memory of what a tensor views, until nobody asks for it any more."""

    def __init__(
        self, flat: torch.Tensor, memory: HostMemory, *, watched: torch.Tensor | None = None
    ) -> None:
        self._device = flat.device
        self._memory = memory
        self._arrived: torch.Tensor | None = None
        self._arriving: torch.cuda.Event | None = None
        buffer = memory.take(flat.numel())
        self._host = buffer[: flat.numel()]
        # The host memory may go to another only when the copies to and from it have ended.
        self._copies: list[torch.cuda.Event] = []
        weakref.finalize(self, memory.give, buffer, self._copies).atexit = False
        with unmetered(), torch.no_grad():
            self._departure = memory.send(flat, self._host, flat if watched is None else watched)
        if self._departure is not None:
            self._copies.append(self._departure.event)

    def prefetch(self) -> None:
        """Begin to bring it back; nothing waits."""
        if self._device.type == "cuda" and self._arrived is None:
            stream = self._memory.stream("back", self._device)
            with metered(), torch.cuda.stream(stream):
                if self._departure is not None:
                    stream.wait_event(self._departure.event)
                self._arrived = self._host.to(self._device, non_blocking=True)
            self._arriving = stream.record_event()
            self._copies.append(self._arriving)

    def fetch(self) -> torch.Tensor:
        """Its bytes on the device."""
        if self._departure is not None:
            self._departure.event.synchronize()  # it left in forward: nothing to wait for
            self._memory.drain()
            if self._departure.let_go():
                raise UsageError(
                    "an activation was changed in place after backward was to use it",
                    hint="offload copies it while the block goes on; compute out of place there",
                )
        self.prefetch()
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            with metered():
                return self._host.to(self._device, copy=True)
        if self._arriving is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arriving)
            # It was allocated on the stream of the copies, which alone decides when it is free:
            # so that is told who reads it.
            arrived.record_stream(torch.cuda.current_stream(self._device))
        return arrived


@dataclass(slots=True, eq=False)
class _Departure:
    """What is being copied to the host, and held until that is done."""

    watched: torch.Tensor | None
    version: int
    event: torch.cuda.Event
    forward: int
    was_changed: bool = False

    def let_go(self) -> bool:
        """Stop holding the tensor, once it is copied; says whether it was changed before that, as
        the copy may then have seen the change.
        """
        watched, self.watched = self.watched, None
        if watched is not None and watched._version != self.version:
            self.was_changed = True
        return self.was_changed


class HostMemory:
    """Where the activations of a model or a store wait, and the ways there and back.

    Buffers are used again: fresh memory is slow to touch, and pinned memory slow to make. Their
    sizes are powers of two, so that activations of other lengths fit too, and there is never more
    memory than was in use at one time. Copies go beside the computing: on CUDA on streams of their
    own, elsewhere at once. Safe to use from several threads.
    """

    def __init__(self, *, pin: bool | None = None) -> None:
        if pin and not torch.cuda.is_available():
            raise UsageError(
                "there is no CUDA here to pin host memory for", value="pin_memory=True"
            )
        self._wanted = pin
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._free: defaultdict[int, list[_UsedBuffer]] = defaultdict(list)
        self.in_use = 0
        self.unused = 0
        self._most = 0
        self._streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}
        self._pending: deque[_Departure] = deque()
        self._forward = 0
        self._forwards: list[weakref.ref[OffloadedForward]] = []
        self._lock = threading.RLock()  # the end of what waits here may come while it is held

    def __reduce__(self) -> tuple[Callable[[], HostMemory], tuple[()]]:
        # A copy of the model, or a pickle of it: what waits in host memory is the original's.
        return partial(HostMemory, pin=self._wanted), ()

    def begin(self, block: nn.Module) -> OffloadedForward:
        """A forward of a block, the next one in backward's reverse order."""
        self.next_forward()
        self._forwards = [each for each in self._forwards if each() is not None]
        forward = OffloadedForward(block, self, before=self._forwards[-_AHEAD:])
        self._forwards.append(weakref.ref(forward))
        return forward

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least so many bytes."""
        size = max(_LEAST, 1 << (size - 1).bit_length())
        with self._lock:
            used = next((free for each in (size, 2 * size) if (free := self._free[each])), None)
            buffer, events = used.pop() if used else (None, ())
            if buffer is not None:
                self.unused -= buffer.numel()
            self.in_use += size if buffer is None else buffer.numel()
            self._most = max(self._most, self.in_use)
            while self.in_use + self.unused > self._most:
                largest = max(each for each, free in self._free.items() if free)
                del self._free[largest][0]
                self.unused -= largest
        if buffer is None:
            with unmetered(), torch.no_grad():
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        for event in events:
            event.synchronize()
        return buffer

    def give(self, buffer: torch.Tensor, events: Sequence[torch.cuda.Event] = ()) -> None:
        """Take a buffer back that nobody reads or writes once the events have come."""
        with self._lock:
            self.in_use -= buffer.numel()
            self.unused += buffer.numel()
            self._free[buffer.numel()].append((buffer, events))

    def release(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._free.clear()
            self.unused = 0

    def send(
        self, flat: torch.Tensor, host: torch.Tensor, watched: torch.Tensor
    ) -> _Departure | None:
        """Copy to the host; the tensor is held until that is done, and watched for changes. None
        where it is done.
        """
        if flat.device.type != "cuda":
            host.copy_(flat)
            return None
        stream = self.stream("out", flat.device)
        # What computes the tensor is on its way, not done. And the tensor is held until the copy
        # has ended: its memory would go to the next one, which the copy would then read.
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
        with self._lock:
            departure = _Departure(watched, watched._version, stream.record_event(), self._forward)
            self._pending.append(departure)
            self.drain()
        return departure

    def next_forward(self) -> None:
        """Wait until what the forward before the last one moved has gone; the last one's may still
        be on its way.
        """
        with self._lock:
            while self._pending and self._pending[0].forward < self._forward:
                self._pending[0].event.synchronize()
                self._pending.popleft().let_go()
            self._forward += 1

    def drain(self) -> None:
        """Let go of what has been copied."""
        with self._lock:
            while self._pending and self._pending[0].event.query():
                self._pending.popleft().let_go()

    def stream(self, way: str, device: torch.device) -> torch.cuda.Stream:
        if (way, device) not in self._streams:
            self._streams[way, device] = torch.cuda.Stream(device)
        return self._streams[way, device]
