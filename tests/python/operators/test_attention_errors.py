"""Wrong arguments: an error before any work that names the argument, what it should be and is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ikattn
import ikattn.reference
from agreement import direction
from samples import Arguments, Sample, of_features, of_weights

INF, NAN = float("inf"), float("nan")
B, H, L, S, D, D_V, M = 2, 4, 5, 7, 8, 6, 3
SHAPE = Sample("errors", B, H, None, L, S, D, D_V, M)
GROUPED = {"enable_gqa": True}
WANTED = [True] * 5 + [False] * 2
SEED = torch.tensor([1, 2])


@dataclass(frozen=True)
class Mistake:
    """A change to a correct call, the error, and what its message says: the argument first, what
    came last."""

    name: str
    change: Callable[[Arguments], Arguments]
    says: tuple[str | torch.dtype | float, ...]
    error: type[Exception] = RuntimeError

    def message(self, function: str) -> str:
        *expected, got = (_pattern(word) for word in self.says)
        return ".*".join([f"{function}: ", *expected, "got", got])


def _pattern(word: str | torch.dtype | float) -> str:
    if isinstance(word, torch.dtype):
        return f"({word}|{c10_name(word)})"
    text = f"{word:g}" if isinstance(word, float) else word
    return rf"(?<!\w){re.escape(text)}(?!\w)"


def c10_name(dtype: torch.dtype) -> str:
    """How C++ prints a dtype."""
    special = {"bool": "Bool", "bfloat16": "BFloat16", "float8_e4m3fn": "Float8_e4m3fn"}
    name = str(dtype).removeprefix("torch.")
    return special.get(name) or torch.empty(0, dtype=dtype).type().split(".")[-1][: -len("Tensor")]


def shaped(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Callable[..., Arguments]:
    return lambda call: {name: torch.zeros(shape, dtype=dtype)}


def typed(name: str, dtype: torch.dtype) -> Callable[..., Arguments]:
    """An argument in another type; ``all`` of them, or of those the call lacks, zeros."""
    if name == "all":
        return lambda call: {n: x.to(dtype) for n, x in call.items() if torch.is_tensor(x)}
    absent = {"key_bias": torch.zeros(S), "attn_mask": torch.zeros(L, S)}
    return lambda call: {name: (absent | call)[name].to(dtype)}


def valued(**options: object) -> Callable[..., Arguments]:
    return lambda call: options


def grouped(heads: int) -> Callable[..., Arguments]:
    """key and value with this many heads."""
    return lambda call: (
        GROUPED
        | {
            name: torch.zeros(B, heads, S, call[name].shape[-1]).double()
            for name in ("key", "value")
            if name in call
        }
    )


def words_of(text: str) -> tuple[str | torch.dtype, ...]:
    words = [word.strip() for word in text.split(";")]
    return tuple(getattr(torch, word[6:]) if word.startswith("torch.") else word for word in words)


def mistakes_of_shape(table: str) -> list[Mistake]:
    """Lines of an argument, its wrong shape, and what the message says after its name."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [
        Mistake(
            f"{name} of {shape}",
            shaped(name, *map(int, shape.split())),
            (name, *words_of(says), str([*map(int, shape.split())])),
        )
        for name, shape, says in rows
    ]


def mistakes_of_type(table: str) -> list[Mistake]:
    """Lines of an argument, its wrong type, and what the message says after its name."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [
        Mistake(
            f"{name} in {dtype}",
            typed(name, getattr(torch, dtype)),
            (name.replace("all", "query"), *words_of(says), getattr(torch, dtype)),
            TypeError,
        )
        for name, dtype, says in rows
    ]


SHAPES = mistakes_of_shape("""
    query     | 4 5 8       | [B, H, L, d]
    key       | 4 7 8       | [B, G, S, d]
    value     | 4 7 8       | [B, G, S, d_v]
    query     | 2 0 5 8     | at least one head
    query     | 2 4 5 0     | head size
    key       | 3 4 7 8     | batch size; 2
    key       | 2 4 7 9     | head size; 8
    value     | 2 4 8 6     | = [2, 4, 7, d_v]
    w1        | 8 3         | [H, d, M]
    w1        | 4 9 3       | d = 8
    w1        | 2 8 3       | H = 4
    w1        | 3 4 8 3     | batch size 2
    w1        | 4 8 0       | from 1 to 2^20
    w2        | 4 8 4       | shape of w1, [4, 8, 3]
    key_bias  | 8           | [2, 4, 7]
    key_bias  | 2 7         | [2, 4, 7]
    attn_mask | 5 8         | [2, 4, 5, 7]
    attn_mask | 2 5 7       | [2, 4, 5, 7]
