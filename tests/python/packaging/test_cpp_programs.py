"""The C++ programs in examples/cpp that use what Python wrote: checkpoints and exported models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils
from torch import Tensor, nn

import ikattn
from attention_cases import CASES, KERNELS, case, make
from ikattn._library import cmake_prefix_path
from programs import build_examples, run, run_checked

pytestmark = [pytest.mark.compiles, pytest.mark.full]


@pytest.fixture(scope="module")
def programs(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built programs."""
    build = tmp_path_factory.mktemp("programs")
    build_examples(source_tree, build, cmake_prefix_path(), "attend", "serve")
    return build


def test_the_program_of_the_page_runs_as_shown(source_tree: Path, tmp_path: Path) -> None:
    page = (source_tree / "docs" / "guide" / "cpp.md").read_text()
    for language, name in (("cmake", "CMakeLists.txt"), ("cpp", "program.cpp")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
        (tmp_path / name).write_text(block)
    prefixes = f"-DCMAKE_PREFIX_PATH={cmake_prefix_path()};{torch.utils.cmake_prefix_path}"
    run_checked("cmake", "-S", tmp_path, "-B", tmp_path / "build", prefixes, cwd=tmp_path)
    run_checked("cmake", "--build", tmp_path / "build", cwd=tmp_path)
    assert run(tmp_path / "build" / "program", cwd=tmp_path).stdout.startswith("[2, 4, 100, 16] ")


# --- attend: ikattn::nn::MultiheadAttention with a checkpoint -------------------------------------


def attend(
    programs: Path, module: nn.MultiheadAttention, arguments: dict[str, Any], folder: Path
) -> tuple[Tensor, Tensor]:
    """Output and weights per head that C++ computes."""
    torch.save(dict(module.state_dict()), folder / "attention.pt")
    inputs = {name: x.detach() for name, x in arguments.items() if isinstance(x, Tensor)}
    torch.save(inputs, folder / "inputs.pt")
    settings = {
        "num_heads": module.num_heads,
        "p": getattr(module, "p", 2.0),
        "kernel": "rbf" if getattr(module, "kernel", "dot") == "rbf" else "dot",
        "add_zero_attn": int(module.add_zero_attn),
        "batch_first": int(module.batch_first),
    }
    files = (folder / name for name in ("attention.pt", "inputs.pt", "outputs.pt"))
    pairs = (f"{name}={value}" for name, value in settings.items())
    run_checked(programs / "attend", *files, *pairs, cwd=folder, OMP_NUM_THREADS="1")
    return torch.load(folder / "outputs.pt")


@pytest.mark.parametrize("kernel", ["stock", *KERNELS])
def test_a_checkpoint_from_python_gives_the_same_numbers_in_cpp(programs, kernel, tmp_path):
    for number, name in enumerate(CASES):
        options, arguments = case(name, batch_first=number % 2 == 1)
        module = make(kernel, **options).eval()
        found = attend(programs, module, arguments, tmp_path)
        arguments |= {"average_attn_weights": False, "is_causal": False}
        with torch.no_grad():
            expected = module(**arguments)
        for got, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(got, truth, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("p", "stationary"), [(None, True), (1.5, True), (None, False)])
def test_options_without_state_are_told_to_the_program(programs, p, stationary, tmp_path):
    _, arguments = case("two bool masks", False)
    module = make("implicit", p=p, stationary=stationary)
    found = attend(programs, module, arguments, tmp_path)
    torch.testing.assert_close(found, module(**arguments, average_attn_weights=False))


def test_wrong_checkpoints_are_named(programs: Path, tmp_path: Path) -> None:
    module = make("implicit")

    def error_with(state: dict[str, Tensor]) -> str:
        torch.save(state, tmp_path / "state.pt")
        torch.save({}, tmp_path / "inputs.pt")
        names = ("state.pt", "inputs.pt", "outputs.pt", f"num_heads={module.num_heads}")
        finished = run(programs / "attend", *names, cwd=tmp_path)
        assert finished.returncode == 1
        return finished.stderr

    state = module.state_dict()
    assert "torch.save(dict(module.state_dict()), path)" in error_with(state)
    assert "missing: in_proj_weight" in error_with(
        {name: x for name, x in state.items() if name != "in_proj_weight"}
    )
    assert "unexpected: spectral.w3" in error_with({**state, "spectral.w3": torch.zeros(1)})


# --- serve: an exported model ---------------------------------------------------------------------


class Regressor(nn.Module):
    """x [B, L, 3] -> [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.project_in = nn.Linear(3, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = ikattn.convert(nn.TransformerEncoder(layer, 2), num_frequencies=7, seed=0)
        self.project_out = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.project_out(self.encoder(self.project_in(x)).mean(dim=1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Regressor, Path]]:
    torch.manual_seed(0)
    model = Regressor().eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.randn(3, 9, 3),), dynamic_shapes=({0: batch, 1: length},)
        )
        package = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path_factory.mktemp("exported") / "model.pt2"),
            inductor_configs={"aot_inductor.metadata": {"features": "3"}},
        )
        yield model, Path(package)


def numbers(text: str) -> Tensor:
    return torch.tensor([float(number) for number in text.split(",")])


def serve(programs: Path, package: Path, lines: list[str], *batch: int) -> list[str]:
    (programs / "lines.csv").write_text("\n".join(lines))
    command = " ".join(map(str, ("./serve", package, *batch)))
    finished = run("sh", "-c", f"{command} < lines.csv", cwd=programs, OMP_NUM_THREADS="1")
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_every_line_is_answered_with_what_the_model_makes_of_it(programs, exported, batch):
    model, package = exported
    sequences = [torch.randn(length, 3) for length in (4, 4, 4, 4, 70, 70, 1, 4)]
    lines = [",".join(map(repr, x.flatten().tolist())) for x in sequences]
    replies = serve(programs, package, lines, *batch)
    for reply, x in zip(replies, sequences, strict=True):
        torch.testing.assert_close(numbers(reply), model(x[None])[0], rtol=1e-4, atol=1e-5)


def test_a_bad_line_is_answered_in_its_place_and_spoils_no_other(programs, exported):
    model, package = exported
    lines = ["1,2,3", "1,2", "1,two,3", "", " 3, 2 ,1 \r", "1e-50,-1e-400,1", "1,2,1e50"]
    replies = serve(programs, package, lines)
    answers = {0: [1.0, 2.0, 3.0], 4: [3.0, 2.0, 1.0], 5: [0.0, 0.0, 1.0]}
    for reply, x in ((replies[line], x) for line, x in answers.items()):
        expected = model(torch.tensor([[x]]))[0]
        torch.testing.assert_close(numbers(reply), expected, rtol=1e-4, atol=1e-5)
    assert replies[1] == "error: a line must have a multiple of F = 3 numbers, got 2"
    assert replies[2].startswith("error: number 2 must be a number")
    assert replies[3].startswith("error: number 1 must be a number")
    assert replies[6].endswith("got '1e50'")
    assert len(replies) == 7


@pytest.mark.parametrize("batch", ["x", "3x", "0", "-1", ""])
def test_the_largest_batch_is_a_positive_number(programs: Path, batch: str) -> None:
    finished = run(programs / "serve", "model.pt2", batch, cwd=programs)
    assert finished.returncode == 1
    message = f"serve: the largest batch must be a positive number, got '{batch}'"
    assert finished.stderr.startswith(message)
