"""``ikattn.attribute`` on models that pad their input, see pictures, or run in unusual modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ikattn
from drawing import moved
from ikattn.explain import block_maps, decomposed_norms, value_zeroing
from tiny_texts import tiny_model, tiny_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 65,
    "pad_token_id": 0,
}
IDS = torch.tensor([[2, 61, 60, 60, 60, 60, 62, 5, 6]])  # 60 is a picture's


def varied(model: Any) -> Any:
    torch.manual_seed(0)
    return moved(model, 0.1).eval()


def check_sum(found: Any) -> None:
    prefix = 0 if found.prefix_scores is None else found.prefix_scores.sum(-1)
    total = found.scores.sum(-1) + prefix + found.bias
    torch.testing.assert_close(total, found.value, rtol=1e-4, atol=1e-5)


# --- Tokens that were given


def test_tokens_keep_their_names_where_a_model_pads_them() -> None:
    both = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{n}": 2 for side in ("encoder", "decoder") for n in both}
    config = transformers.LEDConfig(
        **sizes, d_model=16, vocab_size=40, attention_window=4, pad_token_id=0,
        max_encoder_position_embeddings=40, decoder_start_token_id=3,
    )  # fmt: skip
    model = varied(transformers.LEDForConditionalGeneration(config))
    found = ikattn.attribute(model, "w1 w2 w3", "w4 w5", tokenizer=tiny_tokenizer())
    assert found.tokens == [["w1", "w2", "w3"]]
    assert found.scores.shape == (1, 3)
    check_sum(found)


def test_virtual_tokens_are_no_tokens() -> None:
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(n_embd=16, n_head=4, n_layer=2, vocab_size=40)
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        base = transformers.GPT2LMHeadModel(config)
        own = kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = varied(peft.get_peft_model(base, own))
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for method in ("decompx", "alti_logit"):
            found = ikattn.attribute(model, inputs, 7, method=method)
            assert found.scores.shape == (1, 5)
            check_sum(found)


class Two(nn.Module):
    """Two encoders, of which the second reads what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.one, self.two = (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
                1,
                enable_nested_tensor=False,
            )
            for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.two(self.one(self.words(ids)))[:, 0]
        return made


def test_scores_go_through_both_of_two_encoders() -> None:
    model, ids = varied(Two()), torch.tensor([[3, 14, 15, 9, 2]])
    found = ikattn.attribute(model, ids, 1)
    entered = model.words(ids).detach()
    joined = nn.TransformerEncoder(model.one.layers[0], 2, enable_nested_tensor=False).eval()
    joined.layers = nn.ModuleList([model.one.layers[0], model.two.layers[0]])
    expected = ikattn.attribute(joined, entered, lambda output: output[:, 0, 1])
    torch.testing.assert_close(found.scores, expected.scores)
    with pytest.raises(ValueError, match=r"two.layers reads what one.layers made"):
        ikattn.attribute(model, ids, 1, method="rollout:encoder")


@pytest.mark.parametrize("shape", [(5, 2), (3, 3)])
@pytest.mark.parametrize("method", ["decompx", "rollout:encoder"])
def test_tokens_may_come_first(shape: tuple[int, int], method: str) -> None:
    model = varied(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2))
    x = torch.randn(*shape, 16)
    found = ikattn.attribute(model, x, lambda y: y[-1, :, 3], method=method)
    for layer in model.layers:
        layer.self_attn.batch_first = True
    turned = x.transpose(0, 1)
    expected = ikattn.attribute(model, turned, lambda y: y[:, -1, 3], method=method)
    torch.testing.assert_close(found.scores, expected.scores)


# --- Pictures


def qwen() -> tuple[Any, dict[str, Any]]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0]}
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 16, "patch_size": 8, "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_scaling": rope}, vision_config=vision, image_token_id=60,
        vision_start_token_id=61, vision_end_token_id=62, video_token_id=63,
    )  # fmt: skip
    pixels = {"pixel_values": torch.randn(16, 384), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    model = transformers.Qwen3VLForConditionalGeneration(config)
    return model, pixels | {"mm_token_type_ids": (IDS == 60).int()}


def gemma() -> tuple[Any, dict[str, Any]]:
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=vision, mm_tokens_per_image=4, image_token_index=60,
        boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip
    types = {"token_type_ids": (IDS == 60).long()}
    model = transformers.Gemma3ForConditionalGeneration(config)
    return model, types | {"pixel_values": torch.randn(1, 3, 16, 16)}


@pytest.mark.parametrize("build", [qwen, gemma])
@pytest.mark.parametrize("method", ["decompx", "alti_logit", "rollout:alti"])
def test_a_picture_is_its_tokens(build: Callable[[], Any], method: str) -> None:
    torch.manual_seed(0)
    model, pixels = build()
    varied(model)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)} | pixels
    found = ikattn.attribute(model, inputs, 7, method=method)
    assert found.scores.shape == (1, 9)
    assert found.prefix_scores is None
    if method != "rollout:alti":
        check_sum(found)
    alone = ikattn.attribute(model, IDS[:, 6:], 7, method=method)
    assert alone.scores.shape == (1, 3)


