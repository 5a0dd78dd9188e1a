import os
import signal

import pytest

from longtail.interrupt import Interrupted, Interruption


def _receive(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)  # to the main thread: the handler runs before the next line


def test_without_a_signal_nothing_happens() -> None:
    with Interruption() as interruption:
        interruption.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_for_the_next_check(number: signal.Signals) -> None:
    with Interruption() as interruption:
        _receive(number)
        for _ in range(2):
            with pytest.raises(Interrupted):
                interruption.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_does_not_wait(number: signal.Signals) -> None:
    with Interruption(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        _receive(signal.SIGINT)
        _receive(number)


def test_handlers_are_as_before_afterwards_however_it_ends() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), Interruption():  # noqa: PT012
        assert signal.getsignal(signal.SIGINT) not in before
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
