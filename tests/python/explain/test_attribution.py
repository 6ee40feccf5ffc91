"""``ikattn.attribute``: parts that add up, against vectors that are pushed through by hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from families import ALONE, POST, PRE
from ikattn.explain import Attribution
from ikattn.explain.attribution import _decompx
from ikattn.explain.attribution._linear import LinearModel
from ikattn.nn.parameter_groups import frozen
from recorded_models import encoder, recorded
from tiny_texts import tiny_model
from tiny_transformers import build_tiny, tiny_inputs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PROMPT = torch.tensor([[3, 14, 15, 9, 2]])
# With code of their own for what mixes tokens, or none of the tables' names.
OTHERS = ("bert", "gpt2", "llama", "t5", "bart", "whisper", "vit", "deberta-v2", "bloom", "mamba")
# In which numbers that depend on the tokens are added in a way that is not understood.
REFUSED = {"olmo_hybrid": "add up", "pegasus_x": "depend on the tokens"}


def decoder(kind: str = "Llama") -> Any:
    grouped = {} if kind == "GPT2" else {"num_key_value_heads": 1, "head_dim": 8}
    return tiny_model({"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"), **grouped)


def classifier() -> Any:
    return tiny_model("BertForSequenceClassification", num_labels=3)


def seq2seq() -> Any:
    return tiny_model("T5ForConditionalGeneration")


# --- Against vectors pushed through by hand


def pushed_through(layer: Any, x: Tensor, vectors: Tensor) -> Tensor:
    """Applies a post-norm layer of torch's to vectors [K, L, D], with the numbers that x fixes."""
    attention = layer.self_attn
    D, H = x.size(-1), attention.num_heads
    q, k, v = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (q, k, v))
    weights = (q @ k.mT / (D // H) ** 0.5).softmax(-1)
    values = vectors @ attention.in_proj_weight.chunk(3)[2].mT
    mixed = weights @ values.unflatten(-1, (H, -1)).transpose(1, 2)
    attended = mixed.transpose(1, 2).flatten(2) @ attention.out_proj.weight.mT
    whole = x + attention(x, x, x, need_weights=False)[0]

    def through(norm: Any, y: Tensor, of: Tensor) -> Tensor:
        scale = (of.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return (y - y.mean(-1, keepdim=True)) / scale * norm.weight

    y, whole_y = through(layer.norm1, vectors + attended, whole), layer.norm1(whole)
    inner = layer.linear1(whole_y)
    slopes = F.gelu(inner) / inner
    fed = (y @ layer.linear1.weight.mT * slopes) @ layer.linear2.weight.mT
    out = whole_y + layer.linear2(F.gelu(inner))
    return through(layer.norm2, y + fed, out)


@torch.no_grad()
def test_parts_are_those_of_vectors_pushed_through_one_by_one() -> None:
    torch.manual_seed(0)
    model: Any = encoder().double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    vectors = torch.zeros(5, 5, 16, dtype=torch.float64)
    vectors[range(5), range(5)] = x[0]
    whole = x
    for layer in model.layers:
        vectors = pushed_through(layer, whole, vectors)
        whole = layer(whole)
    found = ikattn.attribute(model, x, target=lambda output: output[:, 3, 7])
    torch.testing.assert_close(found.scores[0], vectors[:, 3, 7])
    torch.testing.assert_close(found.value, whole[:, 3, 7])
    norms = ikattn.explain.decomposed_norms(model, {"src": x}, sources=2)
    assert norms.shape == (2, 1, 5, 5)


def test_a_linear_model_is_its_own_attribution() -> None:
    """Attention whose weights do not depend on the input, and nothing else: exact parts."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=False).double().eval()
    with torch.no_grad():
        attention.in_proj_weight[:16] = 0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x)[0]

    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    model = Model().eval()
    found = ikattn.attribute(model, x, target=lambda y: y[:, 1, 2])
    (gradient,) = torch.autograd.grad(model(x)[:, 1, 2].sum(), x)
    torch.testing.assert_close(found.scores, (gradient * x).sum(-1).detach())
    assert float(found.bias.abs().max()) < 1e-12


# --- Adding up


@pytest.mark.parametrize("kind", [*PRE, *POST, *ALONE, *OTHERS])
def test_parts_add_up_of_every_family(kind: str) -> None:
    model = build_tiny(kind)
    inputs = tiny_inputs(model)

    def target(output: Any) -> Tensor:
        return output[0].flatten(1)[:, -5]  # type: ignore[no-any-return]

    if kind in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[kind]):
            ikattn.attribute(model, inputs, target)
        return
    found = ikattn.attribute(model, inputs, target)
    total = found.scores.sum(-1) + found.bias
    if found.prefix_scores is not None:
        total = total + found.prefix_scores.sum(-1)
    torch.testing.assert_close(total, found.value, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(found.value, target(model(**inputs)), rtol=1e-4, atol=1e-5)
    assert bool((found.scores[0] != 0).any())


@pytest.mark.parametrize(
    "branch",
    [
        lambda x: x.exp(),  # no slope, no gate: a sum
        lambda x: x.detach() * 2,  # as in a quantised module, through which no gradient comes
        lambda x: torch.zeros_like(x) + (5 + x.detach()).round(),
    ],
)
def test_what_depends_on_tokens_is_no_bias(branch: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x)[0] + branch(x)

    with pytest.raises(RuntimeError, match="depend on the tokens but are added"):
        ikattn.attribute(Model().eval(), torch.randn(1, 4, 8), target=lambda y: y[:, 0, 0])


@pytest.mark.parametrize("method", ["decompx", "alti_logit", "rollout:alti"])
def test_a_head_through_which_no_gradient_comes_is_refused(method: str) -> None:
    model = decoder("GPT2").float()  # its only nn.Linear is the head
    model.lm_head = nn.Sequential(model.lm_head, Detached())
    with pytest.raises(RuntimeError, match=r"not add up|no gradient comes back"):
        ikattn.attribute(model, PROMPT, slice(3, 5), method=method)


class Detached(nn.Module):
    """A quantised module is like this."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + 0


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "gemma2", "albert", "gpt_neox", "vit"])
def test_vectors_of_tokens_add_up(kind: str) -> None:
    """With every bias shared they are, together, what each block made; without, nearly never."""
    model = build_tiny(kind)
    inputs = {name: x[:1] for name, x in tiny_inputs(model).items()}
    shared = ikattn.explain.decomposed_norms(model, inputs, biases="absdot")
    assert bool(shared.isfinite().all())
    assert shared.shape == ikattn.explain.decomposed_norms(model, inputs, sources=2).shape


# --- Targets


def test_a_span_is_the_sum_of_its_tokens() -> None:
    model = decoder()
    whole = ikattn.attribute(model, PROMPT, target=slice(2, 5))
    each = ikattn.attribute(model, PROMPT, target=slice(2, 5), each=True)
    assert each.scores.shape == (1, 3, 5)
    torch.testing.assert_close(each.scores.sum(1), whole.scores)
    with torch.no_grad():
        logits = model(PROMPT).logits
    torch.testing.assert_close(each.value[0], logits[0, [1, 2, 3], [15, 9, 2]])
    assert float(each.scores[0].triu(2).abs().max()) == 0  # causal: nothing from what comes later
    answer = ikattn.attribute(model, PROMPT, "answer", prompt_length=2)
    torch.testing.assert_close(answer.scores, whole.scores)
    ids = ikattn.attribute(model, PROMPT[:, :2], target=[15, 9, 2])
    torch.testing.assert_close(ids.scores, whole.scores)


def test_one_token_the_next_and_a_contrast() -> None:
    model = decoder()
    with torch.no_grad():
        likeliest = int(model(PROMPT).logits[0, -1].argmax())
    found = ikattn.attribute(model, PROMPT)
    torch.testing.assert_close(found.scores, ikattn.attribute(model, PROMPT, likeliest).scores)
    other = ikattn.attribute(model, PROMPT, 7)
    contrast = ikattn.attribute(model, PROMPT, likeliest, against=7)
    torch.testing.assert_close(contrast.scores, found.scores - other.scores)


def test_padding_on_either_side_changes_nothing() -> None:
    model = decoder()
    alone = ikattn.attribute(model, PROMPT, target=slice(-2, None))
    left = {
        "input_ids": torch.cat([torch.zeros(1, 2, dtype=torch.long), PROMPT], 1),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3, 4]]),
    }
    found = ikattn.attribute(model, left, target=slice(-2, None))
    torch.testing.assert_close(found.scores[:, 2:], alone.scores, rtol=1e-6, atol=1e-8)
    assert found.scores[:, :2].tolist() == [[0.0, 0.0]]
    right = {
        "input_ids": torch.cat([PROMPT, torch.zeros(1, 2, dtype=torch.long)], 1),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
    }
    found = ikattn.attribute(model, right, target=slice(-2, None))
    torch.testing.assert_close(found.scores[:, :5], alone.scores, rtol=1e-6, atol=1e-8)


