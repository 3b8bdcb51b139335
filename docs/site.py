"""A hook of mkdocs that builds the documentation site from the documents of the repository.

The documents link to each other as they do on the file system. `make site` copies them, and the files they link to,
into build/site-pages in the same tree, adds the pages of the API, and builds build/site. Formulas become MathML, which
browsers render by themselves. A link to a file that does not exist is an error.
"""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*/*.md")
# Pages of the API: a title, and the objects that the page documents.
API = {
    "blocks": (
        "Blocks",
        "anymamba.blocks.mamba1.Mamba1 anymamba.blocks.mamba1.Mamba1Config anymamba.blocks.mamba2.Mamba2 "
        "anymamba.blocks.mamba2.Mamba2Config anymamba.blocks.mamba3.Mamba3 "
        "anymamba.blocks.mamba3_config.Mamba3Config anymamba.blocks.attention.Attention "
        "anymamba.blocks.attention.AttentionConfig anymamba.blocks.base.Block",
    ),
    "scan": (
        "Scans",
        "anymamba.scan.scan.scan anymamba.scan.ssd.ssd anymamba.scan.selective_scan.selective_scan "
        "anymamba.scan.mamba3_scan.trapezoid_scan anymamba.scan.mamba3_scan.rotated_trapezoid_scan "
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
        "anymamba.generation.state.GenerationState anymamba.generation.scoring.score_text "
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
    """Copy the pages, and add documents to the navigation that it does not name yet."""
    pages = Path(config.docs_dir)
    shutil.rmtree(pages, ignore_errors=True)
    documents = sorted({path for pattern in DOCUMENTS for path in ROOT.glob(pattern)})
    for path in documents:
        _copy_document(path, pages / _page_name(path))
        for target in _linked_files(path):
            if target.suffix != ".md":
                copy = pages / target.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(target, copy)
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(ROOT / "docs" / name, pages)
    for name, (title, objects) in API.items():
        text = f"# {title}\n\n" + "\n\n".join(f"::: {path}" for path in objects.split())
        (pages / "api").mkdir(parents=True, exist_ok=True)
        (pages / "api" / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    unlisted = [name for name in map(_page_name, documents) if name not in repr(config.nav)]
    if unlisted:
        config.nav.append({"More": unlisted})
    return config


def on_page_content(content: str, **_: Any) -> str:
    """Replace the formulas of a page, which arithmatex marks, by MathML."""
    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', _to_mathml, content, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', _to_mathml, content, flags=re.DOTALL)


def _to_mathml(match: re.Match[str]) -> str:
    """Convert a formula in LaTeX."""
    from latex2mathml.converter import convert

    display = "block" if match[0].startswith("<div") else "inline"
    formula = " ".join(html.unescape(match[1]).split())
    mathml: str = convert(formula, display=display)
    return f'<div class="formula">{mathml}</div>' if display == "block" else mathml


def _page_name(path: Path) -> str:
    """Return the path of a document's page: the README is the first page."""
    name = path.relative_to(ROOT).as_posix()
    return "index.md" if name == "README.md" else name


def _copy_document(path: Path, copy: Path) -> None:
    """Copy a document so that links to the README lead to the first page."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8")
    above = "../" * (len(path.relative_to(ROOT).parts) - 1)
    copy.write_text(text.replace(f"]({above}README.md", f"]({above}index.md"), encoding="utf-8")


def _linked_files(path: Path) -> Iterator[Path]:
    """Yield the files of the repository that a document links to or shows."""
    for link in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        target = (path.parent / link).resolve()
        if "://" not in link and target.is_file() and target.is_relative_to(ROOT):
            yield target
