"""Programs that begin with torch imported: each is forked from one process, which waits for them.

What a launcher starts is this file, which imports next to nothing; it asks for the program, ends as
that does, and if it is killed, so is the program.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[3]
PLACE = "CKPTKIT_TESTS_WARM"
_LONGEST = 2**16  # bytes of a request that are read at a time


@contextmanager
def warm(module: str, folder: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """A process that has imported a module; gives the environment of those who want it to run."""
    place = str(folder / "warm")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, __file__, "serve", module, place],
        stdout=subprocess.PIPE,
        env=os.environ | environment | {"PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield {PLACE: place}
        finally:
            process.kill()


def run(arguments: list[str]) -> int:
    """Run `main` of the module with these arguments, with this process' streams and environment."""
    place = {"environment": dict(os.environ), "folder": str(Path.cwd()), "group": os.getpgrp()}
    asked = json.dumps({"arguments": arguments, **place}).encode()
    if os.getpgrp() != os.getsid(0):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program gets it too, and ends as it does
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.connect(os.environ[PLACE])
        socket.send_fds(pipe, [asked[:1]], [0, 1, 2])
        pipe.sendall(asked[1:] + b"\n")
        code = pipe.recv(1)
    if not code:  # it was killed
        os.kill(os.getpid(), signal.SIGKILL)
    return code[0]


def serve(module: str, place: str) -> None:
    """Fork for each request, for ever."""
    main = importlib.import_module(module).main
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(64)
        os.write(1, b"ready\n")
        while True:
            pipe, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(pipe, main)
            pipe.close()


def _answer(pipe: socket.socket, main: Callable[..., object]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked, fds, *_ = socket.recv_fds(pipe, _LONGEST, 3)
    while not asked.endswith(b"\n"):
        asked += pipe.recv(_LONGEST)
    for number, (name, fd) in enumerate(zip(("stdin", "stdout", "stderr"), fds, strict=True)):
        os.dup2(fd, number)
        os.close(fd)
        # Those of the server know whether what they were made for can be sought in.
        setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    document = json.loads(asked)
    os.environ.clear()
    os.environ.update(document["environment"])
    os.chdir(document["folder"])
    with suppress(PermissionError):  # of another session: what is sent to its group is not for this
        os.setpgid(0, document["group"])
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    code = 0
    try:
        main(*document["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - told as Python tells it
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    pipe.sendall(bytes([code]))
    os._exit(code)


def _end_with(pipe: socket.socket) -> None:
    pipe.recv(1)  # nothing comes, but the end of who asked
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(run(sys.argv[1:]))
