"""``python -m ikattn selftest``: what it runs, how it tells failures, and proofs of a machine."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

import devices
import ikattn
from ikattn import cli
from ikattn.cli import selftest
from ikattn.cli import selftest_calls as calls
from ikattn.cli.selftest import Result

KEY = "build\tGPU\t13000"


def test_every_instruction_set_of_this_processor_passes(tmp_path, capsys):
    file = tmp_path / "found.json"
    assert cli.main(["selftest", "--device", "cpu", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    results = [Result(**each) for each in found["results"]]
    assert [result.family for result in results] == list(selftest.cpu_environments())
    assert torch.ops.ikattn.instruction_set() in {result.family for result in results}
    for result in results:
        assert result.passed
        assert result.proven == "the CPU"
        assert result.error is None or 0 < result.error <= 1
    assert found["info"] == ikattn.info()
    assert capsys.readouterr().out.startswith("family")


def test_a_family_that_hangs_dies_or_errs_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(body: str) -> Result:
        monkeypatch.setattr(selftest, "child_program", lambda *_: body)
        return selftest._in_a_process("weights", "cuda", {}, is_timed=False)

    monkeypatch.setattr(selftest, "SECONDS", 0.5)
    hung = program("import time; time.sleep(60)")
    assert (hung.family, hung.passed, hung.says) == ("weights", False, "was ended after 0.5 s")
    monkeypatch.setattr(selftest, "SECONDS", 30)
    assert program("raise SystemExit('no memory')").says == "no memory"
    assert program("import os; os.abort()").passed is False
    wrong = program("print('{\"error\": 1.5}')")
    assert (wrong.passed, wrong.error) == (False, 1.5)


def test_errors_are_held_against_a_composition_in_the_type() -> None:
    def wrong_in_bfloat16(**call: torch.Tensor) -> torch.Tensor:
        factor = 1 + 2**-5 if call["query"].dtype == torch.bfloat16 else 1
        return calls._composition(**call) * factor

    call = calls.attention_call(torch.bfloat16, 1, 2, 20, 30)
    right = calls.worst(ikattn.implicit_kernel_attention, call, "cpu", calls._composition)
    assert 0 < right <= 1
    assert calls.worst(wrong_in_bfloat16, call, "cpu", calls._composition) > 1
    assert calls._error(torch.tensor([math.nan]), torch.ones(1)) == math.inf


def test_every_family_of_the_ledger_has_calls() -> None:
    ledger = json.loads(torch.ops.ikattn.kernel_families())
    assert list(selftest.gpu_checks("interpreter")) == [family["name"] for family in ledger]


def test_a_proof_holds_what_passed_and_is_faster(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "ikattn" / "proven"
    file.parent.mkdir()
    file.write_text("another build\tGPU\t13000\tsplit\t2026-01-01\n")
    results = [
        Result("hopper", "H200 at c2071f5", True, 0.5, 1.0),
        Result("weights", None, True, 0.5, 1.0, ratio=0.8),
        Result("split", None, True, 0.5, 1.0, ratio=1.2),
        Result("decoding", None, False, 2.5, 1.0),
    ]
    assert selftest.enable(results, KEY, "2026-11-28") == ["weights"]
    assert selftest.enable(results, KEY, "2026-11-29") == ["weights"]
    assert file.read_text().splitlines() == [
        "another build\tGPU\t13000\tsplit\t2026-01-01",
        f"{KEY}\tweights\t2026-11-29",
    ]
    selftest.forget(KEY)
    assert file.read_text() == "another build\tGPU\t13000\tsplit\t2026-01-01\n"
    assert "weights" in selftest.table(results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--device", "cuda"]) == 2
    assert "ikattn selftest: " in capsys.readouterr().err
    for option in ("--enable", "--forget"):
        assert cli.main(["selftest", option]) == 2
        assert "no GPU here that could prove a family" in capsys.readouterr().err


@pytest.mark.skipif(
    os.environ.get("IKATTN_TEST_DEVICE") != "interpreter", reason="wants the interpreter's device"
)
def test_every_family_passes_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(devices.__file__).parent), prepend=os.pathsep)
    program = selftest.child_program
    monkeypatch.setattr(selftest, "SECONDS", 300)
    monkeypatch.setattr(selftest, "child_program", lambda *of: f"import devices; {program(*of)}")
    for result in selftest.run("interpreter", unproven=True):
        assert result.passed, result


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has a key")
def test_a_machine_without_a_gpu_has_no_key_for_proofs() -> None:
    assert torch.ops.ikattn.machine_key() == ""
