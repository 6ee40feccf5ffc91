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
    return lambda call: {name: call[name].to(dtype)}


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


def all_typed(dtype: torch.dtype) -> Callable[..., Arguments]:
    return lambda call: {n: x.to(dtype) for n, x in call.items() if torch.is_tensor(x)}


SHAPES = [
    Mistake("query of 3 axes", shaped("query", H, L, D), ("query", "[B, H, L, d]", "[4, 5, 8]")),
    Mistake("query of 5 axes", shaped("query", 1, B, H, L, D), ("query", "[1, 2, 4, 5, 8]")),
    Mistake("key of 3 axes", shaped("key", H, S, D), ("key", "[B, G, S, d]", "[4, 7, 8]")),
    Mistake("value of 3 axes", shaped("value", H, S, D), ("value", "[B, G, S, d_v]", "[4, 7, 8]")),
    Mistake(
        "query without heads",
        shaped("query", B, 0, L, D),
        ("query", "at least one head", "[2, 0, 5, 8]"),
    ),
    Mistake(
        "query without size", shaped("query", B, H, L, 0), ("query", "head size", "[2, 4, 5, 0]")
    ),
    Mistake(
        "key of another batch",
        shaped("key", 3, H, S, D),
        ("key", "batch size", "2", "[3, 4, 7, 8]"),
    ),
    Mistake(
        "key of another size", shaped("key", B, H, S, 9), ("key", "head size", "8", "[2, 4, 7, 9]")
    ),
    Mistake(
        "key of other heads",
        shaped("key", B, 2, S, D),
        ("key", "heads of query, 4", "2 (enable_gqa=True"),
    ),
    Mistake("key heads that do not divide", grouped(3), ("heads of key must divide", "4", "3")),
    Mistake("key of more heads", grouped(8), ("heads of key must divide", "4", "8")),
    Mistake("key of no heads", grouped(0), ("heads of key must divide", "4", "0")),
    Mistake(
        "value of other keys",
        shaped("value", B, H, 8, D_V),
        ("value", "= [2, 4, 7, d_v]", "[2, 4, 8, 6]"),
    ),
    Mistake(
        "value of other heads",
        shaped("value", B, 2, S, D_V),
        ("value", "= [2, 4, 7, d_v]", "[2, 2, 7, 6]"),
    ),
    Mistake(
        "value of another batch",
        shaped("value", 1, H, S, D_V),
        ("value", "= [2, 4, 7, d_v]", "[1, 4, 7, 6]"),
    ),
    Mistake("w1 of 2 axes", shaped("w1", D, M), ("w1", "[H, d, M]", "[8, 3]")),
    Mistake("w1 of 5 axes", shaped("w1", 1, B, H, D, M), ("w1", "[H, d, M]", "[1, 2, 4, 8, 3]")),
    Mistake("w1 of another size", shaped("w1", H, 9, M), ("w1", "d = 8", "[4, 9, 3]")),
    Mistake("w1 of other heads", shaped("w1", 2, D, M), ("w1", "H = 4", "[2, 8, 3]")),
    Mistake("w1 of one head", shaped("w1", 1, D, M), ("w1", "H = 4", "[1, 8, 3]")),
    Mistake(
        "w1 of another batch", shaped("w1", 3, H, D, M), ("w1", "batch size 2", "[3, 4, 8, 3]")
    ),
    Mistake("w1 of no frequencies", shaped("w1", H, D, 0), ("w1", "at least one", "[4, 8, 0]")),
    Mistake("w1 in the authors' order", shaped("w1", D, H, M), ("w1", "d = 8", "[8, 4, 3]")),
    Mistake(
        "w2 of other frequencies",
        shaped("w2", H, D, 4),
        ("w2", "shape of w1, [4, 8, 3]", "[4, 8, 4]"),
    ),
    Mistake(
        "w2 with a batch axis of its own",
        shaped("w2", B, H, D, M),
        ("w2", "shape of w1, [4, 8, 3]", "[2, 4, 8, 3]"),
    ),
    Mistake("w2 that would broadcast", shaped("w2", H, D, 1), ("w2", "shape of w1", "[4, 8, 1]")),
    Mistake("key_bias of other keys", shaped("key_bias", 8), ("key_bias", "[2, 4, 7]", "[8]")),
    Mistake("key_bias [B, S]", shaped("key_bias", B, S), ("key_bias", "[2, 4, 7]", "[2, 7]")),
    Mistake(
        "key_bias of 4 axes",
        shaped("key_bias", B, H, 1, S),
        ("key_bias", "[2, 4, 7]", "[2, 4, 1, 7]"),
    ),
    Mistake(
        "mask of other keys", shaped("attn_mask", L, 8), ("attn_mask", "[2, 4, 5, 7]", "[5, 8]")
    ),
    Mistake(
        "mask [B, L, S]", shaped("attn_mask", B, L, S), ("attn_mask", "[2, 4, 5, 7]", "[2, 5, 7]")
    ),
    Mistake(
        "mask [B H, L, S]",
        shaped("attn_mask", B * H, L, S),
        ("attn_mask", "[2, 4, 5, 7]", "[8, 5, 7]"),
    ),
    Mistake(
        "mask of 5 axes",
        shaped("attn_mask", 1, B, H, L, S),
        ("attn_mask", "[2, 4, 5, 7]", "[1, 2, 4, 5, 7]"),
    ),
    Mistake(
        "bool mask [B, S]",
        shaped("attn_mask", B, S, dtype=torch.bool),
        ("attn_mask", "[2, 4, 5, 7]", "[2, 7]"),
    ),
    Mistake(
        "dropout_seed of 3",
        lambda call: {"dropout_p": 0.5, "dropout_seed": torch.zeros(3).long()},
        ("dropout_seed", "int64", "[2]", "[3]"),
    ),
    Mistake(
        "dropout_seed of 2 axes",
        lambda call: {"dropout_p": 0.5, "dropout_seed": torch.zeros(1, 2).long()},
        ("dropout_seed", "int64", "[2]", "[1, 2]"),
    ),
]

