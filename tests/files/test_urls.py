"""URLs are shown without what is secret in them."""

from __future__ import annotations

import pytest

from fminfer.files.remote_files import hide_secrets, show_url


@pytest.mark.parametrize(
    "url, shown",
    [
        ("s3://bucket/in/a.jsonl", "s3://bucket/in/a.jsonl"),
        (
            "abfs://box@account.dfs.core.windows.net/a",
            "abfs://box@account.dfs.core.windows.net/a",
        ),
        ("https://me:pa@ss@host:8080/a@b:c", "https://me:***@host:8080/a@b:c"),
        ("https://token@host/a", "https://***@host/a"),
        ("sftp://me:secret@host/a", "sftp://me:***@host/a"),
        (
            "https://h/a.jsonl?X-Amz-Date=1&X-Amz-Signature=a/b%2F+=",
            "https://h/a.jsonl?X-Amz-Date=***&X-Amz-Signature=***",
        ),
        ("https://h/a?it's=se cret'", "https://h/a?it's=***"),
        ("https://h/a?secret", "https://h/a?***"),
        ("https://h/a?&=secret;b#fragment", "https://h/a?&=***;***"),
        ("s3://b/what?.jsonl", "s3://b/what?.jsonl"),
        (
            "simplecache::https://me:secret@h/a?b=c",
            "simplecache::https://me:***@h/a?b=***",
        ),
    ],
)
def test_passwords_and_values_of_queries_are_masked(url: str, shown: str) -> None:
    assert show_url(url) == shown


def test_urls_in_a_text_are_masked_and_its_other_words_stay() -> None:
    text = (
        "403, url='https://me:pw@h/a?sig=x&b=y' (see http://[::1]:9/b?c=d), "
        "tcp://h:9031 e?f=g"
    )
    assert hide_secrets(text) == (
        "403, url='https://me:***@h/a?sig=***&b=***' (see http://[::1]:9/b?c=***), tcp://h:9031 "
        "e?f=g"
    )
    assert hide_secrets(
        "no such file: https://h/it's?a=se'cret", "https://h/it's?a=se'cret"
    ) == ("no such file: https://h/it's?a=***")
