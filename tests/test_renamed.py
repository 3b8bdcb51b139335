"""Names of former versions raise an error that says the new ones."""

import importlib

import pytest

import anymamba
from anymamba.renamed import _FORMER_NAMES, _SECOND_NAMES, renamed_attributes


@pytest.mark.parametrize("former", _FORMER_NAMES)
def test_a_former_module_raises_an_error_with_its_new_name(former):
    new_name = _FORMER_NAMES[former]
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(former)
    assert f"{former} is now {new_name}" in str(error.value)


@pytest.mark.parametrize("new_name", sorted(set(_FORMER_NAMES.values())))
def test_a_new_name_can_be_imported(new_name):
    module, _, names = new_name.partition(" ")
    for name in names.strip("()").split(", "):
        assert not name or hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("second", _SECOND_NAMES)
def test_a_second_name_is_the_same_package(second):
    pytest.importorskip("transformers")
    assert importlib.import_module(second) is importlib.import_module(_SECOND_NAMES[second])


def test_other_missing_modules_raise_the_usual_error():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'anymamba\.models\.nothing'$"):
        importlib.import_module("anymamba.models.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'Mamba4'"):
        anymamba.Mamba4  # noqa: B018


def test_a_renamed_attribute_names_its_successor():
    get_attribute = renamed_attributes("anymamba.generation", {"TextStream": "IncrementalDetokenizer"})
    with pytest.raises(ImportError, match=r"use anymamba\.generation\.IncrementalDetokenizer"):
        get_attribute("TextStream")
    with pytest.raises(AttributeError, match="has no attribute 'x'"):
        get_attribute("x")
