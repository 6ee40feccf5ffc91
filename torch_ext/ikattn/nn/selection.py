"""How modules of a model are selected, and which of them look like attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

Selection: TypeAlias = (
    Callable[[str, nn.Module], bool] | str | type[nn.Module] | Sequence[str | type[nn.Module]]
)

_WRAPPERS = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")


def unseen_attention(model: nn.Module, seen: Iterable[nn.Module]) -> list[str]:
    """Names modules that look like attention, and neither hold nor are part of what is seen.

    They are told by the names of their classes; the outermost of several is named.
    """
    seen = set(seen)
    inside = {part for module in seen for part in module.modules()}
    names: list[str] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_attention = ("Attention" in kind or "Attn" in kind) and module not in inside
        if not is_attention or not any(True for _ in module.parameters()):
            continue
        if any(part in seen for part in module.modules()):
            continue
        if not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return names


def describe_unseen(names: Sequence[str]) -> str:
    """Lists the first names, and how many more there are."""
    more = "" if len(names) <= 4 else f" and {len(names) - 4} more"
    return f"{', '.join(names[:4])}{more}"


def wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields torch's wrappers for several ranks in a model, with what each is around."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__[:6] == "torch."}
        yield from ((kind, name) for kind in _WRAPPERS if kind in kinds)


def check_unwrapped(function: str, model: nn.Module) -> None:
    """Raises ValueError where torch keeps parameters alike on all ranks, but not new ones."""
    for wrapper, name in wrapped(model):
        raise ValueError(
            f"{function}: expected a model that is not wrapped yet, got {wrapper} around "
            f"{name or 'it'}, which would not keep new frequencies alike on all ranks; call "
            f"{function} first"
        )


def is_selected(
    names: Sequence[str], module: nn.Module, path: Iterable[nn.Module], select: Selection | None
) -> bool:
    """Whether ``select`` names the module, which has these names; ``path`` leads to it.

    TypeError tells of a ``select``, or ``layers=``, that is no selection.
    """
    if select is None:
        return True
    if callable(select) and not isinstance(select, type):
        return any(select(name, module) for name in names)
    wanted: Any = [select] if isinstance(select, str | type) else select
    if not (isinstance(wanted, Collection) and all(isinstance(x, str | type) for x in wanted)):
        raise TypeError(
            "select must be a predicate of name and module, a pattern of names, a type, or a list "
            f"of patterns and types, got {select!r}"
        )
    types = tuple(part for part in wanted if isinstance(part, type))
    patterns = [part for part in wanted if isinstance(part, str)]
    by_name = any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
    return by_name or any(isinstance(part, types) for part in path)


def path_to(model: nn.Module, name: str) -> list[nn.Module]:
    """Returns the modules that lead from the model to the one of that name, both included."""
    modules = [model]
    for part in name.split(".") if name else ():
        modules.append(getattr(modules[-1], part))
    return modules
