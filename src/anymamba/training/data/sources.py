"""Sources of text: the files that a config names, and which of them cannot be used."""

from __future__ import annotations

import codecs
import glob
import sys
import sysconfig
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from anymamba.training.config.sections import DataSection
from anymamba.training.data.documents import Document, Text, line_text, split

_LINES_SUFFIXES = (".jsonl", ".ndjson")
_BLOCK_BYTES = 2**20  # that are read at once
_HEAD_BYTES = 2**16  # in which a binary file has a NUL byte, and one in another encoding is not UTF-8
_MAX_LISTED = 20  # problems that are listed one by one
_PACKED_SUFFIXES = (
    ".gz",
    ".tgz",
    ".bz2",
    ".xz",
    ".lzma",
    ".zst",
    ".lz4",
    ".br",
    ".zip",
    ".7z",
    ".tar",
    ".parquet",
    ".arrow",
)
_MAGIC_BYTES = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"7z\xbc\xaf", b"PAR1", b"ARROW1")

_BYTE_ORDER_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # the first begins with that of UTF-16
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}


def find_text(config: DataSection, report: Callable[[str], None] = lambda _: None) -> Text:
    """Find the text that a config names, and split it in two.

    `report` receives a line for each file that is skipped, and one if bytes of another encoding than UTF-8 are learned.
    Raise `UnusableTextError` if some of it cannot be used, and the config does not skip such files.
    """
    stdin, utf8 = b"", config.tokenizer not in ("bytes", None)
    if "-" in config.sources:
        if sys.stdin is None:
            raise ValueError('data.sources: "-" means stdin, which is closed')
        stdin = sys.stdin.buffer.read()
    documents, problems = find_documents(
        config.sources,
        config.jsonl_field,
        config.format,
        stdin,
        exclude=config.exclude,
        utf8=utf8,
    )
    if problems and (config.on_error == "stop" or not documents):
        raise UnusableTextError(problems)
    for line in shorten_list(problems):
        report(f"skipped: {line}")
    if not utf8 and config.format != "text":
        _report_other_encodings(documents, stdin, report)
    return Text(documents, *split(documents, config.held_out, stdin), stdin, problems)


class UnusableTextError(ValueError):
    """Files, or lines of them, that cannot be used.

    Attributes:
        problems: A sentence for each.
        lines: The first few of them, and what to do about them.
    """

    def __init__(self, problems: list[str]) -> None:
        """Format the message."""
        self.problems = problems
        end = "with --data.exclude PATTERN, or skip what is not text with --data.on_error skip"
        self.lines = [f"{problems[0]}; fix it, leave it out {end}"]
        if len(problems) > 1:
            self.lines = [*shorten_list(problems), f"{len(problems):,} in all: fix them, leave them out {end}"]
        super().__init__("; ".join(self.lines))


def shorten_list(lines: list[str]) -> list[str]:
    """Return lines, the last of which counts those left out if there are too many."""
    return lines if len(lines) <= _MAX_LISTED else [*lines[:_MAX_LISTED], f"and {len(lines) - _MAX_LISTED:,} more"]


class FoundDocuments(NamedTuple):
    """Documents, in the order of the sources, and a sentence for each file or line that cannot be used."""

    documents: list[Document]
    problems: list[str]


def find_documents(
    sources: tuple[str, ...],
    field: str,
    format: str = "auto",
    stdin: bytes = b"",
    *,
    exclude: tuple[str, ...] = (),
    utf8: bool = False,
) -> FoundDocuments:
    """Find the documents of files, directories, glob patterns, stdin ("-") and "stdlib".

    A file that is found again, through another source or a link, is used once, under its first name.

    Args:
        sources: Where to look; each must exist, and have files.
        field: Field of a JSON object that holds the text.
        format: "text": each file is a document, as it is; "jsonl": each line of each file; "auto": by the file's name.
        stdin: Bytes that were read from stdin.
        exclude: Patterns of files and directories to leave out, by name or by path.
        utf8: Whether text must be UTF-8, which is then checked.
    """
    documents: dict[Path | None, list[Document]] = {}
    problems: list[str] = []
    missing = [source for source in sources if not _exists(source)]
    if missing:
        raise ValueError(f"{', '.join(missing)}: no such file, directory or pattern")
    for source in sources:
        paths = []
        for file in list_files(source):
            path = None if file.path is None else file.path.resolve()
            if _is_excluded(file, exclude):
                continue
            paths.append(path)
            if path not in documents:
                documents[path] = list(_documents_of(file, field, format, stdin, utf8, problems))
        if not any(documents[path] for path in paths) and not problems:
            raise ValueError(f"{source}: no text files there" + (" that are not excluded" if exclude else ""))
    return FoundDocuments([document for several in documents.values() for document in several], problems)


