"""Bodies of requests, read or refused as each route does it, and the table of the fields that are not honoured."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gateway.api.chat import ChatRequest
from gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from gateway.errors import BadParameter
from gateway.requests import fields
from gateway.requests.bodies import RequestBody, parse
from gateway.requests.schemas import CompletionRequest

TABLE = tomllib.loads((Path(fields.__file__).parent / "fields.toml").read_text())
ROUTES: list[type[RequestBody]] = [CompletionRequest, ChatRequest]
every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
LEAST: dict[type[RequestBody], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [5]},
}


def read(route: type[RequestBody], **body: Any) -> RequestBody:
    return parse(json.dumps(LEAST[route] | body).encode(), route)


def refusal(route: type[RequestBody], **body: Any) -> BadParameter:
    with pytest.raises(BadParameter) as error:
        read(route, **body)
    return error.value
