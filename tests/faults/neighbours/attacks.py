"""What neighbours do, each a function of one client, which does it over and over until the time is up.

A new one is a function below with `@attack`; its name and first line are what the table and `--only` show. `beside`
says how many well-behaved clients the victim is compared beside, where they are not as many as the attack's.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tests.faults.neighbours.clients import Behaviour, Client

# As large as a body may be, but for what stands around it.
_LARGE = 2 * 1024 * 1024 - 4096


@dataclass(frozen=True)
class Attack:
    """`descriptors`: how many each process of the system may have."""

    behaviour: Behaviour
    clients: int
    beside: int
    descriptors: int | None = None

    @property
    def name(self) -> str:
        return self.behaviour.__name__.replace("_", "-")

    @property
    def about(self) -> str:
        return (self.behaviour.__doc__ or "").splitlines()[0]


ATTACKS: dict[str, Attack] = {}


def attack(clients: int, beside: int | None = None, descriptors: int | None = None) -> Callable[[Behaviour], Behaviour]:
    def register(behaviour: Behaviour) -> Behaviour:
        known = Attack(behaviour, clients, clients if beside is None else beside, descriptors)
        ATTACKS[known.name] = known
        return behaviour

    return register


# -- prompts -----------------------------------------------------------------------------------------------------------


@attack(clients=4)
def long_prompts_refused(client: Client) -> None:
    """Texts of 2 MB, far over the context."""
    client.post({"prompt": "word " * (_LARGE // 5)})


@attack(clients=4)
def long_texts_tokenized(client: Client) -> None:
    """Texts of 2 MB to /tokenize."""
    client.post({"prompt": "word " * (_LARGE // 5)}, "/tokenize")


@attack(clients=8)
def long_prompts_accepted(client: Client) -> None:
    """Prompts that fill the context, no two of which begin alike."""
    count = client.gateway.max_context - 8
    ids = [10 + hash((client.unique, at)) % 500 for at in range(count)]
    client.post({"prompt": ids, "max_tokens": 4})


# -- what is generated -------------------------------------------------------------------------------------------------


@attack(clients=7)
def byte_tokens_with_logprobs(client: Client) -> None:
    """One byte token again and again, up to 8,000 times, with 20 logprobs each: the text is held back."""
    answer = client.post({"prompt": "\U0001f600"}, "/tokenize")
    if not answer.startswith(b"{"):
        return  # refused, or nobody there
    token = json.loads(answer)["tokens"][-4:][0]
    most = min(8000, client.gateway.max_context - 16)
    body = {"prompt": "x", "max_tokens": most, "allowed_token_ids": [token], "ignore_eos": True, "logprobs": 20}
    client.post(body)


@attack(clients=2)
def echo_with_logprobs(client: Client) -> None:
    """256 choices in one request, 16 for each of 16 prompts, which are echoed with 20 logprobs a token."""
    prompts = [f"{client.unique} {number} " + "here and there " * 90 for number in range(16)]
    client.post({"prompt": prompts, "n": 16, "max_tokens": 1, "echo": True, "logprobs": 20})


@attack(clients=1)
def choices(client: Client) -> None:
    """64 choices in one request, 400 tokens each."""
    prompts = [f"{client.unique} {number}" for number in range(4)]
    client.post({"prompt": prompts, "n": 16, "max_tokens": 400, "ignore_eos": True})


@attack(clients=4)
def prompt_logprobs(client: Client) -> None:
    """Prompts that fill the context, with 20 logprobs for each of their tokens."""
    count = client.gateway.max_context - 8
    ids = [10 + hash((client.unique, at)) % 500 for at in range(count)]
    client.post({"prompt": ids, "max_tokens": 1, "prompt_logprobs": 20})


@attack(clients=4)
def logprobs_held_back(client: Client) -> None:
    """A token without text until the context is full, with 20 logprobs each: all are due at the end."""
    body = {"prompt": "x", "max_tokens": client.gateway.max_context - 16, "allowed_token_ids": [0]}
    client.post(body | {"ignore_eos": True, "logprobs": 20, "stream": True, "return_rounds": True})


# -- grammars ----------------------------------------------------------------------------------------------------------


@attack(clients=12)
def grammars_abandoned(client: Client) -> None:
    """120 distinct schemas at a time, whose senders leave before they are compiled."""
    with ExitStack() as connections:
        for number in range(10):
            names = [f"{client.unique}-{number}-{at}" for at in range(100)]
            properties = {name: {"type": "string", "pattern": f"^[a-z]{{3,{9 + number}}}{name}$"} for name in names}
            schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
            connections.enter_context(client.sent({"prompt": "x", "max_tokens": 64, "guided_json": schema}))
        client.linger(1)


def _ambiguous(client: Client) -> str:
    return 'start: s\ns: s s | s s s | "a" | "aa" | ' + f'"{client.unique}"'


@attack(clients=4)
def ambiguous_grammar(client: Client) -> None:
    """A grammar that reads a text in more ways than can be counted."""
    client.post({"prompt": "x", "max_tokens": 400, "min_tokens": 400, "guided_grammar": _ambiguous(client)})


@attack(clients=1)
def ambiguous_grammars(client: Client) -> None:
    """A grammar that reads a text in more ways than can be counted, for 64 choices in one request."""
    prompts = [f"{client.unique} {number}" for number in range(4)]
    client.post(
        {"prompt": prompts, "n": 16, "max_tokens": 400, "min_tokens": 400, "guided_grammar": _ambiguous(client)}
    )


# -- connections -------------------------------------------------------------------------------------------------------


@attack(clients=1, beside=0, descriptors=256)
def idle_connections(client: Client) -> None:
    """400 connections that say nothing, where each process may have 256 descriptors."""
    with ExitStack() as connections:
        for _ in range(400):
            connection = connections.enter_context(socket.socket())
            connection.settimeout(1)
            with suppress(OSError):
                connection.connect(("127.0.0.1", client.gateway.port))
                client.answers["connected"] += 1
        client.linger(60)


@attack(clients=1, beside=64)
def unread_streams(client: Client) -> None:
    """64 streams of long texts with 20 logprobs a token, of which nobody reads a byte."""
    with ExitStack() as connections:
        for number in range(64):
            body = {"prompt": f"{client.unique} {number}", "max_tokens": client.gateway.max_context - 64}
            body |= {"ignore_eos": True, "stream": True, "logprobs": 20}
            connections.enter_context(client.sent(body, receive_bytes=4096))
        client.linger(60)


@attack(clients=1)
def tiny_chunks(client: Client) -> None:
    """A body of 60,000 chunks of a byte, with a key that nobody knows."""
    client.post_chunks(b"1\r\nx\r\n" * 60_000 + b"0\r\n\r\n")


# -- bodies ------------------------------------------------------------------------------------------------------------


@attack(clients=4)
def deep_and_large_bodies(client: Client) -> None:
    """2 MB of brackets, of nested objects, of numbers, of members, of unknown fields, of a schema; and 20 MB."""
    members = ",".join(f'"{number}":0' for number in range(_LARGE // 12))
    bodies = [
        b"[" * _LARGE,
        b'{"a":' * (_LARGE // 5),
        b'{"prompt":[' + b"1," * (_LARGE // 2 - 8) + b"1]}",
        f'{{"prompt":"x","logit_bias":{{{members}}}}}'.encode(),
        f'{{"prompt":"x",{members}}}'.encode(),
        b'{"prompt":"x","guided_json":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b" " * 20_000_000,
    ]
    client.post(bodies[(client.number + client.turn) % len(bodies)])


@attack(clients=4)
def ignored_fields(client: Client) -> None:
    """2 MB of texts in a field that is ignored, while a long text is written."""
    client.post(b'{"prompt":"x","max_tokens":400,"ignore_eos":true,"metadata":[' + b'"aa",' * 400_000 + b'"aa"]}')