TYPES = [
    Mistake(
        "everything int64",
        all_typed(torch.int64),
        ("query", "float64, float32, bfloat16 or float16", torch.int64),
        TypeError,
    ),
    Mistake(
        "everything complex",
        all_typed(torch.complex64),
        ("query", "float64", torch.complex64),
        TypeError,
    ),
    Mistake("everything bool", all_typed(torch.bool), ("query", "float64", torch.bool), TypeError),
    Mistake(
        "everything float8",
        all_typed(torch.float8_e4m3fn),
        ("query", "float64", torch.float8_e4m3fn),
        TypeError,
    ),
    Mistake(
        "key of another dtype",
        typed("key", torch.float32),
        ("key", "dtype of query", torch.float64, torch.float32),
        TypeError,
    ),
    Mistake(
        "value of another dtype",
        typed("value", torch.bfloat16),
        ("value", "dtype of query", torch.bfloat16),
        TypeError,
    ),
    Mistake(
        "w1 in a lower precision",
        typed("w1", torch.bfloat16),
        ("w1", "dtype of query", torch.bfloat16),
        TypeError,
    ),
    Mistake(
        "w1 in a higher precision",
        lambda call: {**all_typed(torch.float32)(call), "w1": call["w1"]},
        ("w1", "dtype of query", torch.float32, torch.float64),
        TypeError,
    ),
    Mistake(
        "w1 of integers", typed("w1", torch.int32), ("w1", "dtype of query", torch.int32), TypeError
    ),
    Mistake(
        "w2 unlike w1", typed("w2", torch.float32), ("w2", "dtype of w1", torch.float32), TypeError
    ),
    Mistake(
        "key_bias of integers",
        shaped("key_bias", S, dtype=torch.int64),
        ("key_bias", "floating point", torch.int64),
        TypeError,
    ),
    Mistake(
        "key_bias of bools",
        shaped("key_bias", S, dtype=torch.bool),
        ("key_bias", "floating point", torch.bool),
        TypeError,
    ),
    Mistake(
        "key_bias of half",
        shaped("key_bias", S, dtype=torch.float16),
        ("key_bias", "dtype of query", torch.float16),
        TypeError,
    ),
    Mistake(
        "mask of integers",
        shaped("attn_mask", L, S, dtype=torch.int64),
        ("attn_mask", "bool", "floating point", torch.int64),
        TypeError,
    ),
    Mistake(
        "mask of bytes",
        shaped("attn_mask", L, S, dtype=torch.uint8),
        ("attn_mask", "bool", "floating point", torch.uint8),
        TypeError,
    ),
    Mistake(
        "mask of half",
        shaped("attn_mask", L, S, dtype=torch.float16),
        ("attn_mask", "dtype of query", torch.float16),
        TypeError,
    ),
    Mistake(
        "dropout_seed of int32",
        lambda call: {"dropout_p": 0.5, "dropout_seed": torch.zeros(2).int()},
        ("dropout_seed", "int64", torch.int32),
    ),
    Mistake(
        "dropout_seed of floats",
        lambda call: {"dropout_p": 0.5, "dropout_seed": torch.zeros(2)},
        ("dropout_seed", "int64", torch.float32),
    ),
]

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

