"""A game as an environment: the model guesses a number and reads "Higher." or "Lower."."""

import random
import re

HIGHEST, MOST_GUESSES = 20, 5


class Guess:
    """One game after another; each `reset` begins one."""

    def reset(self, seed: int) -> str:
        """Draw a number, and return what the model reads first."""
        self._number, self._guesses = random.Random(seed).randint(1, HIGHEST), 0
        self._low, self._high = 1, HIGHEST
        return f"I think of a number from 1 to {HIGHEST}. Guess it. Answer with one number."

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return an answer to a guess, its reward, and whether the game is over.

        A number that can be right earns 0.1, the right one 1, less 0.15 for each guess before.
        """
        self._guesses += 1
        is_over = self._guesses == MOST_GUESSES
        if not (found := re.fullmatch(r"\s*(\d{1,4})\.?\s*", text)):
            return "Answer with one number.", 0.0, is_over
        guess = int(found[1])
        if guess == self._number:
            return "Right.", 1.0 - 0.15 * (self._guesses - 1), True
        reward = 0.1 if self._low <= guess <= self._high else 0.0
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return "Higher.", reward, is_over
        self._high = min(self._high, guess - 1)
        return "Lower.", reward, is_over
