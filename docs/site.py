"""The documentation site: a hook of mkdocs that lays out its pages from the documents of the repository.

The documents stay where they are and link to each other as they do on the file system. `make site` copies them, and
what they link to, into build/site-pages in the same tree, adds the pages of the API, and builds build/site. A link to
something that is not there is an error.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*/*.md")
# Pages of the API: what each shows, with the text before it.
API = {
    "blocks": (
        "Blocks",
        "anymamba.blocks.mamba1.Mamba1 anymamba.blocks.mamba1.Mamba1Config anymamba.blocks.mamba2.Mamba2 "
        "anymamba.blocks.mamba2.Mamba2Config anymamba.blocks.mamba3.block.Mamba3 "
        "anymamba.blocks.mamba3.config.Mamba3Config anymamba.blocks.base.Block",
    ),
    "scan": (
        "Scans",
        "anymamba.scan.scan.scan anymamba.scan.ssd.ssd anymamba.scan.selective_scan.selective_scan "
        "anymamba.scan.trapezoidal_scan.trapezoid_scan anymamba.scan.rotated_scan.rotated_trapezoid_scan "
        "anymamba.scan.path.SsdPath",
    ),
    "models": (
        "Language models",
        "anymamba.models.lm.MambaLM anymamba.models.outputs.LMOutput anymamba.models.config.MambaLMConfig "
        "anymamba.models.cache.LMCache",
    ),
    "generation": (
        "Generation",
        "anymamba.generation.pipeline.pipeline anymamba.generation.pipeline.Pipeline "
        "anymamba.generation.generate.generate "
        "anymamba.generation.generate.stream anymamba.generation.decoder.decoder "
        "anymamba.generation.state.GenerationState anymamba.generation.scoring.likelihood "
        "anymamba.generation.tokenizers.load_tokenizer",
    ),
    "training": (
        "Training",
        "anymamba.training.api.train anymamba.training.api.resume anymamba.training.config.run_config "
        "anymamba.training.optim.optimizer.parameter_groups",
    ),
    "inspect": (
        "Inspect",
        "anymamba.analysis.dual anymamba.analysis.measures anymamba.analysis.layer_inputs anymamba.analysis.recurrence",
    ),
}


def on_config(config: Any) -> Any:
    """Lay out the pages, and add documents to the navigation that it does not name yet."""
    pages = Path(config.docs_dir)
    shutil.rmtree(pages, ignore_errors=True)
    documents = sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)})
    for path in documents:
        _write(pages / _name(path), path.read_text(encoding="utf-8"), path)
        for target in _linked(path):
            if target.suffix != ".md":
                copy = pages / target.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, copy)
    shutil.copy(ROOT / "docs" / "site.css", pages)
    for name, (title, objects) in API.items():
        text = f"# {title}\n\n" + "\n\n".join(f"::: {path}" for path in objects.split())
        (pages / "api").mkdir(parents=True, exist_ok=True)
        (pages / "api" / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    more = [name for name in map(_name, documents) if name not in repr(config.nav)]
    if more:
        config.nav.append({"More": more})
    return config


def _name(path: Path) -> str:
    """Where a document goes: the README is the first page."""
    name = path.relative_to(ROOT).as_posix()
    return "index.md" if name == "README.md" else name


def _write(copy: Path, text: str, path: Path) -> None:
    """A copy in which links to the README lead to the first page."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    above = "../" * (len(path.relative_to(ROOT).parts) - 1)
    copy.write_text(text.replace(f"]({above}README.md", f"]({above}index.md"), encoding="utf-8")


def _linked(path: Path) -> Iterator[Path]:
    """Files of the repository that a document links to or shows."""
    for link in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        target = (path.parent / link).resolve()
        if "://" not in link and target.is_file() and target.is_relative_to(ROOT):
            yield target
