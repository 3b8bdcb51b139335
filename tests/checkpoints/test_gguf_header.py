"""A GGUF file whose counts and lengths exceed its bytes is rejected at once."""

import struct
import time

import pytest

from anymamba.checkpoints import open_checkpoint
from anymamba.checkpoints.formats.gguf_header import check_header

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


def text(content, order="<"):
    return struct.pack(f"{order}Q", len(content)) + content.encode()


def field(name, kind, value, order="<"):
    return text(name, order) + struct.pack(f"{order}I", kind) + value


def array(kind, count, content=b"", order="<"):
    return struct.pack(f"{order}IQ", kind, count) + content


def tensor(name, shape, offset=0, order="<"):
    sizes = struct.pack(f"{order}I{len(shape)}Q", len(shape), *shape)
    return text(name, order) + sizes + struct.pack(f"{order}IQ", 0, offset)


def header(*entries, tensors=0, fields=None, order="<"):
    fields = len(entries) - tensors if fields is None else fields
    return b"GGUF" + struct.pack(f"{order}IQQ", 3, tensors, fields) + b"".join(entries)


@pytest.mark.parametrize("order", ["<", ">"])
def test_headers_within_the_file_pass(order, tmp_path):
    entries = [
        field("general.architecture", STRING, text("mamba", order), order),
        field("numbers", ARRAY, array(UINT8, 3, b"abc", order), order),
        field("texts", ARRAY, array(STRING, 2, text("a", order) + text("", order), order), order),
        field("none", ARRAY, array(STRING, 0, b"", order), order),
        field("count", UINT32, bytes(4), order),
        tensor("x", [2, 3], order=order),
    ]
    (tmp_path / "a.gguf").write_bytes(header(*entries, tensors=1, order=order) + bytes(24))
    check_header(tmp_path / "a.gguf")


ARCHITECTURE = field("general.architecture", STRING, text("mamba"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            header(ARCHITECTURE, field("t", ARRAY, array(UINT8, 10**7))),
            "it claims 10000000 elements of an array, and 0",
        ),
        (header(ARCHITECTURE, field("t", ARRAY, array(UINT8, 2**60))), "it claims 1152921504606846976 elements"),
        (header(ARCHITECTURE, field("t", ARRAY, array(STRING, 2**60, bytes(80)))), "and 80 bytes are left"),
        (header(ARCHITECTURE, field("t", ARRAY, array(ARRAY, 2**60))), "an array of elements of type 9"),
        (header(field("t", ARRAY, array(UINT8, 2**20 + 1, bytes(2**20 + 1)))), "at most 1,048,576 elements"),
        (header(field("t", STRING, struct.pack("<Q", 2**63))), "9223372036854775808 bytes of a text"),
        (header(struct.pack("<Q", 2**62) + bytes(9), fields=1), "bytes of a field's name, and"),
        (header(fields=2**50), "it claims 1125899906842624 fields, and 0 bytes are left"),
        (header(tensors=2**50, fields=0), "it claims 1125899906842624 tensors"),
        (header(field("t", 77, b"")), "unknown type 77 of a field"),
        (header(tensor("x", [2**40, 2**40]), tensors=1), r"a tensor of shape \[1099511627776, 1099511627776\]"),
        (header(tensor("x", [1], offset=10**9), tensors=1), "at offset 1000000000, in a file of"),
        (header(tensor("x", [1] * 9), tensors=1), "at most 8 dimensions, got 9"),
        (header(ARCHITECTURE)[:-3], "5 bytes of a text, and 2 bytes are left"),
        (b"GGUF\3\0", "it ends within the version"),
        (b"", "it ends within the magic number"),
        (b"GGML" + bytes(20), "expected it to begin with GGUF"),
    ],
)
def test_counts_beyond_the_file_are_rejected_at_once(content, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 5
