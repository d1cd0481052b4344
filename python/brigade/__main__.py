"""`python -m brigade ...`: the program `brigade`, for scripts with this Python."""

from __future__ import annotations

import os
import sys

from brigade.errors import NotInstalled
from brigade.programs import find_brigade


def main() -> None:
    """Replaces this process by `brigade`, or exits with 127 where it is not installed."""
    try:
        program = find_brigade()
    except NotInstalled as error:
        print(f"brigade: {error}", file=sys.stderr)
        sys.exit(127)
    # The interpreter of `brigade launch train.py`, unless the user names another one.
    if sys.executable and not os.environ.get("PYTHON_EXEC"):
        os.environ["PYTHON_EXEC"] = sys.executable
    os.execv(program, [os.fspath(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