ALL = [*SHAPES, *TYPES, *NUMBERS]
ATTENTION_TENSORS = ("query", "key", "value", "w1", "w2", "key_bias", "attn_mask")


def correct_call() -> Arguments:
    return {name: x for name, x in SHAPE.arguments().items() if x is not None}


def on(device: str, call: Arguments) -> Arguments:
    """The same call there."""
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


FEATURE_MISTAKES = [
    Mistake("x of 3 axes", shaped("x", H, L, D), ("x", "[B, H, L, d]", "[4, 5, 8]")),
    Mistake("x without heads", shaped("x", B, 0, L, D), ("x", "at least one head", "[2, 0, 5, 8]")),
    Mistake("x of integers", typed("x", torch.int64), ("x", "float64", torch.int64), TypeError),
    Mistake("w1 of 2 axes", shaped("w1", D, M), ("w1", "[H, d, M]", "[8, 3]")),
    Mistake("w1 of another size", shaped("w1", H, 9, M), ("w1", "d = 8", "[4, 9, 3]")),
    Mistake("w1 of other heads", shaped("w1", 2, D, M), ("w1", "H = 4", "[2, 8, 3]")),
    Mistake(
        "w1 of another batch", shaped("w1", 3, H, D, M), ("w1", "batch size 2", "[3, 4, 8, 3]")
    ),
    Mistake("w1 of no frequencies", shaped("w1", H, D, 0), ("w1", "at least one", "[4, 8, 0]")),
    Mistake(
        "w1 in a lower precision",
        typed("w1", torch.float16),
        ("w1", "dtype of", torch.float16),
        TypeError,
    ),
    Mistake("w2 of other frequencies", shaped("w2", H, D, 4), ("w2", "shape of w1", "[4, 8, 4]")),
    Mistake(
        "w2 unlike w1", typed("w2", torch.float32), ("w2", "dtype of w1", torch.float32), TypeError
    ),
]


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


@pytest.mark.parametrize("dropout_p", [-0.5, 1.0, NAN])
def test_keep_mask_wants_a_probability_below_one(dropout_p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout_keep_mask: dropout_p must be in \[0, 1\)"):
        ikattn.ops.dropout_keep_mask(torch.tensor([1, 2]), (1, 1, 2, 2), dropout_p)


@pytest.mark.parametrize("seed", [torch.zeros(3).long(), torch.zeros(2), torch.zeros(1, 2).long()])
def test_keep_mask_wants_a_pair_of_int64(seed: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"dropout_keep_mask: dropout_seed must be an int64"):
        ikattn.ops.dropout_keep_mask(seed, (1, 1, 2, 2), 0.5)


def test_keep_mask_wants_sizes_that_are_not_negative() -> None:
    with pytest.raises(RuntimeError, match=r"sizes must not be negative, got 1, 1, -2, 2"):
        ikattn.ops.dropout_keep_mask(torch.tensor([1, 2]), (1, 1, -2, 2), 0.5)


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
        (
            {"key": torch.zeros(2, 2, 5, 9)},
            r"key must have shape .* of query, .*got \[2, 2, 5, 9\]",
        ),
    ],
    ids=[
        "unknown kernel",
        "no frequencies",
        "frequencies for rbf",
        "frequencies for dot",
        "other frequencies for dot",
        "p",
        "magnitude of dot",
        "shape",
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
    """They are read by address: a wrong shape must not be a wrong read."""
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
