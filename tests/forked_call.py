"""Ask a `ForkServer` for a process: the call, and a program in the place of `python`.

    python -IS forked_call.py FOLDER -c CODE [WORD ...]

As a program it takes `-c` and `-m`, passes its streams, variables and folder on, and ends as the
forked process does. Where the call is another one, or a variable that Python reads when it starts
is not as the server's, it becomes the real Python. It is started often, so it imports only what is
part of Python or has no imports: `array` and `os` would take a third of its time.
"""

import _socket
import marshal
import posix
import sys

READ_AT_START = ("PYTHON", "LANG", "LC_")
"""What the names of variables begin with that Python reads when it starts."""


def at_start(variables):
    return {name: each for name, each in variables.items() if name.startswith(READ_AT_START)}


def ask(folder, words, variables, cwd, streams):
    """Have `python WORDS` forked; returns a pipe in which its exit code will be."""
    body = marshal.dumps((list(words), dict(variables), cwd))
    reading, writing = posix.pipe()
    to = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        to.connect(f"{folder}/socket")
        passed = b"".join(each.to_bytes(4, sys.byteorder) for each in (*streams, writing))
        rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)
        to.sendmsg([len(body).to_bytes(4, "big")], [rights])
        to.sendall(body)
    finally:
        to.close()
        posix.close(writing)
    return reading


def main(folder, *words):
    with open(f"{folder}/server", "rb") as file:
        python, known = marshal.load(file)
    variables = {_text(name): _text(each) for name, each in posix.environ.items()}
    flag = words[1:2] if words[:1] == ("-P",) else words[:1]
    if flag not in (("-c",), ("-m",)) or at_start(variables) != known:
        posix.execv(python, [python, *words])
    code = int(posix.read(ask(folder, words, variables, posix.getcwd(), (0, 1, 2)), 16))
    if code < 0:
        posix.kill(posix.getpid(), -code)
    posix._exit(code)


def _text(data):
    return data.decode(sys.getfilesystemencoding(), "surrogateescape")


if __name__ == "__main__":
    main(*sys.argv[1:])
