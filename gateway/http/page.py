"""The live page at `/`, which shows rounds as they happen: static files of this package, without the gateway's state.

The files need no API key: they are the same in every installation. The page fetches its data through the REST API,
with the API key that the user enters. The page loads nothing from other sites and has no inline scripts; the
response headers make browsers refuse both.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_SCRIPTS = (
    "api.js",
    "choice.js",
    "clipboard.js",
    "conversation.js",
    "element.js",
    "error.js",
    "figures.js",
    "form.js",
    "lane.js",
    "page.js",
    "served.js",
    "snippet.js",
)
_FILES = {"/": "index.html"} | {f"/static/{name}": name for name in ("page.css", "icon.svg", *_SCRIPTS)}
PATHS = frozenset(_FILES)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Files cached from a gateway of another version must not call this version's API.
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add a route for each static file of the page. A requested path is never looked up on the disk."""
    contents = {path: (_DIRECTORY / name).read_bytes() for path, name in _FILES.items()}

    async def file(http: Request) -> Response:
        path = http.scope["path"]
        kind = _TYPES[Path(_FILES[path]).suffix]
        return Response(contents[path], media_type=kind, headers=HEADERS)

    for path in contents:
        app.add_route(path, file, methods=["GET"], include_in_schema=False)
