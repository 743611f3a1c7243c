"""Flags become a template of requests, or are refused with what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fminfer.core.errors import UsageError
from fminfer.files.tables.row_template import RowTemplate
from fminfer.files.tables.table_file import find_delimiter
from fminfer.files.tables.table_options import RowRequests, TableOptions


def make_template(
    text_field: Any = "prompt", flag_fields: Any = (), **options: Any
) -> RowTemplate:
    options = {"prompt_template": "{{ text }}", **options}
    return TableOptions(**options).make_template(text_field, dict(flag_fields))


def test_without_flags_rows_take_the_likeliest_tokens() -> None:
    """As --prompt does; other fields are those of any request."""
    assert make_template().fields == {"temperature": 0}
    assert make_template("input").fields == {}
    assert make_template(fields=("top_p=0.5",)).fields == {"top_p": 0.5}
    columns = make_template(columns=("temperature=heat",))
    assert columns.fields == {}
    assert columns.columns == {"temperature": "heat"}


def test_fields_of_flags_have_the_names_of_chats() -> None:
    """--top-k-per-token sets logprobs, which are two fields of a chat."""
    flags = {"logprobs": 3, "max_tokens": 4}
    assert make_template("messages", flags).fields == {
        "logprobs": True,
        "top_logprobs": 3,
        "max_tokens": 4,
        "temperature": 0,
    }


def test_labels_become_a_constraint(tmp_path: Path) -> None:
    """They stand in the flag, spaces and all, or in a file, one a line."""
    file = tmp_path / "labels"
    file.write_text("yes, please\n\n no\r\n")
    assert make_template(choices=" good, bad").fields["structured_outputs"] == {
        "choice": [" good", " bad"],
        "probabilities": True,
    }
    assert make_template(choices=f"@{file}").fields["structured_outputs"] == {
        "choice": ["yes, please", " no"],
        "probabilities": True,
    }
    with pytest.raises(UsageError, match="some labels begin with a space"):
        make_template(choices="good, bad")
    with pytest.raises(UsageError, match="is one label"):
        make_template(choices="labels.txt")
    with pytest.raises(UsageError, match="1,001 labels"):
        make_template(choices=",".join(map(str, range(1001))))


def test_templates_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("\ufeffIs it?\n{{ text }}\n", encoding="utf-8")
    template = make_template("messages", system_template=f"@{file}")
    assert template.templates["--system-template"] == "Is it?\n{{ text }}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_template": None, "choices": "a,b"},
            "--choices needs --prompt-template",
        ),
        ({"prompt_template": None, "delimiter": ";"}, "Add --prompt-template"),
        ({"prompt_template": "@/no/such"}, "--prompt-template @/no/such: .*read"),
        (
            {"prompt_template": "{% if"},
            r"^--prompt-template, line 1: .*[^.]\. Correct the template",
        ),
        ({"system_template": "x"}, "not asked as chats"),
        ({"fields": ("seed",)}, "must be NAME=JSON"),
        ({"fields": ("stop=x",)}, "is not JSON .* double quotes"),
        ({"fields": ("seed=NaN",)}, "NaN is not JSON"),
        ({"fields": ("top_p=1e999",)}, "the number 1e999 is too large"),
        ({"fields": ("prompt=1",)}, "which the template makes"),
        ({"columns": ("messages=a",)}, "which the template makes"),
        ({"fields": ("seed=1", "seed=2")}, "seed is set twice"),
        ({"fields": ("seed=1",), "columns": ("seed=a",)}, "seed is set twice"),
        ({"fields": ("n=1",), "flag_fields": {"n": 2}}, "n is set twice"),
        (
            {"choices": "a,b", "fields": ("structured_outputs={}",)},
            "structured_outputs is set twice",
        ),
        ({"choices": "a,,b"}, "empty label"),
        ({"choices": "a,a"}, "one twice"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_template(**options)


def test_without_a_template_lines_are_requests() -> None:
    """Nothing is asked of the model then."""
    requests = RowRequests(TableOptions(), {}, is_raw=False)

    def fail(*args: Any, **facts: Any) -> Any:
        raise AssertionError("no template needs it")

    assert requests.make_template(fail, []) is None


def test_a_delimiter_is_of_delimited_files() -> None:
    """One that no file has is refused; one that a file's name says is no setting."""
    paths = [Path("a.csv"), Path("b.tsv.gz"), Path("c.parquet"), Path("d.jsonl")]

    assert find_delimiter(paths[:1], ",") is None
    assert find_delimiter(paths[1:2], "\\t") is None
    assert find_delimiter(paths[:1], ";") == ";"
    assert find_delimiter(paths, ",") == ","
    assert find_delimiter([], ",") == ","
    assert find_delimiter(paths[2:], None) is None
    for path in paths[2:]:
        with pytest.raises(UsageError, match=f"and {path.name} is none. Save a CSV"):
            find_delimiter([path], ",")
