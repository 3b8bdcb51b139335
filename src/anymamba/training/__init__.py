"""Training: config, data, optimizer, checkpoints, and the loop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anymamba.training.config.run_config import TrainingConfig as TrainingConfig
from anymamba.training.config.run_config import read_config as read_config

if TYPE_CHECKING:
    from anymamba.training.api import resume as resume
    from anymamba.training.api import train as train


def __getattr__(name: str) -> Any:
    """Import functions that need torch on demand: the command line makes its options from the config without it."""
    if name not in ("train", "resume"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("anymamba.training.api"), name)
