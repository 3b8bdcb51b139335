import os

import pytest


@pytest.fixture(autouse=True)
def patient_disk(monkeypatch):
    """Nothing here survives a power cut, so nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
