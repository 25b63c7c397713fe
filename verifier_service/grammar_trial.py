"""Compiles one grammar in a process that may die of it: `python grammar_trial.py <grammar`, run by `grammar.py`.

A few bytes of grammar can keep the library busy for minutes, fill the memory, or overflow the stack, which ends the
process: its own limits count none of these. Prints what is wrong with the grammar, nothing if it compiles.
"""

from __future__ import annotations

import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_SECONDS = 2
MEMORY_BYTES = 256 << 20
# Half of what the smallest thread of a Linux process has.
STACK_BYTES = 1 << 20


def start(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of `grammar`, within the limits of every request; it may hold an error."""
    # An ambiguous grammar grows with its output: a mask would take a second, and everybody waits for it.
    limits = LLParserLimits(max_lexer_states=50_000, step_max_items=20_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def error(matcher: LLMatcher) -> str:
    """Why the library has given up, empty if it has not. That no token continues the output is no reason."""
    words = matcher.get_error()
    return "" if words.startswith("NoExtensionBias") else words


def _try() -> None:
    matcher = start(LLTokenizer("byte"), sys.stdin.read())
    matcher.compute_bitmask()
    print(error(matcher))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_try).start()
