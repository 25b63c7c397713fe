"""HTTP clients: our own processes and this machine are reached directly, others by the environment's proxies.

Which authorities are trusted is the environment's (SSL_CERT_FILE, SSL_CERT_DIR) in both cases. What measures goes
directly too: through a proxy it would measure the proxy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx

from spire.address import is_loopback, reachable
from spire.errors import SpireError


def direct_client(**options: Any) -> httpx.Client:
    """A client that knows no proxy. Raises SpireError where the trusted certificates cannot be read."""
    with _explained():
        return httpx.Client(transport=httpx.HTTPTransport(), **options)


def direct_async_client(limits: httpx.Limits, **options: Any) -> httpx.AsyncClient:
    """The same for many requests at once."""
    with _explained():
        return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(limits=limits), **options)


def client_for(url: str, **options: Any) -> httpx.Client:
    """A client for what listens at `url`, which may be another machine: through the environment's proxy for it.

    Raises SpireError where `url` is none, or that proxy cannot be used.
    """
    if not goes_by_proxy(url):
        return direct_client(**options)
    with _explained(by_proxy=True):
        return httpx.Client(**options)


def goes_by_proxy(url: str) -> bool:
    """True where the environment names a proxy for `url`. This machine needs none, whatever no_proxy says.

    Raises SpireError where `url` is none.
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SpireError(f"{url} is no URL: {error}") from error
    if is_loopback(reachable(address.host)) or proxy_bypass(address.host):
        return False
    return not {address.scheme, "all"}.isdisjoint(getproxies())


def past_proxy(url: str) -> str:
    """A remark for who measures `url` directly and finds nobody; empty where no proxy is named for it."""
    return "; measurements do not go through the environment's proxy" if goes_by_proxy(url) else ""


@contextmanager
def _explained(by_proxy: bool = False) -> Iterator[None]:
    """Turn what making a client raises into one sentence, about the environment's proxies where it goes `by_proxy`."""
    try:
        yield
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if not by_proxy:
            raise SpireError(f"this HTTP client cannot be made: {error}") from error
        proxies = ", ".join(name for name in os.environ if name.lower().endswith("_proxy"))
        raise SpireError(
            f"the environment's proxies ({proxies}) cannot be used: {error}. Unset them, or list the host in NO_PROXY"
        ) from error
    except OSError as error:
        named = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), "certifi")
        raise SpireError(f"the trusted certificates of {named} cannot be read: {error}") from error
