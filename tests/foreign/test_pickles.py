"""A pickle is read without anything of it being run, and whatever is in it costs little."""

from __future__ import annotations

import collections
import pathlib
import pickle
import pickletools
import random
import tracemalloc
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from ckptkit.errors import FormatError
from ckptkit.foreign import pickles
from ckptkit.foreign.pickles import read_pickle
from ckptkit.foreign.pickles.globals import Global, Placeholder
from ckptkit.foreign.torch_file import plain


def read(data: bytes) -> Any:
    return read_pickle(data, "a/file.pt")


PLAIN = {
    "numbers": [0, -1, 255, 256, 65_536, -(2**31), 2**40, -(2**70), 1.5, True, False, None],
    "texts": ["", "x" * 300, "é\udc80", b"", b"y" * 300],
    "nested": {"a": ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), 3: [[], {}, ()]},
    "kinds": [{1, 2}, complex(1, -2)],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_what_python_makes_of_them(protocol: int) -> None:
    assert read(pickle.dumps(PLAIN, protocol=protocol)) == PLAIN


def test_a_few_types_become_plain_values() -> None:
    values = [
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        collections.defaultdict(dict, {"a": {}}),
        torch.Size([2, 3]),
        torch.device("cuda", 1),
        torch.bfloat16,
        bytearray(b"abc"),
        frozenset([1]),
        pathlib.PosixPath("/a/b"),
    ]
    plain = [{"a": 1}, {"a": 2, "b": 1}, {"a": {}}, (2, 3), "cuda:1", "torch.bfloat16", b"abc"]
    for protocol in (2, 4):
        assert read(pickle.dumps(values, protocol=protocol)) == [*plain, frozenset([1]), "/a/b"]


def test_placeholders_may_refer_to_each_other() -> None:
    mesh = b"ctorch.distributed.device_mesh\nDeviceMesh\n)\x81"
    data = mesh + b"q\x00}K\x01" + mesh + b"}K\x02h\x00sbsb."
    root = read(data)
    assert root.state[1].state[2] is root
    assert len(repr(root)) < 200


def test_what_is_shared_by_many_is_no_deeper_for_that() -> None:
    """An empty tuple is always the same one; a size of a tuple is that tuple."""
    size = (2, 3)
    values = [[torch.Size([]), torch.Size(size), (), size] for _ in range(200)]
    for protocol in (2, 4):
        assert read(pickle.dumps(values, protocol=protocol)) == [[(), size, (), size]] * 200


class Evil:
    def __reduce__(self) -> Any:
        return print, ("a pickle was run",)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pickle.dumps(Evil()), "builtins.print"),
        (b"cos\nsystem\n(X\x02\x00\x00\x00lstR.", "os.system"),
        (b"cbuiltins\ngetattr\n(cbuiltins\nlist\nX\x06\x00\x00\x00appendtR.", "attribute"),
        (b"cbuiltins\neval\n.", "builtins.eval"),
        (pickle.dumps(Path), "pathlib.Path"),
    ],
)
def test_what_is_not_on_the_list_is_refused_by_name(
    data: bytes, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FormatError, match=named) as caught:
        read(data)
    assert str(caught.value).startswith("a/file.pt: ")
    assert not capsys.readouterr().out


def test_getattr_answers_one_pair_only() -> None:
    shard = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
    asked = b"c__builtin__\ngetattr\n(" + shard + b"X%c\x00\x00\x00%btR."
    wanted = "torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState"
    assert read(asked % (17, b"ProcessGroupState")) == Global(wanted)
    with pytest.raises(FormatError, match="attribute"):
        read(asked % (8, b"__init__"))


def test_what_would_be_called_is_told() -> None:
    call = read(pickle.dumps(ChunkStorageMetadata(torch.Size([1]), torch.Size([2]))))
    assert isinstance(call, Placeholder)
    assert call.kind == "ChunkStorageMetadata"
    assert call.fields() == {"offsets": (1,), "sizes": (2,)}


def test_a_type_of_numpy_that_is_cut_short_is_refused() -> None:
    kind = b"cnumpy\ndtype\n(U\2f8\x89\x88tR" + b"K\3\x85b"
    data = b"cnumpy.core.multiarray\nscalar\n" + kind + b"U\x08abcdefgh\x86R."
    with pytest.raises(FormatError, match="not of numbers"):
        plain(read(data), "a/file.pt")


