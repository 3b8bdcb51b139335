"""Signals that end work at the next point where it can end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts(*signals: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Whether one of `signals` has arrived; a second one stops at once. Only the main thread can watch for signals."""
    came = False

    def note(*_: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    watched = signals if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
