"""Calls drawn from a number (tests/fuzz): the same ones in every run, and others in a full one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ikattn  # noqa: F401  registers the operators

TESTS = Path(__file__).resolve().parents[2]
NO_LIBRARIES = shutil.ignore_patterns("lib", "share", "__pycache__")
FRESH = int.from_bytes(os.urandom(6), "little")

# Found in earlier campaigns, with the fault that each was.
REGRESSIONS = (
    # A key bias of NaN on a key that a mask hides.
    "AttentionCall(seed=10596205581457090449, S=2, values='special', bias='1S', mask='S')",
    # An entry of NaN in a mask of pairs, of a key that its bias hides.
    "AttentionCall(seed=3085692473416707006, L=2, values='special', mask='LS', mask_kind='float', "
    "gradients=('key',), laws=('hidden_keys_appended',))",
    # A NaN key behind an edge whose bias is -inf.
    "EdgeCall(seed=9983349334403756901, E=3, H=2, values='special', edge_bias='EH')",
    # A NaN bias of an edge whose key is hidden.
    "EdgeCall(seed=9, S=3, E=4, values='special', key_bias='S', edge_bias='E')",
    # A NaN value along an edge whose weight has vanished, beside hidden edges.
    "EdgeCall(seed=12608571341593237622, S=48, E=157, H=2, d=15, dtype='bfloat16', "
    "values='special', p=1.0, scale=0.5, edge_bias='E')",
    # A NaN entry in the mask of a kept key that its bias hides.
    "StateCall(seed=6974332415782984032, steps=(('add', 15), ('attend', 9), ('attend', 17)))",
    # 1/Z of a row without the largest keys, times dO and a value, which left float32.
    "AttentionCall(seed=13365629847724101335, L=13, S=13, d=31, dtype='float32', values='wide', "
    "causal=True, p=1.5, gradients=('query',))",
    "AttentionCall(seed=17050710742189916618, L=15, S=8, H=2, G=2, d=1, d_v=31, M=1, "
    "dtype='float32', values='wide', causal=True, frequencies='G', gradients=('query',))",
    "AttentionCall(seed=16868372414225507578, L=60, S=30, d=8, d_v=7, M=4, dtype='float32', "
    "values='wide', layouts=('contiguous', 'expanded columns', 'contiguous', 'columns'), "
    "eps=1e-08, gradients=('query',))",
    # Weights of a row that is NaN, in tiles that the diagonal crosses: finite where it sees a key,
    "AttentionCall(seed=16660752492686136942, L=65, S=50, values='special', causal=True, "
    "bias='H1', laws=('weights',))",
    # and NaN where it sees none.
    "AttentionCall(seed=3806491588642666222, L=65, S=65, values='special', causal=True, "
    "laws=('weights',))",
    # More features than a sum over them has sizes for.
    "WrongCall(seed=2183772306866612007, base='StateCall', ways=(3479532021,))",
    # A head size of values with which the output has more than 2^63 numbers.
    "WrongCall(seed=10186008084181029652, base='AttentionCall', ways=(1096122594,))",
    # Offsets of packed sequences that are sparse.
    "WrongCall(seed=12375796275222541635, base='AttentionCall', ways=(4227609237,))",
    # A dropout mask of more than 2^63 numbers.
    "WrongCall(seed=4521920293590204006, base='AttentionCall', ways=(3341979396,))",
    # A second derivative under a mask that hides keys with the lowest number of its type.
    "AttentionCall(seed=6824952624862708916, B=2, H=2, L=17, S=65, d_v=16, M=15, values='normal', "
    "causal=True, scale=2.0, eps=0.001, stationary=True, mask='B111', dropout=0.5, "
    "mask_kind='float with -inf', gradients=('query', 'key', 'w1'), laws=('second_derivative',))",
    # Heads that depend on each other, behind a norm: a factor whose pivot was rounding.
    "MapCall(seed=16519648513108844893, B=3, H=5, L=34, S=63, d_v=7, D=3, dtype='bfloat16', "
    "parts=2, centered=(True,), causal=True, square=True, bias=True, mask='float')",
)


def fuzz(
    *arguments: str, module: str = "fuzz", **environment: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("linear_time", ["auto", "always"])
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(2026, marks=pytest.mark.operators, id="fixed"),
        pytest.param(FRESH, marks=pytest.mark.full, id="fresh"),
    ],
)
def test_fuzzed_calls_hold(seed: int, linear_time: str) -> None:
    done = fuzz("--seed", str(seed), "--calls", "1000", IKATTN_LINEAR_TIME=linear_time)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_campaign_that_was_killed_goes_on_where_its_record_ends(tmp_path: Path) -> None:
    record = tmp_path / "shard.jsonl.gz"
    arguments = ("--seed", "3", "--kind", "EdgeCall", "--record", str(record))
    assert fuzz("--calls", "30", *arguments).returncode == 0
    record.write_bytes(record.read_bytes()[:-30])  # which a kill leaves
    done = fuzz("--calls", "40", *arguments)
    assert "40 passed, 0 failed" in done.stdout, done.stdout + done.stderr


def test_what_a_campaign_found_stays_mended() -> None:
    done = fuzz("--replay", *REGRESSIONS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_planted_faults_are_places_in_the_sources(source_tree: Path, tmp_path: Path) -> None:
    for folder in ("csrc", "torch_ext"):
        shutil.copytree(source_tree / folder, tmp_path / folder, ignore=NO_LIBRARIES)
    done = fuzz("plant", str(tmp_path), module="fuzz.faults")
    assert done.returncode == 0, done.stdout + done.stderr
