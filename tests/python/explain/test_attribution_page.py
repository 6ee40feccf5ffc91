"""Attributions as pages: what stands in them, and what a reader sees and does in a browser."""

from __future__ import annotations

import base64
import html
import math
import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chromium import Tab
from ikattn.explain import Attribution
from ikattn.maps.tokens import readable_tokens
from ikattn.maps.words import text_span, texts_of
from pages import HOSTILE, assert_markup_does_nothing, contents_of, open_page

TOKENS = ["<pad>", "<pad>", "The", "Ġdog", "Ġis", "\n", "Ġtired"]
TARGETS = ["Ġso", "Ġvery", "Ġtired"]


def attribution(tokens: Sequence[str] = TOKENS, targets: Sequence[str] = TARGETS) -> Attribution:
    """Returns targets apart: target i adds (i + 1) (j - 4) at token j, and nothing at padding."""
    places = torch.arange(len(tokens)) - 4.0
    scores = (torch.arange(len(targets)) + 1.0)[:, None] * places
    scores[:, torch.tensor([token == "<pad>" for token in tokens])] = 0
    bias = torch.full((1, len(targets)), 0.5)
    value = scores.sum(-1)[None] + bias
    found = Attribution(scores[None], value, bias, method="decompx")
    found.tokens, found.target_tokens = [list(tokens)], [list(targets)]
    return found


def translation() -> Attribution:
    found = Attribution(torch.tensor([[3.0, -1.0, 0.0]]), torch.tensor([1.0]), torch.tensor([-2.0]))
    found.prefix_scores = torch.tensor([[0.25, 0.75]])
    found.tokens, found.prefix_tokens = [["▁kleines", "▁Tier", "<pad>"]], [["<pad>", "▁small"]]
    return found


def scores_of(text: dict[str, Any]) -> Tensor:
    raw = base64.b64decode(text["scores"])
    numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
    return torch.tensor(numbers).reshape(-1, len(text["texts"]))


# --- Tokens as text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["The", "Ġdog", "\n", "ĠĠĠ", "Ġsays", "Ċ", "ĠMünchen"], "The dog\n    says\n München"),
        (["Ġ\\xf0\\x9f", "\\x98", "\\x80", "!"], " 😀!"),
        (["Ġ\\xf0\\x9f", "a", "Ġ\\xc3"], " \\xf0\\x9fa \\xc3"),
        (["ĠĠurnata", "ĠċĠ"], " Ġurnata ċĠ"),  # Maltese
        (["<s>", "▁so", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>", "▁me"], "<s> so€\n me"),
        (["[CLS]", "un", "##believ", "##able", "##", "[SEP]"], "[CLS] unbelievable ## [SEP]"),
        (["im@@", "plicit", "kernel"], "implicit kernel"),
        (["a</w>", "ph", "oto</w>"], "a photo "),
        (["1", "2"], "1 2"),
        (["a\ud800", "\u2028"], "a\\ud800 \u2028"),
        ([], ""),
    ],
)
def test_tokens_are_the_text_that_they_were(tokens: list[str], text: str) -> None:
    texts = texts_of(tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text


def test_byte_level_tokens_of_any_letters_are_the_text_again() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="pip install 'ikattn[analyze]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
    text = "Ħeġġeġ: 今天很好。\n\n\tif x:\n        return '😀👩\u200d👧' + '\\xe9é'  # \u05e9\r\n"
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    for size in (0, 280, 330):  # single bytes, and pairs that end within letters
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet)
        own.train_from_iterator([text], trainer)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=own)
        texts = texts_of(readable_tokens(tokenizer, tokenizer(text)["input_ids"]))
        assert "".join(texts) == text


@pytest.mark.parametrize(
    ("tokens", "scored", "shown"),
    [
        (["<pad>", "<pad>", "a", "b"], [0, 0, 1, 0], slice(2, 4)),
        (["[CLS]", "a", "[SEP]", "[PAD]", "[PAD]"], [1, 1, 0, 0, 0], slice(0, 3)),
        # the end of the text is padding's name, too: the first of them ends the text
        (["a", "</s>", "</s>", "</s>"], [1, 0, 0, 0], slice(0, 2)),
        (["<pad>", "a"], [1, 1], slice(0, 2)),  # where a decoder begins
        (["a", "b", "", ""], [1, 0, 0, 0], slice(0, 2)),  # of by_words
        (["a", "a"], [0, 0], slice(0, 2)),
        (["<pad>"], [0], slice(0, 1)),
        ([], [], slice(0, 0)),
    ],
)
def test_padding_is_no_text(tokens: list[str], scored: list[int], shown: slice) -> None:
    assert text_span(tokens, [bool(x) for x in scored]) == shown


# --- What stands in the page


