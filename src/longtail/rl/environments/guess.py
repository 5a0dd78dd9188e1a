"""A game as an environment: the model guesses a number and reads "Higher." or "Lower."."""

import random
import re

HIGHEST, MOST_GUESSES = 20, 5


class Guess:
    """One game after another; each `reset` begins one."""

    def reset(self, seed: int) -> str:
        """Draw a number, and return what the model reads first."""
        self._number, self._guesses = random.Random(seed).randint(1, HIGHEST), 0
        return f"I think of a number from 1 to {HIGHEST}. Guess it. Answer with one number."

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return an answer to a guess, its reward, and whether the game is over.

        A number that is found early earns more, up to 1; a text without one number is a guess, too.
        """
        self._guesses += 1
        numbers = re.findall(r"\d+", text)
        if numbers == [str(self._number)]:
            return "Right.", 1.0 - (self._guesses - 1) / MOST_GUESSES, True
        said = "Answer with one number."
        if len(numbers) == 1:
            said = "Higher." if int(numbers[0]) < self._number else "Lower."
        return said, 0.0, self._guesses == MOST_GUESSES
