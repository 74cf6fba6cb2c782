from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ckptkit.errors import FormatError, InvalidNameError
from ckptkit.format.names import (
    MAX_NAME_BYTES,
    MAX_NODE_BYTES,
    ancestors,
    checked_path,
    escape,
    join,
    name_from_file,
    split,
    unescape,
)

NODE = re.compile(r"([A-Za-z0-9_.\-]|%[0-9A-F]{2})+")

any_name = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
tricky_name = st.text("._-%/\\azj09AF ckptk", min_size=1, max_size=24)


@given(any_name | tricky_name)
@example("zarr.json")
@example("__proto__")
@example(".ckptkit")
@example("...")
def test_any_name_is_spelled_in_safe_characters_and_read_back(name: str) -> None:
    try:
        node = escape(name)
    except InvalidNameError:
        assert len(name.encode()) > MAX_NODE_BYTES / 3
        return
    assert NODE.fullmatch(node)
    assert node not in (".", "..", "zarr.json")
    assert not node.startswith(("__", ".ckptkit"))
    assert unescape(node) == name
    assert unquote_to_bytes(node).decode() == name, "any URL library reads a name"
    assert name_from_file(node, "names.0") == node


@given(st.lists(any_name | tricky_name, min_size=1, max_size=6))
def test_a_path_gives_its_names_back(names: list[str]) -> None:
    assume(all(len(name.encode()) <= 50 for name in names))
    path = join(*names)
    assert split(path) == tuple(names)
    assert checked_path(path) == path


@given(st.text(max_size=12) | st.from_regex(NODE, fullmatch=True))
def test_a_spelling_is_accepted_only_if_it_is_the_one_of_its_name(text: str) -> None:
    try:
        accepted = name_from_file(text, "names.0")
    except FormatError:
        return
    assert accepted == text
    assert join(*split(text)) == text


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("layers.0.wq.weight", "layers.0.wq.weight"),
        ("a/b", "a%2Fb"),
        ("a\\b", "a%5Cb"),
        ("100%", "100%25"),
        ("é", "%C3%A9"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("....", "%2E%2E%2E%2E"),
        (".hidden", ".hidden"),
        ("__x", "%5F_x"),
        ("_x", "_x"),
        (".ckptkit", "%2Eckptkit"),
        (".ckptkit-2", "%2Eckptkit-2"),
        ("zarr.json", "zarr%2Ejson"),
        ("zarr.jsonl", "zarr.jsonl"),
        ("a b\n", "a%20b%0A"),
    ],
)
def test_each_name_has_the_spelling_the_format_gives(name: str, node: str) -> None:
    assert escape(name) == node


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "not a name"),
        ("/model/a", "not a name"),
        ("model/a/", "not a name"),
        ("model//a", "not a name"),
        ("model/../a", "not a name"),
        ("../../etc/passwd", "not a name"),
        (".", "not a name"),
        ("model/./a", "not a name"),
        ("a\0b", "not a name"),
        ("a%00", "not a name"),
        ("C:\\a", "not a name"),
        ("model\\a", "not a name"),
        ("%", "not a name"),
        ("%2", "not a name"),
        ("%2f", "not a name"),
        ("%41", "not a name"),
        ("a%2Eb", "not a name"),
        ("%FF", "not a name"),
        ("%C0%AF", "not a name"),
        ("é", "not a name"),
        ("a\n", "not a name"),
        ("zarr.json", "not a name"),
        ("model/zarr.json", "not a name"),
        ("__x", "not a name"),
        (".ckptkit/rank-00000.msgpack", "not a name"),
        ("a" * (MAX_NODE_BYTES + 1), "not a name"),
        ("a" * 10_000, "longer than 1024"),
        ("/".join("a" * 33), "more than 32"),
    ],
)
def test_a_hostile_path_is_refused_by_readers_and_writers(path: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as error:
        name_from_file(path, "arrays.3.name")
    assert error.value.where == "arrays.3.name"
    assert len(str(error.value)) < 1000
    with pytest.raises(InvalidNameError, match=problem):
        checked_path(path)


@pytest.mark.parametrize("value", [None, 7, b"model/a", ["model"], True])
def test_a_name_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(FormatError, match="has to be text"):
        name_from_file(value, "arrays.0.name")


@pytest.mark.parametrize("name", ["", "a\0b", "\0", "\ud800", "é" * 41, "a" * 10_000])
def test_a_name_the_format_cannot_hold_is_refused_before_it_is_written(name: str) -> None:
    with pytest.raises(InvalidNameError):
        escape(name)


def test_the_limits_themselves_are_allowed() -> None:
    node = "a" * MAX_NODE_BYTES
    path = "/".join([node] * 4 + ["b" * (MAX_NAME_BYTES - 4 * (MAX_NODE_BYTES + 1))])
    assert len(path) == MAX_NAME_BYTES
    assert checked_path(path) == path
    assert checked_path("/".join("a" * 32))
    assert escape("é" * 40) == "%C3%A9" * 40
    with pytest.raises(InvalidNameError):
        checked_path(path + "b")


def test_the_groups_above_an_array_begin_with_the_root() -> None:
    assert ancestors("model/a.b/c") == ("", "model", "model/a.b")
    assert ancestors("a") == ("",)
