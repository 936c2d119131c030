"""`python -m jbatch.serve`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from jbatch.config import UserError
from jbatch.serve.config import parse
from jbatch.serve.sockets import bind


def main(arguments: Sequence[str]) -> int:
    """Serves until a signal; returns the exit code."""
    # Until the server has handlers of its own, a signal ends the process at once: an exception would wait for the
    # compiler to return, and libraries' own callbacks and event loops swallow it.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    try:
        config = parse(arguments)
        with bind(config.host, config.port) as sock:
            from jbatch.serve.start import run  # it takes a second to import: not before the port is ours

            run(config, sock, _report)
    except UserError as error:
        _report(f"error: {error}")
        return 2
    _report("stopped")
    return 0


def _report(line: str) -> None:
    print(f"jbatch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # rather than wait for a step that is being compiled in the background
