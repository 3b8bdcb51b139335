"""A model to the hub: weights, config, tokenizer and a card, in one commit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from anymamba.checkpoints.formats import default_format
from anymamba.checkpoints.hub import check_repository_id, push
from anymamba.checkpoints.load import copy_companions, save_model
from anymamba.models.lm import MambaLM

_CARD = """---
library_name: anymamba
pipeline_tag: text-generation
tags: [{family}]
---
# {name}

A {family} language model of {parameters:,} parameters, in the {format} format.

```python
import anymamba

text = anymamba.pipeline("{name}")
print(text("Once upon a time", temperature=0.8).text)
```
"""


def push_model(
    model: MambaLM,
    name: str,
    *,
    companions: str | os.PathLike[str] | None = None,
    format: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Write a model to a repository of the hub (`MambaLM.push_to_hub` has the contract)."""
    check_repository_id(name)
    parameters, format = sum(p.numel() for p in model.parameters()), format or default_format(model.config)
    with TemporaryDirectory() as temporary:
        directory = Path(temporary)
        save_model(model, directory, format)
        card = directory / "README.md"
        card.write_text(
            _CARD.format(name=name, family=model.config.layer, parameters=parameters, format=format), encoding="utf-8"
        )
        if companions is not None:
            copy_companions(Path(companions), directory)
            if (own := Path(companions) / "README.md").is_file():
                shutil.copyfile(own, card)
        return push(directory, name, private=private, token=token)
