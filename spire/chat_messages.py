"""Chat messages as templates take them: one reader of those that are served and of those that are learnt from.

Text only. A template reads what a message holds beside role and content, but for fields of tools and sound.
"""

from __future__ import annotations

from typing import Any

from spire.chat_template import TemplateRefusal
from spire.kinds import kind_of

ROLES = ("system", "developer", "user", "assistant")
# Fields that no template is given, with the values that ask for nothing. Others are refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "tools": ([],),
    "audio": (),
    "refusal": ("",),
    "prefix": (False,),
}
# Fields that no template is given, whatever they hold.
IGNORED = frozenset({"annotations"})
_LONGEST_SHOWN = 40


def plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message with role and content as a template takes it: its content is one text, and nothing in it is null.

    Raises TemplateRefusal about the field, which it names with `where` in front.
    """
    _check_role(message["role"], f"{where}.role")
    content = _text_of(message["content"], f"{where}.content")
    for name, neutral in UNSUPPORTED.items():
        if (value := message.get(name)) is not None and not any(_same(value, one) for one in neutral):
            raise _unsupported(f"{where}.{name}", f"{where}.{name} is not supported")
    left_out = UNSUPPORTED.keys() | IGNORED
    kept = {name: value for name, value in message.items() if value is not None and name not in left_out}
    return kept | {"content": content}


def _check_role(role: Any, where: str) -> None:
    if not isinstance(role, str):
        raise TemplateRefusal(f"{where} is {kind_of(role)}: it must be a string", param=where)
    if role not in ROLES:
        known = ", ".join(ROLES)
        message = f"role {role[:_LONGEST_SHOWN]!r} is not supported (no tools are); these are: {known}"
        raise TemplateRefusal(message, param=where)


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
        raise _unsupported(where, f"{where} is {str(kind)[:_LONGEST_SHOWN]}: only text is supported")
    if not isinstance(text := part.get("text"), str):
        raise TemplateRefusal(f"{where}.text is {kind_of(text)}: it must be a string", param=f"{where}.text")
    return text


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _unsupported(param: str, message: str) -> TemplateRefusal:
    return TemplateRefusal(message, "unsupported_parameter", param)