# --- Functions as targets


@pytest.mark.parametrize(
    "target",
    [
        lambda output: output.last_hidden_state[:, 2].norm(dim=-1),
        lambda output: output.last_hidden_state.log_softmax(-1)[:, 0, 3],
        lambda output: torch.cosine_similarity(output[0][:, 0], output[0][:, 1]),
        lambda output: output.pooler_output.square().mean(-1),
    ],
)
def test_a_function_is_taken_by_its_tangent(target: Callable[[Any], Tensor]) -> None:
    model, ids = tiny_model("BertModel"), torch.tensor([[1, 7, 9, 4, 2], [1, 5, 5, 6, 2]])
    found = ikattn.attribute(model, ids, target)
    check_sum(found)
    with torch.no_grad():
        torch.testing.assert_close(found.value, target(model(ids)))
        made = model(ids)
    for value in made.values():
        value.requires_grad_()
    gradients = torch.autograd.grad(target(made).sum(), list(made.values()), allow_unused=True)

    def linear(output: Any) -> Tensor:
        pairs = zip(output.values(), gradients, strict=True)
        return sum((x * g).flatten(1).sum(-1) for x, g in pairs if g is not None)  # type: ignore[return-value]

    expected = ikattn.attribute(model, ids, linear)
    torch.testing.assert_close(found.scores, expected.scores)


def test_a_function_without_a_gradient_is_told() -> None:
    model, ids = tiny_model("BertModel"), torch.tensor([[1, 7, 9]])
    with pytest.raises(ValueError, match=r"got some without.* neither detach nor round"):
        ikattn.attribute(model, ids, lambda output: output[0][:, 0, 0].detach())
    with pytest.raises(ValueError, match=r"tensor of numbers, .* got torch.int64 \[1\]"):
        ikattn.attribute(model, ids, lambda output: output[0][:, 0].argmax(-1))


# --- Modes


class Blocks(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks, self.reentrant = nn.TransformerEncoder(layer, 2).layers, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x[:, 0]


def test_modes_around_a_call_change_nothing() -> None:
    model, x = varied(Blocks()), torch.randn(2, 5, 16)
    expected = ikattn.attribute(model, x, 1).scores

    def found() -> Tensor:
        return ikattn.attribute(model, x.clone(), 1).scores

    with torch.no_grad():
        torch.testing.assert_close(found(), expected)
    with torch.inference_mode():
        torch.testing.assert_close(found(), expected)
        for function in (value_zeroing, block_maps, decomposed_norms):
            assert function(model, {"x": x.clone()}).isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(found(), expected, rtol=0.2, atol=0.05)
        model(x).sum().backward()  # keeps weights in bfloat16, with their graph
        torch.testing.assert_close(found(), expected, rtol=0.2, atol=0.05)
    model.blocks[0].forward = torch.compile(model.blocks[0].forward, backend="eager")
    model(x)
    torch.testing.assert_close(found(), expected)
    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func"):
        torch.func.grad(lambda h: found().sum() * h)(torch.ones(()))
    with torch.inference_mode():
        made = Blocks().eval()
    with pytest.raises(ValueError, match=r"blocks.0.\S+ was made in torch.inference_mode"):
        ikattn.attribute(made, x, 1)


@pytest.mark.parametrize(
    ("reentrant", "reason"), [(True, r"no_grad and .* use_reentrant=True"), (False, r"once more")]
)
def test_checkpointed_blocks_are_told(reentrant: bool, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        ikattn.attribute(Blocks(reentrant).eval(), torch.randn(2, 5, 16), 1)


# --- Padding and empty inputs of blocks


@pytest.mark.parametrize("function", [value_zeroing, block_maps, decomposed_norms])
def test_blocks_of_torch_take_padding_and_masks(function: Callable[..., Tensor]) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, x = varied(nn.TransformerEncoder(layer, 2)), torch.randn(6, 6, 16)
    alone = function(model, {"src": x[:1, :4]})
    padding = torch.zeros(6, 6, dtype=torch.bool)
    padding[0, 4:] = True
    found = function(model, {"src": x, "src_key_padding_mask": padding})
    torch.testing.assert_close(found[:, :1, :4, :4], alone, rtol=1e-3, atol=1e-5)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    assert float(function(model, {"src": x, "mask": causal}).triu(1).abs().max()) < 1e-6
    with pytest.raises(ValueError, match=r"must hold a token, got \{'src': \[6, 0, 16\]\}"):
        function(model, {"src": x[:, :0]})
    model.layers[1].self_attn.batch_first = False
    with pytest.raises(ValueError, match=r"layers.1.self_attn has batch_first=False"):
        function(model, {"src": x})
