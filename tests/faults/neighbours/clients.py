"""Clients that attack, or behave: threads of a process of their own, so that whoever measures has a lock to itself.

The process is nicer than the services: an attacker comes from another machine and takes none of their cores.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.faults.neighbours.stack import Gateway

COMPLETIONS = "/v1/completions"
# Seconds after which a client does not wait for its answer any more.
PATIENCE_SECONDS = 60.0
_NICENESS = 5

Body = dict[str, Any]


@dataclass
class Client:
    """One of several that do the same over and over: which one, and how often it has."""

    gateway: Gateway
    number: int
    turn: int = 0
    seed: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    until: float = 0.0

    @property
    def unique(self) -> str:
        """A text that no other client and no other turn has."""
        return f"{self.seed}-{self.number}-{self.turn}"

    def post(self, body: Body | bytes, path: str = COMPLETIONS) -> bytes:
        """Send a body, read the whole answer and return it; its status is counted."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("POST", path, _encoded(body), self._headers)
            response = connection.getresponse()
            answer = response.read()
            self.answers[str(response.status)] += 1
            return answer
        except (OSError, http.client.HTTPException) as error:
            self.answers[type(error).__name__] += 1
            return b""
        finally:
            connection.close()

    def post_chunks(self, chunks: bytes, path: str = COMPLETIONS) -> None:
        """Send a body that is chunked already, and read the answer's first line; its status is counted."""
        with socket.create_connection(("127.0.0.1", self.gateway.port), PATIENCE_SECONDS) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            try:
                connection.sendall(head.encode() + chunks)
                line = connection.recv(64).split(b" ")
                self.answers[line[1].decode() if len(line) > 1 else "closed"] += 1
            except OSError as error:
                self.answers[type(error).__name__] += 1

    @contextmanager
    def sent(self, body: Body, path: str = COMPLETIONS, receive_bytes: int | None = None) -> Iterator[socket.socket]:
        """A connection by which a request went whose answer nobody has read. Leaving the block closes it."""
        with socket.socket() as connection:
            connection.settimeout(PATIENCE_SECONDS)
            if receive_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            try:
                connection.connect(("127.0.0.1", self.gateway.port))
                connection.sendall(_head(path, self._headers, content := _encoded(body)) + content)
                self.answers["sent"] += 1
            except OSError as error:
                self.answers[type(error).__name__] += 1
            yield connection

    def linger(self, seconds: float) -> None:
        """Do nothing for a while, or until the attack is over."""
        time.sleep(max(0.0, min(seconds, self.until - time.monotonic())))

    @property
    def _headers(self) -> dict[str, str]:
        return self.gateway.headers | {"Content-Type": "application/json"}


Behaviour = Callable[[Client], None]


def well_behaved(client: Client) -> None:
    """A short prompt and 64 tokens, streamed and read."""
    client.post({"prompt": f"Once upon a time {client.unique}", "max_tokens": 64, "ignore_eos": True, "stream": True})


class Crowd:
    """So many clients that all do the same until `seconds` are over, each at least once. Leaving waits for them."""

    def __init__(self, gateway: Gateway, behaviour: Behaviour, clients: int, seconds: float, seed: int):
        context = multiprocessing.get_context("spawn")
        self.answers: Counter[str] = Counter()
        self._told, told = context.Pipe(duplex=False)
        arguments = (gateway, behaviour, clients, seconds, seed, told)
        self._process = context.Process(target=_run, args=arguments, daemon=True)

    def __enter__(self) -> Crowd:
        self._process.start()
        self._told.recv()  # it has begun
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(EOFError):
            self.answers = self._told.recv()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    @property
    def over(self) -> bool:
        return self._told.poll() or not self._process.is_alive()


def _run(gateway: Gateway, behaviour: Behaviour, clients: int, seconds: float, seed: int, told: Any) -> None:
    os.nice(_NICENESS)
    told.send(True)
    until = time.monotonic() + seconds
    crowd = [Client(gateway, number, seed=seed, until=until) for number in range(clients)]
    threads = [threading.Thread(target=_repeat, args=(client, behaviour), daemon=True) for client in crowd]
    for thread in threads:
        thread.start()
    deadline = until + 2 * PATIENCE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    told.send(sum((client.answers for client in crowd), Counter[str]()))
    told.close()
    os._exit(0)  # whoever still waits for an answer leaves


def _repeat(client: Client, behaviour: Behaviour) -> None:
    while True:
        behaviour(client)
        client.turn += 1
        if time.monotonic() >= client.until:
            return


def _encoded(body: Body | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def _head(path: str, headers: dict[str, str], content: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()
