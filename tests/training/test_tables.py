"""Files of numbers, labels and texts: what is read, and what is rejected with its line."""

import json

import numpy as np
import pytest

from anymamba.training.data.tables import read_tables


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_row_of_a_table_is_a_sequence_or_a_step(tmp_path):
    source = write(tmp_path / "a.csv", "x0,x1,label\n1,2,a\n3,4.5,b\n\n")
    table = read_tables([source], targets=["label"])
    assert [x.tolist() for x in table.sequences] == [[[1], [2]], [[3], [4.5]]]
    assert (table.targets, table.channels, table.columns) == ([["a"], ["b"]], ["value"], ["x0", "x1"])
    assert table.origins[1].endswith("a.csv, line 3")
    steps = read_tables([source], inputs=["x1", "x0"], steps=True)
    assert [x.tolist() for x in steps.sequences] == [[[2, 1], [4.5, 3]]]
    assert steps.channels == ["x1", "x0"]


def test_a_column_names_the_sequence_of_a_step(tmp_path):
    source = write(tmp_path / "a.csv", "id,u,v,y\np,1,2,0.5\nq,3,4,0.1\np,5,6,0.5\n")
    table = read_tables([source], targets=["y"], sequence="id")
    assert [x.tolist() for x in table.sequences] == [[[1, 2], [5, 6]], [[3, 4]]]
    assert (table.targets, table.channels) == ([["0.5"], ["0.1"]], ["u", "v"])


def test_json_lines_have_texts_or_numbers(tmp_path):
    lines = [{"text": "héy", "label": "a"}, {"text": "b", "label": 2}]
    table = read_tables([write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))], targets=["label"])
    assert [x.tolist() for x in table.sequences] == [list("héy".encode()), [98]]
    assert (table.targets, table.columns, table.is_text) == ([["a"], [2]], ["text"], True)
    source = write(tmp_path / "b.jsonl", '{"x": [1, 2, 3], "y": [1, 2]}\n{"x": [4.5], "y": [3, 4]}')
    table = read_tables([source], targets=["y"])
    assert [x.tolist() for x in table.sequences] == [[[1], [2], [3]], [[4.5]]]
    assert table.targets == [[1, 2], [3, 4]]


def test_arrays_with_targets_in_another_file(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(2, 3, 2))
    np.save(tmp_path / "y.npy", np.array([1, 0]))
    table = read_tables([str(tmp_path / "x.npy")], targets=[str(tmp_path / "y.npy")])
    assert table.sequences[1].tolist() == [[6, 7], [8, 9], [10, 11]]
    assert table.targets == [[1], [0]]
    np.save(tmp_path / "series.npy", np.arange(5))
    assert read_tables([str(tmp_path / "series.npy")], steps=True).sequences[0].shape == (5, 1)
    two = [str(tmp_path / "series.npy")] * 2
    assert len(read_tables(two, steps=True).sequences) == 2


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.csv", "", {}, "expected a first line with the names of the columns, got an empty file"),
        ("a.csv", "x,y\n1,2\n3\n", {}, "line 3: expected 2 cells, as line 1 has, got 1"),
        ("a.csv", "x,y\n1,2\n3,nan\n", {}, "line 3: column 'y' must be a finite number, got 'nan'"),
        ("a.csv", "x,y\n1,\n", {}, "line 2: column 'y' must be a number, got ''$"),
        ("a.csv", "x,y\n1,two\n", {}, "column 'y' must be a number, got 'two'; texts are read from .jsonl"),
        ("a.csv", "x,y\n1,2\n", {"targets": ["z"]}, "line 1: no column 'z'; there are x, y"),
        ("a.csv", "x;y\n1;2\n", {}, "line 1: expected names separated by commas, got semicolons: 'x;y'"),
        ("a.csv", "x\ty\n1\t2\n", {"targets": ["y"]}, "expected names separated by commas, got tabs"),
        ("a.csv", "x,x\n1,2\n", {}, "columns must have different names, got 'x' twice"),
        ("a.csv", "x\n1\n", {"targets": ["x"]}, "no column is left to read next to x"),
        ("a.csv", "x,y\n", {}, "expected sequences, got none"),
        ("a.csv", "i,x,y\na,1,2\na,3,4\n", {"sequence": "i", "targets": ["y"]}, "line 3: a sequence has one target"),
        ("a.csv", 'x,y\n"1,2\n', {}, "not readable CSV"),
        ("a.jsonl", '{"x": [1]}\n{', {}, "line 2: not readable JSON"),
        ("a.jsonl", "[1]", {}, "line 1: expected an object, got list"),
        ("a.jsonl", '{"x": [1], "y": 1}', {}, "data.inputs must name the field to read: x, y"),
        ("a.jsonl", '{"x": [1]}', {"targets": ["y"]}, "line 1: no field 'y'; there are x"),
        ("a.jsonl", '{"x": [[1, 2], [3]]}', {}, "line 1: step 1 of 'x' must have 2 numbers, got 1"),
        ("a.jsonl", '{"x": [1]}\n{"x": [[1, 2]]}', {}, "line 2: expected 1 numbers per step, as line 1 has, got 2"),
        ("a.jsonl", '{"x": [1]}\n{"x": "one"}', {}, "line 2: expected 1 numbers per step, as line 1 has, got a text"),
        ("a.jsonl", '{"x": [1, NaN]}', {}, "'x'.1. must be a finite number, got nan"),
        ("a.jsonl", '{"x": []}', {}, "'x' must be a text, or a list of numbers or of lists"),
        ("a.jsonl", '{"x": ""}', {}, "'x' must have text, got none"),
        ("a.npy", "nothing", {}, "not a readable .npy file of numbers"),
        ("a.txt", "x", {}, "expected a file named .csv, .jsonl, .ndjson, .npy, got .txt"),
    ],
)
def test_what_cannot_be_used_is_rejected_with_its_line(tmp_path, name, text, options, message):
    with pytest.raises(ValueError, match=message):
        read_tables([write(tmp_path / name, text)], **options)


