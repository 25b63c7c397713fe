"""Refuses requests from foreign web pages: pages that are neither this gateway's own nor of an allowed origin.

A gateway with API keys needs no check for foreign pages: they have no key. A gateway without keys, as on loopback,
distinguishes its user's programs from foreign pages by the rules of browsers: a foreign page's request with a JSON
content type needs a CORS preflight, and its headers Origin and Host name the page's site, even if the site's name
resolves to this machine (DNS rebinding). Does not know: who may use an address that other machines can reach.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from gateway.errors import ForeignPage, NotJson
from spire.address import is_loopback

_JSON = re.compile(rb"application/([\w.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)


class ForeignPages:
    """Refuses requests that foreign web pages may have sent.

    `hosts`: the host names, besides those of loopback, that a Host header may contain; None allows any name, for a
    gateway that other machines may reach. `origins`: the allowed origins; `bodies`: the paths that take JSON.
    """

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str], bodies: Collection[str]):
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._origins, self._bodies = frozenset(origins), frozenset(bodies)

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise ForeignPage or NotJson for a request that a foreign web page may have sent."""
        headers = dict(scope["headers"])
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin")
        if self._hosts is not None and host:
            name = re.sub(r":\d*$", "", host).strip("[]").lower()  # without port and brackets
            if not (is_loopback(name) or name.endswith(".localhost") or name in self._hosts):
                advice = "ask for it at 127.0.0.1 or localhost, or start it with --allow-host NAME"
                raise ForeignPage(f"this gateway is not {name[:80]!r}: {advice}")
        if origin is not None:
            page = origin.decode("latin-1")
            if not ({page, "*"} & self._origins or _site(page) == host.lower()):
                raise ForeignPage("a page of another site may not ask here: --cors-origins names those that may")
        takes_json = scope["method"] == "POST" and scope["path"] in self._bodies
        if takes_json and not _JSON.fullmatch(headers.get(b"content-type", b"").strip()):
            raise NotJson("the body's type must be declared: send the header 'Content-Type: application/json'")


def _site(page: str) -> str | None:
    """Return the host and port of a page's origin; None for an origin that is no URL."""
    try:
        return urlsplit(page).netloc.lower()
    except ValueError:
        return None