""")
HEADS = [
    Mistake(
        "key of 2 heads",
        shaped("key", B, 2, S, D),
        ("key", "heads of query, 4", "2 (enable_gqa=True"),
    ),
    *(
        Mistake(f"{n} grouped heads", grouped(n), ("heads of key must divide", "4", str(n)))
        for n in (3, 8, 0)
    ),
    Mistake(
        "bool mask [B, S]",
        shaped("attn_mask", B, S, dtype=torch.bool),
        ("attn_mask", "[2, 4, 5, 7]", "[2, 7]"),
    ),
]
TYPES = mistakes_of_type("""
    all       | int64         | float64, float32, bfloat16 or float16
    all       | float8_e4m3fn | float64
    key       | float32       | dtype of query; torch.float64
    value     | bfloat16      | dtype of query
    w1        | bfloat16      | dtype of query
    w2        | float32       | dtype of w1
    key_bias  | bool          | floating point
    key_bias  | float16       | dtype of query
    attn_mask | int64         | bool; floating point
    attn_mask | float16       | dtype of query
""")
SEEDS = [
    Mistake(
        f"dropout_seed {told}",
        valued(dropout_p=0.5, dropout_seed=seed),
        ("dropout_seed", "int64", told),
    )
    for seed, told in (
        (torch.zeros(3).long(), "[3]"),
        (torch.zeros(1, 2).long(), "[1, 2]"),
        (torch.zeros(2).int(), torch.int32),
        (torch.zeros(2), torch.float32),
    )
]
WIDER = Mistake(
    "w1 in a higher precision",
    lambda call: {**typed("all", torch.float32)(call), "w1": call["w1"]},
    ("w1", "dtype of query", torch.float32, torch.float64),
    TypeError,
)

NUMBERS = [
    Mistake(f"{name} = {number}", valued(**{name: number}), (name, says, number), ValueError)
    for name, numbers, says in (
        ("p", (0.999, 0.5, 0.0, -1.0, INF, -INF, NAN), ">= 1 or None"),
        ("eps", (0.0, -1.0, -1e-5, INF, NAN), "finite and positive"),
        ("magnitude_scale", (INF, -INF, NAN), "finite"),
        ("dropout_p", (-0.1, 1.0, 1.5, INF, -INF, NAN), "in [0, 1)"),
    )
    for number in numbers
]

ALL = [*SHAPES, *HEADS, *TYPES, *SEEDS, WIDER, *NUMBERS]


def correct_call() -> Arguments:
    return {name: x for name, x in SHAPE.arguments().items() if x is not None}


def on(device: str, call: Arguments) -> Arguments:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}


# Kernels check what they are given; on the meta device, and for torch.compile, fake ones do.
each_device = pytest.mark.parametrize("device", ["cpu", "meta"])


@pytest.mark.parametrize("way", ["reference", "vmap", "grad", "jvp", "fake", "recorded"])
@pytest.mark.parametrize("mistake", SHAPES[:8], ids=lambda mistake: mistake.name)
def test_errors_are_the_same_where_no_kernel_runs(mistake: Mistake, way: str) -> None:
    call = correct_call() | mistake.change(correct_call())

    def attend(w1: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention(**(call | {"w1": w1}))

    def faked() -> Tensor:
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, call)
            return ikattn.implicit_kernel_attention(**fake)

    w1 = call["w1"]
    ways: dict[str, Callable[[], object]] = {
        "reference": lambda: ikattn.reference.implicit_kernel_attention(**call),
        "vmap": lambda: torch.func.vmap(attend)(torch.stack([w1, w1])),
        "grad": lambda: torch.func.grad(lambda x: attend(x).sum())(w1),
        "jvp": lambda: torch.func.jvp(attend, (w1,), (w1,)),
        "fake": faked,
        "recorded": lambda: attend(w1.clone().requires_grad_()),
    }
    with pytest.raises(mistake.error, match=mistake.message("implicit_kernel_attention")):
        ways[way]()


FEATURE_MISTAKES = mistakes_of_shape("""
    x  | 4 5 8     | [B, H, L, d]
    x  | 2 0 5 8   | at least one head
    w1 | 8 3       | [H, d, M]
    w1 | 4 9 3     | d = 8
    w1 | 2 8 3     | H = 4
    w1 | 3 4 8 3   | batch size 2
    w1 | 4 8 0     | from 1 to 2^20
    w2 | 4 8 4     | shape of w1
