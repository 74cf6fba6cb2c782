from __future__ import annotations

from pathlib import Path

from tests.cli.programs import ckpt, document


def test_a_lost_manifest_is_made_again_byte_for_byte(run: Path) -> None:
    manifest = run / "step-0000000020" / "manifest.msgpack"
    written = manifest.read_bytes()
    manifest.unlink()
    found = document("rebuild", manifest.parent)
    assert (found["step"], found["strategy"], found["arrays"], found["packs"]) == (
        20,
        "ddp:2,fsdp:2",
        6,
        4,
    )
    assert manifest.read_bytes() == written


def test_the_text_names_the_save(run: Path) -> None:
    manifest = run / "step-0000000020" / "manifest.msgpack"
    manifest.unlink()
    (save,) = (manifest.parent / "data").iterdir()
    text = ckpt("rebuild", manifest.parent, "--save-id", save.name).stdout
    assert text == f"step 20 is committed again: 6 arrays in 4 packs, saved as {save.name}\n"


def test_a_good_manifest_is_not_replaced(run: Path) -> None:
    result = ckpt("rebuild", run / "step-0000000020")
    assert result.exit_code == 2
    assert "committed already" in result.stderr
    assert "hint: there is nothing to rebuild" in result.stderr


def test_packs_that_are_not_whole_give_no_step(run: Path) -> None:
    result = ckpt("rebuild", run / "step-0000000030")
    assert result.exit_code == 3
    assert not (run / "step-0000000030" / "manifest.msgpack").exists()


def test_a_run_cannot_say_which_step(run: Path) -> None:
    result = ckpt("rebuild", run)
    assert result.exit_code == 2
    assert "without a manifest: 30" in result.stderr


def test_a_save_that_is_not_there_is_not_found(run: Path) -> None:
    (run / "step-0000000020" / "manifest.msgpack").unlink()
    assert (
        ckpt("rebuild", run / "step-0000000020", "--save-id", "20200101T000000Z-nope").exit_code
        == 4
    )


def test_an_empty_manifest_is_as_good_as_lost(run: Path) -> None:
    manifest = run / "step-0000000020" / "manifest.msgpack"
    written = manifest.read_bytes()
    manifest.write_bytes(b"")
    assert "without a manifest: 20, 30" in ckpt("rebuild", run).stderr
    assert ckpt("rebuild", manifest.parent).exit_code == 0
    assert manifest.read_bytes() == written
