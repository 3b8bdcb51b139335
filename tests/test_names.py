"""Every name that docs/names.md gives for this library exists, and accepts the arguments it is shown with."""

import ast
import dataclasses
import inspect
import re

import pytest

import anymamba
from anymamba.generation.sampling import Sampling
from anymamba.models.families import FAMILIES
from anymamba.models.outputs import LMOutput
from tests.documents import ROOT

CONFIGS = [family.CONFIG for family in FAMILIES.values()]
FIELDS = {name for config in CONFIGS for name in (f.name for f in dataclasses.fields(config))}
LM = anymamba.MambaLM
DRAWING = [f.name for f in dataclasses.fields(Sampling)]
KEYWORDS = {
    *FIELDS,
    *(name for call in (LM.forward, LM.from_pretrained) for name in inspect.signature(call).parameters),
}
BLOCK = anymamba.Mamba3(d_model=32, d_state=16, headdim=16)
# What stands for an object in the tables; other words are arguments, of any value.
KNOWN = {name: getattr(anymamba, name) for name in dir(anymamba)}
KNOWN |= {"anymamba": anymamba, "block": BLOCK, "path": anymamba.SsdPath(), "model": LM}


def rows(section):
    """Return the second column of the tables of a section, row by row."""
    text = (ROOT / "docs/names.md").read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    table = [re.split(r"(?<!\\)\|", line)[1:] for line in text.splitlines() if line.startswith("| ")]
    return [cells[1] for cells in table[1:]]


def spans(section):
    """Return the code of that column."""
    return [code for cell in rows(section) for code in re.findall(r"`([^`]+)`", cell)]


def resolved(node):
    """Return the object that an expression names, None for an argument."""
    if isinstance(node, ast.Name):
        return KNOWN.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolved(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def check_there(code):
    """Raise unless the names of some code exist and calls have the arguments that are written."""
    if code.endswith("="):
        assert code[:-1] in KEYWORDS, code
        return
    if re.fullmatch(r"\.\w+", code):
        assert code[1:] in LMOutput._fields, code
        return
    if code.startswith("ANYMAMBA_"):
        return
    code = f"SsdPath{code}" if re.match(r"\.\w+\(", code) else code
    tree = ast.parse(code.replace("(..., ", "(").replace(", ...)", ")"))
    match tree.body[0]:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if not isinstance(value, ast.Call):
            assert name in KEYWORDS, code
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolved(node)
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Call):
            function = resolved(node.func)
            assert function is not None, f"{code}: no such function"
            signature = inspect.signature(getattr(function, "forward", function))
            expected = {*signature.parameters, *(KEYWORDS if inspect.isclass(function) else DRAWING)}
            assert all(keyword.arg in expected for keyword in node.keywords), code


@pytest.mark.parametrize("code", spans("Sizes and options"))
def test_sizes_and_options_are_fields(code):
    name, _, value = code.partition("=")
    if name.startswith('"'):
        return
    assert name in FIELDS or all(hasattr(config, name) for config in CONFIGS[1:]), name
    if value.startswith('"'):
        dataclasses.replace(BLOCK.config, **{name: ast.literal_eval(value)})


def test_parameters_are_those_of_blocks():
    small = {"d_model": 32, "d_state": 16}
    made = [
        anymamba.Mamba1(**small),
        anymamba.Mamba2(**small, headdim=16, learnable_init_states=True),
        anymamba.Mamba3(**small, headdim=16, is_mimo=True, mimo_rank=2),
    ]
    there = {name for block in made for name, _ in block.named_parameters()}
    named = [code for code in spans("Parameters") if code != "D_has_hdim"]
    assert len(named) > 10
    assert set(named) <= there


@pytest.mark.parametrize("section", ["Algorithms", "Calls and caches", "The official package's calls"])
def test_calls_exist_with_their_arguments(section):
    found = spans(section)
    assert len(found) > 4
    for code in found:
        check_there(code)


@pytest.mark.parametrize(
    "code",
    ["SsdPath.quick()", "anymamba.nothing()", "block.prefill(x, chunks=3)", "MambaLM(stretch=2)", "speed=1", "x="],
)
def test_what_is_not_there_is_noticed(code):
    with pytest.raises((AttributeError, AssertionError)):
        check_there(code)