def test_the_page_holds_every_score_without_padding(tmp_path: Path) -> None:
    size = attribution().to_html(tmp_path / "scores.html")
    assert size == (tmp_path / "scores.html").stat().st_size
    (sequence,) = contents_of(tmp_path / "scores.html")["sequences"]
    (text,) = sequence["texts"]
    assert text["texts"] == ["The", " dog", " is", "\n", " tired"]
    assert (text["first"], text["padding"]) == (2, 2)
    torch.testing.assert_close(scores_of(text), attribution().scores[0, :, 2:])
    assert sequence["targets"] == [" so", " very", " tired"]
    assert sequence["value"] == attribution().value[0].tolist()
    assert sequence["bias"] == [0.5] * 3


def test_rows_that_a_sequence_has_not_are_left_out(tmp_path: Path) -> None:
    found = attribution()
    found.target_tokens = [TARGETS[:2]]
    found.to_html(tmp_path / "scores.html")
    (sequence,) = contents_of(tmp_path / "scores.html")["sequences"]
    assert len(sequence["value"]) == len(scores_of(sequence["texts"][0])) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_scores_of_any_type_and_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=dtype, requires_grad=True).T
    found = Attribution(scores, scores.sum(-1), torch.tensor([0.0, math.nan]))
    found.to_html(tmp_path / "scores.html")
    sequences = contents_of(tmp_path / "scores.html")["sequences"]
    assert [scores_of(own["texts"][0]).tolist() for own in sequences] == [[[1, 3]], [[2, -4]]]
    assert [own["bias"] for own in sequences] == [[0.0], [None]]
    assert [own["texts"][0]["texts"] for own in sequences] == [["0", " 1"]] * 2


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    attribution().to_html(tmp_path / "scores.html", title="{{script}} <b> {{contents}}")
    text = (tmp_path / "scores.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(|<link|<img|src=", text)
    assert "<title>{{script}} &lt;b&gt; {{contents}}</title>" in text
    assert 'id="targets"' in text
    assert 'id="layer"' not in text  # a part of the other modes
    assert text.count("{{") == 4  # of the title, which stands twice


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "scores.html"
    none = torch.zeros(0)
    with pytest.raises(ValueError, match=r"with B of 1 or more, got \[0, 3\]"):
        Attribution(torch.zeros(0, 3), none, none).to_html(page)
    found = attribution()
    found.tokens = [TOKENS[1:]]
    with pytest.raises(ValueError, match=r"tokens\[0\] must hold the 7 tokens .* got 6"):
        found.to_html(page)
    found = translation()
    found.prefix_tokens = [["a"]]
    with pytest.raises(ValueError, match=r"prefix_tokens\[0\] must hold the 2 tokens"):
        found.to_html(page)
    found = attribution()
    found.target_tokens = [[*TARGETS, "!"]]
    with pytest.raises(ValueError, match=r"target_tokens\[0\] must be 3 at most"):
        found.to_html(page)
    found.target_tokens *= 2
    with pytest.raises(ValueError, match=r"target_tokens must hold 1 lists, .* got 2"):
        found.to_html(page)
    found = attribution()
    found.bias = torch.zeros(1)
    with pytest.raises(ValueError, match=r"bias must be of \[1, 3\] targets .* got \[1\]"):
        found.to_html(page)
    assert not list(tmp_path.iterdir())


def test_a_notebook_has_a_large_result_with_its_targets_summed(tmp_path: Path) -> None:
    scores = torch.zeros(1, 200, 2500)
    scores[0, :, :3] = torch.tensor([1.0, -1.0, 0.5])
    found = Attribution(scores, scores.sum(-1), torch.zeros(1, 200), method="decompx")
    found.tokens = [["a<b", *["▁c"] * 2499]]
    frame = found._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts" ')
    assert len(frame) < 500_000
    (page,) = re.findall('srcdoc="(.*?)"', frame, re.S)
    (tmp_path / "page.html").write_text(html.unescape(page))
    (sequence,) = contents_of(tmp_path / "page.html")["sequences"]
    assert sequence["value"] == [100]
    assert scores_of(sequence["texts"][0])[0, :4].tolist() == [200, -200, 100, 0]
    huge = Attribution(torch.zeros(1, 10**6), torch.zeros(1), torch.zeros(1))
    assert "to_html(path) writes it to a file" in huge._repr_html_()


# --- What a reader sees and does


def opened(tab: Tab, found: Attribution, folder: Path, title: str | None = None) -> None:
    found.to_html(folder / "scores.html", title=title)
    open_page(tab, folder / "scores.html")


def all_of(tab: Tab, selector: str, what: str) -> list[Any]:
    script = f"[...document.querySelectorAll({selector!r})].map(x => x.{what})"
    return list(tab.evaluate(script))


