"""Which attention modules a model has, and what of each can be changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.nn.multihead_attention import MultiheadAttention

Selection: TypeAlias = (
    Callable[[str, nn.Module], bool] | str | type[nn.Module] | Sequence[str | type[nn.Module]]
)


_WRAPPERS = ("DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel")


class AttentionModule(NamedTuple):
    """An attention module of a model, and every name it goes by there."""

    module: StockMultiheadAttention
    names: list[str]

    @property
    def is_ours(self) -> bool:
        """Whether it is an ``ikattn.MultiheadAttention`` that nobody has changed."""
        return type(self.module) is MultiheadAttention and "forward" not in vars(self.module)

    @property
    def is_plain(self) -> bool:
        """Whether nobody else has changed what it computes."""
        is_known = type(self.module) in (StockMultiheadAttention, MultiheadAttention)
        return is_known and "forward" not in vars(self.module)

    @property
    def kernel(self) -> str | None:
        """The kernel of one of ours, None of another."""
        return getattr(self.module, "kernel", None)

    def describe(self) -> str:
        """What the module is, for a table."""
        if hasattr(self.module, "_hf_hook"):
            return "offloaded by accelerate: convert the model before that"
        if not self.is_plain:
            kind = type(self.module)
            own_forward = " with a forward of its own" if "forward" in vars(self.module) else ""
            return f"a {kind.__module__}.{kind.__qualname__}{own_forward}"
        if not self.is_ours:
            return "nn.MultiheadAttention"
        described = f"kernel={self.kernel!r}"
        if self.kernel != "dot":
            described += f", p={self.module.p}"
        if self.kernel == "implicit":
            described += f", {type(self.module.spectral).__name__}"
        return described

    def __str__(self) -> str:
        return " = ".join(name or "the model itself" for name in self.names)


class ConversionReport(tuple[AttentionModule, ...]):
    """The attention modules of a model, each once, and what each is now; prints as a table."""

    __slots__ = ()

    @property
    def converted(self) -> tuple[AttentionModule, ...]:
        """Those that are ``ikattn.MultiheadAttention``."""
        return tuple(found for found in self if found.is_ours)

    @property
    def stock(self) -> tuple[AttentionModule, ...]:
        """Those that ``convert`` could change."""
        return tuple(found for found in self if found.is_plain and not found.is_ours)

    @property
    def left(self) -> tuple[AttentionModule, ...]:
        """Those that ``convert`` leaves alone, because somebody else has changed them."""
        return tuple(found for found in self if not found.is_plain)

    def __str__(self) -> str:
        width = max((len(str(found)) for found in self), default=0)
        lines = [
            f"{found!s:{width}}  {'left alone: ' * (not found.is_plain)}{found.describe()}"
            for found in self
        ]
        return "\n".join(lines)


def conversion_report(model: nn.Module) -> ConversionReport:
    """Tells of every attention module in a model whether it is converted, could be, or not.

    Args:
        model: Any module.

    Returns:
        A tuple, in the order of the modules' first names, that prints as a table.

    Example:
        >>> import torch, ikattn
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4), 2)
        >>> _ = ikattn.convert(model, select="layers.0.*")
        >>> print(ikattn.conversion_report(model))
        layers.0.self_attn  kernel='implicit', p=2.0, Direct
        layers.1.self_attn  nn.MultiheadAttention
    """
    by_module: dict[nn.Module, AttentionModule] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, StockMultiheadAttention):
            by_module.setdefault(module, AttentionModule(module, [])).names.append(name)
    return ConversionReport(by_module.values())


def unseen_attention(model: nn.Module, seen: Iterable[nn.Module]) -> list[str]:
    """Names of modules that look like attention, and neither hold nor are part of what is seen.

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
    """The first names, and how many more there are."""
    more = "" if len(names) <= 4 else f" and {len(names) - 4} more"
    return f"{', '.join(names[:4])}{more}"


def select_modules(model: nn.Module, select: Selection | None) -> list[AttentionModule]:
    """Returns the selected attention modules, each once, in the order of their first names.

    Raises:
        TypeError: The model is none, or select is no selection.
        ValueError: There are none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_selection(select)
    report = conversion_report(model)
    if not report:
        types = sorted({type(module).__name__ for module in model.modules()})
        libraries = {type(x).__module__.partition(".")[0] for x in model.modules()}
        hint = "".join(
            f"; for models of {library} there is ikattn.integrations.{module}"
            for library, module in (("transformers", "transformers"), ("torch_geometric", "pyg"))
            if library in libraries
        )
        raise ValueError(f"no nn.MultiheadAttention in this model of {', '.join(types)}{hint}")
    selected = []
    for found in report:
        path = chain.from_iterable(path_to(model, name) for name in found.names)
        if is_selected(found.names, found.module, path, select):
            selected.append(found)
    if not selected:
        names = ", ".join(map(str, report))
        raise ValueError(f"select={select!r} matches none of the attention modules: {names}")
    return selected


def check_unwrapped(function: str, model: nn.Module) -> None:
    """Raises ValueError where torch keeps parameters alike on all ranks, but not new ones."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__[:6] == "torch."}
        for wrapper in kinds.intersection(_WRAPPERS):
            raise ValueError(
                f"{function}: expected a model that is not wrapped yet, got {wrapper} around "
                f"{name or 'it'}, which would not keep new frequencies alike on all ranks; call "
                f"{function} first"
            )


def _check_selection(select: object) -> None:
    several = isinstance(select, Collection) and all(isinstance(x, str | type) for x in select)
    if select is not None and not callable(select) and not several:
        raise TypeError(
            "select must be a predicate of name and module, a pattern of names, a type, or a list "
            f"of patterns and types, got {select!r}"
        )


def is_selected(
    names: Sequence[str], module: nn.Module, path: Iterable[nn.Module], select: Selection | None
) -> bool:
    """Whether ``select`` names the module, which has these names; ``path`` leads to it."""
    if select is None:
        return True
    if callable(select) and not isinstance(select, type):
        return any(select(name, module) for name in names)
    wanted: list[Any] = [select] if isinstance(select, str | type) else list(select)
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