def _documents_of(
    file: Document, field: str, format: str, stdin: bytes, utf8: bool, problems: list[str]
) -> Iterator[Document]:
    """Yield the documents of a file; append a sentence to `problems` for what cannot be used."""
    name = str(file.path or "stdin")
    try:
        if format != "text":
            check_unpacked(file, stdin)
            check_not_binary(file, stdin)
        if format == "jsonl" or (format == "auto" and Path(file.name).suffix.lower() in _LINES_SUFFIXES):
            yield from _lines_of(file, field, stdin, problems)
            return
        if utf8:
            check_utf8(file, stdin)
        elif file.path is not None:
            file.path.open("rb").close()
        yield file
    except ValueError as error:
        problems.append(f"{name}: {error}")
    except OSError as error:
        problems.append(f"{name}: cannot be read ({error.strerror})")


def list_files(source: str) -> Iterator[Document]:
    """Yield the files of a source, each as one document."""
    path = Path(source)
    if source == "-":
        yield Document("stdin", None)
    elif source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from (d for d in _files(root, "*.py") if not d.name.startswith(("site-packages/", "dist-packages/")))
    elif path.is_dir():
        yield from _files(path, "*")
    elif path.is_file():
        yield Document(path.name, path)
    else:
        root = Path(*takewhile(lambda part: not _is_pattern(part), path.parts))
        for name in sorted(glob.glob(source, recursive=True)):  # noqa: PTH207
            if Path(name).is_file():
                yield Document(Path(name).relative_to(root).as_posix(), Path(name))


def _exists(source: str) -> bool:
    return source in ("-", "stdlib") or Path(source).exists() or _is_pattern(source)


def _is_excluded(document: Document, patterns: tuple[str, ...]) -> bool:
    """Return whether a pattern matches the path, the path below the source, or the name of a file or its parents."""
    name = PurePosixPath(document.name)
    names = [text for part in (name, *name.parents[:-1]) for text in (str(part), part.name)]
    names += [] if document.path is None else [document.path.as_posix()]
    return any(fnmatchcase(text, pattern.rstrip("/")) for pattern in patterns for text in names)


def _is_pattern(text: str) -> bool:
    return any(letter in text for letter in "*?[")


def _files(root: Path, pattern: str) -> Iterator[Document]:
    """Yield the files below a directory, by their paths in it; empty and hidden ones are left out."""
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root)
        if path.is_file() and path.stat().st_size and not any(part.startswith(".") for part in name.parts):
            yield Document(name.as_posix(), path)


def check_unpacked(document: Document, stdin: bytes) -> None:
    """Raise `ValueError` if a file is compressed, an archive, a table or UTF-16, by its name or its first bytes."""
    head = document.read_range(stdin, 0, 16)
    if Path(document.name).suffix.lower() in _PACKED_SUFFIXES or head.startswith(_MAGIC_BYTES):
        raise ValueError("compressed or binary, not text; unpack it")
    check_not_utf16(head)


def check_not_utf16(head: bytes, where: str = "") -> None:
    """Raise `ValueError` if the first bytes of a text are the byte order mark of UTF-16 or UTF-32."""
    for encoding, marks in _BYTE_ORDER_MARKS.items():
        if head.startswith(marks):
            raise ValueError(f"{where}{encoding} text; convert it to UTF-8: iconv -f {encoding} -t UTF-8 FILE > NEW")


def check_not_binary(document: Document, stdin: bytes) -> None:
    """Raise `ValueError` if the beginning of a file has a NUL byte, which no text in an encoding like ASCII has."""
    offset = document.read_range(stdin, 0, _HEAD_BYTES).find(b"\0")
    if offset >= 0:
        raise ValueError(f"binary, not text (a NUL byte at byte {offset})")


def check_utf8(document: Document, stdin: bytes) -> None:
    """Raise `ValueError` if a document is not UTF-8, reading a block at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with document.open(stdin) as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])  # bytes of a character that began in the block before
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(f"not UTF-8 text ({error.reason} at byte {offset - pending + error.start})") from error
            if not block:
                return
            offset += len(block)


def _report_other_encodings(documents: list[Document], stdin: bytes, report: Callable[[str], None]) -> None:
    """Report in one line the files whose beginnings are not UTF-8: a model of bytes learns them as they are."""
    names = []
    for document in documents:
        if document.line is None:  # JSON lines have been parsed
            try:
                head = document.read_range(stdin, 0, _HEAD_BYTES)
                codecs.getincrementaldecoder("utf-8")().decode(head)
            except UnicodeDecodeError as error:
                names.append(f"{document.path or 'stdin'}: byte {error.start}")
    if names:
        subject = "1 file is" if len(names) == 1 else f"{len(names):,} files are"
        report(
            f"{subject} not UTF-8 text (first {names[0]}), and learned as bytes; "
            "if it is Latin-1: iconv -f LATIN1 -t UTF-8 FILE > NEW"
        )


def _lines_of(document: Document, field: str, stdin: bytes, problems: list[str]) -> Iterator[Document]:
    begin = 0
    with document.open(stdin) as file:
        for number, line in enumerate(file, 1):
            end = begin + len(line)
            try:
                text = line_text(line, field) if line.strip() else b""
            except ValueError as error:
                problems.append(f"{document.path or 'stdin'}:{number}: {error}")
            else:
                if text:
                    yield Document(f"{document.name}:{number}", document.path, 0, len(text), (begin, end, field))
            begin = end
