"""`spire complete "prompt"`: request a completion from a running gateway and stream it to the terminal.

The command is a REST client like any other: it loads no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from spire.cli.gateway_client import ClientCompletion, run_completion, stream_completion
from spire.cli.origins import ASKED, Origins, Painter
from spire.http import GatewayError, client_for

# Fields of a request whose option has another name.
_FIELDS = {
    "stop_token": "stop_token_ids",
    "include_stop": "include_stop_str_in_output",
    "allow_token": "allowed_token_ids",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
    "choice": "guided_choice",
    "truncate": "truncate_prompt_tokens",
}
# Options that are not sent as fields of the request.
_NO_FIELDS = {"prompt", "url", "special_tokens", "keep_special", "rule", "draft", "k"}
_NO_FIELDS |= {"stream", "show_speculation", "as_json"}


def complete(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    url: Annotated[str, typer.Option(help="Where the gateway listens.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model that must be served; any other is an error.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens to generate.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token.")] = 1.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many most probable tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the top probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    n: Annotated[int | None, typer.Option("-n", "--n", help="How many texts; several are not streamed.")] = None,
    best_of: Annotated[int | None, typer.Option(help="Generate this many texts and print the n most probable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    stop_token: Annotated[list[int] | None, typer.Option(help="End at this token id; repeatable.")] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Keep the stop text in the output.")] = False,
    keep_special: Annotated[bool, typer.Option("--keep-special", help="Show special tokens in the text.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the model's end token.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Print each token's logprob and this many alternatives.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="Prompt logprobs, with this many alternatives.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Penalty for tokens that the text has.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Penalty for each time the text has a token.")] = None,
    cache_salt: Annotated[str | None, typer.Option(help="Share cached prompts only within the same salt.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty factor for tokens of the prompt and the text; 1 is none.")
    ] = None,
    logit_bias: Annotated[list[str] | None, typer.Option(help="TOKEN_ID=BIAS, from -100 to 100; repeatable.")] = None,
    allow_token: Annotated[list[int] | None, typer.Option(help="Allow only these token ids; repeatable.")] = None,
    json_schema: Annotated[Path | None, typer.Option(help="A file: the text is JSON of this schema.")] = None,
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="A file: the text follows this grammar (Lark or GBNF).")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The text is one of the given choices; repeatable.")] = None,
    json_whitespace: Annotated[
        bool,
        typer.Option("--json-whitespace", help="Allow white space between JSON tokens; otherwise JSON is compact."),
    ] = False,
    special_tokens: Annotated[bool, typer.Option(help="Prepend the start token to the prompt.")] = True,
    truncate: Annotated[int | None, typer.Option(help="Keep so many last tokens of the prompt; -1: as fits.")] = None,
    rule: Annotated[str | None, typer.Option(help="block, rejection, or invariant (the default with --seed).")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft to use, by name; 'off' decodes plainly.")] = None,
    k: Annotated[int | None, typer.Option("-k", "--k", help="Draft tokens a round.")] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it comes.")] = True,
    show_speculation: Annotated[bool, typer.Option("--show-speculation", help="Mark what the draft guessed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Complete a prompt through a running gateway."""
    options = locals() | {"logit_bias": _biases(logit_bias or [])}
    options |= {"json_schema": _read(json_schema), "grammar": _read(grammar)}
    fields = {_FIELDS.get(name, name): value for name, value in options.items() if name not in _NO_FIELDS}
    request = _given(**fields, speculation=_given(rule=rule, draft=draft, k=k))
    request |= {} if special_tokens else {"add_special_tokens": False}
    request |= {"skip_special_tokens": False} if keep_special else {}
    if show_speculation and echo:
        raise typer.BadParameter("--show-speculation marks what is generated: leave --echo out")
    if show_speculation:  # the gateway reports the text offset of a token with its logprob
        request = {"logprobs": 0} | request | ASKED
    several = (n or 1) > 1 or best_of is not None
    painter = Painter() if show_speculation and not as_json else None
    if painter:
        typer.echo(painter.legend, err=True)
    with client_for(url, timeout=None) as client:
        if as_json or several or not stream or prompt_logprobs is not None:
            result = run_completion(client, url, prompt, **request)
            if as_json:
                return typer.echo(result.as_json())
            for completed in result.choices:
                if several:
                    typer.echo(f"── {completed['index']}")
                _print_text([completed], painter)
        else:
            result = ClientCompletion(prompt)
            _print_text(stream_completion(client, url, result, **request), painter)
    for completed in result.choices if prompt_logprobs is not None else []:
        _print_prompt_logprobs(completed["prompt_logprobs"])
    for completed in result.choices if logprobs is not None else []:
        _print_logprobs(completed)
    Console(stderr=True, highlight=False).print(f"[dim]{result.summary}[/]")


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are set, without None, False and {}: the gateway has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != {}}


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GatewayError(f"{file} cannot be read: {error}") from error


def _biases(given: list[str]) -> dict[str, float]:
    biases = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[str(int(token))] = float(bias)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias takes TOKEN_ID=BIAS, not {text!r}") from None
    return biases


def _print_text(pieces: Iterable[dict[str, Any]], painter: Painter | None) -> None:
    """Print the streamed pieces of one choice. A `painter` marks the text that the draft proposed."""
    origins = Origins()
    for piece in pieces:
        if painter is None:
            typer.echo(piece["text"], nl=False)
            continue
        for text, origin in origins.runs(piece):
            typer.echo(painter.paint(text, origin), nl=False)
    typer.echo(painter.end() if painter else "")


def _print_logprobs(choice: dict[str, Any]) -> None:
    """Print a line for each token of a choice: its logprob, the token, and the most probable alternatives."""
    told = choice["logprobs"]
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        _print_token(token, logprob, top or {})


def _print_prompt_logprobs(positions: list[dict[str, Any] | None]) -> None:
    """Print a line for each token of the prompt except the first, which has no logprob."""
    for position in filter(None, positions):
        (token, *others) = position.values()
        tops = {other["decoded_token"]: other["logprob"] for other in others}
        _print_token(token["decoded_token"], token["logprob"], tops)


def _print_token(token: str, logprob: float | None, tops: dict[str, float]) -> None:
    others = "  ".join(f"{json.dumps(other, ensure_ascii=False)} {value:.3f}" for other, value in tops.items())
    told = "" if logprob is None else f"{logprob:.3f}"
    typer.echo(f"{told:>9}  {json.dumps(token, ensure_ascii=False):<16}  {others}")
