import os

import pytest


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch):
    """No test here needs to survive a power cut, so none waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
