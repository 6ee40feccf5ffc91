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
        """The pattern of the message."""
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
    query     | 1 2 4 5 8   | [B, H, L, d]
    key       | 4 7 8       | [B, G, S, d]
    value     | 4 7 8       | [B, G, S, d_v]
    query     | 2 0 5 8     | at least one head
    query     | 2 4 5 0     | head size
    key       | 3 4 7 8     | batch size; 2
    key       | 2 4 7 9     | head size; 8
    value     | 2 4 8 6     | = [2, 4, 7, d_v]
    value     | 2 2 7 6     | = [2, 4, 7, d_v]
    value     | 1 4 7 6     | = [2, 4, 7, d_v]
    w1        | 8 3         | [H, d, M]
    w1        | 1 2 4 8 3   | [H, d, M]
    w1        | 4 9 3       | d = 8
    w1        | 2 8 3       | H = 4
    w1        | 1 8 3       | H = 4
    w1        | 3 4 8 3     | batch size 2
    w1        | 4 8 0       | from 1 to 2^20
    w1        | 8 4 3       | d = 8
    w2        | 4 8 4       | shape of w1, [4, 8, 3]
    w2        | 2 4 8 3     | shape of w1, [4, 8, 3]
    w2        | 4 8 1       | shape of w1
    key_bias  | 8           | [2, 4, 7]
    key_bias  | 2 7         | [2, 4, 7]
    key_bias  | 2 4 1 7     | [2, 4, 7]
    attn_mask | 5 8         | [2, 4, 5, 7]
    attn_mask | 2 5 7       | [2, 4, 5, 7]
    attn_mask | 8 5 7       | [2, 4, 5, 7]
    attn_mask | 1 2 4 5 7   | [2, 4, 5, 7]
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
    all       | complex64     | float64
    all       | bool          | float64
    all       | float8_e4m3fn | float64
    key       | float32       | dtype of query; torch.float64
    value     | bfloat16      | dtype of query
    w1        | bfloat16      | dtype of query
    w1        | int32         | dtype of query
    w2        | float32       | dtype of w1
    key_bias  | int64         | floating point
    key_bias  | bool          | floating point
    key_bias  | float16       | dtype of query
    attn_mask | int64         | bool; floating point
    attn_mask | uint8         | bool; floating point
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


def test_more_frequencies_than_sizes_of_64_bits_allow_are_refused() -> None:
    x, w = torch.ones(1, 2, 40, 1), torch.ones(()).expand(2, 1, 2**56)
    with pytest.raises(RuntimeError, match=r"w1 must hold from 1 to 2\^20 frequencies, got \[2, 1"):
        ikattn.implicit_kernel_attention(x, x, x, w)


ATTENTION_TENSORS = ("query", "key", "value", "w1", "w2", "key_bias", "attn_mask")


def correct_call() -> Arguments:
    return {name: x for name, x in SHAPE.arguments().items() if x is not None}


