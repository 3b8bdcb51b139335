import os

import pytest

from tests.training.cases import draw_nothing


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch):
    """Skip syncs: no test here needs to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def plots():
    """Let the runs of a test draw plots."""


@pytest.fixture(autouse=True)
def no_plots(request, monkeypatch):
    """Let the runs of a test draw no plots, unless it uses `plots`."""
    if "plots" not in request.fixturenames:
        draw_nothing(monkeypatch.setattr)
