"""Compile one grammar in a process that may crash: `python grammar_trial.py compile <grammar`, run by `grammar.py`.

A few bytes of grammar can keep the library busy for minutes, fill the memory, or overflow the stack, which ends the
process; the library's own limits cover none of these. stderr holds the grammar's error, and nothing if it compiles.
`python grammar_trial.py convert <grammar` converts a grammar from llama.cpp's notation (GBNF) to Lark's.
"""

from __future__ import annotations

import os
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

CPU_SECONDS = 2
MEMORY_BYTES = 256 << 20
# Half of the smallest stack of a thread on Linux.
STACK_BYTES = 1 << 20


def start(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher for `grammar` and an empty output, with the limits of every request. Check it with `error`."""
    # The state of an ambiguous grammar grows with the output until the whole batch waits for one mask.
    limits = LLParserLimits(max_lexer_states=50_000, step_max_items=2_000, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def error(matcher: LLMatcher) -> str:
    """Return the library's error message, or an empty string. A state that no token can continue is not an error."""
    words = matcher.get_error()
    return "" if words.startswith("NoExtensionBias") else words


def _compile() -> None:
    matcher = start(LLTokenizer("byte"), sys.stdin.read())
    matcher.compute_bitmask()
    sys.stderr.write(error(matcher))


def _convert() -> None:
    try:
        sys.stdout.write(gbnf_to_lark(sys.stdin.read()))
    except Exception as problem:  # the library raises bare Exceptions
        sys.stderr.write(f"it has ::=, so it should be in llama.cpp's notation (GBNF): {problem}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Decoding has priority.
    os.nice(10)
    threading.stack_size(STACK_BYTES)
    threading.Thread(target={"compile": _compile, "convert": _convert}[sys.argv[1]]).start()
