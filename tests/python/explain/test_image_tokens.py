"""Image tokens in prompts of vision-language models, found by changing places of the pictures."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ikattn
from ikattn.explain import image_tokens

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<pad>", "<unk>", "<image>", "<video>", "<begin>", "<end>", "<image_soft_token>"]
SPECIAL += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
TEXT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "pad_token_id": 0,
}  # fmt: skip
EYE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 4,
}  # fmt: skip
NAMED = {"image_token": "<image>", "video_token": "<video>", "vision_bos_token": "<begin>"}
NAMED |= {"vision_eos_token": "<end>", "start_image_token": "<begin>", "end_image_token": "<end>"}
NAMED |= {"context_image_token": "<image>"}
SIDE = {"height": 32, "width": 32}


def processor_of(name: str, pictures: Any, named: dict[str, str], **options: Any) -> Any:
    """A processor with a tokenizer of few words; video processors need torchvision."""
    words = {word: n for n, word in enumerate([*SPECIAL, "look", "here"])}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:],
        extra_special_tokens=NAMED | named,
    )  # fmt: skip
    kind = getattr(transformers, f"{name}Processor")
    if "video_processor" in inspect.signature(kind.__init__).parameters:
        options["video_processor"] = SimpleNamespace(merge_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
        return kind(image_processor=pictures, tokenizer=tokenizer, **options)


def qwen() -> Any:
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 10000}
    pictures = transformers.Qwen2VLImageProcessor(**sizes)
    eye = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    eye |= {"out_hidden_size": 16, "window_size": 16, "fullatt_block_indexes": []}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope}, vision_config=eye, image_token_id=2,
        video_token_id=3, vision_start_token_id=4, vision_end_token_id=5,
    )  # fmt: skip
    return processor_of("Qwen2_5_VL", pictures, {}), config, {}


def intern() -> Any:
    pictures = transformers.GotOcr2ImageProcessor(size=SIDE, min_patches=1, max_patches=6)
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"}, image_token_id=2, image_seq_length=16,
        vision_config=EYE | {"image_size": [32, 32], "patch_size": [4, 4]},
    )  # fmt: skip
    return processor_of("InternVL", pictures, {}, image_seq_length=16), config, {}


def gemma() -> Any:
    named = {"boi_token": "<image>", "eoi_token": "<end>", "image_token": "<image_soft_token>"}
    pictures = transformers.Gemma3ImageProcessor(size=SIDE)
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=EYE, mm_tokens_per_image=16, image_token_id=6
    )
    scan = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
    scan |= {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    return processor_of("Gemma3", pictures, named, image_seq_length=16), config, scan


def llava() -> Any:
    grids = [[32, 64], [64, 32], [64, 64], [32, 96]]
    sizes = {"size": {"shortest_edge": 32}, "crop_size": SIDE, "image_grid_pinpoints": grids}
    config = transformers.LlavaNextConfig(
        text_config=TEXT | {"model_type": "llama"}, image_token_id=2, image_grid_pinpoints=grids,
        vision_config=EYE | {"model_type": "clip_vision_model", "projection_dim": 16},
    )  # fmt: skip
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    pictures = transformers.LlavaNextImageProcessor(**sizes)
    return processor_of("LlavaNext", pictures, {}, patch_size=4, **options), config, {}


def idefics() -> Any:
    sizes = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    text = TEXT | {"model_type": "llama"}
    given = {"image_token_id": 2, "scale_factor": 2}
    config = transformers.Idefics3Config(text_config=text, vision_config=EYE, **given)
    pictures = transformers.Idefics3ImageProcessor(**sizes)
    return processor_of("Idefics3", pictures, {}, image_seq_len=16), config, {}


def built(build: Any) -> Any:
    torch.manual_seed(0)
    processor, config, options = build()
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:  # Gemma's projection begins at zero
            torch.nn.init.normal_(parameter)
    return processor, model, options


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (qwen, [(5, 8), (11, 4)]),
        (intern, [(8, 12), (4, 4), (12, 4), (4, 4)]),
        (gemma, [(4, 4), (4, 8), (4, 4), (12, 4)]),
        (llava, [(8, 8), (10, 16), (8, 8), (16, 6)]),
        (idefics, [(8, 12), (4, 4), (12, 8), (4, 4)]),
    ],
)
def test_a_place_of_a_picture_moves_its_tokens(build: Any, shapes: list[tuple[int, int]]) -> None:
    processor, model, options = built(build)
    numbers = np.random.default_rng(0)
    arrays = [numbers.integers(0, 256, size, dtype=np.uint8) for size in ((40, 64, 3), (90, 32, 3))]
    pictures = [Image.fromarray(array) for array in arrays]
    text = f"look {processor.image_token} here {processor.image_token} look"

    def vectors(given: list[Any]) -> Tensor:
        inputs, found = processor(images=given, text=[text], return_tensors="pt", **options), []
        part = "language_model" if hasattr(model.model, "language_model") else "text_model"
        hook = getattr(model.model, part).register_forward_pre_hook(
            lambda _module, _args, given: found.append(given["inputs_embeds"][0]), with_kwargs=True
        )
        with hook, torch.no_grad():
            model(**inputs)
        return found[0]

    inputs = processor(images=pictures, text=[text], return_tensors="pt", **options)
    views = image_tokens(processor, inputs, pictures, **options)
    assert [tuple(view.tokens.shape) for view in views] == shapes
    for number, (top, left) in ((0, (4, 44)), (0, (24, 8)), (1, (70, 2)), (1, (10, 18))):
        other = arrays[number].copy()
        other[top : top + 12, left : left + 12] ^= 255
        changed = [Image.fromarray(other) if n == number else pictures[n] for n in range(2)]
        moved = (vectors(changed) - vectors(pictures)).norm(dim=-1)
        for view in views:
            if view.number != number:
                assert moved[view.tokens].max() < 1e-4 * moved.max()
                continue
            h, w = view.tokens.shape
            row, column = divmod(int(moved[view.tokens].argmax()), w)
            height, width = other.shape[:2]
            assert h * top / height - 2 < row < h * (top + 12) / height + 1
            assert w * left / width - 2 < column < w * (left + 12) / width + 1


def test_an_answer_has_a_score_for_each_place() -> None:
    processor, model, _ = built(qwen)
    picture = Image.new("RGB", (64, 40))
    inputs = processor(images=[picture], text=["look <image> here look"], return_tensors="pt")
    found = ikattn.attribute(model, inputs, slice(-2, None))
    (view,) = image_tokens(processor, inputs, [[picture]])
    scores = found.scores[view.sequence, view.tokens]
    assert torch.equal(scores.flatten(), found.scores[0, 1:41])


def test_unknown_orders_are_refused() -> None:
    processor, _, _ = built(llava)
    processor.num_additional_image_tokens = 3
    picture = Image.new("RGB", (64, 40))
    inputs = processor(images=[picture], text=["<image>"], return_tensors="pt")
    with pytest.raises(ValueError, match="order of the 236 tokens that LlavaNextProcessor makes"):
        image_tokens(processor, inputs, [picture])


def test_other_pictures_are_refused() -> None:
    processor = SimpleNamespace(video_token_id=3, video_processor=SimpleNamespace(merge_size=2))
    inputs = {"input_ids": torch.tensor([[1, 3, 3, 3, 0]])}
    with pytest.raises(ValueError, match=r"pictures must be those of the prompt, got none"):
        image_tokens(processor, inputs)
    inputs["video_grid_thw"] = torch.tensor([[1, 4, 4]])
    with pytest.raises(ValueError, match=r"hold 3 tokens of videos, and the videos given make 4"):
        image_tokens(processor, inputs)
