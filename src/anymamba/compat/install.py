"""Put the stand-in where `import mamba_ssm` and `import causal_conv1d` look, and take it away again."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

PACKAGES = ("mamba_ssm", "causal_conv1d")
VERSIONS = {"mamba_ssm": "2.3.0", "causal_conv1d": "1.6.0"}  # the packages whose functions these are
_OURS = "__anymamba__"


class NotStandingIn(NotImplementedError, ImportError):  # noqa: N818
    """Something of the official packages that the stand-in does not have, asked for by an import."""


class _NoSuchName(NotImplementedError, AttributeError):  # noqa: N818
    """The same, asked for as an attribute."""


def _missing(kind: type[Exception], name: str) -> NoReturn:
    raise kind(f"{name}: anymamba's stand-in has no such module or name (docs/compat.md lists what there is)")


class _Finder(MetaPathFinder, Loader):
    """Makes the modules of `names.TABLE`, and raises for others."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        from anymamba.compat.names import TABLE

        if fullname not in TABLE:
            _missing(NotStandingIn, fullname)
        return ModuleSpec(fullname, self, is_package=True)  # so that a missing name is looked for as a submodule

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from anymamba.compat.names import TABLE

        name = module.__name__
        vars(module).update(TABLE[name])
        setattr(module, _OURS, True)
        module.__version__ = VERSIONS[name.partition(".")[0]]  # type: ignore[attr-defined]
        module.__doc__ = f"anymamba's stand-in for {name}."

        def missing(attribute: str) -> NoReturn:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            _missing(_NoSuchName, f"{name}.{attribute}")

        module.__getattr__ = missing  # type: ignore[method-assign]


_finder = _Finder()


def install() -> None:
    """Make later imports of `mamba_ssm` and `causal_conv1d` find the stand-in.

    Raises:
        RuntimeError: one of them is installed, or was imported before. Then nothing is changed.
    """
    if _finder in sys.meta_path:
        return
    for name in PACKAGES:
        if name in sys.modules:
            raise RuntimeError(f"anymamba.compat.install: {name} has already been imported; call it before that import")
        if importlib.util.find_spec(name) is not None:
            raise RuntimeError(
                f"anymamba.compat.install: {name} is installed, and the stand-in never hides it; uninstall it first"
            )
    sys.meta_path.append(_finder)
    # transformers' modules look for the packages once, when they are imported.
    early = [n for n, module in sys.modules.items() if n.startswith("transformers.models.") and _is_mixer(module)]
    for package in PACKAGES:
        for name in _modules_of(package):
            importlib.import_module(name)
    if early:
        warnings.warn(
            f"anymamba.compat.install: {', '.join(sorted(early))} were imported earlier and do not use it", stacklevel=2
        )


def _modules_of(package: str) -> list[str]:
    from anymamba.compat.names import TABLE

    return [name for name in TABLE if name.partition(".")[0] == package]


def _is_mixer(module: ModuleType) -> bool:
    return "causal_conv1d_fn" in vars(module) or "mamba_inner_fn" in vars(module)


def uninstall() -> None:
    """Remove the stand-in. Names already imported from it keep working."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [n for n, module in sys.modules.items() if n.partition(".")[0] in PACKAGES]:
        if getattr(sys.modules[name], _OURS, False):
            del sys.modules[name]
