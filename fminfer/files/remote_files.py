"""Single files behind a URL, through fsspec: listed, compared, fetched and uploaded.

fsspec is imported with the first URL. URLs are shown without passwords and values of queries.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fminfer.core.errors import FminferError, OutputError, UsageError
from fminfer.files.disk import path_beside
from fminfer.files.line_reader import NAMED_ENDINGS, ROW_ENDINGS, is_input_name
from fminfer.machine.installation import describe_install

PART = f".part{os.getpid()}"  # added to a name while the file is on its way
# headers that change with a file
HTTP_MARKS = ("ETag", "Last-Modified", "Content-MD5", "Digest")
MASK = "***"
IN_TEXT = re.compile(r"[\w.+:-]+://[^\s'\"<>]*[^\s'\"<>.,:;!)\]]")


def list_inputs(url: str, endings: Sequence[str]) -> list[str]:
    """List inputs at a URL as a local folder's are; a URL with a query is that of one file."""
    if split_query(url)[1]:
        return [url]
    folder, _, pattern = url.rpartition("/")
    if "*" not in pattern:
        file_system, path = _open_file_system(url)
        if not file_system.isdir(path):
            return [url]
        folder = url
        pattern = "*"
    file_system, path = _open_file_system(folder)
    entries = file_system.ls(path, detail=True)
    names = sorted(
        entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file"
    )
    names = [name for name in names if fnmatchcase(name, pattern)]
    input_names = [name for name in names if is_input_name(name, endings)]
    if not input_names:
        has_tables = any(is_input_name(name, ROW_ENDINGS) for name in names)
        remedy = "; its tables need --prompt-template" if has_tables else ""
        raise UsageError(
            f"{show_url(url)} holds no file to answer ({NAMED_ENDINGS}){remedy}"
        )
    return [f"{folder}/{name}" for name in input_names]


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return a URL's file system and the path in it."""
    import fsspec

    file_system, path = fsspec.url_to_fs(url)
    return file_system, path


def find_version(url: str) -> str | None:
    """Return what changes with the file (its ETag, or size and time); None: it is not there."""
    file_system, path = _open_file_system(url)
    try:
        if url.startswith(("http://", "https://")):  # whose ukey is the same for ever
            return _make_header_version(file_system.info(path))
        return str(file_system.ukey(path))
    except FileNotFoundError:
        return None


def _make_header_version(info: dict[str, Any]) -> str:
    """Return what a web server tells of a file; another one each time if it tells too little."""
    marks = {name: info[name] for name in HTTP_MARKS if info.get(name)}
    return json.dumps(marks | {"size": info.get("size")}) if marks else uuid.uuid4().hex


def fetch_file(url: str, local: Path) -> None:
    file_system, path = _open_file_system(url)
    part = path_beside(local, PART)
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)  # prompts are private
    file_system.get_file(path, str(part))
    part.chmod(0o600)  # some file systems copy the mode
    os.replace(part, local)


def upload_file(local: Path, url: str) -> None:
    """Upload a file under another name and move it, where that can be done."""
    file_system, path = _open_file_system(url)
    try:
        file_system.put_file(str(local), path + PART)
        file_system.mv(path + PART, path)
    except NotImplementedError:
        file_system.put_file(str(local), path)


def remove_file(url: str) -> None:
    file_system, path = _open_file_system(url)
    file_system.rm_file(path)


def check_writable(url: str) -> None:
    """Raise a UsageError if no file can be written and removed beside a URL."""
    folder = url.rpartition("/")[0]
    try:
        file_system, path = _open_file_system(url)
        file_system.pipe_file(path + PART, b"")
        file_system.rm_file(path + PART)
    except Exception as error:
        raise UsageError(
            f"answers cannot be uploaded to {show_url(folder)}: "
            f"{_explain_error(error, 'write and delete there', url)}, or give another --output"
        ) from error


@contextmanager
def raising_url_errors(url: str) -> Iterator[None]:
    """Turn what goes wrong with a URL into a UsageError."""
    try:
        yield
    except FminferError:
        raise
    except Exception as error:
        explained = _explain_error(error, "read it", url)
        raise UsageError(f"{show_url(url)} cannot be read: {explained}") from error


@contextmanager
def raising_upload_errors(url: str, output: Path) -> Iterator[None]:
    """Turn what goes wrong with an upload into an OutputError."""
    try:
        yield
    except Exception as error:
        raise OutputError(
            f"{show_url(url)} cannot be uploaded: {type(error).__name__}: "
            f"{hide_secrets(str(error), url)}. All rows are kept in {output}; run the "
            "same command again, and they are uploaded without being answered anew"
        ) from error


def _explain_error(error: Exception, right: str, url: str) -> str:
    """Say what is wrong, and what to do; `right` is what credentials have to allow."""
    text = hide_secrets(str(error), url)
    if isinstance(error, ImportError):
        command = describe_install("remote", "s3fs")
        return f"{text}. For s3://: {command}; gcsfs is for gs://, adlfs for abfs://"
    if isinstance(error, ValueError):  # a protocol that is not known
        return f"{text}; see that the URL is spelled right"
    return (
        f"{type(error).__name__}: {text}; see that it is there, and that your "
        "credentials, which the file system takes from its usual places, allow to "
        f"{right}"
    )


def split_query(url: str) -> tuple[str, str]:
    """Return a URL up to its query, and the query with its mark; only web URLs have one."""
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
    parts = [
        _mask_query_part(part, is_web=_is_web(url))
        for part in re.split("([&;])", query)
    ]
    return f"{scheme}://{user}{at}{host}{slash}{path}{question}{''.join(parts)}"


def hide_secrets(text: str, *urls: str) -> str:
    """Mask what is secret in the URLs of a text: of `urls`, and of those without spaces."""
    for url in urls:
        text = text.replace(url, show_url(url))
    return IN_TEXT.sub(lambda match: show_url(match[0]), text)


def _is_web(url: str) -> bool:
    return url.partition("://")[0].endswith(("http", "https"))


def _mask_query_part(part: str, *, is_web: bool) -> str:
    """Mask the value in one `name=value` of a query, or a part of one that is no such pair."""
    name, equals, _ = part.partition("=")
    if equals:
        return f"{name}={MASK}"
    return MASK if is_web and part not in ("", "&", ";") else part
