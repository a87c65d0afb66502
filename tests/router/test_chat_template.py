"""Templates render exactly as Hugging Face renders them, and cannot reach out of their sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest

from router.chat_template import ChatTemplate
from router.errors import ApiError
from tests.router.toy_engine import TEMPLATE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "user", "content": "Hi <b> & 'you'"},
    {"role": "assistant", "content": "Well, é 😀  "},
]
TEMPLATES = [
    TEMPLATE,
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{%- for m in messages -%}\n {% if loop.first %}\n  {% continue %}\n {% endif %}\n{{ m | tojson }}\n{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}{{ tools is none }}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}{% endfor %}{{ ns.last }}",
    "{{ messages | tojson(indent=2) }}{{ messages[0].content | tojson(ensure_ascii=True) }}{{ flag }}",
    "{% if messages %}\n    {{- messages[-1].content }}\n{% endif %}\ntail\n",
]


def render(source: str, *, unfinished: bool = False, prompt: bool = False, **variables: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(
        MESSAGES, add_generation_prompt=prompt, continue_final_message=unfinished, variables=variables
    )


ENDINGS = [(source, False, prompt) for source in TEMPLATES for prompt in (False, True)]
ENDINGS += [(source, True, False) for source in TEMPLATES if "content" in source]


@pytest.mark.parametrize(("source", "unfinished", "prompt"), ENDINGS)
def test_text_equals_that_of_transformers(source: str, unfinished: bool, prompt: bool) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    options = {"add_generation_prompt": prompt, "continue_final_message": unfinished, "flag": True, **SPECIAL}
    ((expected,), _) = reference([[dict(m) for m in MESSAGES]], chat_template=source, **options)
    assert render(source, unfinished=unfinished, prompt=prompt, flag=True) == expected


def test_a_final_message_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(ApiError, match="leaves out the final message") as caught:
        render("{{ messages[0].content }}", unfinished=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_whatever_a_template_trips_over_is_a_bad_request(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(source)
    assert caught.value.fault.value.status == 400
    assert caught.value.param == "messages"


def test_variables_cannot_replace_the_messages() -> None:
    with pytest.raises(ApiError, match="messages"):
        render(TEMPLATE, messages=[])
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "tool", "template": "no"},
                                                         {"name": "default", "template": "named"}]}},
            "named",
        ),
        ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "config"}}, "file"),
    ],
)  # fmt: skip
def test_the_template_is_found_where_models_keep_it(
    tmp_path: Path, files: dict[str, Any], expected: str | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = ChatTemplate.load(tmp_path, files.get("tokenizer_config.json", {}), {})
    if expected is None:
        assert template is None
    else:
        assert template is not None
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False, "variables": {}}
        assert template.render(MESSAGES, **options) == expected