def centre(tab: Tab, selector: str, place: int) -> tuple[float, float]:
    box = f"document.querySelectorAll({selector!r})[{place}].getBoundingClientRect()"
    x, y = tab.evaluate(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")
    return float(x), float(y)


def read(number: str) -> float:
    return math.nan if number == "not finite" else float(number.replace("\u2212", "-"))


def numbers(tab: Tab) -> list[float]:
    """Returns every token of the texts, as a screen reader says them."""
    labels = all_of(tab, "#texts .token", "getAttribute('aria-label')")
    return [read(re.split(" (?!finite)", label)[-1]) for label in labels]


def chosen(tab: Tab) -> list[int]:
    states = all_of(tab, "#targets .token", "getAttribute('aria-selected')")
    return [i for i, state in enumerate(states) if state == "true"]


def assert_shows(tab: Tab, first: int, last: int) -> None:
    """The numbers are those of the targets first to last."""
    found = attribution()
    assert chosen(tab) == list(range(first, last + 1))
    expected = found.scores[0, first : last + 1, 2:].sum(0)
    assert numbers(tab) == expected.tolist()
    cells = all_of(tab, "#sum td:last-child", "textContent")
    value = found.value[0, first : last + 1].sum()
    bias = found.bias[0, first : last + 1].sum()
    wanted = [float(expected.sum()), float(bias), float(value)]
    assert [read(cell) for cell in cells] == pytest.approx(wanted, rel=6e-3)


def test_a_span_of_the_answer_is_chosen_by_clicks_drags_and_keys(tab: Tab, tmp_path: Path) -> None:
    opened(tab, attribution(), tmp_path)
    assert_shows(tab, 0, 2)
    places = [centre(tab, "#targets .token", i) for i in range(3)]
    tab.click(*places[1])
    assert_shows(tab, 1, 1)
    press = {"button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        x, y = places[2]
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, modifiers=8, **press)
    assert_shows(tab, 1, 2)  # with shift
    for kind, (x, y) in zip(
        ("mousePressed", "mouseMoved", "mouseReleased"), (places[1], places[0], places[0]),
        strict=True,
    ):  # fmt: skip
        tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, buttons=1, **press)
    assert_shows(tab, 0, 1)
    tab.evaluate("document.querySelectorAll('#targets .token')[0].focus()")
    tab.press("ArrowRight")
    tab.press("ArrowRight")
    assert_shows(tab, 2, 2)
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", modifiers=8)
    assert_shows(tab, 1, 2)
    tab.press("Home")
    assert_shows(tab, 0, 0)
    tab.press("Escape")
    assert_shows(tab, 0, 2)
    tab.press("End")
    tab.evaluate("document.querySelector('#all').click()")
    assert_shows(tab, 0, 2)
    assert tab.complaints == []


def test_colours_tell_the_sign_and_the_size(tab: Tab, tmp_path: Path) -> None:
    found = Attribution(
        torch.tensor([[2.0, -1.0, 0.0, math.nan]]), torch.tensor([1.0]), torch.tensor([0.0])
    )
    opened(tab, found, tmp_path)
    assert numbers(tab) == pytest.approx([2, -1, 0, math.nan], nan_ok=True)
    classes = all_of(tab, "#texts .token", "className")
    assert classes == ["token for", "token against", "token", "token broken"]
    shares = all_of(tab, "#texts .token", "style.getPropertyValue('--share')")
    assert [float(share) for share in shares] == [1, 0.5, 0, 0]
    assert all_of(tab, ".scale span", "textContent") == ["\u22122.00", "+2.00"]
    tab.evaluate("(c => { c.value = 50; c.dispatchEvent(new Event('input')); })"
                 "(document.querySelector('#contrast'))")  # fmt: skip
    assert all_of(tab, ".scale span", "textContent") == ["\u2264 \u22120.200", "\u2265 +0.200"]
    shares = all_of(tab, "#texts .token", "style.getPropertyValue('--share')")
    assert [float(share) for share in shares] == [1, 1, 0, 0]

    def colours() -> list[Any]:
        tokens = "[...document.querySelectorAll('#texts .token')]"
        return list(tab.evaluate(f"{tokens}.map(t => getComputedStyle(t).backgroundColor)"))

    light = colours()
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.call("Emulation.setEmulatedMedia", features=scheme)
    tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    dark = colours()
    tab.call("Emulation.setEmulatedMedia", features=[])
    assert len({*light[:3], *dark[:2]}) == 5  # and no colour is the same in both


