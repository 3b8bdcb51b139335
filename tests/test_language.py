"""Names and docstrings of the package follow the rules of CONTRIBUTING.md."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "anymamba"
FILES = sorted(SOURCE.rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Names that tell a module's role within its package, and stand-ins that have the names of what they stand for.
REPEATED_NAMES = {"__init__", "__main__", "base", "config", "inspect", "generate", "metrics", "prefill", "tokenizers"}

# Words that had a private meaning, and what to write instead.
PRIVATE_WORDS = {
    r"\brooms?\b": "package, layer or memory",
    r"\bdoors?\b": "entry point or middleware",
    r"(?<!falls )(?<!leaves )\bbehind\b": "after, below or in",
    r"\bwhole numbers?\b": "integers",
    r"\bfresh starts?\b": "zero state or empty cache",
}


@cache
def parsed(file):
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def nodes(*kinds):
    """Yield the nodes of these kinds in all files, each with its location."""
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, kinds):
                yield f"{file.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", node


def test_docstrings_of_functions_begin_with_a_verb():
    first_words = re.compile(r"(The|A|An|What|Whether|How|Where|Of|As)\b")
    assert not [
        f"{location} {node.name}: {docstring.splitlines()[0]}"
        for location, node in nodes(*FUNCTIONS)
        if (docstring := ast.get_docstring(node)) and first_words.match(docstring)
    ]


def test_descriptions_of_arguments_stand_alone():
    entry = re.compile(r"^\s+\*{0,2}(\w+): ([a-z].*)$", re.MULTILINE)
    sections = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)
    assert not [
        f"{location}: {name}: {text}"
        for location, node in nodes(*FUNCTIONS, ast.ClassDef, ast.Module)
        for _, body in sections.findall((ast.get_docstring(node) or "") + "\n")
        for name, text in entry.findall(body)
        if re.match(r"(of|as|like|for|in|the others)\b", text)
    ]


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_words_have_their_usual_meaning(word):
    pattern = re.compile(word, re.IGNORECASE)
    assert not [
        f"{file.relative_to(SOURCE)}:{number}: write {PRIVATE_WORDS[word]}: {line.strip()}"
        for file in [*FILES, *sorted(SOURCE.rglob("*.h")), *sorted(SOURCE.rglob("*.cpp"))]
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_an_assignment_sets_one_attribute():
    def is_several(target):
        return isinstance(target, ast.Tuple) and sum(
            isinstance(element, ast.Attribute) and isinstance(element.value, ast.Name) and element.value.id == "self"
            for element in target.elts
        )

    assert not [
        location for location, node in nodes(ast.Assign) if any(is_several(target) > 1 for target in node.targets)
    ]


def test_checks_have_one_verb():
    assert not [f"{location} {node.name}" for location, node in nodes(*FUNCTIONS) if node.name.startswith("expect_")]


def test_the_name_of_a_module_tells_it_apart():
    names = Counter(file.stem for file in FILES)
    assert not [name for name, count in names.items() if count > 1 and name not in REPEATED_NAMES]