""") + mistakes_of_type("""
    x  | int64     | float64
    w1 | float16   | dtype of
    w2 | float32   | dtype of w1
""")


OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[[Arguments], Arguments]]] = {
    "attention": (ikattn.implicit_kernel_attention, lambda call: call),
    "weights": (ikattn.implicit_kernel_weights, of_weights),
    "features": (ikattn.ops.spectral_features, of_features),
}
MISTAKES = [("attention", x) for x in ALL] + [("features", x) for x in FEATURE_MISTAKES]
MISTAKES += [("weights", x) for x in ALL if not x.name.startswith("value")]


@each_device
@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=lambda x: getattr(x, "name", x))
def test_operators_name_the_wrong_argument(name: str, mistake: Mistake, device: str) -> None:
    function, of_operator = OPERATORS[name]
    call = of_operator(correct_call())
    with pytest.raises(mistake.error, match=mistake.message(function.__name__)):
        function(**on(device, call | mistake.change(call)))


def assert_named(function: Callable[..., Tensor], call: Arguments, name: str) -> None:
    """Calls with a tensor on another device, and with a sparse one."""
    first, second = list(call)[:2]
    says = f"{name} must be on the device of {first}, cpu, got meta"
    if name == first:  # the others are where it is not
        says = f"{second} must be on the device of {first}, meta, got cpu"
    with pytest.raises(RuntimeError, match=f"{function.__name__}: {says}"):
        function(**call | {name: call[name].to("meta")})
    says = rf"{name} must be a dense \(strided\) tensor, got .*Sparse"
    with pytest.raises(RuntimeError, match=says):
        function(**call | {name: call[name].to_sparse()})


# In inference mode autograd, which looks first otherwise, is passed by.
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tensor_on_another_device_or_sparse_is_named(operator: str, inference: bool) -> None:
    call = correct_call() | {"dropout_p": 0.5, "dropout_seed": SEED}
    call |= {"key_bias": torch.zeros(S).double(), "attn_mask": torch.zeros(L, S).double()}
    function, of_operator = OPERATORS[operator]
    call = of_operator(call)
    with torch.inference_mode(inference):
        for name in [n for n, x in call.items() if isinstance(x, Tensor)]:
            assert_named(function, call, name)


def test_what_few_calls_lack_or_have_too_much_of() -> None:
    call, (x, w) = correct_call(), (torch.ones(1, 2, 40, 1), torch.ones(()).expand(2, 1, 2**56))
    with pytest.raises(RuntimeError, match=r"w1 must hold from 1 to 2\^20 frequencies, got \[2, 1"):
        ikattn.implicit_kernel_attention(x, x, x, w)
    few = call | grouped(2)(call) | {"w1": torch.zeros(3, D, M).double(), "w2": None}
    with pytest.raises(RuntimeError, match=r"w1 must have 4 heads .* or 2 .*got \[3, 8, 3\]"):
        ikattn.implicit_kernel_attention(**few)
    with pytest.raises(ValueError, match=r"dropout_seed must be given.*draw_dropout_seed"):
        torch.ops.ikattn.implicit_kernel_attention(**call | {"dropout_p": 0.5})
    with pytest.raises(RuntimeError, match="spectral_features") as caught:
        ikattn.ops.spectral_features(call["query"], call["w1"][:, :7])
    assert "query" not in str(caught.value)


@pytest.mark.parametrize(
    ("seed", "sizes", "dropout_p", "error", "message"),
    [
        (SEED, (1, 1, 2, 2), -0.5, ValueError, r"dropout_p must be in \[0, 1\)"),
        (SEED, (1, 1, 2, 2), NAN, ValueError, r"dropout_p must be in \[0, 1\)"),
        (torch.zeros(3).long(), (1, 1, 2, 2), 0.5, RuntimeError, "dropout_seed must be an int64"),
        (torch.zeros(2), (1, 1, 2, 2), 0.5, RuntimeError, "dropout_seed must be an int64"),
        (SEED, (1, 1, -2, 2), 0.5, RuntimeError, "sizes must not be negative, got 1, 1, -2, 2"),
    ],
)
def test_keep_mask_names_what_is_wrong(seed, sizes, dropout_p, error, message):
    with pytest.raises(error, match=f"dropout_keep_mask: .*{message}"):
        ikattn.ops.dropout_keep_mask(seed, sizes, dropout_p)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"kernel": "cosine"}, r"kernel must be \"dot\", \"rbf\" or \"implicit\", got 'cosine'"),
        ({"kernel": "implicit"}, r"w1 must be given .*w1 missing"),
        ({"kernel": "rbf", "w1": torch.zeros(H, D, M).double()}, r"w1 must be given .*w1 given"),
        ({"w1": torch.zeros(H, D, M).double()}, r"w1 must be given .*w1 given"),
        ({"w2": torch.zeros(H, D, M).double()}, r"w2 must be given for kernel=\"implicit\" and"),
        ({"kernel": "rbf", "p": 0.2}, r"p must be a finite number >= 1 or None, got 0\.2"),
        ({"magnitude_scale": 0.1}, r"magnitude_scale must be None for kernel=\"dot\".*got 0\.1"),
        ({"key": torch.zeros(2, 2, 5, 9)}, r"key must have .* of query, .*got \[2, 2, 5, 9\]"),
    ],
)
def test_decompose_names_what_does_not_fit(options: Arguments, pattern: str) -> None:
    call = correct_call()
    tokens = {"query": call["query"], "key": call["key"]}
    with pytest.raises(ValueError, match=pattern):
        ikattn.ops.similarity_and_magnitude(**tokens | options)


SPOILT: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "shape": ("grad_output", lambda grad: grad[:, :, :-1]),
    "dtype": ("grad_output", lambda grad: grad.float()),
    "order of axes": ("grad_output", lambda grad: grad.mT),
    "device": ("grad_output", lambda grad: grad.to("meta")),
    "output of another call": ("output", lambda x: x[:1]),
    "log_normalizer of another call": ("log_normalizer", lambda x: x[:1]),
}


@pytest.mark.parametrize(("name", "spoil"), SPOILT.values(), ids=SPOILT)
def test_backward_refuses_a_gradient_unlike_the_output_and_results_of_other_calls(name, spoil):
    """Tensors are read by address: a wrong shape must not be a wrong read."""
    call = correct_call()
    names, forward = ("output", "log_normalizer"), torch.ops.ikattn.implicit_kernel_attention
    results = dict(zip(names, forward(**call), strict=True))
    if name in results:
        results[name] = spoil(results[name])
    grad = direction(results["output"])
    grad = spoil(grad) if name == "grad_output" else grad
    tensors = [call[each] for each in ("query", "key", "value", "w1", "w2")]
    arguments = [grad, *tensors, *results.values()]
    for given in [arguments] + [[x.to("meta") for x in arguments]] * (not grad.is_meta):
        with pytest.raises(RuntimeError, match=rf"(?<!\w){name} must"):
            torch.ops.ikattn.implicit_kernel_attention_backward(*given, wanted=WANTED)


def test_other_backwards_refuse_a_gradient_unlike_the_result() -> None:
    call, operators = correct_call(), torch.ops.ikattn
    query, key, w = call["query"], call["key"], (call["w1"], call["w2"])
    grad, wanted = torch.zeros(B, H, L, S - 1).double(), [True] * 4 + [False] * 2
    with pytest.raises(RuntimeError, match=r"grad_weights must be .*got"):
        operators.implicit_kernel_weights_backward(
            grad, query, key, *w, wanted=wanted, average_heads=False
        )
    grad = torch.zeros(B, H, L, 2 * M - 1).double()
    with pytest.raises(RuntimeError, match=r"grad_features must be .*got"):
        operators.spectral_features_backward(grad, query, *w, wanted=[True] * 3)


@pytest.mark.parametrize(
    "function",
    [
        ikattn.implicit_kernel_attention,
        ikattn.which_kernels,
        ikattn.reference.implicit_kernel_attention,
        ikattn.implicit_kernel_weights,
        ikattn.reference.implicit_kernel_weights,
    ],
)
def test_an_option_that_is_none_is_a_type_error_that_names_it(function) -> None:
    x, w1 = torch.randn(1, 2, 3, 4), torch.randn(2, 4, 5)
    tensors = (x, x, w1) if "weights" in function.__name__ else (x, x, x, w1)
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'causal'.*is_causal"):
        function(*tensors, causal=True)
    edges = ikattn.ops.Edges.from_coo(*torch.tensor([[0, 1], [1, 0]]), num_targets=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'attn_mask'"):
        ikattn.ops.softmax_edge_attention(*torch.randn(3, 2, 1, 4), edges, attn_mask=None)
