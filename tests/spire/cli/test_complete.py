"""`spire complete` against the real services: every option reaches the endpoint, and every token shows who chose it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import typer
from typer.testing import CliRunner

from gateway.requests.schemas import CompletionRequest
from spire.cli import app
from spire.cli.origins import Origins, Painter
from tests.gateway.conftest import eventually
from tests.marks import thoroughly
from tests.services import Services

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def url(services: Services) -> str:
    eventually(lambda: httpx.get(f"{services.url}/ready").json().get("draft") == "connected")
    return services.url


def run(url: str, *options: str, prompt: str = PROMPT) -> str:
    result = CliRunner().invoke(app, ["complete", prompt, "--url", url, *options])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def report(url: str, *options: str, prompt: str = PROMPT) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run(url, *options, "--json", prompt=prompt))
    return told


def ask(url: str, **request: Any) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, **request}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


# Named otherwise, or by what they are for; of the rest, what makes no sense on a command line.
RENAMED = {
    "stop_token_ids": "stop_token",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "keep_special",
    "allowed_token_ids": "allow_token",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "add_special_tokens": "special_tokens",
    "truncate_prompt_tokens": "truncate",
    "speculation": "rule",
    "return_token_origins": "show_speculation",
}
NO_OPTION = {"response_format", "stream_options"}
# The same under other names.
NO_OPTION |= {"structured_outputs", "guided_whitespace_pattern", "max_completion_tokens"}
NO_OPTION |= {"return_token_ids", "return_metrics", "return_rounds"}


def test_every_parameter_of_a_completion_is_an_option() -> None:
    assert CompletionRequest.model_fields.keys() >= NO_OPTION | RENAMED.keys()
    (command,) = [c for name, c in typer.main.get_command(app).commands.items() if name == "complete"]  # type: ignore[attr-defined]
    options = {parameter.name for parameter in command.params}
    assert {RENAMED.get(name, name) for name in CompletionRequest.model_fields.keys() - NO_OPTION} <= options
    assert {"draft", "k"} <= options


def test_options_ask_for_what_the_endpoint_s_fields_ask_for(url: str, tmp_path: Path) -> None:
    whole = ask(url, max_tokens=30, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=3, n=2, presence_penalty=0.5)
    options = (
        "--max-tokens 30 --temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.01 --seed 3 -n 2 --presence-penalty 0.5"
    )
    told = report(url, *options.split())
    assert [choice["text"] for choice in told["choices"]] == [choice["text"] for choice in whole["choices"]]

    texts = run(url, *options.split())
    assert texts == "".join(f"── {choice['index']}\n{choice['text']}\n" for choice in whole["choices"])


@pytest.mark.thorough
def test_adjustments_and_stops_are_passed_on(url: str) -> None:
    greedy = ["--temperature", "0", "--max-tokens", "20"]
    plain = run(url, *greedy)
    first = ask(url, temperature=0, max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    assert run(url, *greedy, "--logit-bias", f"{first}=-100") != plain
    assert run(url, *greedy, "--allow-token", str(first), "--stop-token", str(first)) == "\n"
    assert run(url, *greedy, "--echo") == PROMPT + plain
    assert run(url, *greedy, "--stop", plain[8:12]) == plain[: plain.index(plain[8:12])] + "\n"
    kept = run(url, *greedy, "--stop", plain[8:12], "--include-stop")
    assert kept == plain[: plain.index(plain[8:12]) + 4] + "\n"
    assert run(url, *greedy, "--allow-token", "1", "--ignore-eos").strip() == ""
    assert run(url, *greedy, "--allow-token", "1", "--ignore-eos", "--keep-special") == "<s>" * 20 + "\n"
    assert report(url, *greedy, "--truncate", "2")["usage"]["prompt_tokens"] == 2


@pytest.mark.thorough
def test_a_grammar_is_followed(url: str, tmp_path: Path) -> None:
    assert re.fullmatch(r"[0-9]{3}\n", run(url, "--regex", "[0-9]{3}", "--max-tokens", "12"))
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "blue"]}')
    assert json.loads(run(url, "--json-schema", str(schema), "--max-tokens", "12")) in ("red", "blue")
    grammar = tmp_path / "answer.lark"
    grammar.write_text('start: "yes" | "no"')
    assert run(url, "--grammar", str(grammar), "--max-tokens", "12") in ("yes\n", "no\n")
    assert run(url, "--choice", "yes", "--choice", "no", "--max-tokens", "12") in ("yes\n", "no\n")
    schema.write_text('{"type": "array", "items": {"enum": [5]}, "minItems": 5, "maxItems": 5}')
    array = ["--json-schema", str(schema), "--max-tokens", "100", "--temperature", "2", "--seed", "1"]
    assert run(url, *array) == "[5,5,5,5,5]\n"
    assert run(url, *array, "--json-whitespace").split() != ["[5,5,5,5,5]"]


def test_rule_draft_and_depth_are_passed_on(url: str) -> None:
    told = report(url, "--rule", "block", "-k", "3", "--max-tokens", "40", "--seed", "1", "--ignore-eos")
    assert told["metrics"]["speculative_decoding"]["rule"] == "block"
    assert len(told["metrics"]["speculative_decoding"]["acceptance_histogram"]) <= 4
    assert told["usage"]["completion_tokens"] == 40
    assert report(url, "--draft", "off", "--max-tokens", "8")["tau"] is None


def test_logprobs_are_printed_token_by_token(url: str) -> None:
    lines = run(url, "--prompt-logprobs", "2", "--max-tokens", "1").splitlines()[1:]
    assert len(lines) == len(ask(url, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]) - 1
    assert all(re.match(r"\s+-?\d+\.\d{3}  \"", line) for line in lines)
    text, *lines = run(url, "--logprobs", "2", "--max-tokens", "5", "--temperature", "0").splitlines()
    assert len(lines) == 5
    assert all(re.match(r"\s+-?\d+\.\d{3}  \"", line) for line in lines)
    assert text.startswith(", ")


@pytest.mark.parametrize("streaming", ["--stream", thoroughly("--no-stream")])
def test_brackets_hold_what_the_draft_guessed_and_nothing_else_changes(url: str, streaming: str) -> None:
    options = ["--seed", "7", "--max-tokens", "60", "--ignore-eos", streaming]
    shown = run(url, *options, "--show-speculation")
    assert shown.replace("⟦", "").replace("⟧", "") == run(url, *options)
    choice = ask(url, seed=7, max_tokens=60, ignore_eos=True, logprobs=0, return_token_origins=True)["choices"][0]
    assert "draft" in choice["token_origins"]
    drafted = [
        token
        for token, origin in zip(choice["logprobs"]["tokens"], choice["token_origins"], strict=True)
        if origin == "draft"
    ]
    assert "".join(re.findall("⟦(.*?)⟧", shown, re.DOTALL)) == "".join(drafted)


def test_the_legend_and_a_refusal_do_not_stand_among_the_text(url: str) -> None:
    arguments = ["complete", PROMPT, "--url", url, "--show-speculation", "--max-tokens", "4"]
    told = CliRunner().invoke(app, arguments)
    assert "guessed by the draft" in told.stderr
    assert "guessed by the draft" not in told.stdout
    refused = CliRunner().invoke(app, [*arguments, "--echo"])
    assert refused.exit_code == 2
    assert "--echo" in refused.output


def test_a_bias_that_is_none_is_refused(url: str) -> None:
    refused = CliRunner().invoke(app, ["complete", PROMPT, "--url", url, "--logit-bias", "five=1"])
    assert refused.exit_code == 2
    assert "TOKEN_ID=BIAS" in refused.output


# -- runs of one origin, however pieces come -------------------------------------------------------------------------


def pieces() -> Iterator[dict[str, Any]]:
    """`a` `bc` and a character of two tokens, of which the first has no text yet, then `d`."""
    yield {"text": "a", "token_origins": ["target", "draft"], "logprobs": {"text_offset": [0]}}
    yield {"text": "bc", "token_origins": ["draft"], "logprobs": {"text_offset": [1]}}
    yield {"text": "\u00e9", "token_origins": ["target"], "logprobs": {"text_offset": [3, 3]}}
    yield {"text": "d", "token_origins": ["draft"], "logprobs": {"text_offset": [4]}}


def test_a_character_of_two_tokens_belongs_to_the_one_that_completed_it() -> None:
    origins = Origins()
    runs = [run for piece in pieces() for run in origins.runs(piece)]
    assert runs == [("a", "target"), ("bc", "draft"), ("\u00e9", "target"), ("d", "draft")]


def test_colour_marks_what_brackets_mark() -> None:
    def painted(painter: Painter) -> str:
        origins = Origins()
        runs = [run for piece in pieces() for run in origins.runs(piece)]
        return "".join(painter.paint(text, origin) for text, origin in runs) + painter.end()

    assert painted(Painter(coloured=False)) == "a⟦bc⟧\u00e9⟦d⟧"
    coloured = painted(Painter(coloured=True))
    assert click.unstyle(coloured) == "abc\u00e9d"
    assert click.style("bc", fg="green", underline=True) in coloured
