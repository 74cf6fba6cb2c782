"""An interpreter of pickles that runs nothing: what a pickle would call becomes a placeholder that
says so.

Python's own unpickler calls what a file names, which may be anything. Here a name has to be on a
list, a call gives a `Placeholder` with its name and arguments, and only a few plain types become
values. No pickle makes this take more than some hundred times its bytes: a value is counted with
all that is inside of it, what is in several places in each, so that no small file stands for a huge
value.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.pickles.globals import (
    ALIASES,
    CALLS,
    CALLS_BELOW,
    DTYPES,
    KEYED,
    STORAGES,
    VALUES,
    Global,
    Placeholder,
)

MOST_DEPTH = 64
MOST_BYTES = 1 << 30
# How many items a value may have: so many, and so many more for each byte of the pickle.
_ITEMS, _ITEMS_PER_BYTE = 1 << 16, 32
# And how many may be passed to functions, which copy them.
_CALLED_PER_BYTE = 4
_MOST_NUMBER_BYTES = 255
# Smaller ints are their own hashes. Larger ones and tuples can be made to have all the same, and
# each is compared with all before it then: so many may.
_OWN_HASH = 2**61 - 1
_MOST_ALIKE = 1 << 10
# A longer text counts as an item for so many of its bytes.
_LONG, _ITEM_BYTES = 64, 8
# What may come again, how many and of what length: no key of a map, which would be the same then.
_ENTRY = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
_AGAIN, _MOST_AGAIN = 32, 1 << 14
# It is made first of all, of a class in the memo.
_NEW = re.compile(rb"(?:h.|j....)\)\x81\x94", re.DOTALL)
# Four times for each tensor of DCP: a tuple is memoized, put into another, that is memoized, a
# function called with it, the result memoized.
_REST_OF_SIZE, _SIZE = b"\x94\x85\x94R\x94", Global("torch.Size")
_INT32, _UINT32, _FLOAT64 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct(">d")


def read_pickle(
    data: bytes | memoryview, where: str, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The value of a pickle; FormatError where it is none, or asks for what is not on the list.

    `persistent` gives the values of its persistent ids.
    """
    if len(data) > MOST_BYTES:
        raise FormatError(f"a pickle of more than {MOST_BYTES} bytes", where=where, value=len(data))
    reader = _Interpreter(bytes(data), where, persistent)
    try:
        return reader.run()
    except (LookupError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise FormatError(
            f"not a valid pickle at byte {reader.at}: {error}"[:200],
            where=where,
            hint="the file was cut short or changed; copy it again",
        ) from error


class _Interpreter:
    def __init__(self, data: bytes, where: str, persistent: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.where = where
        self.at = 0
        self.persistent = persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stack below each mark."""
        self.memo: list[Any] = []
        self.most = _ITEMS + _ITEMS_PER_BYTE * len(data)
        self.called = 0
        """How many items were passed to functions."""
        self.known: dict[int, tuple[Any, int, int]] = {}
        """Of values that are more than one item: how many, and how deep they are. By place in
        memory, so the value itself is kept as well.
        """
        self.hashes: set[tuple[int, int]] = set()
        """The hashes of keys, each with the map that it is in; keys that are `alike` share one."""
        self.alike = 0
        self.last: tuple[int, int, int, int] | None = None
        """Where the value of the last key begins, and how long stack, marks and memo were there."""
        self.again: deque[tuple[bytes, Any, list[Any]]] = deque(maxlen=_AGAIN)
        """Entries of tensors, byte by byte, with their values and what they put into the memo."""
        self.inside: set[int] = set()
        """Those that are inside of others. They do not change any more, but for the states of
        placeholders: so no value is ever inside of itself, and what was counted stays right.
        """

    def run(self) -> Any:
        # Half of all opcodes are these four, which take a third of the time here.
        data, memo, actions = self.data, self.memo, _BY_CODE
        at, stack = self.at, self.stack
        while True:
            code = data[at]  # an IndexError is that it has no end
            at += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _GET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _GET_LONG:
                stack.append(memo[_UINT32.unpack_from(data, at)[0]])
                at += 4
            elif code == _SMALL_NUMBER:
                stack.append(data[at])
                at += 1
            elif (action := actions[code]) is not None:
                self.at = at
                action(self)
                at, stack = self.at, self.stack
            elif code != _STOP:
                raise ValueError(f"the opcode {code:#04x} is not one that is read here")
            elif self.below or len(self.stack) != 1:
                raise ValueError("it ends with other than one value")
            else:
                return self.stack[0]

    def refuse(self, what: str, value: object = None, hint: str = "") -> FormatError:
        shown = {} if value is None else {"value": value}
        return FormatError(what, where=self.where, hint=hint, **shown)

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.data):
            raise ValueError(f"{length} bytes are wanted where {len(self.data) - self.at} are left")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, length: int) -> int:
        return int.from_bytes(self.take(length), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + 4096)
        text = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return text

    def marked(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        found = self.stack
        self.stack = self.below.pop()
        return found

    def counted(self, parts: Sequence[Any], items: int = 1, depth: int = 1) -> tuple[int, int]:
        """How many items are in a value of these parts, and how deep it is."""
        known, inside = self.known, self.inside
        items += len(parts)
        for part in parts:
            found = known.get(id(part))
            if found is not None:
                inside.add(id(part))
                items += found[1]
                if found[2] >= depth:
                    depth = found[2] + 1
        if items > self.most:
            raise self.refuse("the value of the pickle has too many items for its bytes", self.most)
        if depth > MOST_DEPTH:
            raise self.refuse(f"the value of the pickle is more than {MOST_DEPTH} levels deep")
        return items, depth

    def push(self, made: Any, parts: Sequence[Any] = ()) -> None:
        """Put a container on the stack: a new one, or an empty tuple, of which there is one."""
        if id(made) not in self.known:
            self.known[id(made)] = (made, *self.counted(parts)) if parts else (made, 1, 1)
        self.stack.append(made)

    def grow(self, target: Any, parts: Sequence[Any]) -> None:
        """Count what a container gets."""
        place = id(target)
        if place not in self.known:
            raise ValueError("something is put into what is no container")
        _, items, depth = self.known[place]
        self.known[place] = (target, *self.counted(parts, items, depth))
        if place in self.inside:
            raise self.refuse("the pickle changes a value that is inside of another already")

    def text(self, length: int) -> None:
        self.long(self.take(length).decode("utf-8", "surrogatepass"), length)

    def raw(self, length: int) -> None:
        self.long(self.take(length), length)

    def long(self, value: Any, length: int) -> None:
        if length > _LONG:
            self.known[id(value)] = (value, length // _ITEM_BYTES, 0)
        self.stack.append(value)

    def remember(self, end: int) -> None:
        """Remember the entry of a tensor that ends here, if nothing can change it any more."""
        begun, self.last = self.last, None
        if begun is None or self.data[end - 1] != _BUILD or end - begun[0] > _MOST_AGAIN:
            return
        begin, *lengths, memoized = begun
        value, made = self.stack[-1:], self.memo[memoized:]
        parts = [it for it in made if type(it) in (Placeholder, list, dict, set)]
        # It was made first, in its place, and is in nothing yet: so it took nothing from below.
        if (
            (lengths == [len(self.stack) - 1, len(self.below)] and parts[:1] == value)
            and (_NEW.match(self.data, begin) and parts[0].name == _ENTRY)
            and [it for it in parts if id(it) not in self.inside] == value
            and all(it.state is not None for it in parts if type(it) is Placeholder)
        ):
            self.inside.add(id(value[0]))
            self.again.append((self.data[begin:end], value[0], made))

    def integer(self, length: int) -> None:
        if length > _MOST_NUMBER_BYTES:
            raise ValueError(f"a number of {length} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        parts = self.stack[len(self.stack) - count :]
        if len(parts) < count:
            raise IndexError("the stack is empty")
        del self.stack[len(self.stack) - count :]
        is_size = self.data.startswith(_REST_OF_SIZE, self.at) and self.stack[-1:] == [_SIZE]
        if not is_size or {*map(type, parts)} != {int}:
            self.push(tuple(parts), parts)
            return
        # What `torch.Size` is called with comes back: the same as opcode by opcode.
        size, items, memo = tuple(parts), count + 1, self.memo
        args = (size,)
        self.known[id(size)], self.known[id(args)] = (size, items, 1), (args, items + 2, 2)
        self.inside.add(id(size))
        self.called_with(items + 2, _SIZE.name)
        memo += (size, args, size)
        self.stack[-1] = size
        self.at += len(_REST_OF_SIZE)

    def key(self, key: Any, target: Any) -> Any:
        """A key of a map: the hash of a tuple of tuples would take for ever."""
        is_tuple = type(key) is tuple and self.known.get(id(key), (key, 0, 1))[2] <= 1
        if is_tuple or (type(key) is int and abs(key) >= _OWN_HASH):
            seen = len(self.hashes)
            self.hashes.add((id(target), hash(key)))
            self.alike += len(self.hashes) == seen
            if self.alike > _MOST_ALIKE:
                raise self.refuse("too many keys of the pickle have the same hash")
            return key
        if type(key) in (str, int, bytes, float, bool, type(None), Placeholder, Global):
            return key
        raise self.refuse("a key of a map that cannot be one", type(key).__name__)

    def put(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if len(pairs) % 2:
            raise ValueError("a key without a value")
        keys = [key if type(key) is str else self.key(key, target) for key in pairs[::2]]
        self.grow(target, pairs)
        if type(target) is dict:
            target.update(zip(keys, pairs[1::2], strict=True))
        elif type(target) is Placeholder:
            target.items += zip(keys, pairs[1::2], strict=True)
        else:
            raise ValueError("items are put into what is no map")

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        self.grow(target, values)
        if type(target) is list:
            target += values
        elif type(target) is Placeholder:
            target.items += values
        elif type(target) is set:
            target.update(self.key(value, target) for value in values)
        else:
            raise ValueError("values are added to what is no list")

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("the name of a global is no text")
        full = f"{ALIASES.get(module, module)}.{name}"
        if full in DTYPES:
            self.stack.append(full)
        elif full in CALLS or full in STORAGES or full in VALUES or full.startswith(CALLS_BELOW):
            self.stack.append(Global(full))
        else:
            raise self.refuse(
                "the pickle asks for a global that is not read here",
                f"{module}.{name}"[:120],
                hint="nothing of it was run; save the tensors without that object",
            )

    def call(self, keywords: object = None) -> None:
        if keywords:
            raise ValueError("keywords are passed")
        args = self.stack.pop()
        called = self.stack.pop()
        if type(called) is not Global or type(args) is not tuple:
            raise ValueError("what is called is no global")
        if called.name in CALLS or called.name.startswith(CALLS_BELOW):
            self.push(Placeholder(called.name, args), args)
            return
        if called.name not in VALUES:
            raise self.refuse("the pickle calls what is no function", called.name)
        # What they make is of the size of what they get: a pickle may not ask for it for ever.
        self.called_with(self.counted(args)[0], called.name)
        checks = {"checked": partial(self.key, target=args)} if called.name in KEYED else {}
        made = VALUES[called.name](*args, **checks)
        if type(made) in (str, bytes):
            self.long(made, len(made))
        elif type(made) in (Global, complex):
            self.stack.append(made)
        else:
            self.push(made, args)

    def called_with(self, items: int, name: str) -> None:
        self.called += items
        if self.called > _ITEMS + _CALLED_PER_BYTE * len(self.data):
            raise self.refuse("the pickle calls functions too often", name)

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is dict:
            return  # what an OrderedDict has for attributes, such as `_metadata`
        if type(target) is not Placeholder or target.state is not None:
            raise ValueError("a state is given to what has none")
        if id(target) in self.inside:
            # Meshes refer to each other. Nothing here follows states that it does not know.
            self.counted((state,))
        else:
            self.grow(target, (state,))
        target.state = state

    def memoize(self, place: int) -> None:
        # Every pickler fills them in turn, so that they are a list.
        if place > len(self.memo):
            raise ValueError("a place of the memo is left out")
        self.last = None
        if place < len(self.memo):
            self.again.clear()
        self.memo[place : place + 1] = [self.stack[-1]]

    def persist(self) -> None:
        if self.persistent is None:
            raise self.refuse("the pickle refers to something outside of it")
        self.stack.append(self.persistent(self.stack.pop()))

    def dict_of(self) -> None:
        pairs = self.marked()
        self.push({})
        self.put(pairs)

    def frozen_set(self) -> None:
        values = self.marked()
        self.push(frozenset(self.key(value, values) for value in values), values)

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        self.last = None
        if self.stack:
            self.stack.pop()
        else:
            self.marked()

    def frame(self) -> None:
        self.last = None
        if self.number(8) > len(self.data) - self.at:
            raise ValueError("a frame reaches past the end")

    def protocol(self) -> None:
        if self.number(1) > 5:
            raise ValueError("a protocol of a later Python")


# What most of a pickle is made of; with no call in between, for there are millions of them.
def _short_text(it: _Interpreter) -> None:
    at, data = it.at, it.data
    length = data[at]
    it.at = end = at + 1 + length
    if end >= len(data):
        raise ValueError("a text reaches past the end")
    text = data[at + 1 : end].decode("utf-8", "surrogatepass")
    it.remember(at - 1)
    it.long(text, length)
    if data[end] != _MEMOIZE:
        return
    it.memo.append(text)
    it.at = end + 1
    # Layers are alike: where the entry behind another key comes again, so does its value.
    for entry, value, made in it.again:
        if data.startswith(entry, it.at):
            it.at += len(entry)
            it.stack.append(value)
            it.memo += made
            return
    it.last = it.at, len(it.stack), len(it.below), len(it.memo)


_STOP, _BUILD, _GET, _GET_LONG, _SMALL_NUMBER, _MEMOIZE = (*b".bhjK", 0x94)
# What each opcode does; those that are not here are refused.
_ACTIONS: dict[int, Callable[[_Interpreter], object]] = {
    0x80: _Interpreter.protocol,
    0x95: _Interpreter.frame,
    ord("("): _Interpreter.mark,
    ord("0"): _Interpreter.pop,
    ord("1"): _Interpreter.marked,
    ord("2"): lambda it: it.stack.append(it.stack[-1]),
    ord("N"): lambda it: it.stack.append(None),
    0x88: lambda it: it.stack.append(True),
    0x89: lambda it: it.stack.append(False),
    ord("M"): lambda it: it.stack.append(it.number(2)),
    ord("J"): lambda it: it.stack.append(_INT32.unpack(it.take(4))[0]),
    0x8A: lambda it: it.integer(it.number(1)),
    0x8B: lambda it: it.integer(it.number(4)),
    ord("G"): lambda it: it.stack.append(_FLOAT64.unpack(it.take(8))[0]),
    ord("X"): lambda it: it.text(it.number(4)),
    0x8C: _short_text,
    0x8D: lambda it: it.text(it.number(8)),
    ord("U"): lambda it: it.text(it.number(1)),
    ord("T"): lambda it: it.text(it.number(4)),
    ord("C"): lambda it: it.raw(it.number(1)),
    ord("B"): lambda it: it.raw(it.number(4)),
    **dict.fromkeys((0x8E, 0x96), lambda it: it.raw(it.number(8))),
    ord(")"): lambda it: it.stack.append(()),
    **{0x84 + n: partial(_Interpreter.tuple_of, count=n) for n in (1, 2, 3)},
    ord("t"): lambda it: it.push(tuple(parts := it.marked()), parts),
    ord("]"): lambda it: it.push([]),
    ord("l"): lambda it: it.push(made := it.marked(), made),
    ord("a"): lambda it: it.extend([it.stack.pop()]),
    **dict.fromkeys((ord("e"), 0x90), lambda it: it.extend(it.marked())),
    ord("}"): lambda it: it.push({}),
    ord("d"): _Interpreter.dict_of,
    ord("s"): lambda it: it.put([it.stack.pop(), it.stack.pop()][::-1]),  # on top is the value
    ord("u"): lambda it: it.put(it.marked()),
    0x8F: lambda it: it.push(set()),
    0x91: _Interpreter.frozen_set,
    ord("q"): lambda it: it.memoize(it.number(1)),
    ord("r"): lambda it: it.memoize(it.number(4)),
    ord("c"): lambda it: it.find(it.line(), it.line()),
    0x93: lambda it: it.find(name=it.stack.pop(), module=it.stack.pop()),
    **dict.fromkeys((ord("R"), 0x81), _Interpreter.call),
    0x92: lambda it: it.call(keywords=it.stack.pop()),
    ord("b"): _Interpreter.build,
    ord("Q"): _Interpreter.persist,
}
_BY_CODE = [_ACTIONS.get(code) for code in range(256)]
