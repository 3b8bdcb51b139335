import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "anymamba"

# Top to bottom: a package imports only from itself and from those below it.
LAYERS = [
    "cli",
    "serving",
    "training",
    "integrations",
    "compat",
    "analysis",
    "generation",
    "checkpoints",
    "models",
    "blocks",
    "quantization",
    "scan",
    "ops",
    "kernels",
    "core",
]

# Files of the package itself: imported by everything, or importing everything.
TOP_LEVEL = {"__init__", "__main__", "renamed", "version"}

# Methods that are shorthands for functions of a higher layer; they import it when they are called.
ALLOWED_UPWARD_IMPORTS = {
    ("models/lm.py", "checkpoints"),  # from_pretrained, save_pretrained, push_to_hub
    ("models/lm.py", "generation"),  # generate
    ("models/sequence/sequence_model.py", "checkpoints"),  # from_pretrained, save_pretrained
}


def layer_of(file):
    """Return the layer of a file: its top directory below the package, or its own name."""
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def imported_layers(code, package):
    """Yield the layers that a file of `package` imports from, each with its line."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "anymamba":
                yield (rest[0] if rest else ""), f"line {node.lineno}: {name}"


FILES = sorted(file for file in SOURCE.rglob("*.py") if layer_of(file) not in TOP_LEVEL)


def test_every_file_is_in_a_layer():
    assert {layer_of(file) for file in FILES} == set(LAYERS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_a_file_imports_only_from_its_layer_and_those_below(file):
    path, layer = file.relative_to(SOURCE), layer_of(file)
    for imported, line in imported_layers(file.read_text(encoding="utf-8"), ["anymamba", *path.parts[:-1]]):
        if imported in TOP_LEVEL or (path.as_posix(), imported) in ALLOWED_UPWARD_IMPORTS:
            continue
        assert imported in LAYERS, f"{path}, {line}: import from the package that defines it"
        assert LAYERS.index(imported) >= LAYERS.index(layer), f"{path}, {line}: {imported} is above {layer}"


# The kernels of a device, which only `kernels` itself knows.
DEVICES = [
    f"anymamba.kernels.{folder.name}" for folder in (SOURCE / "kernels").iterdir() if (folder / "__init__.py").exists()
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_only_the_kernels_name_a_device(file):
    assert DEVICES
    path = file.relative_to(SOURCE)
    if layer_of(file) == "kernels":
        return
    for _, line in imported_layers(file.read_text(encoding="utf-8"), ["anymamba", *path.parts[:-1]]):
        name = line.partition(": ")[2]
        assert not any(f"{name}.".startswith(f"{device}.") for device in DEVICES), f"{path}, {line}"


@pytest.mark.parametrize(
    ("code", "layer"),
    [
        ("import anymamba.models.lm", "models"),
        ("from anymamba import models", "models"),
        ("from anymamba.models import lm", "models"),
        ("from ..models.lm import MambaLM", "models"),
        ("from .. import models", "models"),
        ("from .io import atomic_write", "core"),
        ("import anymamba", ""),
    ],
)
def test_every_form_of_an_import_is_seen(code, layer):
    assert [imported for imported, _ in imported_layers(code, ["anymamba", "core"])] == [layer]
