"""A manifest made again from the packs: the very bytes that were lost, or a refusal."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest

import ckptkit
from ckptkit import PerRank, Run, Sum, Writer
from ckptkit.errors import FormatError, NotFoundError, StepExistsError, UsageError, VersionError
from tests.checkpoint.saving import add, assert_holds, files, save, save_by, small_state

STATE, OTHER = small_state(1), small_state(2)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A committed step with a bit of everything."""

    def fill(writer: Writer) -> None:
        for name, tensor in STATE.items():
            add(writer, name, tensor, role="param")
        placed = {"fsdp": "owner(1)"}
        mine = np.arange(4) if writer.rank == 1 else None
        writer.add("late/w", mine, shape=(4,), dtype="int64", placements=placed)
        writer.add_alias("model/tied", "model/w")
        writer.add_object("lr", 0.1)
        writer.add_object("rng", PerRank([writer.rank]))
        writer.add_object("tokens", Sum(writer.rank))

    save_by(tmp_path, fill, strategy="fsdp:3", step=7, details={"zero": 3})
    return tmp_path / "step-0000000007"


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A committed step with group documents that rank 0 knows nothing of."""

    def fill(writer: Writer) -> None:
        placed = {"pp": f"stage({writer.rank})"}
        writer.add(f"stage{writer.rank}/w", np.arange(3), placements=placed)

    save_by(tmp_path, fill, strategy="pp:3", step=7)
    return tmp_path / "step-0000000007"


def lose_manifest(step: Path) -> bytes:
    manifest = step / "manifest.msgpack"
    data = manifest.read_bytes()
    manifest.unlink()
    return data


@pytest.mark.parametrize("fixture", ["step", "staged"])
def test_a_lost_manifest_comes_back_byte_for_byte(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    step: Path = request.getfixturevalue(fixture)
    before = files(step)
    lose_manifest(step)
    manifest = ckptkit.rebuild(step)
    assert files(step) == before
    assert manifest.to_bytes() == before["manifest.msgpack"]
    assert ckptkit.verify(step) == []


def test_lost_group_documents_come_back_with_the_manifest(staged: Path) -> None:
    before = files(staged)
    lose_manifest(staged)
    (groups,) = staged.glob("data/*/groups.zip")
    groups.unlink()
    ckptkit.rebuild(staged)
    assert files(staged) == before


@pytest.mark.parametrize("damage", [b"", b"damaged", None])
def test_a_damaged_manifest_is_replaced(step: Path, damage: bytes | None) -> None:
    whole = lose_manifest(step)
    damaged = whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage
    (step / "manifest.msgpack").write_bytes(damaged)
    ckptkit.rebuild(step)
    assert (step / "manifest.msgpack").read_bytes() == whole


def test_a_good_manifest_is_not_replaced(step: Path) -> None:
    before = files(step)
    with pytest.raises(StepExistsError) as caught:
        ckptkit.rebuild(step)
    assert caught.value.where == str(step)
    assert "ckpt verify" in caught.value.hint
    assert files(step) == before


def test_a_manifest_of_a_newer_version_is_not_replaced(step: Path) -> None:
    document = {"format": "ckptkit-manifest", "version": 2, "crc32": 0}
    body = msgpack.packb(document)[:-1] + b"\xce"
    newer = body + zlib.crc32(body).to_bytes(4, "big")
    (step / "manifest.msgpack").write_bytes(newer)
    with pytest.raises(VersionError):
        ckptkit.rebuild(step)
    assert (step / "manifest.msgpack").read_bytes() == newer


def second_save(step: Path) -> str:
    """The packs of another complete save beside those of the step; its save id."""
    save(step.parent / "elsewhere", OTHER, strategy="fsdp:2", step=7)
    (folder,) = (step.parent / "elsewhere/step-0000000007/data").iterdir()
    shutil.move(folder, step / "data")
    return folder.name


def test_of_several_complete_saves_one_has_to_be_named(step: Path) -> None:
    (first,) = [folder.name for folder in (step / "data").iterdir()]
    whole = lose_manifest(step)
    second = second_save(step)
    with pytest.raises(UsageError) as caught:
        ckptkit.rebuild(step)
    assert first in str(caught.value)
    assert second in str(caught.value)
    assert "save_id" in caught.value.hint
    assert not (step / "manifest.msgpack").exists()
    ckptkit.rebuild(step, save_id=first)
    assert (step / "manifest.msgpack").read_bytes() == whole


def test_the_named_save_is_the_one_that_is_committed(step: Path) -> None:
    lose_manifest(step)
    ckptkit.rebuild(step, save_id=second_save(step))
    with ckptkit.open(step) as checkpoint:
        assert_holds(checkpoint, OTHER)
    assert ckptkit.verify(step) == []


def test_of_several_saves_the_only_complete_one_is_meant(step: Path) -> None:
    whole = lose_manifest(step)
    second = second_save(step)
    (step / "data" / second / "rank-00001.zip").unlink()
    ckptkit.rebuild(step)
    assert (step / "manifest.msgpack").read_bytes() == whole


def _without_a_pack(step: Path, pack: Path) -> None:
    pack.unlink()


def _with_a_short_pack(step: Path, pack: Path) -> None:
    pack.write_bytes(pack.read_bytes()[:-1])


def _with_a_damaged_record(step: Path, pack: Path) -> None:
    data = bytearray(pack.read_bytes())
    data[data.index(b"ckptkit-rank")] ^= 1
    pack.write_bytes(data)


def _with_a_copied_pack(step: Path, pack: Path) -> None:
    pack.write_bytes((pack.parent / "rank-00002.zip").read_bytes())


@pytest.mark.parametrize(
    "spoil", [_without_a_pack, _with_a_short_pack, _with_a_damaged_record, _with_a_copied_pack]
)
@pytest.mark.parametrize("number", [0, 1])
def test_an_incomplete_save_is_refused(step: Path, spoil: object, number: int) -> None:
    lose_manifest(step)
    (pack,) = step.glob(f"data/*/rank-0000{number}.zip")
    assert callable(spoil)
    spoil(step, pack)
    with pytest.raises(FormatError) as caught:
        ckptkit.rebuild(step)
    assert pack.name in str(caught.value)
    assert caught.value.hint
    assert not (step / "manifest.msgpack").exists()


def test_where_there_are_no_packs_there_is_nothing_to_rebuild(tmp_path: Path, step: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFoundError) as caught:
            ckptkit.rebuild(place)
        assert str(place) in caught.value.where
        assert caught.value.hint
    lose_manifest(step)
    with pytest.raises(NotFoundError) as caught:
        ckptkit.rebuild(step, save_id="20200101T000000Z-0123456789ab")
    assert caught.value.has_value
    assert next((step / "data").iterdir()).name in caught.value.hint


def test_the_packs_of_another_step_are_refused(step: Path) -> None:
    lose_manifest(step)
    moved = step.rename(step.with_name("step-0000000008"))
    with pytest.raises(FormatError, match="step 7") as caught:
        ckptkit.rebuild(moved)
    assert "step-0000000007" in caught.value.hint
    assert Run(step.parent).steps() == []
