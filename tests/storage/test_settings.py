"""Storage options: one set for both engines, text or values, checked before anything moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.errors import AccessError, CkptkitError, UsageError
from ckptkit.storage import LocalStore, Options, open_store
from ckptkit.storage.base.address import Settings, read_settings


def test_a_command_line_and_python_mean_the_same() -> None:
    texts = {
        "path_style": "true",
        "anonymous": "no",
        "part_size": "16MiB",
        "timeout": "2.5",
        "concurrency": "4",
        "http": "1",
    }
    values = {
        "path_style": True,
        "anonymous": False,
        "part_size": 16 << 20,
        "timeout": 2.5,
        "concurrency": 4,
        "http": True,
    }
    assert read_settings("s3", texts, {}) == read_settings("s3", values, {})


def test_the_environment_fills_in_what_no_option_says() -> None:
    environment = {
        "AWS_ENDPOINT_URL": "http://there:1",
        "AWS_ENDPOINT_URL_S3": "http://here:2/",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "CKPTKIT_STORAGE_ENGINE": "fsspec",
    }
    found = read_settings("s3", {}, environment)
    assert (found.endpoint, found.region, found.engine) == ("http://here:2", "eu-west-1", "fsspec")
    told = {"endpoint": "https://x", "region": "r", "engine": "obstore"}
    found = read_settings("s3", told, environment)
    assert (found.endpoint, found.region, found.engine) == ("https://x", "r", "obstore")
    assert read_settings("gs", {}, environment).endpoint is None


def test_encryption_is_given_up_only_when_asked_for() -> None:
    assert read_settings("s3", {"endpoint": "host:9"}, {}).endpoint == "https://host:9"
    found = read_settings("s3", {"endpoint": "host:9", "http": True}, {})
    assert found.endpoint == "http://host:9"
    assert found.is_plain
    assert read_settings("s3", {"http": True}, {}).is_plain
    assert not read_settings("s3", {"http": True, "endpoint": "https://host"}, {}).is_plain
    # Of obstore alone, which only allows it then: s3fs would go to Amazon without encryption.
    assert not read_settings("s3", {}, {"AWS_ALLOW_HTTP": "true"}).is_plain


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"endpiont": "x"}, "endpoint"),
        ({"engine": "boto"}, "obstore"),
        ({"part_size": "16 apples"}, "part_size"),
        ({"part_size": 1 << 20}, "part_size"),
        ({"part_size": "9" * 400}, "part_size"),
        ({"timeout": 0}, "timeout"),
        ({"deadline": "soon"}, "deadline"),
        ({"anonymous": "perhaps"}, "anonymous"),
        ({"anonymous": True, "access_key": "a", "secret_key": "SECRET"}, "anonymous"),
        ({"profile": "p", "access_key": "a", "secret_key": "SECRET"}, "profile"),
        ({"secret_key": "SECRET"}, "access_key"),
        ({"secret_key": "SECRET", "access_key": ""}, "access_key is empty"),
        ({"endpoint": "http://x", "http": False}, "http"),
        ({"endpoint": "http://127.0.0.1:9", "path_style": False}, "path_style"),
        ({"endpoint": "ftp://x"}, "endpoint"),
        ({"endpoint": "http://[::1:9000"}, "endpoint"),
        ({"endpoint": "https://me:SECRET@x"}, "credentials"),
        ({"SECRET": "x", "secret_key": 7}, "SECRET"),
    ],
)
def test_what_cannot_be_right_is_refused_without_showing_a_secret(
    options: Options, word: str
) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        open_store("s3://bucket", options)
    assert "SECRET" not in str(caught.value) or word == "SECRET"


def test_a_path_takes_the_options_of_the_other_place_but_no_typing_errors(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path, {"endpoint": "https://x"}), LocalStore)
    with pytest.raises(UsageError, match="endpiont"):
        open_store(tmp_path, {"endpiont": "https://x"})


def test_settings_show_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    found = Settings(access_key="AAA", secret_key="BBB", session_token="CCC")
    assert not any(secret in repr(found) for secret in found.secrets)
    assert len(found.secrets) == 3
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "DDD")
    assert "DDD" in Settings().secrets


def test_a_client_is_shared_whatever_happens_in_the_working_directory(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.chdir(tmp_path)
    clients = []
    for number in (1, 2):
        os.utime(tmp_path, (number, number))
        store = open_store("s3://bucket/run", {"engine": engine, "anonymous": True})
        clients.append(store._server.client)  # type: ignore[attr-defined]
    assert clients[0] is clients[1]


_SSO = "sso_session = s\nsso_account_id = 123456789012\nsso_role_name = r\n"
_SESSION = "[sso-session s]\nsso_start_url = https://x.awsapps.com/start\nsso_region = us-east-1\n"


@pytest.mark.parametrize(
    ("text", "expected", "word", "hint"),
    [
        ("[default\n", UsageError, "cannot be read .*config", "~/.aws"),
        ("[default]\nrole_arn = a\nsource_profile = nope\n", UsageError, "wrong .*nope", "~/.aws"),
        ("[default]\naws_access_key_id = me\n", AccessError, "half .*secret_access_key", "~/.aws"),
        ("[default]\ncredential_process = false\n", AccessError, "could not be got", "aws sts"),
        (f"[default]\n{_SSO}{_SESSION}", AccessError, "nobody is logged in", "aws sso login"),
    ],
)
def test_a_fault_in_the_configuration_of_aws_is_told_as_that(
    text: str,
    expected: type[CkptkitError],
    word: str,
    hint: str,
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [it for it in os.environ if it.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"endpoint": "http://127.0.0.1:9", "region": "us-east-1", "engine": engine}
    with pytest.raises(expected, match=word) as caught:
        open_store("s3://bucket/run", options).list()
    assert hint in caught.value.hint
