"""Checks and encodes the prompts of a request, texts or token ids, which must fit the model's context."""

from __future__ import annotations

from typing import Any

from gateway.errors import BadParameter, over_context
from gateway.requests.bodies import check_unicode
from gateway.requests.schemas import CompletionRequest
from gateway.verifier_client import ServedModel
from spire.text.kinds import kind_of

Prompt = str | list[int]

# More tokens than any body holds.
_ANY_LENGTH = 2**31


def encode_prompts(request: CompletionRequest, model: ServedModel, max_choices: int) -> list[list[int]]:
    """Return the token ids of each prompt. Raises BadParameter, also if prompt and output exceed the context."""
    _check_choices(request, max_choices)
    context = model.info.max_context
    longest = context if request.truncate_prompt_tokens is None else _ANY_LENGTH
    prompts = _prompts_of(request.prompt, longest, model.info.vocab_size)
    return [_encoded(prompt, request, model, longest) for prompt in prompts]


def _check_choices(request: CompletionRequest, most: int) -> None:
    """Raise BadParameter if a request asks for more than `most` choices, whatever the form of its prompts."""
    value, each = request.prompt, request.candidates
    prompts = len(value) if isinstance(value, list) and value and not _is_token(value[0]) else 1
    if prompts * each > most:
        name = "prompt" if prompts > 1 else request.candidates_name
        message = f"{prompts * each} choices are asked for, {each} for each prompt; a request may have {most}"
        raise BadParameter(name, message)


def _encoded(prompt: Prompt, request: CompletionRequest, model: ServedModel, longest: int) -> list[int]:
    context, special = model.info.max_context, request.add_special_tokens
    tokens = model.codec.encode(prompt, longest, special) if isinstance(prompt, str) else prompt
    if (kept := request.truncate_prompt_tokens) is not None:
        tokens = tokens[-max(1, context - request.max_tokens if kept == -1 else kept) :]
    if not tokens:
        raise BadParameter("prompt", "a prompt has no tokens")
    if len(tokens) + request.max_tokens > context:
        raise _no_room(request, len(tokens), context)
    return tokens


def _prompts_of(value: Any, max_context: int, vocab_size: int) -> list[Prompt]:
    """Return the request's prompts: texts unchanged, token ids checked for range and number. Raises BadParameter."""
    if isinstance(value, str):
        return [text_prompt(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise BadParameter("prompt", "prompt must be a string, a list of strings, or one or more lists of token ids")
    if _is_token(value[0]):
        return [_token_ids(value, max_context, vocab_size, "prompt")]
    return [_one_of_many(item, value[0], max_context, vocab_size, f"prompt[{at}]") for at, item in enumerate(value)]


def _one_of_many(item: Any, first: Any, max_context: int, vocab_size: int, where: str) -> Prompt:
    if isinstance(first, str) and isinstance(item, str):
        return text_prompt(item, where)
    if isinstance(first, list) and isinstance(item, list):
        return _token_ids(item, max_context, vocab_size, where)
    raise BadParameter("prompt", f"{where} is {kind_of(item)}: a prompt list holds only strings or only lists of ids")


def text_prompt(text: str, where: str) -> str:
    """Return the text unchanged. Raises BadParameter if the text is empty or not valid Unicode."""
    if not text:
        raise BadParameter("prompt", f"{where} is empty")
    check_unicode(text, "prompt", where)
    return text


def _token_ids(ids: list[Any], max_context: int, vocab_size: int, where: str) -> list[int]:
    if not ids:
        raise BadParameter("prompt", f"{where} is empty")
    if len(ids) > max_context:
        raise over_context("prompt", max_context, result_of("prompt", len(ids)))
    for token in ids:
        if not _is_token(token):
            raise BadParameter("prompt", f"{where} holds {kind_of(token)} among token ids")
        if not 0 <= token < vocab_size:
            raise BadParameter("prompt", f"{where} holds token id {token}; ids end at {vocab_size - 1}")
    return ids


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def result_of(name: str, tokens: int) -> str:
    return f"your {name} resulted in {tokens} tokens. Please reduce the length of the {name}."


def _no_room(request: CompletionRequest, prompt_tokens: int, max_context: int) -> BadParameter:
    """Return the error for prompt + output over the context: names the prompt if that fills it, else max_tokens."""
    name, wanted = request.prompt_name, request.max_tokens
    if prompt_tokens > max_context:
        return over_context(name, max_context, result_of(name, prompt_tokens))
    parts = f"({prompt_tokens} in the {name}, {wanted} in the completion)"
    advice = f"Please reduce the length of the {name} or completion."
    however = f"you requested {prompt_tokens + wanted} tokens {parts}. {advice}"
    return over_context(name if prompt_tokens == max_context else request.limit_name, max_context, however)
