"""Second names of packages, and errors for former names that say the new ones.

Both are finders at the end of `sys.meta_path`, so they see only the imports that nothing else answers.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# A directory of that name would shadow the library it is named after, in a script that runs from there.
_SECOND_NAMES = {"anymamba.inspect": "anymamba.analysis", "anymamba.transformers": "anymamba.integrations.transformers"}

# Former modules that documents and examples imported, and where their public names are now.
_FORMER_NAMES = {
    "anymamba.ground": "anymamba.core",
    "anymamba.ground.operators": "anymamba (kernels_off, portable)",
    "anymamba.ground.finite": "anymamba (check_finite)",
    "anymamba.ground.allocator": "anymamba (keep_freed_memory)",
    "anymamba.ground.context": "anymamba.core.context_parallel",
    "anymamba.ground.files": "anymamba.core.io",
    "anymamba.ground.narrow": "anymamba.quantization",
    "anymamba.ground.products": "anymamba.core.linear",
    "anymamba.blocks.block": "anymamba.blocks",
    "anymamba.blocks.modules": "anymamba.blocks.layers",
    "anymamba.blocks.narrow": "anymamba.quantization",
    "anymamba.generation.likelihood": "anymamba.generation",
    "anymamba.generation.text": "anymamba.generation",
    "anymamba.kernels.cpu.library": "anymamba.kernels",
    "anymamba.models.formats": "anymamba.checkpoints.formats",
    "anymamba.models.narrow": "anymamba.quantization",
    "anymamba.models.opening": "anymamba.checkpoints",
    "anymamba.models.output": "anymamba.models",
    "anymamba.models.pretrained": "anymamba.checkpoints",
    "anymamba.models.stack_config": "anymamba.models",
    "anymamba.ops.narrow": "anymamba.quantization",
    "anymamba.scan.rotated": "anymamba.scan",
    "anymamba.scan.selective": "anymamba.scan",
    "anymamba.scan.trapezoid": "anymamba.scan",
    "anymamba.serving.load": "anymamba.serving.load_test",
    "anymamba.training.costs": "benchmarks.cost_model",
    "anymamba.training.display": "anymamba.training.metrics",
    "anymamba.training.file_config": "anymamba.training",
    "anymamba.training.file_kinds": "anymamba.training",
    "anymamba.training.file_task": "anymamba.training",
    "anymamba.training.language": "anymamba.training",
    "anymamba.training.language_task": "anymamba.training.tasks",
    "anymamba.training.loop": "anymamba.training",
    "anymamba.training.parallel": "anymamba.training.distributed",
    "anymamba.training.predictions": "anymamba.training",
    "anymamba.training.report": "anymamba.training.metrics",
    "anymamba.training.sections": "anymamba.training",
    "anymamba.training.step": "anymamba.training.tasks",
    "anymamba.training.task": "anymamba.training",
}


class _SecondNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that imports a package under its second name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a specification of a package that has a second name, None for others."""
        return importlib.util.spec_from_loader(fullname, self) if fullname in _SECOND_NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the package in the place of the empty module."""
        sys.modules[module.__name__] = importlib.import_module(_SECOND_NAMES[module.__name__])


class _FormerNames(importlib.abc.MetaPathFinder):
    """A finder that raises an error with the new name of a module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Return None.

        Raises:
            ModuleNotFoundError: The module has a new name.
        """
        # The parent is imported first, so its error would hide that of the submodule: name both.
        new_names = [
            f"{former} is now {new}"
            for former, new in _FORMER_NAMES.items()
            if former == fullname or (former.startswith(f"{fullname}.") and fullname in _FORMER_NAMES)
        ]
        if new_names:
            message = f"{fullname} was renamed in version 0.2.0: {', '.join(new_names)}"
            raise ModuleNotFoundError(message, name=fullname)


def install_finders() -> None:
    """Make second names importable, and former names raise an error that says the new ones."""
    sys.meta_path += [_SecondNames(), _FormerNames()]


def renamed_attributes(module: str, new_names: dict[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that names the successor, in `new_names`, of a public name that was removed."""

    def get_attribute(name: str) -> Any:
        if name in new_names:
            # ImportError, as `from module import name` hides the message of an AttributeError.
            raise ImportError(f"{module}.{name} was renamed in version 0.2.0: use {module}.{new_names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get_attribute
