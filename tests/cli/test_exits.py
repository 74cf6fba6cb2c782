from __future__ import annotations

import errno
import shlex
from pathlib import Path

import click
import numpy as np
import pytest
from ckptkit.cli.output import code_of

import ckptkit
from ckptkit import errors
from tests.checkpoint.saving import Tensor, save
from tests.cli.programs import ckpt


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.UsageError("x"), 2),
        (errors.StrategyError("x"), 2),
        (errors.UnsupportedTypeError("x"), 2),
        (errors.StepExistsError("x"), 2),
        (errors.FormatError("x"), 3),
        (errors.VersionError("x"), 3),
        (errors.CorruptionError("x"), 3),
        (errors.NotFoundError("x"), 4),
        (errors.NotCommittedError("x"), 4),
        (errors.StorageError("x"), 5),
        (errors.AccessError("x"), 5),
        (errors.PeerError("x"), 6),
        (ValueError("x"), 70),
        (errors.CkptkitError("x"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(errno.EPIPE, "x"), 141),
    ],
)
def test_every_kind_of_error_has_its_code(error: BaseException, code: int) -> None:
    assert code_of(error) == code


def test_ctrl_c_while_a_class_is_made_is_an_interruption() -> None:
    class Field:
        def __set_name__(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
        type("Settings", (), {"field": Field()})
    assert code_of(caught.value) == 130


@pytest.mark.parametrize("command", ["ls", "prune"])
def test_a_damaged_step_instead_of_a_run_has_a_code_that_the_help_names(
    command: str, tmp_path: Path
) -> None:
    save(tmp_path, {"model/w": Tensor(np.zeros(2))}, step=7)
    step = tmp_path / "step-0000000007"
    (step / "manifest.msgpack").write_bytes(b"damaged")
    code = ckpt(command, step).exit_code
    assert code == 3
    assert f"\n    {code}    " in ckpt(command, "--help").stdout


def test_no_error_of_the_library_is_a_bug_of_it() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    named = [
        kind
        for kind in kinds
        if kind is not ckptkit.CkptkitError and issubclass(kind, ckptkit.CkptkitError)
    ]
    assert len(named) > 10
    assert not [kind for kind in named if code_of(kind("x")) == 70]


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_an_error_is_a_line_and_a_hint_on_stderr(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str, **options: object) -> None:
        raise errors.CorruptionError(
            "it is\x1b[2J bad", where="run/x", value=3, hint="throw it away"
        )

    monkeypatch.setattr(ckptkit, "open", fail)
    result = ckpt("show", "run/x", *option)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "error: run/x: it is\\x1b[2J bad (got 3)\nhint: throw it away\n"


def test_a_bug_is_one_line_and_where_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckptkit, "open", lambda _, **options: 1 / 0)
    result = ckpt("show", "x")
    assert result.exit_code == 70
    assert result.stderr.startswith(
        "error: this is a bug in ckptkit: ZeroDivisionError: division by zero"
    )
    assert "hint: report it" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("CKPTKIT_DEBUG", "1")
    assert "Traceback" in ckpt("show", "x").stderr


def test_wrong_usage_looks_as_all_errors_do() -> None:
    for arguments in (["show"], ["show", "x", "--bogus"], ["bogus"], ["--bogus"]):
        result = ckpt(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        first, second = result.stderr.splitlines()
        assert first.startswith("error: ")
        assert second.startswith("hint: `ckpt")


def test_the_choices_of_a_missing_option_are_one_line() -> None:
    first, _ = ckpt("export", "x", "y").stderr.splitlines()
    choices = "hf, safetensors, torch, dcp"
    assert first == f"error: missing option '--to-format'. Choose from: {choices}"


def test_a_command_in_a_hint_can_be_pasted(tmp_path: Path) -> None:
    place = tmp_path / "it's [a] run"
    save(place, {"model/w": Tensor(np.zeros(2))}, step=7)
    step = place / "step-0000000007"
    with ckptkit.open(step) as checkpoint, pytest.raises(errors.NotFoundError) as absent:
        checkpoint["w"]
    told = [ckpt("ls", step), ckpt("show", step, "w"), ckpt("rebuild", step)]
    for text in (str(absent.value), *(result.stderr for result in told)):
        pasted = next(part for part in text.split("`") if part.startswith("ckpt "))
        assert ckpt(*shlex.split(pasted)[1:]).exit_code == 0


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ckptkit, "open", interrupt)
    result = ckpt("show", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["ls", "show", "verify", "reshard", "diff", "rules"])
def test_every_command_names_what_others_saved(command: str, tmp_path: Path) -> None:
    (tmp_path / ".zgroup").touch()
    to = ("--to", "fsdp:2")
    more: dict[str, tuple[object, ...]] = {
        "reshard": (tmp_path / "new", *to),
        "rules": to,
        "diff": (tmp_path,),
    }
    result = ckpt(command, tmp_path, *more.get(command, ()))
    assert result.exit_code == 4
    told = "no checkpoint of ckptkit, but a plain Zarr folder"
    assert result.stderr.startswith(f"error: {tmp_path}: {told}\nhint: this version cannot read it")
