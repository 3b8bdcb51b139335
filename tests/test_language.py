"""Names and docstrings of the package, its tests, benchmarks and examples follow the rules of CONTRIBUTING.md."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "anymamba"
PACKAGE = sorted(SOURCE.rglob("*.py"))
OTHERS = [file for name in ("tests", "benchmarks", "examples", "docs") for file in sorted((ROOT / name).rglob("*.py"))]
FILES = [*PACKAGE, *OTHERS]
TEXTS = [file for kind in ("*.h", "*.cpp", "*.js", "*.css", "*.html") for file in sorted(SOURCE.rglob(kind))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Names that tell a module's role within its package, and stand-ins that have the names of what they stand for.
REPEATED_NAMES = {"__init__", "__main__", "base", "config", "inspect", "generate", "metrics", "prefill", "tokenizers"}

# Names that do not say what they hold.
CATCH_ALL_NAMES = {"found", "given", "own", "wanted", "made", "said", "here"}

# Words that had a private meaning, and what to write instead.
PRIVATE_WORDS = {
    r"(?<![a-z])rooms?(?![a-z])": "package, layer or memory",
    r"(?<![a-z])doors?(?![a-z])": "entry point or middleware",
    r"(?<!falls )(?<!leaves )(?<![a-z])behind(?![a-z])": "after, below or in",
    r"whole[ _]numbers?": "integers",
    r"fresh[ _]starts?": "zero state or empty cache",
    r"(?<![a-z])refus(e|es|ed|ing)(?![a-z])": "reject or raise",
}

# Stems of words with a British spelling.
BRITISH_STEMS = re.compile(
    r"(discreti|generali|initiali|maximi|minimi|normali|optimi|organi|quanti|recogni|seriali|summari|utili|vectori)s"
    r"(e|ed|er|es|ing|ation)|behaviour|(?<![a-z])centre|colour|favour|honour|(?<![a-z])licence|neighbour|artefact",
    re.IGNORECASE,
)

# Lines that break a rule on purpose: words of a text that a model writes, and an option that is rejected.
DELIBERATE = re.compile(r"day, hand\. eyes\. door\.|did you mean (--)?optimizer")


@cache
def parse(file):
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def nodes(*kinds):
    """Yield the nodes of these kinds in all files, each with its location."""
    for file in FILES:
        for node in ast.walk(parse(file)):
            if isinstance(node, kinds):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node


def lines_with(pattern):
    """Return the lines with a pattern, each with its location, but for this file and deliberate ones."""
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in [*FILES, *TEXTS]
        if file != Path(__file__)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line) and not DELIBERATE.search(line)
    ]


def test_docstrings_of_functions_begin_with_a_verb():
    """Except for those of tests, which explain why what the name of the test says must hold."""
    first_words = re.compile(r"(The|A|An|What|Whether|How|Where|Of|As|Each|Every)\b")
    assert not [
        f"{location} {node.name}: {docstring.splitlines()[0]}"
        for location, node in nodes(*FUNCTIONS)
        if not node.name.startswith("test_") and (docstring := ast.get_docstring(node)) and first_words.match(docstring)
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


def test_names_say_what_they_hold():
    names = {ast.Name: "id", ast.arg: "arg", **dict.fromkeys(FUNCTIONS, "name")}
    assert not [
        f"{location} {name}"
        for location, node in nodes(*names)
        if (name := getattr(node, names[type(node)])) in CATCH_ALL_NAMES
        and not isinstance(getattr(node, "ctx", None), ast.Load)
    ]


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_words_have_their_usual_meaning(word):
    assert not lines_with(re.compile(word, re.IGNORECASE)), f"write {PRIVATE_WORDS[word]}"


def test_words_are_spelled_as_in_american_english():
    assert not lines_with(BRITISH_STEMS)


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


def test_functions_are_named_by_a_verb():
    """A participle alone does not say what is done; properties and burn-mamba's `SsdPath.fused` are no verbs."""
    assert not [
        f"{location} {node.name}"
        for location, node in nodes(*FUNCTIONS)
        if location.startswith("src/") and re.fullmatch(r"_*(?!need|feed|embed|seed|fused)[a-z]+ed", node.name)
        if not any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)
    ]


def test_the_name_of_a_module_tells_it_apart():
    names = Counter(file.stem for file in PACKAGE)
    assert not [name for name, count in names.items() if count > 1 and name not in REPEATED_NAMES]