def test_classes_and_sequences_of_a_batch() -> None:
    model = classifier()
    inputs = {
        "input_ids": torch.tensor([[3, 14, 15, 9], [4, 5, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    found = ikattn.attribute(model, inputs, target=[2, 0])
    one = ikattn.attribute(model, {n: x[1:, :2] for n, x in inputs.items()}, target=0)
    torch.testing.assert_close(found.scores[1, :2], one.scores[0])
    torch.testing.assert_close(found.bias[1], one.bias[0])
    with torch.no_grad():
        logits = model(**inputs).logits
    torch.testing.assert_close(found.value, logits[[0, 1], [2, 0]])


def test_both_inputs_of_an_encoder_decoder_have_parts() -> None:
    inputs = {"input_ids": PROMPT, "decoder_input_ids": torch.tensor([[0, 4, 5]])}
    found = ikattn.attribute(seq2seq(), inputs, target=slice(1, 3))
    assert found.prefix_scores is not None
    assert found.prefix_scores.shape == (1, 3)
    total = found.scores.sum(-1) + found.prefix_scores.sum(-1) + found.bias
    torch.testing.assert_close(total, found.value)
    assert float(found.bias.abs()) < 1e-8  # T5 has no biases


def test_a_source_that_adds_nothing_has_scores_of_zero() -> None:
    model = seq2seq()
    for block in model.decoder.block:
        torch.nn.init.zeros_(block.layer[1].EncDecAttention.o.weight)
    inputs = {"input_ids": PROMPT, "decoder_input_ids": torch.tensor([[0, 4, 5]])}
    found = ikattn.attribute(model, inputs, target=slice(1, 3))
    assert found.scores.shape == PROMPT.shape
    assert not found.scores.any()
    assert found.prefix_scores.shape == (1, 3)
    assert found.prefix_scores.any()


def test_the_source_is_the_encoders_whatever_the_order_of_modules() -> None:
    model = seq2seq()
    inputs = {"input_ids": PROMPT, "decoder_input_ids": torch.tensor([[0, 4, 5]])}
    expected = ikattn.attribute(model, inputs, target=slice(1, 3))
    encoder = model._modules.pop("encoder")
    model._modules["encoder"] = encoder  # the last of the modules now
    found = ikattn.attribute(model, inputs, target=slice(1, 3))
    torch.testing.assert_close(found.scores, expected.scores)
    torch.testing.assert_close(found.prefix_scores, expected.prefix_scores)


@pytest.mark.parametrize("method", ["alti_logit", "rollout:alti"])
def test_attention_that_pools_beside_the_blocks_is_not_rolled_out(method: str) -> None:
    config = build_tiny("siglip_vision_model").config
    config.num_labels = 3
    own = transformers.SiglipConfig(vision_config=config.to_dict())
    own.num_labels = 3
    model = transformers.SiglipForImageClassification(own).eval()
    picture = {"pixel_values": torch.randn(1, 3, config.image_size, config.image_size)}
    found = ikattn.attribute(model, picture, 1, method=method)
    assert bool(found.scores.isfinite().all())
    assert bool(found.scores.any())


# --- Methods


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Gemma2"])
def test_alti_logit_is_what_attention_writes(kind: str) -> None:
    model = decoder(kind)
    found = ikattn.attribute(model, PROMPT, target=slice(3, 5), method="alti_logit")
    written: list[Tensor] = []
    name = {"GPT2": "attn.c_proj", "Gemma2": "post_attention_layernorm"}.get(
        kind, "self_attn.o_proj"
    )
    hooks = [
        module.register_forward_hook(lambda module, args, output: written.append(output))
        for path, module in model.named_modules()
        if path.endswith(name)
    ]
    last: list[Tensor] = []
    norm = model.transformer.ln_f if kind == "GPT2" else model.model.norm
    hooks.append(norm.register_forward_pre_hook(lambda module, args: last.append(args[0])))
    with torch.no_grad():
        model(PROMPT)
    for hook in hooks:
        hook.remove()
    x = last[0].detach().requires_grad_()
    with frozen(model.parameters()), LinearModel(), torch.enable_grad():
        logits = model.lm_head(norm(x))
        cap = getattr(model.config, "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
    (g,) = torch.autograd.grad(logits[0, [2, 3], [9, 2]].sum(), x)
    total = sum(float((g * y).sum()) for y in written)
    if kind == "GPT2":
        total -= sum(float((g * block.attn.c_proj.bias).sum()) for block in model.transformer.h)
    torch.testing.assert_close(float(found.scores.sum()), total, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.scores.sum(-1) + found.bias, found.value)


def test_rollout_reads_the_rows_of_the_target() -> None:
    model = classifier()
    found = ikattn.attribute(model, PROMPT, method="rollout:encoder")
    recording = recorded(model, PROMPT, "encoder")
    torch.testing.assert_close(found.scores, ikattn.rollout(recording)[:, 0])  # [CLS]
    assert bool(found.bias.isnan().all())


def test_a_decoder_without_attention_has_parts_and_no_rollout() -> None:
    model = tiny_model("MambaForCausalLM", state_size=4)
    found = ikattn.attribute(model, PROMPT, 3)
    torch.testing.assert_close(found.scores.sum(-1) + found.bias, found.value)
    with pytest.raises(ValueError, match=r"no attention .* found in MambaForCausalLM"):
        ikattn.attribute(model, PROMPT, 3, method="rollout:alti")


def test_blocks_that_run_twice_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (decoder(), decoder("GPT2")):
        once = ikattn.attribute(model, PROMPT, slice(3, 5), each=True)
        monkeypatch.setattr(_decompx, "_MUCH", 0)
        twice = ikattn.attribute(model, PROMPT, slice(3, 5), each=True)
        monkeypatch.undo()
        torch.testing.assert_close(once.scores, twice.scores)
        assert "forward" not in vars(model.get_decoder())


def test_types_and_implicit_attention() -> None:
    model = classifier().float()
    expected = ikattn.attribute(model.double(), PROMPT, 1).scores.float()
    found = ikattn.attribute(model.float(), PROMPT, 1)
    assert found.scores.dtype == torch.float32
    torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-5)
    half = ikattn.attribute(model.bfloat16(), PROMPT, 1)
    torch.testing.assert_close(half.scores, expected, rtol=0.2, atol=0.05)
    model = ikattn.convert(classifier(), num_frequencies=4)
    found = ikattn.attribute(model, PROMPT, 1)
    torch.testing.assert_close(found.scores.sum(-1) + found.bias, found.value)


def test_what_torch_compiled_runs_as_written() -> None:
    model = classifier()
    expected = ikattn.attribute(model, PROMPT, 1)
    model.bert.encoder.compile(backend="eager")
    torch.testing.assert_close(ikattn.attribute(model, PROMPT, 1).scores, expected.scores)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", ["decompx", "alti_logit", "rollout:alti"])
def test_on_a_gpu(method: str) -> None:
    model = decoder("GPT2").float()
    expected = ikattn.attribute(model, PROMPT, slice(3, 5), method=method)
    found = ikattn.attribute(model.cuda(), PROMPT.cuda(), slice(3, 5), method=method)
    torch.testing.assert_close(found.scores.cpu(), expected.scores, rtol=1e-3, atol=1e-4)


def test_the_model_is_left_as_it_was() -> None:
    model = classifier()
    model.bert.embeddings.requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    ikattn.attribute(model, PROMPT)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    with pytest.raises(ZeroDivisionError):
        ikattn.attribute(model, PROMPT, lambda output: 1 / 0)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


# --- What is refused


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (decoder, {"target": slice(3, 9)}, r"span within the 5 tokens"),
        (decoder, {"target": slice(0, 3)}, r"must not hold the first token"),
        (decoder, {"target": slice(3, 3)}, r"span within the 5 tokens"),
        (decoder, {"target": slice(1, 4, 2)}, r"without a step"),
        (decoder, {"target": 40}, r"must be a logit, 0 to 39, got 40"),
        (decoder, {"target": 3, "against": 99}, r"against must be a logit"),
        (decoder, {"target": slice(2, 4), "against": -1}, r"against must be a logit"),
        (classifier, {"target": 1, "against": 3}, r"against must be a logit, 0 to 2, got 3"),
        (decoder, {"target": "answer"}, r'"answer", with prompt_length'),
        (decoder, {"target": []}, r"target as token ids needs .* and 0 ids"),
        (classifier, {"target": 3}, r"must be a logit, 0 to 2, got 3"),
        (classifier, {"target": [0, 1]}, r"1 classes, one a sequence, got 2"),
        (classifier, {"target": slice(1, 2)}, r"predicts the next token"),
        (classifier, {"target": lambda x: x.logits}, r"one number .* got 3 .* \[1, 5, 16\]"),
        (classifier, {"method": "decomp"}, r"method must be"),
        (classifier, {"method": "rollout"}, r"method must be"),
        (classifier, {"activation": "zo"}, r"activation must be"),
        (classifier, {"method": "alti_logit"}, r"residual stream .* take \"decompx\""),
        (seq2seq, {"method": "alti_logit", "target": 3}, r"is_encoder_decoder of T5"),
        (lambda: nn.Linear(5, 5).eval(), {}, r"must have attention|must give logits"),
    ],
)
def test_what_cannot_be_attributed_is_told(build, options, message):
    model = build()
    inputs: Any = PROMPT
    if build is seq2seq:
        inputs = {"input_ids": PROMPT, "decoder_input_ids": torch.tensor([[0, 4]])}
    if isinstance(model, nn.Linear):
        inputs = torch.randn(1, 5)
    with pytest.raises(ValueError, match=message):
        ikattn.attribute(model, inputs, **options)


def test_inputs_and_values_that_are_nothing() -> None:
    with pytest.raises(ValueError, match=r"must hold a token, got \[1, 0\]"):
        ikattn.attribute(decoder(), PROMPT[:, :0], 3)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        ikattn.attribute(lambda x: x, PROMPT, 3)  # type: ignore[arg-type]
    model = decoder()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="the value must be finite"):
        ikattn.attribute(model, PROMPT, torch.tensor(3))
    mixture = build_tiny("mixtral").float()
    with pytest.raises(
        NotImplementedError, match=r"called with \d copies of one sequence.*sources=1"
    ):
        ikattn.explain.decomposed_norms(mixture, {"input_ids": PROMPT})


@pytest.mark.parametrize("options", [{"activation": "ramp"}, {"sources": 0}, {"sources": 1.5}])
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    for function in (ikattn.explain.decomposed_norms, ikattn.explain.block_maps):
        with pytest.raises(ValueError, match=r"must be .*, got"):
            function(decoder(), {"input_ids": PROMPT}, **options)


def test_threads_take_turns() -> None:
    model = decoder("GPT2").float()
    expected = ikattn.attribute(model, PROMPT, 3)
    with ThreadPoolExecutor(3) as pool:
        every = list(pool.map(lambda _: ikattn.attribute(model, PROMPT, 3), range(6)))
    assert all(torch.equal(each.scores, expected.scores) for each in every)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_training_and_models_without_logits() -> None:
    with pytest.raises(ValueError, match="eval mode"):
        ikattn.attribute(classifier().train(), PROMPT)
    bare = classifier().bert
    with pytest.raises(ValueError, match=r"must give logits .* or a function of its output"):
        ikattn.attribute(bare, PROMPT)


# --- What is found


def test_words_and_ranks() -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0, 0.25]])
    found = Attribution(
        scores, torch.tensor([2.0]), torch.tensor([0.25]), tokens=[["[CLS]", "a<b", "##c", "d"]]
    )
    words = found.by_words([[None, 0, 0, 1]])
    assert words.scores.tolist() == [[1.0, 0.25]]
    assert words.tokens == [["a<bc", "d"]]
    torch.testing.assert_close(words.scores.sum(-1) + words.bias, words.value)
    assert [token.token for token in found.ranked(2)[0]] == ["##c", "a<b"]
    with pytest.raises(ValueError, match="by_words: words must hold 4"):
        found.by_words([[0]])
    for number in (-1, 1.5):
        with pytest.raises(ValueError, match=r"numbers from 0 or None, got"):
            found.by_words([[0, 0, 0, number]])  # type: ignore[list-item]
    assert str(found) == (
        "sequence 0    score\n0 [CLS]      0.5000\n1 a<b       -1.0000\n2 ##c        2.0000\n"
        "3 d          0.2500\nbias         0.2500\nvalue        2.0000"
    )


def test_a_table_of_targets_apart_and_ranks_that_lack_something() -> None:
    found = ikattn.attribute(decoder(), PROMPT, slice(3, 5), each=True)
    lines = str(found).splitlines()
    assert lines[0].split() == ["sequence", "0", "0", "1"]
    assert len(lines) == 1 + 5 + 2
    with pytest.raises(ValueError, match=r"got \[1, 2, 5\] of targets apart: .* without each="):
        found.ranked(3)
    with pytest.raises(ValueError, match=r"got None for found.tokens: pass tokenizer="):
        ikattn.attribute(decoder(), PROMPT).ranked(3)
