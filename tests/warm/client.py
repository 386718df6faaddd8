"""Asks the server for a process that runs what the command line says, passes signals on to it and
ends as it ends. Runs the real interpreter where the server does not take the command.
"""

import contextlib
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    command, *words = sys.argv[1:]
    framework = os.path.basename(os.path.dirname(command))
    path = os.path.join(os.environ.get("WHENCE_TESTS_SOCKETS", ""), framework)
    request = {"command": command, "words": words, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            instead(words)
        text = json.dumps(request).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(text)
        replies = connection.makefile()
        pid = int(replies.readline() or 0)
        if not pid:
            instead(words)
        for number in PASSED_ON:
            signal.signal(number, lambda received, _frame: os.kill(pid, received))
        status = int(replies.readline())
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def instead(words: list[str]) -> None:
    python = os.environ.get("WHENCE_TESTS_PYTHON", "python3")
    os.execvp(python, [python, *words])


main()
