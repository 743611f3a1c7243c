"""Files behind URLs (`s3://…`): copied here before a run; answers are uploaded after it.

In between all is local: each remote folder has one here that stands for it, in which a
run reads, keeps its journal and writes as it does anywhere.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import click

from fminfer.core.errors import UsageError
from fminfer.files.disk import path_beside
from fminfer.files.input_models import check_no_models
from fminfer.files.journal import journal_path
from fminfer.files.line_reader import ENDINGS, NAMED_ENDINGS, ROW_ENDINGS
from fminfer.files.ordered_output import errors_path, vectors_path
from fminfer.files.remote_files import (
    PART,
    check_writable,
    fetch_file,
    find_version,
    list_inputs,
    raising_upload_errors,
    raising_url_errors,
    remove_file,
    show_url,
    split_query,
    upload_file,
)
from fminfer.files.status_file import status_path
from fminfer.files.tables.table_writer import OUTPUT_ENDINGS
from fminfer.machine.user_cache import find_cache_path, make_private_folder

Location = Path | str  # a local path, or a URL
# added to a local name; holds the version of the remote file that is the same
SYNCED = ".synced"
# paths in a status file
FILE_IDS = ("input_file_id", "output_file_id", "error_file_id")


def default_work_dir() -> Path:
    """Return where copies and journals of remote files are."""
    return find_cache_path() / "remote"


class RemoteFolders:
    """The local folders in `work_dir` that stand for remote ones; local paths pass unchanged."""

    def __init__(
        self, work_dir: Path, *, is_quiet: bool, has_rows: bool = False
    ) -> None:
        self._work_dir = work_dir
        self._endings = ROW_ENDINGS if has_rows else ENDINGS  # of inputs
        self._is_quiet = is_quiet
        self._urls: dict[Path, str] = {}  # of each local folder
        self._sources: dict[Path, str] = {}  # the URL of each copy

    def fetch_inputs(self, location: Location) -> list[Path]:
        """Return local copies of a URL's file or files: `folder`, `folder/part-*.jsonl`."""
        if isinstance(location, Path):
            return [location]
        check_no_models([location])
        with raising_url_errors(location):
            urls = list_inputs(_trim_url(location), self._endings)
            return [self._fetch_file(url) for url in urls]

    def find_local_output(self, output: Location | None) -> Path | None:
        """Return where the answers for `output` are written here.

        Raises:
            UsageError: it is a signed URL.
        """
        if not isinstance(output, str):
            return output
        url = _trim_url(output)
        if split_query(url)[1]:
            raise UsageError(
                f"--output {show_url(url)} has a query. Answers are several files, and a signed "
                "URL is of one; give a URL without a query, or a local path"
            )
        return (
            self._local_path(url)
            if url.endswith((".jsonl", *ENDINGS, *OUTPUT_ENDINGS))
            else self._make_local_folder(url)
        )

    def prepare_outputs(
        self, outputs: list[Path], table: Path | None = None, *, restart: bool
    ) -> None:
        """Copy outputs here that others have completed, and see that one can write there."""
        tried: set[Path] = set()
        for output in outputs:
            url = self._find_url(output)
            if url is None:
                continue
            if restart:
                path_beside(output, SYNCED).unlink(missing_ok=True)
            else:
                with raising_url_errors(url):
                    self._fetch_output(output, url)
            if not path_beside(output, SYNCED).exists() and output.parent not in tried:
                tried.add(output.parent)
                check_writable(url)
        if table is not None and (url := self._find_url(table)) is not None:
            with raising_url_errors(url):
                self._fetch_table(table, url)

    def upload_outputs(self, outputs: list[Path], table: Path | None = None) -> None:
        """Upload what is complete and not there yet, the answers last: all is there then."""
        for output in outputs:
            url = self._find_url(output)
            is_complete = output.exists() and not journal_path(output).exists()
            if url is None or not is_complete or _is_synced(output):
                continue
            self._print_line(f"Uploading {show_url(url)} …")
            with raising_upload_errors(url, output):
                self._upload_file(output, url, table)

    def _upload_file(self, output: Path, url: str, table: Path | None) -> None:
        folder = self._urls[output.parent]
        errors = errors_path(output)
        status = status_path(output)
        named = self._write_status_with_urls(status)
        upload_file(named, f"{folder}/{status.name}")
        named.unlink()
        if errors.exists():
            upload_file(errors, f"{folder}/{errors.name}")
        elif find_version(f"{folder}/{errors.name}") is not None:  # of an earlier run
            remove_file(f"{folder}/{errors.name}")
        if (vectors := vectors_path(output)).exists():
            upload_file(vectors, f"{folder}/{vectors.name}")
        if table is not None:
            table_url = f"{folder}/{table.name}"
            upload_file(table, table_url)
            path_beside(table, SYNCED).write_text(find_version(table_url) or "")
        upload_file(output, url)
        path_beside(output, SYNCED).write_text(find_version(url) or "")

    def _fetch_file(self, url: str) -> Path:
        local = self._local_path(url)
        shown = show_url(url)
        if not local.name.endswith(self._endings):
            remedy = "rename it"
            if local.name.endswith(ROW_ENDINGS):
                remedy = "add --prompt-template, which says what a table's rows ask"
            raise UsageError(
                f"{shown} has none of the endings {NAMED_ENDINGS}; {remedy}"
            )
        if self._sources.setdefault(local, url) != url:
            raise UsageError(
                f"{shown} is given twice, in URLs that differ in their query alone. "
                "Their answers would meet in one file; answer them by two commands "
                "with two --output folders"
            )
        version = find_version(url)
        synced = path_beside(local, SYNCED)
        if version is None:
            raise UsageError(
                f"{shown} does not exist; give a .jsonl file or a folder of them"
            )
        if not local.exists() or _read_text(synced) != version:
            self._print_line(f"Fetching {show_url(url)} …")
            fetch_file(url, local)
            synced.write_text(version)
        return local

    def _fetch_output(self, output: Path, url: str) -> None:
        """Fetch a remote output, unless the one here is the same or yet to be uploaded."""
        synced = path_beside(output, SYNCED)
        recorded = _read_text(synced)
        version = find_version(url)
        if version is None:  # nothing is there, or not any more
            synced.unlink(missing_ok=True)
            return
        is_here = output.exists() or journal_path(output).exists()
        if is_here and recorded in (None, version):
            return
        self._print_line(f"Fetching {show_url(url)} …")
        for path in (status_path(output), errors_path(output), vectors_path(output)):
            other = f"{self._urls[output.parent]}/{path.name}"
            path.unlink(missing_ok=True)
            if find_version(other) is not None:
                fetch_file(other, path)
        fetch_file(url, output)
        synced.write_text(version)

    def _fetch_table(self, table: Path, url: str) -> None:
        """Fetch a remote table, so that only a run's own is replaced; drop one that is gone."""
        synced = path_beside(table, SYNCED)
        recorded = _read_text(synced)
        version = find_version(url)
        if version == recorded:  # the same, or here alone, and yet to be uploaded
            return
        if version is None:
            table.unlink(missing_ok=True)
            synced.unlink()
            return
        self._print_line(f"Fetching {show_url(url)} …")
        fetch_file(url, table)
        synced.write_text(version)

    def _write_status_with_urls(self, status: Path) -> Path:
        """Write a status file that names files by their URLs; return where."""
        fields = json.loads(status.read_text())
        for name in FILE_IDS:
            if fields[name] is not None:
                fields[name] = show_url(
                    self._find_url(Path(fields[name])) or fields[name]
                )
        named = path_beside(status, PART)
        named.write_text(json.dumps(fields, indent=2) + "\n")
        return named

    def _print_line(self, text: str) -> None:
        if not self._is_quiet:
            click.echo(text, err=True)

    def _local_path(self, url: str) -> Path:
        """Return where a file's copy is: another signature is of the same file."""
        folder, _, name = split_query(url)[0].rpartition("/")
        return self._make_local_folder(folder) / name

    def _make_local_folder(self, url: str) -> Path:
        shown = show_url(url)  # another password is for the same folder
        folder = (
            self._work_dir / hashlib.blake2b(shown.encode(), digest_size=8).hexdigest()
        )
        try:
            make_private_folder(folder)
        except OSError as error:
            raise UsageError(
                f"{folder} cannot be made: {error.strerror}; give another --work-dir"
            ) from error
        self._urls[folder] = url
        return folder

    def _find_url(self, path: Path) -> str | None:
        folder = self._urls.get(path.parent)
        return None if folder is None else f"{folder}/{path.name}"


def _trim_url(url: str) -> str:
    path, query = split_query(url)
    return url if url.endswith("://") else path.rstrip("/") + query


def _is_synced(output: Path) -> bool:
    """Tell whether a complete output was not written since it was the same as the remote one."""
    synced = path_beside(output, SYNCED)
    return synced.exists() and synced.stat().st_mtime_ns >= output.stat().st_mtime_ns


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