def on(device: str, call: Arguments) -> Arguments:
    """Moves a call to a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}


# Kernels check what they are given; on the meta device, and for torch.compile, fake ones do.
each_device = pytest.mark.parametrize("device", ["cpu", "meta"])


@each_device
@pytest.mark.parametrize("mistake", ALL, ids=lambda mistake: mistake.name)
def test_attention_names_the_wrong_argument(mistake: Mistake, device: str) -> None:
    call = correct_call()
    with pytest.raises(mistake.error, match=mistake.message("implicit_kernel_attention")):
        ikattn.implicit_kernel_attention(**on(device, call | mistake.change(call)))


@each_device
@pytest.mark.parametrize(
    "mistake",
    [mistake for mistake in ALL if not mistake.name.startswith("value")],
    ids=lambda mistake: mistake.name,
)
def test_weights_name_the_wrong_argument(mistake: Mistake, device: str) -> None:
    call = of_weights(correct_call())
    with pytest.raises(mistake.error, match=mistake.message("implicit_kernel_weights")):
        ikattn.implicit_kernel_weights(**on(device, call | mistake.change(call)))


@pytest.mark.parametrize("way", ["reference", "vmap", "grad", "jvp", "fake"])
@pytest.mark.parametrize("mistake", SHAPES[:8], ids=lambda mistake: mistake.name)
def test_errors_are_the_same_where_no_kernel_runs(mistake: Mistake, way: str) -> None:
    call = correct_call() | mistake.change(correct_call())

    def attend(w1: Tensor) -> Tensor:
        return ikattn.implicit_kernel_attention(**(call | {"w1": w1}))

    def faked() -> Tensor:
        with FakeTensorMode() as mode:
            fakes = {
                name: mode.from_tensor(x) if isinstance(x, Tensor) else x
                for name, x in call.items()
            }
            return ikattn.implicit_kernel_attention(**fakes)

    w1 = call["w1"]
    ways: dict[str, Callable[[], object]] = {
        "reference": lambda: ikattn.reference.implicit_kernel_attention(**call),
        "vmap": lambda: torch.func.vmap(attend)(torch.stack([w1, w1])),
        "grad": lambda: torch.func.grad(lambda x: attend(x).sum())(w1),
        "jvp": lambda: torch.func.jvp(attend, (w1,), (w1,)),
        "fake": faked,
    }
    with pytest.raises(mistake.error, match=mistake.message("implicit_kernel_attention")):
        ways[way]()


@pytest.mark.parametrize("mistake", SHAPES[:8], ids=lambda mistake: mistake.name)
def test_errors_are_the_same_where_a_gradient_is_wanted(mistake: Mistake) -> None:
    call = correct_call() | mistake.change(correct_call())
    call["w1"].requires_grad_()
    with pytest.raises(mistake.error, match=mistake.message("implicit_kernel_attention")):
        ikattn.implicit_kernel_attention(**call)


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


@each_device
@pytest.mark.parametrize("mistake", FEATURE_MISTAKES, ids=lambda mistake: mistake.name)
def test_features_name_the_wrong_argument(mistake: Mistake, device: str) -> None:
    call = of_features(correct_call())
    with pytest.raises(mistake.error, match=mistake.message("spectral_features")):
        ikattn.ops.spectral_features(**on(device, call | mistake.change(call)))


def test_features_never_speak_of_a_query() -> None:
    call = correct_call()
    with pytest.raises(RuntimeError, match="spectral_features") as caught:
        ikattn.ops.spectral_features(call["query"], call["w1"][:, :7])
    assert "query" not in str(caught.value)


# In inference mode autograd, which looks first otherwise, is passed by.
each_mode = pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])


@each_mode
@pytest.mark.parametrize("name", [*ATTENTION_TENSORS, "dropout_seed"])
def test_a_tensor_on_another_device_is_named(name: str, inference: bool) -> None:
    call = correct_call() | {
        "key_bias": torch.zeros(S).double(),
        "attn_mask": torch.zeros(L, S).double(),
        "dropout_p": 0.5,
        "dropout_seed": torch.tensor([1, 2]),
    }
    call[name] = call[name].to("meta")
    message = f": {name} must be on the device of query, cpu, got meta"
    if name == "query":  # the others are where it is not
        message = ": key must be on the device of query, meta, got cpu"
    with torch.inference_mode(inference):
        with pytest.raises(RuntimeError, match=f"implicit_kernel_attention{message}"):
            ikattn.implicit_kernel_attention(**call)
        if name != "value":
            with pytest.raises(RuntimeError, match=f"implicit_kernel_weights{message}"):
                ikattn.implicit_kernel_weights(**of_weights(call))


@each_mode
@pytest.mark.parametrize("name", ["x", "w1", "w2"])
def test_a_feature_argument_on_another_device_is_named(name: str, inference: bool) -> None:
    call = of_features(correct_call())
    call[name] = call[name].to("meta")
    message = f"{name} must be on the device of x, cpu, got meta"
    if name == "x":
        message = "w1 must be on the device of x, meta, got cpu"
    with (
        torch.inference_mode(inference),
        pytest.raises(RuntimeError, match=f"spectral_features: {message}"),
    ):
        ikattn.ops.spectral_features(**call)


@each_mode
@pytest.mark.parametrize("name", ATTENTION_TENSORS)
def test_a_sparse_tensor_is_refused(name: str, inference: bool) -> None:
    call = correct_call()
    call |= {"key_bias": torch.zeros(S).double(), "attn_mask": torch.zeros(L, S).double()}
    call[name] = call[name].to_sparse()
    with (
        torch.inference_mode(inference),
        pytest.raises(
            RuntimeError, match=rf"{name} must be a dense \(strided\) tensor, got .*Sparse"
        ),
    ):
        ikattn.implicit_kernel_attention(**call)


def test_grouped_heads_need_frequencies_of_either_side() -> None:
    call = correct_call()
    call |= grouped(2)(call) | {"w1": torch.zeros(3, D, M).double(), "w2": None}
    with pytest.raises(RuntimeError, match=r"w1 must have 4 heads .* or 2 .*got \[3, 8, 3\]"):
        ikattn.implicit_kernel_attention(**call)


def test_the_operator_itself_wants_a_seed_with_its_dropout() -> None:
    call = correct_call() | {"dropout_p": 0.5}
    with pytest.raises(ValueError, match=r"dropout_seed must be given.*draw_dropout_seed"):
        torch.ops.ikattn.implicit_kernel_attention(**call)


@pytest.mark.parametrize(
    ("seed", "sizes", "dropout_p", "error", "message"),
    [
        (SEED, (1, 1, 2, 2), -0.5, ValueError, r"dropout_p must be in \[0, 1\)"),
        (SEED, (1, 1, 2, 2), 1.0, ValueError, r"dropout_p must be in \[0, 1\)"),
        (SEED, (1, 1, 2, 2), NAN, ValueError, r"dropout_p must be in \[0, 1\)"),
        (torch.zeros(3).long(), (1, 1, 2, 2), 0.5, RuntimeError, "dropout_seed must be an int64"),
        (torch.zeros(2), (1, 1, 2, 2), 0.5, RuntimeError, "dropout_seed must be an int64"),
        (SEED[None], (1, 1, 2, 2), 0.5, RuntimeError, "dropout_seed must be an int64"),
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
        ({"w2": torch.zeros(H, D, M).double()}, r"w2 must be given for kernel=\"implicit\" only"),
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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda grad: grad[:, :, :-1],
        lambda grad: grad.float(),
        lambda grad: grad.mT,
        lambda grad: grad.to("meta"),
    ],
    ids=["shape", "dtype", "order of axes", "device"],
)
def test_backward_refuses_a_gradient_unlike_the_output(spoil: Callable[..., Tensor]) -> None:
    call = correct_call()
    output, log_normalizer = torch.ops.ikattn.implicit_kernel_attention(**call)
    tensors = [call[name] for name in ("query", "key", "value", "w1", "w2")]
    arguments = [spoil(direction(output)), *tensors, output, log_normalizer]
    backward = torch.ops.ikattn.implicit_kernel_attention_backward
    with pytest.raises(RuntimeError, match=r"grad_output must be .*got"):
        backward(*arguments, wanted=WANTED)
    if arguments[0].is_meta:
        return
    with pytest.raises(RuntimeError, match=r"grad_output must be .*got"):
        backward(*(x.to("meta") for x in arguments), wanted=WANTED)


@pytest.mark.parametrize("name", ["output", "log_normalizer"])
def test_backward_refuses_results_of_another_call(name: str) -> None:
    """Tensors are read by address: a wrong shape must not be a wrong read."""
    call = correct_call()
    output, log_normalizer = torch.ops.ikattn.implicit_kernel_attention(**call)
    results = {"output": output, "log_normalizer": log_normalizer}
    results[name] = results[name][:1]
    tensors = [call[each] for each in ("query", "key", "value", "w1", "w2")]
    with pytest.raises(RuntimeError, match=f"{name} must"):
        torch.ops.ikattn.implicit_kernel_attention_backward(
            direction(results["output"]),
            *tensors,
            results["output"],
            results["log_normalizer"],
            wanted=WANTED,
        )


@pytest.mark.parametrize("operator", ["weights", "features"])
def test_other_backwards_refuse_a_gradient_unlike_the_result(operator: str) -> None:
    call = correct_call()
    if operator == "weights":
        grad = torch.zeros(B, H, L, S - 1).double()
        tensors = (call["query"], call["key"], call["w1"], call["w2"])
        options: Arguments = {"wanted": [True] * 4 + [False] * 2, "average_heads": False}
        function = torch.ops.ikattn.implicit_kernel_weights_backward
    else:
        grad = torch.zeros(B, H, L, 2 * M - 1).double()
        tensors = (call["query"], call["w1"], call["w2"])
        options = {"wanted": [True] * 3}
        function = torch.ops.ikattn.spectral_features_backward
    with pytest.raises(RuntimeError, match=rf"grad_{operator} must be .*got"):
        function(grad, *tensors, **options)


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
