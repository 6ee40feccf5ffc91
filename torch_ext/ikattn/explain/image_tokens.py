"""Which token of a vision-language model's prompt is which part of a picture.

Sizes: S tokens; h x w image tokens that cover a picture, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ImageView(NamedTuple):
    """Tokens that together cover one picture, or one frame of a video.

    Attributes:
        sequence: The row of the batch.
        number: Which of the pictures, or of the videos.
        frame: Which of the video's frames; None: a picture.
        tokens: Positions in the sequence, ``[h, w]``.
    """

    sequence: int
    number: int
    frame: int | None
    tokens: Tensor


def image_tokens(
    processor: Any, inputs: Mapping[str, Any], pictures: Sequence[Any] = (), **options: Any
) -> list[ImageView]:
    """Finds the tokens of each picture in a prompt, from the processor's own numbers.

    A processor may cut a picture into tiles, and add the whole picture, scaled down: these are two
    views of it, and the tiles of a view stand beside each other as in the picture. Scores of the
    tokens ``[..., S]``, such as a recorded map's rows or an attribution's, are then a grid:
    ``scores[..., view.tokens]`` is ``[..., h, w]``, which :func:`plot_patches` draws.

    Args:
        processor: Of transformers, which made ``inputs``: of Qwen-VL, GLM-V, InternVL, Gemma 3,
            SmolVLM, Idefics 3, LLaVA-NeXT, or another whose pictures are squares of tokens.
        inputs: Its ``input_ids``, ``[B, S]``; for videos its ``video_grid_thw``.
        pictures: All pictures of the batch, in order, or lists of them. They are processed once
            more.
        **options: Those that the processor was called with for pictures, such as
            ``do_pan_and_scan``.

    Returns:
        A view for each picture, tiles and whole picture apart, and for each frame of each video,
        in the order of the prompt.

    Raises:
        ValueError: The prompt does not hold as many image tokens as the pictures make, or their
            order is not known.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from ikattn.explain import image_tokens
        >>> merging = SimpleNamespace(merge_size=2)  # a stand-in for Qwen2-VL's processor
        >>> processor = SimpleNamespace(video_token_id=9, video_processor=merging)
        >>> inputs = {
        ...     "input_ids": torch.tensor([[1, 9, 9, 2, 9, 9, 3]]),
        ...     "video_grid_thw": torch.tensor([[2, 2, 4]]),  # two frames of 1 x 2 tokens
        ... }
        >>> [view.tokens.tolist() for view in image_tokens(processor, inputs)]
        [[[1, 2]], [[4, 5]]]
    """
    views = []
    if len(pictures):
        if not hasattr(processor, "replace_image_token"):
            raise ValueError(
                "image_tokens: processor must be a recent transformers' one of pictures and text, "
                f"got {type(processor).__name__}"
            )
        from transformers import image_utils

        given: Any = pictures
        flat: Any = image_utils.make_flat_list_of_images(given)
        named = {**getattr(processor, "images_kwargs", {}), **options}
        numbers = processor.image_processor(images=flat, **named)
        made = [_picture_of(processor, numbers, i, picture) for i, picture in enumerate(flat)]
        views += _place(inputs, _token_of(processor), made, "picture")
    elif "video_grid_thw" not in inputs:
        raise ValueError("image_tokens: pictures must be those of the prompt, got none")
    if "video_grid_thw" in inputs:
        merged = processor.video_processor.merge_size
        made = [_of_frames(grid, merged) for grid in inputs["video_grid_thw"].tolist()]
        views += _place(inputs, processor.video_token_id, made, "video")
    return sorted(views, key=lambda view: (view.sequence, int(view.tokens[0, 0])))


class _Picture(NamedTuple):
    """A picture's tokens.

    Attributes:
        size: How many there are.
        views: Their numbers in each view, ``[h, w]``.
    """

    size: int
    views: list[Tensor]


def _place(
    inputs: Mapping[str, Any], token: int, made: list[_Picture], kind: str
) -> list[ImageView]:
    places = (torch.as_tensor(inputs["input_ids"]) == token).nonzero().cpu()
    sizes = [picture.size for picture in made]
    if sum(sizes) != len(places):
        raise ValueError(
            f"image_tokens: inputs hold {len(places)} tokens of {kind}s, and the {kind}s given "
            f"make {sum(sizes)}: pass all that inputs were made of, and the same options"
        )
    found = []
    for number, (picture, own) in enumerate(zip(made, places.split(sizes), strict=True)):
        for frame, grid in enumerate(picture.views):
            of_video = frame if kind == "video" else None
            found.append(ImageView(int(own[0, 0]), number, of_video, own[grid, 1]))
    return found


def _picture_of(processor: Any, numbers: Mapping[str, Any], i: int, picture: Any) -> _Picture:
    if "image_grid_thw" in numbers:
        grid = torch.as_tensor(numbers["image_grid_thw"])[i].tolist()
        return _of_frames(grid, processor.image_processor.merge_size)
    token = processor.tokenizer.convert_ids_to_tokens(_token_of(processor))
    count = processor.replace_image_token(numbers, i).count(token)
    if hasattr(processor.image_processor, "image_grid_pinpoints"):
        return _padded(processor, numbers, i, count)
    groups = _groups_of_tiles(processor, numbers, i, picture)
    tiles = sum(rows * columns for rows, columns in groups)
    side = math.isqrt(count // max(1, tiles))
    if tiles == 0 or tiles * side**2 != count:
        raise _unknown(processor, count, i)
    views, begin = [], 0
    for rows, columns in groups:
        size = rows * columns * side**2
        tokens = torch.arange(begin, begin + size).view(rows, columns, side, side)
        views.append(tokens.transpose(1, 2).reshape(rows * side, columns * side))
        begin += size
    return _Picture(count, views)


def _unknown(processor: Any, count: int, i: int) -> ValueError:
    return ValueError(
        f"image_tokens: the order of the {count} tokens that {type(processor).__name__} makes of "
        f"picture {i} is not known"
    )


def _token_of(processor: Any) -> int:
    # With Gemma 3, image_token_id is that of the token before a picture.
    tokens = processor.image_token_ids
    own: int = processor.image_token_id
    return own if own in tokens else tokens[0]


def _of_frames(grid: Sequence[int], merged: int) -> _Picture:
    frames, h, w = grid[0], grid[1] // merged, grid[2] // merged
    return _Picture(frames * h * w, list(torch.arange(frames * h * w).view(frames, h, w)))


def _groups_of_tiles(
    processor: Any, numbers: Mapping[str, Any], i: int, picture: Any
) -> list[tuple[int, int]]:
    """Returns rows and columns of the tiles of each view, in the order of the prompt, if known."""
    own = processor.image_processor
    whole = (1, 1)
    if hasattr(own, "do_image_splitting") and "rows" in numbers:  # Idefics 3
        rows, columns = (list(chain(*numbers[name]))[i] for name in ("rows", "cols"))
        return [(rows, columns), whole] if rows else [whole]
    if hasattr(own, "do_pan_and_scan") and "num_crops" in numbers:  # Gemma 3
        crops = int(numbers["num_crops"][i])
        height, width = _size_of(picture)  # crops lie along the longer side
        return [whole, (1, crops) if width >= height else (crops, 1)] if crops else [whole]
    if hasattr(own, "crop_to_patches") and "num_patches" in numbers:  # InternVL, Aya
        tiles = int(numbers["num_patches"][i]) - 1
        height, width = _size_of(picture)
        shapes = [(tiles // n, n) for n in range(1, tiles + 1) if tiles % n == 0]
        # The processor took the shape whose ratio is the nearest to the picture's.
        nearest = sorted(shapes, key=lambda shape: abs(shape[1] / shape[0] - width / height))
        return [*nearest[:1], whole]
    pixels = numbers["pixel_values"]
    shape: Sequence[int] = pixels[i].shape if len(pixels) > i else ()
    is_square = len(shape) == 3 and shape[1] == shape[2] and "image_sizes" not in numbers
    return [whole] if is_square else []


def _size_of(picture: Any) -> tuple[int, int]:
    from transformers import image_utils

    height, width = image_utils.get_image_size(image_utils.to_numpy_array(picture))
    return height, width


def _padded(processor: Any, numbers: Mapping[str, Any], i: int, count: int) -> _Picture:
    """Returns LLaVA-NeXT's tokens: the whole picture, then its rows with a newline after each."""
    from transformers.models.llava_next import modeling_llava_next

    llava: Any = modeling_llava_next
    size = torch.as_tensor(numbers["image_sizes"])[i]
    pixels = numbers["pixel_values"][i].shape[-1]
    pinpoints = processor.image_processor.image_grid_pinpoints
    rows, columns = llava.get_anyres_image_grid_shape(size, pinpoints, pixels)
    side = pixels // processor.patch_size
    h, w = llava.unpad_image(torch.empty(1, rows * side, columns * side), size).shape[1:]
    if count != side**2 + h * (w + 1):
        raise _unknown(processor, count, i)
    whole, cut = torch.arange(count).split([side**2, h * (w + 1)])
    return _Picture(count, [whole.view(side, side), cut.view(h, w + 1)[:, :w]])
