"""What one thread is given by others: all of it, in order, and soon, however deeply it sleeps."""

from __future__ import annotations

import threading
import time

from spire.service.inbox import Inbox


def test_items_are_taken_in_the_order_put_and_no_more_than_asked_for() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(5):
        inbox.put(number)
    assert len(inbox) == 5
    assert inbox.take(2, 0) == [0, 1]
    assert inbox.take(0, None) == []
    assert inbox.take(9, None) == [2, 3, 4]
    assert inbox.take(9, 0) == []


def test_a_thread_that_waits_for_anything_is_woken() -> None:
    inbox: Inbox[str] = Inbox()
    taken: list[str] = []
    waiting = threading.Thread(target=lambda: taken.extend(inbox.take(9, None)))
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    inbox.put("come")
    waiting.join(5)
    assert taken == ["come"]


def test_nobody_waits_longer_than_he_has_patience() -> None:
    inbox: Inbox[str] = Inbox()
    began = time.monotonic()
    assert inbox.take(9, 0.1) == []
    assert time.monotonic() >= began + 0.1
