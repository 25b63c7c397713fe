"""A checkpoint's chat template: found where Hugging Face keeps it, rendered as transformers renders it, and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from spire.chat_template import ChatTemplate, TemplateRefusal
from spire.errors import CheckpointError
from spire.model.chat_template import TemplateSource, read_chat_template

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Caf\u00e9 \u2014 'why'?\n"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}
""",
    "llama 2": """{% set system = messages[0]['content'] %}{{ bos_token }}
    {%- for message in messages[1:] -%}
    {%- if message.role == 'user' %}[INST] {% if loop.first %}<<SYS>>{{ system }}<</SYS>>{% endif -%}
    {{ message.content.strip() }} [/INST]{% else %} {{ message.content | trim }} {{ eos_token }}{% endif -%}
    {%- endfor %}""",
    "namespaces, breaks and JSON": """{%- set ns = namespace(seen=0) -%}
    {%- for message in messages -%}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% endif -%}
    {%- if ns.seen == 2 %}{% break %}{% endif -%}
    {%- set ns.seen = ns.seen + 1 -%}
    {{ message | tojson }}{{ message | tojson(indent=2) }}
    {%- endfor -%}{{ tools is none }}{{ strftime_now('%Y') }}""",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer_next", [True, False])
def test_a_prompt_is_the_one_transformers_makes(name: str, answer_next: bool) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, TOKENS).render(MESSAGES, 10_000, answer_next)
    (theirs,), _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=answer_next, **TOKENS)
    assert ours == theirs
    assert "brief" in ours


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "no chat template"),
        ("{% for %}", "does not take these messages"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "does not take these messages"),
        ("{{ messages[9].content.more }}", "does not take these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_fails_says_so_to_the_caller(source: str, says: str) -> None:
    with pytest.raises(TemplateRefusal, match=says) as refused:
        ChatTemplate(source).render(MESSAGES, 10_000)
    assert refused.value.code == "invalid_value"


def test_a_prompt_that_no_context_holds_is_not_written_to_its_end() -> None:
    endless = ChatTemplate(
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(TemplateRefusal) as refused:
        endless.render(MESSAGES, 5000)
    assert refused.value.code == "context_length_exceeded"


# -- in a checkpoint -------------------------------------------------------------------------------------------------


def directory(path: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, ""),
        ({"tokenizer_config.json": {"bos_token": "<s>"}}, ""),
        ({"tokenizer_config.json": {"chat_template": "text"}}, "text"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "listed"}]
                }
            },
            "listed",
        ),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "text"}}, "file"),
    ],
    ids=["nothing", "no template", "string", "list", "file first"],
)
def test_a_template_is_found_where_a_checkpoint_may_have_it(
    tmp_path: Path, files: dict[str, Any], template: str
) -> None:
    assert read_chat_template(directory(tmp_path, files)).template == template


def test_special_tokens_are_read_however_they_are_written(tmp_path: Path) -> None:
    written = {
        "special_tokens_map.json": {"unk_token": "<unk>", "eos_token": "old"},
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
            "add_bos_token": True,
            "model_max_length": 512,
        },
    }
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert read_chat_template(directory(tmp_path, written)) == TemplateSource("", tokens)


@pytest.mark.parametrize("text", ["{", "[]", "5"])
def test_a_tokenizer_config_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        read_chat_template(directory(tmp_path, {"tokenizer_config.json": text}))
