"""Python programs without the two seconds of their imports.

A server is forked from the test process once everything is collected, before any test has run. It forks a
child for each program, which thus starts with torch and the package imported, on one thread. Tests of what
an interpreter imports, or has at its start, use `subprocess` instead.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SERVER: list[tuple[socket.socket, int]] = []
"""This process's end of the server's socket and the server's process number, once it is there."""
WIDTH = 10
"""Bytes of a number in a reply."""


class Forked:
    """A started program, as `subprocess.Popen` has it: `[sys.executable, "-m", "tools.kill_runs"]`.

    `-c`, `-m` and the path of a script are known. It leads a process group of its own.
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        self._replies, theirs = socket.socketpair()
        request = [[str(each) for each in args[1:]], str(cwd or Path.cwd()), dict(env or os.environ)]
        with theirs, tempfile.TemporaryFile("w+b") as file:  # a message would be cut at some length
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(SERVER[0][0], [b"."], [theirs.fileno(), file.fileno(), stdout, stderr])
        self.pid = int(self._replies.recv(WIDTH))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._replies.settimeout(timeout)
            self.returncode = int(self._replies.recv(WIDTH))
            self._replies.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except BlockingIOError:
            return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def run_forked(
    args: Sequence[str | Path], timeout: float = 300, check: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with captured text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = Forked(args, stdout=out.fileno(), stderr=err.fileno(), **settings)
        try:
            program.wait(timeout)
        except TimeoutError:
            os.killpg(program.pid, signal.SIGKILL)
            raise
        texts = [file.seek(0) or file.read() for file in (out, err)]
    done = subprocess.CompletedProcess(args, program.wait(), *texts)
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr}")
    return done


def start_server() -> None:
    ours, theirs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of xdist only pass messages
        server = os.fork()
    if server:
        theirs.close()
        SERVER.append((ours, server))
        return
    try:
        _serve(theirs)
    finally:
        os._exit(1)


def stop_server() -> None:
    """Its children's time becomes ours."""
    while SERVER:
        connection, server = SERVER.pop()
        connection.close()
        os.waitpid(server, 0)


def _serve(connection: socket.socket) -> None:
    faulthandler.disable()  # it would write to a file of pytest's
    SERVER.clear()
    kept = os.dup2(connection.detach(), 3)
    os.closerange(4, 4096)  # pipes of pytest and xdist, whose ends must be seen
    connection = socket.socket(fileno=kept)
    while True:
        message, handles, *_ = socket.recv_fds(connection, 1, 4)
        if not message:
            break
        if os.fork() == 0:
            _watch(*handles)
        for handle in handles:
            os.close(handle)
        _reap(os.WNOHANG)
    _reap(0)
    os._exit(0)


def _reap(options: int) -> None:
    try:
        while os.waitpid(-1, options)[0]:
            pass
    except ChildProcessError:
        pass


def _watch(replies: int, request: int, stdout: int, stderr: int) -> None:
    """Tells the number of the program's process, and then how it ended."""
    child = os.fork()
    if child == 0:
        os.close(replies)
        _run_program(json.loads(os.pread(request, 1 << 24, 0)), stdout, stderr)
    os.write(replies, b"%*d" % (WIDTH, child))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(replies, b"%*d" % (WIDTH, status))
    os._exit(0)


def _run_program(request: tuple[list[str], str, dict[str, str]], stdout: int, stderr: int) -> None:
    words, folder, environment = request
    os.setsid()
    for number, handle in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(handle, number)
    os.closerange(3, 64)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    warnings.resetwarnings()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        _interpret(words)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _interpret(words: list[str]) -> None:
    if words[0] in ("-c", "-m"):
        option, what, *rest = words
        sys.path.insert(0, os.getcwd())
        sys.argv = [option, *rest]
        if option == "-m":
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
