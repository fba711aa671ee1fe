"""Help without the libraries: a command's options are read while torch and transformers, which take seconds to import,
are stand-ins (as documentation is built by Sphinx's ``autodoc_mock_imports``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HEAVY = ("torch", "transformers", "safetensors", "numpy")


def only_help(arguments: Sequence[str]) -> bool:
    """Tell whether ``arguments`` can have no other result than a help text."""
    *names, last = arguments or [""]
    return last in ("-h", "--help") and not any(name.startswith("-") for name in names)


@contextmanager
def outlined() -> Iterator[None]:
    """Within the block modules can be imported to be looked at, not to be run; they are forgotten afterwards."""
    before = set(sys.modules)
    finder = _Finder()
    if not before & set(HEAVY):
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
            for name in set(sys.modules) - before:
                if name.partition(".")[0] in HEAVY or name.startswith("kvkeep"):
                    del sys.modules[name]


class _StandIn(ModuleType):
    """A module, and whatever is looked up in it: a class, a decorator, a value."""

    __path__: list[str] = []  # noqa: RUF012 - a package of no files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(name)

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and isinstance(given[0], type | type(only_help)) else _StandIn("made")

    def __mro_entries__(self, bases: Any) -> tuple[()]:
        return ()

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __getitem__ = __or__


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in HEAVY else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""
