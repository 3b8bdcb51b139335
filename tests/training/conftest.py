import os

import pytest

from tests.training.cases import draw_nothing


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch):
    """No test here needs to survive a power cut, so none waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def plots():
    """The runs of a test draw plots."""


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """The runs of a test draw none, unless it asks for `plots`."""
    if "plots" not in request.fixturenames:
        draw_nothing(monkeypatch.setattr)
