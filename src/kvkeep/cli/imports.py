"""A faster import of transformers, without the parts that a process on the CPU does not use.

``import transformers.modeling_utils`` takes four times as long as ``import torch``, and 200 MB. It imports torch's
compiler, its distributed tensors, sympy and scipy, and reads the import structure of all models twice.
:func:`import_transformers` avoids this by the mechanisms of Python and transformers for missing packages:

* It hides optional packages while transformers looks for them (``sys.modules[name] = None``).
* It calls ``is_torch_distributed_available()`` once while torch reports no distributed support. transformers caches the
  result.
* It defers :data:`DEFERRED` and ``torch._dynamo`` (:class:`Deferred`): the code of such a module runs when one of its
  names is first used, except names of submodules. Until then, torch's decorators for ``torch.compile`` return the
  function unchanged.

kvkeep imports names of transformers from their modules (``transformers.cache_utils``). An import from the package would
first read the files of all models.

Only the command line calls this function, because it controls its process. A program that uses kvkeep as a library
imports transformers completely.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, Unpack

UNUSED = ("scipy", "sklearn")
"""Optional packages that transformers imports for losses and for assisted decoding with several tokenizers."""

DEFERRED = ("transformers", "transformers.models", "transformers.processing_utils")
"""Modules that read the files of all models. Of the last one, only typing's Unpack is used."""

_LOCK = threading.RLock()


def import_transformers() -> None:
    """Import ``transformers.modeling_utils`` without the parts that a model on the CPU does not use."""
    if "transformers.modeling_utils" in sys.modules:
        return
    import torch

    if torch.cuda.is_available():  # transformers may compile on a GPU
        return
    with _hidden(UNUSED):
        known = {"__version__": version("transformers"), "Unpack": Unpack}
        for name in DEFERRED:
            defer(name, known)
        _decide_distributed()
        decorators = {name: _undecorated for name in ("allow_in_graph", "assume_constant_result", "disable")}
        defer("torch._dynamo", decorators, ("_trace_wrapped_higher_order_op",))  # masks use this submodule
        import transformers.modeling_utils  # noqa: F401 - fills sys.modules


def defer(name: str, given: dict[str, Any], parts: tuple[str, ...] | None = None) -> None:
    """Defer the module ``name``: its code runs when a name outside ``given`` is first used. parts: the submodules that
    can be imported before that; None: all."""
    if name in sys.modules or (spec := find_spec(name)) is None:
        return
    module: ModuleType = module_from_spec(spec)
    vars(module).update(given)
    module.__class__ = Deferred
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    if parts is not None:
        for part in parts:
            with suppress(ImportError):
                import_module(f"{name}.{part}")
        vars(module).pop("__path__", None)  # Python reads it to import other submodules, which runs the module


class Deferred(ModuleType):
    """A module whose code has not run. :class:`importlib.util.LazyLoader` makes similar modules, but it runs a package
    when one of its submodules is imported."""

    def __getattr__(self, name: str) -> Any:
        package = self.__spec__ is not None and self.__spec__.submodule_search_locations is not None
        if name.startswith("__") and not (package and name == "__path__"):
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        with _LOCK:
            if self.__class__ is Deferred and not self._has(name):
                self._run()
        return getattr(sys.modules[self.__name__], name)

    def _has(self, name: str) -> bool:
        """Import the submodule ``name``, if it is one."""
        if "__path__" not in vars(self) or find_spec(child := f"{self.__name__}.{name}") is None:
            return False
        vars(self)[name] = import_module(child)
        return True

    def _run(self) -> None:
        """Run the module in place."""
        object.__setattr__(self, "__class__", ModuleType)
        assert self.__spec__ is not None and self.__spec__.loader is not None
        if (folders := self.__spec__.submodule_search_locations) is not None:
            self.__path__ = list(folders)
        self.__spec__.loader.exec_module(self)
        made = sys.modules[self.__name__]  # transformers replaces its entry in sys.modules
        if made is not self:
            vars(self)["__getattr__"] = lambda name: getattr(made, name)


def _undecorated(function: Any = None, *given: Any, **options: Any) -> Any:
    return (lambda one: one) if function is None else function


def _decide_distributed() -> None:
    """Make transformers find, and cache, that torch has no distributed support."""
    import torch.distributed
    from transformers.utils.import_utils import is_torch_distributed_available

    stated: Callable[[], bool] = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = stated


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Within the block, prevent imports of the packages ``names``, unless they are already imported."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None: as Python documents
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
