"""Called in place of `python -m cli.main` or `python SCRIPT`: hands a command to `warm.server`, and ends as it ended.

    python -I -S client.py SOCKET felix|SCRIPT [words of the command]

Standard streams, environment and folder are this process's own; signals that can be caught are handed on.
"""

import array
import json
import os
import signal
import socket
import sys

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    ignored = [each for each in HANDED_ON if signal.getsignal(each) is signal.SIG_IGN]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        request = {"argv": sys.argv[2:], "env": dict(os.environ), "cwd": os.getcwd(), "ignored": ignored}
        data = json.dumps(request).encode() + b"\n"
        streams = array.array("i", (0, 1, 2))
        sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(data[sent:])
        answers = connection.makefile()
        pid = int(answers.readline())
        for each in HANDED_ON:
            if each not in ignored:
                signal.signal(each, lambda number, _: os.kill(pid, number))
        code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
