"""Checkpoint formats: one adapter each, which maps the format's config and keys to ours."""

from anymamba.checkpoints.formats.anymamba import AnymambaFormat as AnymambaFormat
from anymamba.checkpoints.formats.base import Format as Format
from anymamba.checkpoints.formats.codestral import CodestralFormat
from anymamba.checkpoints.formats.fla import FlaFormat
from anymamba.checkpoints.formats.hf import TransformersFormat
from anymamba.checkpoints.formats.official import OfficialFormat
from anymamba.models.config import MambaLMConfig

# In the order in which a directory is tried.
FORMATS: dict[str, Format] = {
    f.name: f for f in (FlaFormat(), TransformersFormat(), OfficialFormat(), CodestralFormat(), AnymambaFormat())
}
READ_ONLY = frozenset({"fla"})  # these cannot be written


def default_format(config: MambaLMConfig) -> str:
    """The format to write a model in if none is named: the official one, if it can represent the model."""
    return AnymambaFormat.name if config.stack else OfficialFormat.name


def get_format(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]
