"""Runs Python that a model writes, as a tool or as an environment."""

import re
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


class Python:
    """Runs the last block of Python in a text; a text without one ends the episode."""

    def reset(self) -> str:
        """Return what the model reads behind the problem."""
        return "\nWrite a Python program that prints the answer:\n```python\n# your program\n```"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return what the program prints, no reward, and whether there is no program."""
        programs = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
        if not programs:
            return "", 0.0, True
        printed = python(programs[-1])
        return f"It prints:\n{printed}\nPut the final answer within \\boxed{{}}.", 0.0, False
