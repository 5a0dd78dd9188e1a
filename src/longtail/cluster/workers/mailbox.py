"""Messages that wait for a task, and results of a task that wait for a message."""

from collections.abc import Iterable
from threading import Lock
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Mailbox(Generic[T]):
    """Items in order, put and taken by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._items: list[T] = []

    def put(self, items: Iterable[T]) -> None:
        """Add items."""
        with self._lock:
            self._items.extend(items)

    def take(self) -> list[T]:
        """Return the items since the last call."""
        if not self._items:
            return []
        with self._lock:
            found, self._items = self._items, []
        return found
