"""HTTP clients: direct to Spire's processes and this machine, through the environment's proxies to other hosts.

Every client trusts the authorities of the environment (SSL_CERT_FILE, SSL_CERT_DIR). Measurements always connect
directly, because they would otherwise measure the proxy. `gateway_errors`, `distrust`, `refusal_of` and `answer_of`
say what went wrong between a client and a gateway.
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
from spire.rpc.tls import AUTHORITY
from spire.service.keys import GATEWAY_KEY


class GatewayError(SpireError):
    """Error for an unreachable gateway, a refused request or a broken stream. The message includes advice."""


def direct_client(**options: Any) -> httpx.Client:
    """Return an HTTP client that uses no proxy. Raises SpireError if the trusted certificates cannot be read."""
    with _explained():
        return httpx.Client(transport=httpx.HTTPTransport(), **options)


def direct_async_client(limits: httpx.Limits, **options: Any) -> httpx.AsyncClient:
    """Return an async HTTP client that uses no proxy. Raises SpireError if the trusted certificates cannot be read."""
    with _explained():
        return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(limits=limits), **options)


def client_for(url: str, **options: Any) -> httpx.Client:
    """Return an HTTP client for `url`, which connects through the environment's proxy if one is set for that host.

    Raises SpireError if `url` is invalid, the proxy cannot be used or the trusted certificates cannot be read.
    """
    if not goes_by_proxy(url):
        return direct_client(**options)
    with _explained(by_proxy=True):
        return httpx.Client(**options)


def async_client_for(url: str, limits: httpx.Limits, **options: Any) -> httpx.AsyncClient:
    """Return an async HTTP client for `url`, like `client_for`. Raises SpireError in the same cases."""
    if not goes_by_proxy(url):
        return direct_async_client(limits, **options)
    with _explained(by_proxy=True):
        return httpx.AsyncClient(limits=limits, **options)


@contextmanager
def gateway_errors(url: str) -> Iterator[None]:
    """Convert errors of httpx in requests to the gateway at `url` into a GatewayError."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"the connection to {url} failed: {error}"
        if isinstance(error, httpx.ConnectError) and "[SSL" not in str(error):
            reason = f"no gateway at {url}: start one with 'spire up', or name another with --url"
        raise GatewayError(distrust(url, error) or reason) from error
    except ValueError as error:
        raise GatewayError(f"what {url} is asked for, or what it answers, is no JSON: {error}") from error


def distrust(url: str, error: Exception) -> str:
    """Return what is wrong with the certificate of `url` and what to do; "" if `error` is no refused certificate."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return ""
    advice = f"it must be for this host, and SSL_CERT_FILE must name the {AUTHORITY} of its authority"
    return f"this machine does not trust the certificate of {url} ({error}): {advice}"


def refusal_of(response: httpx.Response) -> str:
    """Return what a gateway said in a response that is an error, with its status."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    advice = f" ({GATEWAY_KEY} is where it is read from)" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    return f"the gateway refused ({response.status_code}): {message}{advice}"


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return the completion that a gateway answered. Raises GatewayError for the answer of something else."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if isinstance(answer, dict) and answer.get("choices"):
        return answer
    raise GatewayError(no_completion(response))


def no_completion(response: httpx.Response) -> str:
    """Return what to say of a response without an error and without a completion."""
    kind = response.headers.get("content-type", "no type")
    return f"{response.url} answers without a completion ({kind}): is a gateway of Spire there?"


def goes_by_proxy(url: str) -> bool:
    """True if the environment sets a proxy for `url`; always False for this machine, regardless of no_proxy.

    Raises SpireError if `url` is invalid.
    """
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SpireError(f"{url} is no URL: {error}") from error
    if is_loopback(reachable(address.host)) or proxy_bypass(address.host):
        return False
    return not {address.scheme, "all"}.isdisjoint(getproxies())


def past_proxy(url: str) -> str:
    """Return a hint for connection errors of measurements, which bypass proxies; empty if `url` has no proxy."""
    return "; measurements do not go through the environment's proxy" if goes_by_proxy(url) else ""


@contextmanager
def _explained(by_proxy: bool = False) -> Iterator[None]:
    """Convert errors of making an HTTP client into a SpireError, which blames and names the proxies if `by_proxy`."""
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
