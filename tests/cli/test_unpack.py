from __future__ import annotations

from pathlib import Path

import pytest
import zarr

from tests.cli.programs import ckpt, document, flip_a_bit


def test_zarr_reads_what_was_unpacked(run: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    found = document("unpack", run, plain, "--memory", "1MiB")
    assert (found["step"], found["arrays"], found["folder"]) == (20, 6, str(plain))
    assert found["files"] == sum(path.is_file() for path in plain.rglob("*"))
    group = zarr.open_group(plain, mode="r")
    assert sorted(group["model"].array_keys()) == ["none", "qkv", "scale", "tied", "w"]  # type: ignore[union-attr]


def test_it_says_where_a_url_and_a_home_lead(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (f"file://{tmp_path}/one", "~/two", f"{tmp_path}/run/../three"):
        found = Path(document("unpack", run, folder)["folder"])
        assert found == tmp_path / Path(folder).name
        assert (found / "zarr.json").is_file()


def test_the_text_says_what_was_written(run: Path, tmp_path: Path) -> None:
    text = ckpt("unpack", run, tmp_path / "plain").stdout
    assert text.startswith(f"unpacked step 20 into {tmp_path / 'plain'}: 6 arrays, ")


def test_a_size_that_is_none_is_a_mistake_in_the_command(run: Path, tmp_path: Path) -> None:
    result = ckpt("unpack", run, tmp_path / "plain", "--memory", "1Mib/s")
    assert result.exit_code == 2
    assert "no size (got '1Mib/s')" in result.stderr
    assert not (tmp_path / "plain").exists()


def test_what_is_there_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "mine").write_text("mine")
    result = ckpt("unpack", run, tmp_path / "plain")
    assert result.exit_code == 2
    assert "there is something already" in result.stderr
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["mine"]


def test_nothing_is_left_when_it_fails(run: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    flip_a_bit(run / "step-0000000020")
    result = ckpt("unpack", run, tmp_path / "plain")
    assert result.exit_code == 3
    assert "checksum" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_made_is_the_storages_fault(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ckpt("unpack", run, tmp_path / "file" / "plain").exit_code == 5
