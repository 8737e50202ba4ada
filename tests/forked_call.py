"""Ask a `ForkServer` for a process: the call, and a program in the place of `python`.

    python -IS forked_call.py FOLDER -c CODE [WORD ...]

As a program it takes `-c` and `-m`, passes its streams, variables and folder on, and ends as the
forked process does. Where the call is another one, or a variable that Python reads when it starts
is not as the server's, it becomes the real Python. It imports little: it is started often.
"""

import _socket
import marshal
import os
import sys
from array import array

READ_AT_START = ("PYTHON", "LANG", "LC_")
"""What the names of variables begin with that Python reads when it starts."""


def at_start(variables):
    return {name: each for name, each in variables.items() if name.startswith(READ_AT_START)}


def ask(folder, words, variables, cwd, streams):
    """Have `python WORDS` forked; returns a pipe in which its exit code will be."""
    body = marshal.dumps((list(words), dict(variables), cwd))
    reading, writing = os.pipe()
    to = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        to.connect(f"{folder}/socket")
        passed = array("i", [*streams, writing]).tobytes()
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)
        to.sendmsg([len(body).to_bytes(4, "big")], [rights])
        to.sendall(body)
    finally:
        to.close()
        os.close(writing)
    return reading


def main(folder, *words):
    with open(f"{folder}/server", "rb") as file:
        python, known = marshal.load(file)
    if words[:1] not in (("-c",), ("-m",)) or at_start(os.environ) != known:
        os.execv(python, [python, *words])
    code = int(os.read(ask(folder, words, os.environ, os.getcwd(), (0, 1, 2)), 16))
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
