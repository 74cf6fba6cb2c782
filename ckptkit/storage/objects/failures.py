"""From what botocore, aiohttp and fsspec raise to an error that says what to do."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckptkit.errors import CkptkitError
from ckptkit.storage.objects import answers
from ckptkit.storage.objects.client import Transient
from ckptkit.storage.refusals import refusal

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
