import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from longtail.system.interrupt import Interrupted, Interruption, signals_as_ctrl_c


def _receive(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)  # to the main thread: the handler runs before the next line


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_waits_for_the_next_check(number):
    with Interruption() as interruption:
        _receive(number)
        for _ in range(2):
            with pytest.raises(Interrupted):
                interruption.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_signal_interrupts_at_once(number):
    with Interruption(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        _receive(signal.SIGINT)
        _receive(number)


def test_handlers_are_restored_at_the_end():
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ZeroDivisionError), Interruption():  # noqa: PT012
        assert signal.getsignal(signal.SIGINT) not in before
        _ = 1 / 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_raises_keyboard_interrupt_outside_an_interruption(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), signals_as_ctrl_c():
        _receive(number)
    assert signal.getsignal(number) is before


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_ctrl_c(), Interruption() as interruption:
            _receive(signal.SIGHUP)
            interruption.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_not_handled_in_another_thread():
    with ThreadPoolExecutor(1) as pool:
        before = signal.getsignal(signal.SIGTERM)
        assert pool.submit(_handlers_inside).result() == before


def _handlers_inside() -> object:
    with signals_as_ctrl_c():
        return signal.getsignal(signal.SIGTERM)
