"""How long a thread's turn on a processor is, where others wait for it. What it does not know: what the thread does."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# The least that Linux takes.
_SHORT_NANOSECONDS = 100_000
# The C library has no name for it before glibc 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def take_short_turns() -> bool:
    """Have the calling thread run the moment it is woken, before threads whose turns are longer.

    A model's thread is woken for a round while all processors have something to do, and waited for the end of the
    gateway's turn: with short turns of its own a round of 16 sequences takes 1 to 4 % less. Its share of the processor
    stays what it was. Threads that it starts have turns as short. Returns whether Linux took the wish, which it heeds
    since 6.12; a thread of another policy than the usual one is left as it is.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not hasattr(os, "SCHED_OTHER") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SHORT_NANOSECONDS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
