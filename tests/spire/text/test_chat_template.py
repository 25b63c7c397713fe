"""A checkpoint's chat template: found where Hugging Face keeps it, rendered as transformers renders it, and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from spire.checkpoints.chat_template import TemplateSource, read_chat_template
from spire.checkpoints.tokenizer import load_tokenizer
from spire.errors import CheckpointError
from spire.text.chat_template import ChatTemplate, TemplateRefusal

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
    "a system message of its own": """{% for message in messages %}{% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\nYou are brief.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
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


OPEN = ["Because", " Because  ", "Because\n\n", "", "end", "<|im_end|>", "{{ mark }}"]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", OPEN)
def test_a_continued_final_message_ends_the_prompt_as_in_transformers(name: str, text: str) -> None:
    source, messages = TEMPLATES[name], [*MESSAGES[:2], {"role": "assistant", "content": text}]
    ours = ChatTemplate(source, TOKENS).render(messages, 10_000, False, continue_final_message=True)
    (theirs,), _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, **TOKENS)
    assert ours == theirs
    assert messages[-1]["content"] == text


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ messages[-1].content[-9:] }}", "{{ 'x' }}"])
def test_a_template_that_leaves_the_last_message_out_cannot_go_on_with_it(source: str) -> None:
    with pytest.raises(TemplateRefusal, match="leaves parts of the last message out") as refused:
        ChatTemplate(source).render(MESSAGES, 10_000, False, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


VARIABLES = """{% if enable_thinking is defined and not enable_thinking %}no thinking {% endif %}
{{ style | default('plain') }}
{{ messages[0].content }}{{ bos_token }}"""


def test_variables_reach_the_template_as_in_transformers() -> None:
    variables = {"enable_thinking": False, "style": {"of": ["old", 5, None]}}
    ours = ChatTemplate(VARIABLES, TOKENS).render(MESSAGES, 10_000, variables=variables)
    (theirs,), _ = render_jinja_template([MESSAGES], chat_template=VARIABLES, **TOKENS, **variables)
    assert ours == theirs != ChatTemplate(VARIABLES, TOKENS).render(MESSAGES, 10_000)
    assert ours.startswith("no thinking {'of': ['old', 5, None]}")


@pytest.mark.parametrize("expression", ["style.__class__.__mro__", "style.append(1)", "style.pop.__globals__"])
def test_a_variable_opens_no_way_out_of_the_sandbox(expression: str) -> None:
    with pytest.raises(TemplateRefusal, match="unsafe"):
        ChatTemplate(f"{{{{ {expression} }}}}").render(MESSAGES, 10_000, variables={"style": [1]})


@pytest.mark.thorough
def test_the_real_tokenizer_has_the_ids_that_transformers_has(smollm2_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    source = read_chat_template(smollm2_dir)
    template = ChatTemplate(source.template, source.special_tokens)
    ours = load_tokenizer(smollm2_dir)
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ):
        messages = [MESSAGES[1], {"role": "assistant", "content": "Once upon "}]
        text = template.render(messages, 10_000, **{"add_generation_prompt": False} | options)
        wanted = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ours.encode(text, add_special_tokens=False).ids == wanted


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
        (path / name).parent.mkdir(exist_ok=True)
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
        ({"tokenizer_config.json": {"chat_template": {"default": "by name", "rag": "x"}}}, "by name"),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "text"}}, "file"),
        ({"chat_template.json": {"chat_template": "processor's"}}, "processor's"),
        ({"chat_template.json": {"chat_template": "x"}, "tokenizer_config.json": {"chat_template": "text"}}, "text"),
        ({"additional_chat_templates/rag.jinja": "x", "chat_template.jinja": "file"}, "file"),
        ({"additional_chat_templates/default.jinja": "first of all", "chat_template.jinja": "file"}, "first of all"),
        ({"chat_template.jinja": "", "tokenizer_config.json": {"chat_template": "text"}}, "text"),
        ({"chat_template.jinja": ""}, ""),
    ],
    ids=[
        "nothing",
        "no template",
        "string",
        "list",
        "object",
        "file first",
        "processor",
        "processor last",
        "others beside it",
        "among others",
        "an empty file",
        "an empty file alone",
    ],
)
def test_a_template_is_found_where_a_checkpoint_may_have_it(
    tmp_path: Path, files: dict[str, Any], template: str
) -> None:
    assert read_chat_template(directory(tmp_path, files)).template == template


def test_special_tokens_are_read_however_they_are_written(tmp_path: Path) -> None:
    written = {
        "special_tokens_map.json": {"unk_token": "<unk>", "eos_token": "</s>"},
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>", "lstrip": False},
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
