"""From what a server answers to an error that says what to do, whichever engine asked."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ckptkit.errors import CkptkitError
from ckptkit.storage.objects import errors as answers
from ckptkit.storage.objects.server import Transient
from ckptkit.storage.disk import refusal

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.location import Location
from ckptkit.storage.objects.server import Transient, UnsupportedError

_AGAIN = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "TooManyRequests",
    "OperationAborted",
    "ServerBusy",
    # Two conditional writes at once: neither was refused for good.
    "ConditionalRequestConflict",
    # The body was damaged on its way.
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",
}
_AGAIN_STATUS = {408, 425, 429, 500, 502, 503, 504}
_CLOCK = "set the clock of this machine (NTP): it is minutes off"
_REGION = "set the option region, or AWS_REGION, to the region of the bucket"
_KEY = "check the access key and the secret key, and whether they belong to this server"
_KINDS: dict[str, tuple[type[CkptkitError], str, str]] = {
    "AccessDenied": (AccessError, "not allowed", "ask for permission to read, write and list here"),
    "AllAccessDisabled": (AccessError, "not allowed", "the bucket is closed; choose another"),
    "InvalidAccessKeyId": (AccessError, "the access key is not known", _KEY),
    "SignatureDoesNotMatch": (AccessError, "the secret key is wrong", _KEY),
    "InvalidToken": (AccessError, "the session token is not valid", "get new credentials"),
    "ExpiredToken": (AccessError, "the credentials have expired", "get new credentials"),
    "TokenRefreshRequired": (AccessError, "the credentials have expired", "get new credentials"),
    "RequestTimeTooSkewed": (AccessError, "the clocks of client and server differ", _CLOCK),
    "RequestExpired": (AccessError, "the clocks of client and server differ", _CLOCK),
    "AuthorizationHeaderMalformed": (StorageError, "the region is wrong", _REGION),
    "PermanentRedirect": (StorageError, "the bucket is in another region", _REGION),
    "TemporaryRedirect": (StorageError, "the bucket is in another region", _REGION),
    "IllegalLocationConstraintException": (StorageError, "the region is wrong", _REGION),
    "InvalidBucketName": (StorageError, "no bucket can have this name", "check the URL"),
    "NoSuchUpload": (
        NotFoundError,
        "the upload is gone",
        "something aborts uploads too early: a rule of the bucket, or a clean-up",
    ),
    "QuotaExceeded": (NoSpaceError, "the quota is used up", "free some space or ask for more"),
    "EntityTooLarge": (StorageError, "the server takes no object of this size", "lower part_size"),
    "NotImplemented": (UnsupportedError, "the server cannot do this", "check what it supports"),
}
_STATUS = {301: "PermanentRedirect", 307: "TemporaryRedirect", 401: "AccessDenied"} | {
    403: "AccessDenied",
    501: "NotImplemented",
    507: "QuotaExceeded",
}
NO_CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or anonymous=true; "
    "for gs:// set GOOGLE_APPLICATION_CREDENTIALS"
)
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: an HTTP status, and the code and message of its XML or JSON."""

    status: int = 0
    code: str = ""
    message: str = ""


def said(answer: Answer, where: str, secrets: Iterable[str] = ()) -> CkptkitError | Transient:
    """What to raise for an answer that is no success."""
    code = answer.code or _STATUS.get(answer.status, "")
    if code == "NoSuchBucket":
        return no_bucket(where)
    if answer.status == 412 or code == "PreconditionFailed":
        return taken(where)
    if code in _AGAIN or (answer.status in _AGAIN_STATUS and code not in _KINDS):
        return Transient(" ".join(str(it) for it in (answer.status or "", code) if it).strip())
    if code in _KINDS:
        kind, what, hint = _KINDS[code]
        return kind(f"{what}{_told(answer, secrets)}", where=where, hint=hint)
    if answer.status == 404:
        return absent(where)
    return StorageError(
        f"the server refused{_told(answer, secrets)}",
        where=where,
        hint="check the endpoint, and whether the server supports what was asked",
    )


def below(top: Location, key: str) -> str:
    """A key as users know it; the whole of it where there is no key."""
    return f"{top}/{key}" if key else str(top)


def absent(where: str) -> NotFoundError:
    """There is no such object."""
    return NotFoundError("no such object", where=where, hint="check the bucket, the path, the name")


def no_bucket(where: str) -> NotFoundError:
    """There is no such bucket."""
    bucket = "/".join(where.split("/")[:3])
    return NotFoundError(
        f"there is no bucket {bucket}",
        where=where,
        hint="check its name and the endpoint, or create it first",
    )


def taken(where: str) -> AlreadyExistsError:
    """There is an object of this name."""
    return AlreadyExistsError(
        "there is an object of this name",
        where=where,
        hint="delete it first or choose another name",
    )


def no_credentials(where: str) -> AccessError:
    """Nobody said with which credentials to ask."""
    return AccessError("no credentials were found", where=where, hint=NO_CREDENTIALS_HINT)


def unknown_host(_where: str) -> Transient:
    """The name of the server has no address; not every resolver says when it is merely busy."""
    return Transient("the server's name has no address", within=1)


def unresolved_host(_where: str) -> Transient:
    """Nobody who knows the address of the server answers now."""
    return Transient("the server's name cannot be looked up now")


def unencrypted(where: str) -> StorageError:
    """Plain http, which nobody asked for."""
    return StorageError(
        "the connection would not be encrypted",
        where=where,
        hint="use an https:// endpoint, or ask for it: http=true",
    )


def untrusted(where: str) -> StorageError:
    """The server's certificate is not trusted."""
    return StorageError(
        "the certificate of the server is not trusted",
        where=where,
        hint="check the endpoint, the clock, and the certificates of this machine",
    )


