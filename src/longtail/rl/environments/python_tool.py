"""A tool: the model runs Python and reads what it prints."""

import subprocess
import sys

_MAX_S, _MAX_CHARACTERS = 5.0, 400


def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: The program; it must print its result.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MAX_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"The program did not end in {_MAX_S:.0f} s."
    said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    return said[:_MAX_CHARACTERS] or "The program printed nothing."
