"""Normalization of chat messages for chat templates, the same for serving and for training.

Only text is supported. All fields of a message are passed to the template, except UNSUPPORTED and IGNORED fields.
"""

from __future__ import annotations

from typing import Any

from spire.text.chat_template import TemplateRefusal
from spire.text.kinds import kind_of

ROLES = ("system", "developer", "user", "assistant")
# Fields that are not passed to templates, with the neutral values that are accepted. Other values are refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "tools": ([],),
    "audio": (),
    "refusal": ("",),
    "prefix": (False,),
}
# Fields that are not passed to templates, whatever their value.
IGNORED = frozenset({"annotations"})
_LONGEST_SHOWN = 40


def plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Normalize a chat message for a chat template: content becomes one string, and null fields are removed.

    `message` must have a role and content. Raises TemplateRefusal naming the field, prefixed by `where`.
    """
    role = message["role"]
    if not isinstance(role, str):
        raise TemplateRefusal(f"{where}.role is {kind_of(role)}: it must be a string", param=f"{where}.role")
    if role not in ROLES:
        said = f"role {role[:_LONGEST_SHOWN]!r} is not supported (no tools are); these are: {', '.join(ROLES)}"
        raise TemplateRefusal(said, param=f"{where}.role")
    content = _text_of(message["content"], f"{where}.content")
    for name, neutral in UNSUPPORTED.items():
        value = message.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise TemplateRefusal(f"{where}.{name} is not supported", "unsupported_parameter", f"{where}.{name}")
    left_out = UNSUPPORTED.keys() | IGNORED
    kept = {name: value for name, value in message.items() if value is not None and name not in left_out}
    return kept | {"content": content}


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        message = f"{where} is {kind_of(content)}: it must be a string, or a list of text parts"
        raise TemplateRefusal(message, param=where)
    return "\n".join(_text_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _text_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    if kind != "text":
        message = f"{where} is {str(kind)[:_LONGEST_SHOWN]}: only text is supported"
        raise TemplateRefusal(message, "unsupported_parameter", where)
    if not isinstance(text := part.get("text"), str):
        raise TemplateRefusal(f"{where}.text is {kind_of(text)}: it must be a string", param=f"{where}.text")
    return text
