"""Takes URLs apart, and shows them without what may be secret: passwords, values of queries."""

from __future__ import annotations

import re

MASK = "***"
IN_TEXT = re.compile(r"[\w.+:-]+://[^\s'\"<>]*[^\s'\"<>.,:;!)\]]")


def split_query(url: str) -> tuple[str, str]:
    """Return a URL up to its query, and that with its question mark; only web servers have any."""
    path, mark, query = url.partition("?")
    return (path, mark + query) if _is_web(url) else (url, "")


def show_url(url: str) -> str:
    """Return a URL as people may see it: passwords and the values of its query are masked."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    place, question, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    user, at, host = authority.rpartition("@")
    name, colon, _ = user.partition(":")
    if colon:
        user = f"{name}:{MASK}"
    elif at and _is_web(url):  # most likely a token
        user = MASK
    parts = [_mask(part, is_web=_is_web(url)) for part in re.split("([&;])", query)]
    return f"{scheme}://{user}{at}{host}{slash}{path}{question}{''.join(parts)}"


def hide_secrets(text: str, *urls: str) -> str:
    """Mask what is secret in the URLs of a text: of `urls`, and of those without spaces."""
    for url in urls:
        text = text.replace(url, show_url(url))
    return IN_TEXT.sub(lambda found: show_url(found[0]), text)


def _is_web(url: str) -> bool:
    return url.partition("://")[0].endswith(("http", "https"))


def _mask(part: str, *, is_web: bool) -> str:
    """Mask the value in one `name=value` of a query, or a part of one that is no such pair."""
    name, equals, _ = part.partition("=")
    if equals:
        return f"{name}={MASK}"
    return MASK if is_web and part not in ("", "&", ";") else part
