"""Converted models under torch.compile, torch.export, AOTInductor and torch.onnx.export."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import ikattn
from agreement import assert_close
from attention_cases import KERNELS, each_kernel
from tiers import each

E, H = 16, 4
# No size equals another or a size of the model, or the compiler would take them for one symbol.
SIZES = ((3, 9), (5, 7), (6, 33), (2, 64))

each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])

Call = Callable[..., Tensor]
DEVICE = "cuda"  # of graphs that are replayed


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class SelfAttention(nn.Module):
    """One module, whose weights are a result too."""

    def __init__(self, kernel: str, dropout: float) -> None:
        super().__init__()
        options = {"kernel": kernel, "p": 3.0, "num_frequencies": 7, "seed": 0}
        self.attention = ikattn.MultiheadAttention(E, H, dropout, batch_first=True, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        output, weights = self.attention(x, x, x, padding, attn_mask=future)
        return output + weights.square().sum(dim=-1, keepdim=True)


class Encoder(nn.Module):
    def __init__(self, kernel: str, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 32, dropout, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder = ikattn.convert(encoder, kernel, p=3.0, num_frequencies=7, seed=0)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


MODELS = {"SelfAttention": SelfAttention, "Encoder": Encoder}
each_model = pytest.mark.parametrize("model_type", MODELS.values(), ids=MODELS)
# A setting takes seconds: the implicit kernel has all of them, the others one each.
each_setting = each(
    ("kernel",),
    [(kernel,) for kernel in KERNELS],
    {"model_type": MODELS, "training": {"train": True, "eval": False}},
    few=[("implicit",)],
)


def make(model_type: type[nn.Module], kernel: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return model_type(kernel, dropout).eval()


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """x [N, L, E], and a padding mask that leaves every sequence a token."""
    torch.manual_seed(batch * 1000 + length)
    ends = torch.randint(1, length + 1, (batch, 1))
    return torch.randn(batch, length, E), torch.arange(length) >= ends


def of_tokens(output: Tensor, padding: Tensor) -> Tensor:
    """Without padding, which torch's fused path of the dot kernel leaves undefined."""
    return output[~padding]