def test_arrays_that_cannot_be_used(tmp_path):
    def save(x):
        np.save(tmp_path / "x.npy", x, allow_pickle=True)
        return [str(tmp_path / "x.npy")]

    for array, options, message in [
        (np.array([[1.0, np.inf]]), {}, r"expected finite numbers, got inf at \[0, 1\]"),
        (np.zeros(3), {}, r"expected an array \(n, t\) or \(n, t, c\), got \(3,\)"),
        (np.array([{}]), {}, "not a readable .npy file of numbers"),
        (np.zeros((2, 3)), {"targets": ["y.npy"]}, "y.npy: no such file"),
        (np.zeros((2, 3)), {"targets": ["label"]}, "data.targets must be one .npy file, got label"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_tables(save(array), **options)
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"expected 2 rows, as .*x.npy has sequences, got \(3,\)"):
        read_tables(save(np.zeros((2, 3))), targets=[str(tmp_path / "y.npy")])
    for sources, message in [([], "data.sources must name files"), (["none.csv"], "none.csv: no such file")]:
        with pytest.raises(ValueError, match=message):
            read_tables(sources)


def npy_file(shape, content=bytes(64), header="{'descr': '<f4', 'fortran_order': False, 'shape': %s}"):
    header = (header % shape if "%s" in header else header).encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


@pytest.mark.parametrize(
    "content",
    [
        npy_file("(10000000000,)"),
        npy_file("(1152921504606846976,)"),
        npy_file("(4294967296, 4294967296)"),
        npy_file("(0, 1152921504606846976)"),
        npy_file("(4, 5)"),
        npy_file("(-1, 4)"),
        npy_file("(" + "-" * 9000 + "1,)"),
        npy_file("", header="{" * 9000),
        b"PK\x03\x04" + bytes(60),
    ],
    ids=["more than memory", "2**60", "overflow", "empty and wide", "short", "negative", "signs", "braces", "zip"],
)
def test_a_header_that_claims_more_than_the_file_has_takes_no_memory(tmp_path, content):
    assert read_tables([write(tmp_path / "good.npy", npy_file("(4, 4)"))]).sequences[0].shape == (4, 1)
    with pytest.raises(ValueError, match=r"not a readable \.npy file of numbers|expected an array") as error:
        read_tables([write(tmp_path / "a.npy", content)])
    assert len(str(error.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("shape", ["()", "(0,)", "(0, 3)"])
def test_an_array_without_steps_is_rejected(tmp_path, shape):
    with pytest.raises(ValueError, match=r"expected an array \(t,\)"):
        read_tables([write(tmp_path / "a.npy", npy_file(shape))], steps=True)
