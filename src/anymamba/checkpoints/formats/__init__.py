"""Checkpoint formats: one adapter each, which maps the format's config and names of tensors to ours.

Read `base.py` first (the protocol of an adapter), then `official.py`, whose names are ours. To add a
format, write an adapter and add it to `FORMATS`; if it can be written, also to `FORMATS` of `cli/options.py`.

GGUF is the exception: a single file with config, weights and tokenizer (`gguf.py`, `gguf_header.py`,
`gguf_tokenizer.py`) instead of a directory, so it cannot follow this recipe and is not in `FORMATS`. It is
special-cased by `gguf.is_gguf` and `gguf.SUFFIX` in `checkpoints/open.py` (config), `checkpoints/weight_files.py`
(tensors), `checkpoints/save.py` and `generation/tokenizers.py` (tokenizer), and `cli/convert.py` (which cannot write
it).
"""

from anymamba.checkpoints.formats.base import Format as Format
from anymamba.checkpoints.formats.codestral import CodestralFormat
from anymamba.checkpoints.formats.fla import FlaFormat
from anymamba.checkpoints.formats.hf import TransformersFormat
from anymamba.checkpoints.formats.hybrids import BambaFormat, GraniteFormat
from anymamba.checkpoints.formats.official import AnymambaFormat as AnymambaFormat
from anymamba.checkpoints.formats.official import OfficialFormat
from anymamba.models.config import MambaLMConfig

# In the order in which they are tried on a directory.
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        FlaFormat(),
        BambaFormat(),
        GraniteFormat(),
        TransformersFormat(),
        OfficialFormat(),
        CodestralFormat(),
        AnymambaFormat(),
    )
}
READ_ONLY = frozenset({"fla"})  # formats that cannot be written


def default_format(config: MambaLMConfig) -> str:
    """Return the format to write a model in if none is named: the official one, if it can represent the model."""
    return AnymambaFormat.name if config.stack else OfficialFormat.name


def get_format(name: str) -> Format:
    """Return the format of that name; raise `ValueError` for an unknown one."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]