def with_gradients(model: nn.Module, call: Call, x: Tensor, padding: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    output = of_tokens(call(x, padding), padding)
    return [output, *torch.autograd.grad(output.sin().sum(), [x, *model.parameters()])]


# --- torch.compile --------------------------------------------------------------------------------


@each_setting
def test_compiled_once_it_computes_what_eager_does_for_every_length(model_type, kernel, training):
    model = make(model_type, kernel, dropout=0.3).train(training)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for number, size in enumerate(SIZES):
        x, padding = inputs(*size)
        once_more = torch._dynamo.config.patch(error_on_recompile=True)
        with once_more if number else nullcontext():
            found = with_gradients(model, compiled, x, padding)
        torch.testing.assert_close(found, with_gradients(model, model, x, padding))


@each_kernel
@each_model
def test_compiled_without_grad_it_computes_what_eager_does_for_every_length(model_type, kernel):
    model = make(model_type, kernel)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for size in SIZES:
        x, padding = inputs(*size)
        with torch.no_grad():
            found, expected = compiled(x, padding), model(x, padding)
        torch.testing.assert_close(of_tokens(found, padding), of_tokens(expected, padding))
    assert counter.frame_count == 1


def test_compiled_torchs_fused_path_refuses_the_values_of_a_float_mask() -> None:
    model = make(Encoder, "dot")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    x, padding = inputs(2, 5)
    mask = torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
    with torch.no_grad():
        found, expected = compiled(x, mask), model(x, mask)
        torch.testing.assert_close(of_tokens(found, padding), of_tokens(expected, padding))
        mask[:, 0] = 0.5
        with pytest.raises(RuntimeError, match="set_fastpath_enabled"):
            compiled(x, mask)
    compiled(x, mask)  # recorded for backward, it goes step by step


@pytest.mark.parametrize("spectral", [None, "direct", "stationary", "ikan", "mikan"])
def test_compiled_checkpoints_compute_what_eager_does(spectral: str | None) -> None:
    """A source that keeps a regulariser needs a setting of torch, which the documentation names."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True)
    options = {} if spectral is None else {"spectral": spectral, "num_frequencies": 8}
    layer = ikattn.convert(layer, "dot" if spectral is None else "implicit", **options)
    x = torch.randn(2, 6, E)

    def call(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        output = compiled(leaf) if checkpointed else layer(leaf)
        loss = output.square().sum() + ikattn.regularization_loss(layer)
        return [output.detach(), *torch.autograd.grad(loss, [leaf, *layer.parameters()])]

    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    allowed = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    with torch._dynamo.config.patch(allowed if spectral in ("ikan", "mikan") else {}):
        for _ in range(2):
            for got, expected in zip(call(True), call(False), strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "training", [True, pytest.param(False, marks=pytest.mark.full)], ids=["train", "eval"]
)
def test_the_default_compiler_takes_a_converted_encoder(training: bool) -> None:
    model = make(Encoder, "implicit").train(training)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in SIZES[:2]:
        x, padding = inputs(*size)
        found, expected = (with_gradients(model, f, x, padding) for f in (compiled, model))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_compiled_the_operator_stays_one_operator() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: list[Tensor]) -> Call:
        graphs.append(graph)
        return graph.forward

    model = make(SelfAttention, "implicit")
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True, dynamic=True)(*inputs(3, 9))
    nodes = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    calls = [str(node.target) for node in nodes if "ikattn" in str(node.target)]
    assert len(calls) == 2, calls  # output, weights
    assert not any("reference" in name for name in calls)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


@on_a_gpu
@each_mode
@each_kernel
@each_model
def test_replayed_as_a_graph_it_computes_what_eager_does(model_type, kernel, training):
    """reduce-overhead: the first call warms up, the second is recorded, the others replay it."""
    model = make(model_type, kernel).train(training).to(DEVICE)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x, padding = (given.to(DEVICE) for given in inputs(5, 7))
        x = x + step
        found = [each.clone() for each in with_gradients(model, compiled, x, padding)]
        expected = with_gradients(model, model, x, padding)
        for got, truth in zip(found, expected, strict=True):
            assert_close(got, truth, 2e-5)  # of the largest: single elements nearly cancel
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@on_a_gpu
@each_kernel
def test_every_replay_of_a_graph_drops_other_weights(kernel: str) -> None:
    model = make(SelfAttention, kernel, dropout=0.5).train().to(DEVICE)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x, padding = (given.to(DEVICE) for given in inputs(5, 7))
    outputs = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        outputs.append(compiled(x, padding)[~padding].detach().clone())
    assert all(output.isfinite().all() for output in outputs)
    assert not any(a.equal(b) for a, b in itertools.combinations(outputs, 2))


# --- torch.export ---------------------------------------------------------------------------------


def export(model: nn.Module) -> torch.export.ExportedProgram:
    axes = {0: Dim("batch"), 1: Dim("length")}
    with torch.no_grad():
        return torch.export.export(model, inputs(3, 9), dynamic_shapes=(axes, axes))


@each_setting
def test_exported_and_loaded_it_computes_what_eager_does(model_type, kernel, training, tmp_path):
    model = make(model_type, kernel).train(training)
    torch.export.save(export(model), tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for size in SIZES:
        x, padding = inputs(*size)
        found, expected = (of_tokens(f(x, padding), padding) for f in (program, model))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "kernel", ["implicit", *(pytest.param(name, marks=pytest.mark.full) for name in ("dot", "rbf"))]
)
def test_an_aot_inductor_package_computes_what_eager_does(kernel: str, tmp_path: Path) -> None:
    model = make(Encoder, kernel)
    path = str(tmp_path / "model.pt2")
    package = torch._inductor.aoti_compile_and_package(export(model), package_path=path)
    loaded = torch._inductor.aoti_load_package(package)
    for size in SIZES:
        x, padding = inputs(*size)
        found, expected = (of_tokens(f(x, padding), padding) for f in (loaded, model))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- ONNX -----------------------------------------------------------------------------------------


def test_decompositions_leave_torchs_operators_alone() -> None:
    program = export(make(Encoder, "implicit")).run_decompositions(ikattn.ops.decompositions())
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not {name for name in names if name.startswith("ikattn")}
    assert "aten.layer_norm.default" in names
    torch.testing.assert_close(
        program.module()(*inputs(5, 7)), make(Encoder, "implicit")(*inputs(5, 7))
    )


def test_the_contribution_operators_decompose_too() -> None:
    class Norms(nn.Module):
        def forward(self, query: Tensor, value: Tensor, weight: Tensor) -> Tensor:
            given = ikattn.contributions(query.softmax(-1), value, weight).summed
            streamed = ikattn.streamed_contributions(query, query, value, weight).summed
            return given + streamed

    x = torch.randn(2, H, 5, 5), torch.randn(2, H, 5, E // H), torch.randn(E, E)
    program = torch.export.export(Norms(), x)
    decomposed = program.run_decompositions(ikattn.ops.decompositions())
    assert "ikattn" in str(program.graph)
    assert "ikattn" not in str(decomposed.graph)
    torch.testing.assert_close(decomposed.module()(*x), Norms()(*x), rtol=1e-4, atol=1e-5)


@each(("kernel",), [(kernel,) for kernel in KERNELS], {"model_type": MODELS}, few=[("implicit",)])
def test_exported_to_onnx_it_computes_what_eager_does(model_type, kernel, tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs it: pip install onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    model = make(model_type, kernel)
    program = export(model).run_decompositions(ikattn.ops.decompositions())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [argument.name for argument in session.get_inputs()]
    for size in SIZES:
        x, padding = inputs(*size)
        arrays = (tensor.numpy() for tensor in (x, padding))
        (found,) = session.run(None, dict(zip(names, arrays, strict=True)))
        expected = model(x, padding)
        torch.testing.assert_close(
            of_tokens(torch.from_numpy(found), padding),
            of_tokens(expected, padding),
            rtol=1e-4,
            atol=1e-5,
        )
