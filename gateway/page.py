"""The live page at `/`: watch rounds as they happen. Static files of this package, and nothing of the gateway's state.

Whoever reaches the gateway may read these files, keys or not: they tell nothing but what every installation has. What
the page shows it asks by the REST API, with the key that is typed into it. Nothing is loaded from elsewhere and no
script stands in the document: the browser is told to refuse both.
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
_FILES = {
    "/": "index.html",
    "/static/page.css": "page.css",
    "/static/page.js": "page.js",
    "/static/api.js": "api.js",
    "/static/choice.js": "choice.js",
    "/static/lane.js": "lane.js",
    "/static/icon.svg": "icon.svg",
}
PATHS = frozenset(_FILES)

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # What a gateway of another version served must not meet this one's API.
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the files, each at its own path: no path is looked up on the disk."""
    contents = {path: (_DIRECTORY / name).read_bytes() for path, name in _FILES.items()}

    async def file(http: Request) -> Response:
        path = http.scope["path"]
        kind = _TYPES[Path(_FILES[path]).suffix]
        return Response(contents[path], media_type=kind, headers=HEADERS)

    for path in contents:
        app.add_route(path, file, methods=["GET"], include_in_schema=False)