def no_https(where: str) -> StorageError:
    """The server does not speak TLS."""
    return StorageError(
        "the server does not speak https",
        where=where,
        hint="check the endpoint; for one without encryption ask for it: http=true",
    )


def wrong_region(where: str) -> StorageError:
    """The server sends on to another region, and does not say which."""
    return StorageError("the bucket is in another region", where=where, hint=_REGION)


def no_ranges(where: str) -> StorageError:
    """The server sends a range, or all of the object, and says that all is what it sends."""
    return StorageError(
        "the server does not say which range it sends",
        where=where,
        hint="engine=fsspec does not ask; better, use a server that supports ranges",
    )


def refused_connection(_where: str) -> Transient:
    """Nobody listens: a server that starts again is back within seconds, a wrong endpoint never."""
    return Transient("nobody listens at the endpoint", within=10)


def xml_answer(status: int, body: str) -> Answer:
    """The answer in an error document of S3, or its JSON elsewhere."""
    code = re.search(r"<Code>([^<]*)</Code>", body)
    message = re.search(r"<Message>([^<]*)</Message>", body)
    return Answer(status, code[1] if code else "", message[1] if message else "")


def _told(answer: Answer, secrets: Iterable[str]) -> str:
    told = " ".join(f"{answer.status or ''} {answer.code}: {answer.message}".split())
    for secret in secrets:
        told = told.replace(secret, "…")
    told = told.strip(": ")
    return f" ({told[:_LONGEST]})" if told else ""

# By name, because none of these packages needs to be there.
_SLOW = {"ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError", "FSTimeoutError"}
_BROKEN = {
    *("ConnectionClosedError", "EndpointConnectionError", "HTTPClientError", "ResponseParserError"),
    *("ClientPayloadError", "ServerDisconnectedError", "ClientOSError", "ClientConnectionError"),
    *("IncompleteReadError", "ResponseStreamingError", "ContentLengthError", "ChecksumError"),
}
_UNTRUSTED = {"SSLError", "SSLCertVerificationError", "ClientConnectorCertificateError"}
_WITHOUT_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("DefaultCredentialsError", "RefreshError", "TokenRetrievalError"),
}
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR)


@contextmanager
def translated(where: str, secrets: Iterable[str] = ()) -> Iterator[None]:
    """Translate every error inside; our own pass unchanged."""
    try:
        yield
    except (CkptkitError, Transient):
        raise
    except Exception as error:  # noqa: BLE001 — file systems raise what they like
        # From None: what these libraries say may hold requests, with their signatures.
        raise translation(error, where, secrets) from None


def translation(
    error: Exception, where: str, secrets: Iterable[str] = ()
) -> CkptkitError | Transient:
    """What to raise instead of an error of an engine."""
    causes = list(_causes(error))
    for cause in causes:
        if answer := _answer(cause):
            return answers.said(answer, where, secrets)
    for cause in causes:
        if told := _connection(cause, where):
            return told
    for cause in causes:
        if told := _plain(cause, where):
            return told
    return answers.said(answers.Answer(message=f"{type(error).__name__}: {error}"), where, secrets)


def answer_of(error: BaseException) -> answers.Answer | None:
    """What the server said, if it said anything."""
    found = (_answer(cause) for cause in _causes(error))
    return next((answer for answer in found if answer), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        # aiohttp keeps what the operating system said here.
        inner = getattr(following, "os_error", None)
        if isinstance(inner, BaseException) and id(inner) not in seen:
            yield inner
        following = following.__cause__ or following.__context__


def _answer(error: BaseException) -> answers.Answer | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = response["Error"]
        code = str(said.get("Code", ""))
        # Without a body botocore gives the status as the code.
        return answers.Answer(status, "" if code.isdigit() else code, str(said.get("Message", "")))
    number = getattr(error, "code", None)
    if type(error).__name__ == "HttpError" and number is not None:
        return answers.Answer(int(number), message=str(getattr(error, "message", "")))
    http = getattr(error, "status", None)
    if type(error).__name__ == "ClientResponseError" and isinstance(http, int):
        return answers.Answer(http, message=str(getattr(error, "message", "")))
    return None


def _connection(error: BaseException, where: str) -> CkptkitError | Transient | None:
    name = type(error).__name__
    if name in _WITHOUT_CREDENTIALS:
        return answers.no_credentials(where)
    if isinstance(error, socket.gaierror) or name == "ClientConnectorDNSError":
        resolver = getattr(error, "os_error", error)
        busy = getattr(resolver, "errno", None) == socket.EAI_AGAIN
        return answers.unresolved_host(where) if busy else answers.unknown_host(where)
    # botocore follows a redirect that leads to itself.
    if isinstance(error, RecursionError):
        return answers.wrong_region(where)
    if (isinstance(error, ssl.SSLError) or name in _UNTRUSTED) and "WRONG_VERSION" in str(error):
        return answers.no_https(where)
    if name in _UNTRUSTED or isinstance(error, ssl.SSLCertVerificationError):
        return answers.untrusted(where)
    if isinstance(error, ConnectionRefusedError):
        return answers.refused_connection(where)
    return None


def _plain(error: BaseException, where: str) -> CkptkitError | Transient | None:
    name = type(error).__name__
    if isinstance(error, TimeoutError) or name in _SLOW:
        return Transient("no answer in time")
    if isinstance(error, ConnectionError) or name in _BROKEN:
        return Transient("the connection broke")
    if isinstance(error, FileNotFoundError):
        return answers.absent(where)
    if isinstance(error, FileExistsError):
        return answers.taken(where)
    if isinstance(error, PermissionError):
        return answers.said(answers.Answer(code="AccessDenied"), where)
    if isinstance(error, OSError) and error.errno in _DISK:
        return refusal(error, where)
    return None
