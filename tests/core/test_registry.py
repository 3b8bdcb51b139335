"""Several implementations per operator and device: which one runs, and the message if a request cannot be met."""

import pytest
import torch

from anymamba.core import registry
from anymamba.core.registry import Implementation, find_kernel, missing_kernel, register, register_library
from tests.support import in_another_process

X = torch.zeros(3)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_IMPLEMENTATIONS", {})
    monkeypatch.setattr(registry, "_LIBRARIES", {})
    monkeypatch.setattr(registry, "_REPORTED", set())
    monkeypatch.setattr(registry._Switches, "requested", "")
    monkeypatch.setattr(registry._Switches, "is_checked", False)


def request(monkeypatch, library):
    monkeypatch.setattr(registry._Switches, "requested", library)


def register_two(first_covers=True):
    """Register two libraries for the CPU, of which the first may cover nothing."""
    for name in ("first", "second"):
        register_library(name, lambda name=name: f"built, as {name}")
        reason = "" if first_covers or name == "second" else "the first has no kernel for this"
        register("double", "cpu", Implementation(lambda x: x, None, lambda x, reason=reason: reason), library=name)
    return [entry.implementation for entry in registry._IMPLEMENTATIONS["double", "cpu"]]


def test_the_first_implementation_that_covers_a_call_runs():
    first, _ = register_two()
    assert find_kernel("double", X) is first
    assert missing_kernel("double", X) == ""
    _, second = register_two(first_covers=False)
    assert find_kernel("double", X) is second


def test_without_an_implementation_every_reason_is_named():
    register("double", "cpu", Implementation(lambda x: x, None, lambda x: "too small"), library="first")
    register("double", "cpu", Implementation(lambda x: x, None, lambda x: "too slow"), library="second")
    assert find_kernel("double", X) is None
    assert missing_kernel("double", X) == "too small; too slow"
    assert missing_kernel("double", X.to("meta")) == "there is none for device meta"


def test_a_library_that_registers_again_replaces_what_it_registered():
    register("double", "cpu", Implementation(lambda x: x), library="first")
    replacement = Implementation(lambda x: 2 * x)
    register("double", "cpu", replacement, library="first")
    assert [entry.implementation for entry in registry._IMPLEMENTATIONS["double", "cpu"]] == [replacement]


def test_the_environment_puts_a_library_first(monkeypatch, capsys):
    request(monkeypatch, "second")
    register_two()
    assert [entry.library for entry in registry._IMPLEMENTATIONS["double", "cpu"]] == ["second", "first"]
    assert find_kernel("double", X) is registry._IMPLEMENTATIONS["double", "cpu"][0].implementation
    assert capsys.readouterr().err == ""


def test_a_request_that_cannot_be_met_is_reported_once(monkeypatch, capsys):
    request(monkeypatch, "first")
    _, second = register_two(first_covers=False)
    assert find_kernel("double", X) is second
    assert find_kernel("double", X) is second
    assert capsys.readouterr().err == "anymamba: ANYMAMBA_KERNELS=first: double: the first has no kernel for this\n"


def test_a_request_for_an_unknown_library_is_an_error(monkeypatch):
    request(monkeypatch, "third")
    register_two()
    for ask in (lambda: find_kernel("double", X), registry.describe_kernels):
        with pytest.raises(ValueError, match="ANYMAMBA_KERNELS must be one of on, off, first, second, got 'third'"):
            ask()


def test_kernels_can_be_switched_off_by_the_environment(monkeypatch):
    request(monkeypatch, "off")
    register_two()
    assert find_kernel("double", X) is None
    assert missing_kernel("double", X) == "switched off by ANYMAMBA_KERNELS=off"
    assert registry.describe_kernels() == {"first": "built, as first", "second": "built, as second"}


def test_the_compiled_kernels_may_be_asked_for_by_name():
    code = "import torch; from anymamba.kernels import missing_kernel; print(missing_kernel('scan', torch.zeros(1)))"
    assert in_another_process(code, ANYMAMBA_KERNELS="cpu") == in_another_process(code, ANYMAMBA_KERNELS="on")