def test_a_token_tells_its_number_when_it_is_pointed_at_or_has_the_focus(tab, tmp_path):
    opened(tab, attribution(), tmp_path)
    assert tab.evaluate("document.querySelector('#tip').hidden")
    tab.move(*centre(tab, "#texts .token", 1))
    told = "document.querySelector('#tip').textContent"
    assert tab.evaluate(told) == "\u22126.00  dog, token 3"
    tab.move(1, 1)
    assert tab.evaluate("document.querySelector('#tip').hidden")
    tab.evaluate("document.querySelector('#texts .token').focus()")
    tab.press("ArrowRight")
    assert tab.evaluate(told) == "\u22126.00  dog, token 3"
    tab.press("ArrowDown")  # the line after the line break
    assert tab.evaluate(told) == "+12.0  tired, token 6"
    assert tab.evaluate("document.querySelectorAll('#texts [tabindex=\"0\"]').length") == 1
    largest = all_of(tab, "#largest button", "textContent")
    assert largest[:2] == ["The 2\u221212.0", "tired 6+12.0"]
    tab.evaluate("document.querySelector('#largest button').click()")
    assert tab.evaluate(told) == "\u221212.0  The, token 2"


def test_an_encoder_decoder_shows_both_texts(tab: Tab, tmp_path: Path) -> None:
    opened(tab, translation(), tmp_path)
    headings = all_of(tab, "#texts h2", "textContent")
    assert headings == ["Encoder (without 1 token of padding)", "Decoder"]
    assert numbers(tab) == [3, -1, 0.25, 0.75]
    cells = all_of(tab, "#sum td", "textContent")
    assert cells[0::2] == ["tokens of the encoder", "tokens of the decoder", "no token", "value"]
    assert [read(cell) for cell in cells[1::2]] == [2, 1, -2, 1]
    assert all_of(tab, "#answer, #choose", "hidden") == [True, True]


def test_one_of_several_sequences_is_chosen(tab: Tab, tmp_path: Path) -> None:
    scores = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    found = Attribution(scores, scores.sum(-1), torch.full((2,), math.nan), method="rollout:alti")
    found.tokens = [["one", "two"], ["[PAD]", "\u05e9\u05dc\u05d5\u05dd"]]
    opened(tab, found, tmp_path)
    assert numbers(tab) == [1, 2]
    assert all_of(tab, ".scale span", "textContent") == ["0", "+2.00"]  # shares have no sign
    tab.evaluate("(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })"
                 "(document.querySelector('#sequence'))")  # fmt: skip
    assert numbers(tab) == [3]
    assert all_of(tab, "#texts .text", "dir") == ["rtl"]
    assert tab.evaluate("document.querySelector('#sum').textContent").endswith("shares)3.00")


def test_hostile_tokens_do_nothing(tab: Tab, tmp_path: Path) -> None:
    tokens = [HOSTILE, "<!--", "&lt;", "\u2028", "${1}", "<b>bold</b>", "\\"]
    opened(tab, attribution(tokens, [HOSTILE, "--><script>"]), tmp_path, HOSTILE)
    assert tab.evaluate("document.title") == HOSTILE
    assert all_of(tab, "#texts .token", "textContent") == tokens
    assert tab.evaluate("document.querySelectorAll('img, bdi b').length") == 0
    assert_markup_does_nothing(tab)


def test_long_texts_stay_quick(tab: Tab, tmp_path: Path) -> None:
    """4000 tokens, 64 targets: a choice takes a fraction of a second."""
    torch.manual_seed(0)
    scores = torch.randn(1, 64, 4000)
    found = Attribution(scores, scores.sum(-1), torch.zeros(1, 64))
    found.tokens, found.target_tokens = [["Ġword"] * 4000], [["Ġword"] * 64]
    opened(tab, found, tmp_path)
    began = time.monotonic()
    for place in range(5):
        tab.click(*centre(tab, "#targets .token", place))
        tab.evaluate("new Promise(done => requestAnimationFrame(done))")
    assert (time.monotonic() - began) / 5 < 1
    shown = [float(number) for number in scores[0, 4, :3]]
    assert numbers(tab)[:3] == pytest.approx(shown, rel=6e-3)


def test_the_frame_of_a_notebook_shows_the_page(tab: Tab, tmp_path: Path) -> None:
    (tmp_path / "notebook.html").write_text(attribution()._repr_html_())
    tab.complaints.clear()
    tab.open((tmp_path / "notebook.html").as_uri())
    box = "document.querySelector('iframe').getBoundingClientRect()"
    left, top = tab.evaluate(f"(b => [b.left, b.top])({box})")
    before = tab.screenshot()
    deadline = time.monotonic() + 10
    while tab.screenshot() == before and time.monotonic() < deadline:
        tab.click(left + 20, top + 50)  # the first target
        time.sleep(0.1)
    assert tab.screenshot() != before  # its script runs: a target was chosen
    assert tab.evaluate("document.querySelector('iframe').contentDocument") is None
    assert tab.complaints == []
