import subprocess
import sys

import pytest

from tests import documents
from tests.documents import ROOT, blocks, pages

RUNNABLE = [page for page in pages() if any(block.language for block in blocks(page))]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs bash")


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    pytest.importorskip("tokenizers")
    command = [sys.executable, "-m", "tests.documents", page, tmp_path]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, (
        f"{process.stdout}{process.stderr}\nA block that needs what is not here (a network, a GPU, a package, minutes) "
        "says so in its first line: # needs the network"
    )


def written(directory, text):
    page = directory / "page.md"
    page.write_text(text)
    return page


class TestExtraction:
    def test_blocks_have_their_line_and_language(self, tmp_path):
        page = written(
            tmp_path,
            "# A\n```python\na = 1\n\nb = 2\n```\n```\nanymamba info\n```\n```\n┌─┐\n```\n  ```sh\nmake test\n  ```\n",
        )
        page_blocks = [(block.line, block.language, block.code) for block in blocks(page)]
        assert page_blocks == [
            (3, "python", "a = 1\n\nb = 2"),
            (8, "shell", "anymamba info"),
            (11, "", "┌─┐"),
            (14, "shell", "make test"),
        ]

    def test_a_block_without_an_end_is_noticed(self, tmp_path):
        with pytest.raises(AssertionError, match="the block of line 1 has no end"):
            blocks(written(tmp_path, "```python\na = 1\n"))

    @pytest.mark.parametrize(
        ("code", "marked"),
        [("# needs the network\nx", True), ("# takes 5 minutes\nx", True), ("x  # needs a GPU", False), ("# x", False)],
    )
    def test_a_mark_is_the_first_line(self, tmp_path, code, marked):
        (block,) = blocks(written(tmp_path, f"```python\n{code}\n```\n"))
        assert block.marked == marked


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "def f(:"),
        ("python", "from anymamba import Mamba4"),
        ("python", "from anymamba.nothing import x"),
        ("toml", "[model]\ndeph = 2"),
        ("json", "{'a': 1}"),
        ("sh", "anymamba generate MODEL --promt x"),
        ("sh", "make nothing"),
        ("sh", "python -m examples.nothing"),
        ("sh", "for x in"),
    ],
)
def test_what_cannot_be_run_is_rejected_even_where_it_is_marked(tmp_path, language, code):
    (block,) = blocks(written(tmp_path, f"```{language}\n# needs patience\n{code}\n```\n"))
    with pytest.raises((SyntaxError, ImportError, ValueError, AssertionError, subprocess.CalledProcessError)):
        documents.check(block)


@pytest.mark.parametrize("language", ["toml", "sh"])
def test_what_can_be_run_is_not_rejected(tmp_path, language):
    code = {
        "toml": "[model]\ndepth = 2",
        "sh": "anymamba train CONFIG.toml --optimizer.lr 1e-3  # a comment\nWANDB_MODE=offline make test SEED=7",
    }
    (block,) = blocks(written(tmp_path, f"```{language}\n{code[language]}\n```\n"))
    documents.check(block)
