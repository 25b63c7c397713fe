"""The API manual at `/docs`: the OpenAPI document rendered as a plain HTML page without scripts."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse

from gateway.http.page import HEADERS

_METAS = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark">'
)


def add_manual(app: FastAPI) -> None:
    async def manual(_: Request) -> HTMLResponse:
        return HTMLResponse(rendered(app.openapi()), headers=HEADERS)

    app.add_route("/docs", manual, methods=["GET"], include_in_schema=False)


def rendered(document: dict[str, Any]) -> str:
    """Return an OpenAPI document as HTML."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    head = f'{_METAS}<title>{title}</title><link rel="stylesheet" href="/static/page.css">'
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(_folded(name, schema, name) for name, schema in document["components"]["schemas"].items())
    about = 'The same for programs: <a href="/openapi.json">/openapi.json</a>.'
    body = f'<main class="manual"><h1>{title}</h1><p>{about}</p>{operations}<h2>Schemas</h2>{schemas}</main>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    answers = "".join(
        f"<dt>{escape(status)}</dt><dd>{escape(answer['description'])}{_links(answer)}</dd>"
        for status, answer in operation["responses"].items()
    )
    about = escape(operation.get("description", operation.get("summary", "")))
    body = operation.get("requestBody")
    takes = f"<p>Takes{_links(body)}</p>" if body else ""
    parameters = _folded("Parameters", operation["parameters"]) if operation.get("parameters") else ""
    return f"<h2>{method.upper()} {escape(path)}</h2><p>{about}</p>{takes}{parameters}<dl>{answers}</dl>"


def _links(part: Any) -> str:
    """Return HTML links to the schemas that a part of the OpenAPI document refers to."""
    names = re.findall(r'"\$ref": "[^"]*?([^"/]+)"', json.dumps(part))
    return "".join(f' <a href="#{escape(name)}">{escape(name)}</a>' for name in dict.fromkeys(names))


def _folded(title: str, content: Any, anchor: str = "") -> str:
    text = escape(json.dumps(content, indent=2, ensure_ascii=False))
    place = f' id="{escape(anchor)}"' if anchor else ""
    return f"<details{place}><summary>{escape(title)}</summary><pre>{text}</pre></details>"