def peak_of(data: bytes) -> int:
    """The most memory that reading a hostile pickle takes."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def doubled(times: int, opcodes: bytes) -> bytes:
    """Values that hold the one before twice: a thousand bytes would be 2**300 items."""
    return b"\x80\x04](K\x01e" + opcodes * times + b"."


LONG_TEXT = b"X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"\x94"
ENCODED = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
BOMBS = {
    "lists in lists twice": doubled(300, b"\x94(22e" + b"](h\x00h\x00e"),
    "tuples of the one before": b"\x80\x04]" + b"2\x86" * 300 + b".",
    "maps of the one before": b"]" + b"q\x00}(K\x00h\x00K\x01h\x00u" * 300 + b".",
    "depth": b"]" + b"\x85" * 100_000 + b".",
    "depth by lists": b"(" * 100_000 + b"l" * 100_000 + b".",
    "a list inside of itself": b"]q\x00h\x00a.",
    "a list inside of itself, later": b"]q\x00\x85q\x01h\x00h\x01a0.",
    "a text of 4 GB": b"X\xff\xff\xff\xffabc.",
    "bytes of 2**63": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "a frame of 2**63": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a number of 2**31 bytes": b"\x8b\xff\xff\xff\x7f\x01.",
    "a memo at 2**32": b"Nr\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
    "a long text many times": LONG_TEXT + b"](" + b"h\x00" * 100_000 + b"e.",
    "copies of a long text": LONG_TEXT + b"](" + ENCODED * 1000 + b"e.",
    "bytes by their number": b"cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.",
    "numbers of one hash": pickle.dumps({n * (2**61 - 1): None for n in range(3000)}),
    "tuples of one hash": pickle.dumps({(n * (2**61 - 1),): None for n in range(3000)}),
    "a set of one hash": pickle.dumps({n * (2**61 - 1) for n in range(3000)}),
    "a set of one hash by a call": pickle.dumps({n * (2**61 - 1) for n in range(3000)}, 2),
    "a map of one hash by a call": b"\x80\x02ccollections\nOrderedDict\n"
    + pickle.dumps([[n * (2**61 - 1), None] for n in range(3000)], 2)[2:-1]
    + b"\x85R.",
    "a set of nested tuples": b"\x8f(K\x01\x85" + b"2\x86" * 40 + b"\x90.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_and_costs_little(bomb: str) -> None:
    data = BOMBS[bomb]
    assert peak_of(data) < (4 << 20) + 40 * len(data)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What DCP writes, of a few tensors and objects."""
    folder = tmp_path_factory.mktemp("dcp")
    state = {"model": {"w": torch.ones(3, 2), "b": torch.ones(3)}, "step": 3, "more": [1, {"a": 2}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        save(state, checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes()


def whole(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value with all that is in its placeholders, so that two can be compared."""
    if id(value) in above:
        return f"{len(above) - above.index(id(value))} levels up"
    above = (*above, id(value))
    if isinstance(value, Placeholder):
        parts = (value.args, value.state, value.items)
        return value.name, *(whole(part, above) for part in parts)
    if isinstance(value, dict):
        return [(whole(key, above), whole(item, above)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(whole(item, above) for item in value)]
    return repr(value)


def metadata_of(entries: dict[str, Any]) -> bytes:
    return pickle.dumps(Metadata(entries), protocol=4)


def entry_of(size: Sequence[int], parts: int, dtype: torch.dtype = torch.float32) -> Any:
    rows, rest = size[0] // parts, size[1:]
    chunks = [
        ChunkStorageMetadata(torch.Size([n * rows, *[0] * len(rest)]), torch.Size([rows, *rest]))
        for n in range(parts)
    ]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_again_is_the_same_value(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is alike in the pickle: names, sizes, types, numbers of parts, objects between."""
    dice = random.Random(seed)
    entries: dict[str, Any] = {}
    for number in range(300):
        size = [dice.choice([8, 16, 600]) for _ in range(dice.randint(1, 3))]
        dtype = dice.choice([torch.float32, torch.bfloat16])
        entry = entry_of(size, dice.choice([1, 2, 4]), dtype)
        name = f"{number}." + "x" * dice.choice([1, 1, 80, 300])
        entries[name] = dice.choice([entry] * 8 + [BytesStorageMetadata(), (name, entry), [name]])
    if seed % 2:  # the same object twice is one place of the memo
        entries |= {f"again.{name}": entry for name, entry in entries.items()}
    data = metadata_of(entries)
    found = read(data)
    told = [(name, whole(value)) for name, value in found.fields()["state_dict_metadata"].items()]
    assert [name for name, _ in told] == list(entries)
    for name, value in told:
        alone = read(pickle.dumps(entries[name], protocol=4))
        assert value == whole(alone)
    monkeypatch.setattr(pickles, "_AGAIN", 0)
    assert whole(found) == whole(read(data))


def test_alike_tensors_are_one_value() -> None:
    found = read(metadata_of({f"layers.{n}": entry_of([8, 4], 2) for n in range(9)}))
    entries = list(found.fields()["state_dict_metadata"].values())
    # In the pickle of the first one stand the names of attributes.
    assert len({id(entry) for entry in entries}) == 2


ENTRY = b"\x80\x04ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n\x940"


def named(key: int) -> bytes:
    return b"\x8c\x01%c\x94" % key


def test_what_has_changed_meanwhile_does_not_come_again() -> None:
    """What stands at a place of the memo may be another one then."""
    entry = b"h\x00)\x81\x94}h\x01h\x02sb"
    begin = ENTRY + b"\x8c\x01k\x940K\x05\x940("
    same = read(begin + b"".join(named(key) + entry for key in b"abc") + b"d.")
    assert [it.state for it in same.values()] == [{"k": 5}] * 3
    assert same["b"] is same["a"]
    put = b"K\x07q\x020"
    there = named(98) + put + entry + named(99) + entry + b"d."
    other = read(begin + named(97) + entry + there)
    assert [it.state for it in other.values()] == [{"k": 5}, {"k": 7}, {"k": 7}]


def test_bytes_that_take_a_key_along_are_no_value_of_their_own() -> None:
    made = b"h\x00)\x81\x94}b"
    begin, keys = ENTRY + b"](", b"abcd"
    # Each text becomes part of a tuple, and what lies behind it is a value for itself.
    found = read(begin + b"".join(named(key) + b"\x85\x94" + made for key in keys) + b"e.")
    assert found[::2] == [(chr(key),) for key in keys]
    # Here the first value is put into a pair with its key, and is meant again in the second pair.
    again = b"h\x00)\x81\x94\x86h\x02}b"
    with pytest.raises(FormatError, match="state"):
        read(begin + b"".join(named(key) + again for key in keys) + b"e.")
    # Here it takes away what is below it, and is put back.
    taken = b"h\x00)\x81\x940" + b"\x85\x85h\x01h\x02}b"
    with pytest.raises(FormatError, match="state"):
        read(begin + b"".join(named(key) + taken for key in keys) + b"e.")


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_may_be_a_key_stays_one_of_its_own(protocol: int) -> None:
    """Objects that are alike are several keys, and several members of a set."""
    objects = [BytesIO(b"y") for _ in range(6)]
    keys = {each: str(number) for number, each in enumerate(objects)}
    found = read(pickle.dumps(keys, protocol=protocol))
    assert list(found.values()) == list("012345")
    mixed = {*objects, *"abcdefgh"}
    assert len(read(pickle.dumps(mixed, protocol=protocol))) == len(mixed)
    assert len(read(pickle.dumps(frozenset(mixed), protocol=protocol))) == len(mixed)


def test_what_could_still_change_does_not_come_again() -> None:
    """A list that is nowhere, and is filled later."""
    entry = b"h\x00)\x81\x94]\x940}b"
    begin = ENTRY + b"}\x94("
    ends = named(ord("z")) + b"Nuh\x04K\x01a00h\x04h\x07\x86."
    data = begin + named(97) + entry + named(98) + entry + ends
    assert read(data) == ([1], [])


def test_remembering_takes_no_longer_than_reading() -> None:
    class Memo(list[Any]):
        copied = 0

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            if isinstance(place, slice):
                Memo.copied += len(found)
            return found

    part = b"\x8c\x00\x94" + b"\x94" * 8000 + b"\x8c\x01b" * 2000
    data = b"\x80\x04(" + part * 4 + b"1N."
    it = pickles._Interpreter(data, "a", None)
    it.memo = Memo()
    assert it.run() is None
    assert Memo.copied < len(data)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """The pickle with some bytes other than they were, left out, repeated, or cut off."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randrange(len(changed)), dice.randint(1, 8)
        match dice.randrange(5):
            case 0:
                changed[at] = dice.randrange(256)
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = changed[at : at + length] * dice.randint(1, 50)
            case 3:
                changed[at] = dice.choice(OPCODES)
            case 4:
                other = dice.randrange(len(changed))
                changed[at : at + length] = changed[other : other + length]
        if not changed:
            break
    return bytes(changed)


OPCODES = [ord(each.code) for each in pickletools.opcodes]


def fuzz(metadata: bytes, times: int, seed: int) -> int:
    dice = random.Random(seed)
    refused = 0
    for _ in range(times):
        try:
            read(mutated(metadata, dice))
        except FormatError:
            refused += 1
    return refused


def test_whatever_is_changed_gives_a_value_or_a_format_error(metadata: bytes) -> None:
    assert isinstance(read(metadata), Placeholder)
    tracemalloc.start()
    try:
        assert fuzz(metadata, 300, seed=1) > 100
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_a_hundred_thousand_changes_give_a_value_or_a_format_error(metadata: bytes) -> None:
    assert fuzz(metadata, 100_000, seed=2) > 10_000


def test_large_and_many_keys_are_no_bomb() -> None:
    value = {"ids": {2**62 + n: n for n in range(3000)}, "pairs": {(n, 1): n for n in range(3000)}}
    assert read(pickle.dumps(value)) == value


def test_sizes_read_at_once_are_counted_as_opcode_by_opcode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [torch.Size(range(n)) for n in range(1, 5)] * 2
    values = [sizes, sizes[0], [torch.Size([True]), torch.Size([2**70, 300])], (5,)]
    data = pickle.dumps(values, protocol=4)
    assert data.count(pickles._REST_OF_SIZE) > 3

    def counted() -> tuple[Any, ...]:
        it = pickles._Interpreter(data, "a", None)
        value = it.run()
        of_memo = [it.known.get(id(made), (made, 0, 0)) for made in it.memo]
        inside = [id(made) in it.inside for made in it.memo]
        return value, of_memo, inside, it.called

    at_once = counted()
    monkeypatch.setattr(pickles, "_REST_OF_SIZE", b"\xff")
    assert at_once == counted()
