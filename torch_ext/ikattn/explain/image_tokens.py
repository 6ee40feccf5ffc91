"""The parts of a picture that the tokens of a vision-language model's prompt stand for."""

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
        processor: Of transformers, which made ``inputs``: of Qwen-VL, InternVL, Gemma 3,
            SmolVLM, Idefics 3, LLaVA-NeXT, or another whose pictures are squares of tokens.
        inputs: Its ``input_ids``, ``[B, S]``; for videos its ``video_grid_thw``.
        pictures: All of the batch, in order, or lists of them; they are processed once more.
        **options: Those that the processor was called with for pictures, such as
            ``do_pan_and_scan``.

    Returns:
        A view for each picture, tiles and whole picture apart, and for each frame of each video,
        in the order of the prompt.

    Raises:
        ValueError: The prompt holds other image tokens, or their order is not known.

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
        from transformers import image_utils

        if not hasattr(processor, "replace_image_token"):
            got = type(processor).__name__
            raise ValueError(f"image_tokens: processor must be a recent transformers', got {got}")
        given: Any = pictures
        flat: Any = image_utils.make_flat_list_of_images(given)
        named = {**getattr(processor, "images_kwargs", {}), **options}
        numbers = processor.image_processor(images=flat, **named)
        # The image_token_id of Gemma 3 is the token before a picture.
        own, known = processor.image_token_id, processor.image_token_ids
        token = own if own in known else known[0]
        text = processor.tokenizer.convert_ids_to_tokens(token)
        made = []
        for i, picture in enumerate(flat):
            count = processor.replace_image_token(numbers, i).count(text)
            sides = image_utils.get_image_size(image_utils.to_numpy_array(picture))
            grids = _grids_of(processor, numbers, i, sides, count)
            if sum(x.numel() for x in grids) == 0 or max(int(x.max()) for x in grids) >= count:
                raise ValueError(
                    f"image_tokens: the order of the {count} tokens that "
                    f"{type(processor).__name__} makes of picture {i} is not known"
                )
            made.append((count, grids))
        views += _place(inputs, token, made, "picture")
    elif "video_grid_thw" not in inputs:
        raise ValueError("image_tokens: pictures must be those of the prompt, got none")
    if "video_grid_thw" in inputs:
        merged = processor.video_processor.merge_size
        videos = [_frames(grid, merged) for grid in inputs["video_grid_thw"].tolist()]
        made = [(sum(x.numel() for x in grids), grids) for grids in videos]
        views += _place(inputs, processor.video_token_id, made, "video")
    return sorted(views, key=lambda view: (view.sequence, int(view.tokens[0, 0])))


def _place(
    inputs: Mapping[str, Any], token: int, made: list[tuple[int, list[Tensor]]], kind: str
) -> list[ImageView]:
    """Finds pictures in the prompt, of each of which ``made`` has the size and its views."""
    places = (torch.as_tensor(inputs["input_ids"]) == token).nonzero().cpu()
    sizes = [size for size, _ in made]
    if sum(sizes) != len(places):
        raise ValueError(
            f"image_tokens: inputs hold {len(places)} tokens of {kind}s, and the {kind}s given "
            f"make {sum(sizes)}: pass all that inputs were made of, and the same options"
        )
    return [
        ImageView(int(own[0, 0]), number, frame if kind == "video" else None, own[grid, 1])
        for number, ((_, grids), own) in enumerate(zip(made, places.split(sizes), strict=True))
        for frame, grid in enumerate(grids)
    ]


def _grids_of(
    processor: Any, numbers: Mapping[str, Any], i: int, sides: tuple[int, int], count: int
) -> list[Tensor]:
    """Returns the numbers of picture i's tokens in each view, ``[h, w]``; [] if not known."""
    own = processor.image_processor
    if "image_grid_thw" in numbers:
        frames = _frames(torch.as_tensor(numbers["image_grid_thw"])[i].tolist(), own.merge_size)
        return frames if sum(x.numel() for x in frames) == count else []
    if hasattr(own, "image_grid_pinpoints"):
        return _padded(processor, numbers, i, count)
    groups = _groups_of_tiles(own, numbers, i, sides)
    tiles = max(1, sum(rows * columns for rows, columns in groups))
    side = math.isqrt(count // tiles)
    grids, begin = [], 0
    for rows, columns in groups if tiles * side**2 == count else []:
        size = rows * columns * side**2
        tokens = torch.arange(begin, begin + size).view(rows, columns, side, side)
        grids.append(tokens.transpose(1, 2).reshape(rows * side, columns * side))
        begin += size
    return grids


def _frames(grid: Sequence[int], merged: int) -> list[Tensor]:
    frames, h, w = grid[0], grid[1] // merged, grid[2] // merged
    return list(torch.arange(frames * h * w).view(frames, h, w))


def _groups_of_tiles(
    own: Any, numbers: Mapping[str, Any], i: int, sides: tuple[int, int]
) -> list[tuple[int, int]]:
    """Returns rows and columns of the tiles of each view, in the order of the prompt."""
    whole, (height, width) = (1, 1), sides
    if hasattr(own, "do_image_splitting") and "rows" in numbers:  # Idefics 3
        rows, columns = (list(chain(*numbers[name]))[i] for name in ("rows", "cols"))
        return [(rows, columns), whole] if rows else [whole]
    if hasattr(own, "do_pan_and_scan") and "num_crops" in numbers:  # Gemma 3
        crops = int(numbers["num_crops"][i])  # along the longer side
        return [whole, (1, crops) if width >= height else (crops, 1)] if crops else [whole]
    if hasattr(own, "crop_to_patches") and "num_patches" in numbers:  # InternVL, Aya
        tiles = int(numbers["num_patches"][i]) - 1
        shapes = [(tiles // n, n) for n in range(1, tiles + 1) if tiles % n == 0]
        # The processor took the shape whose ratio is the nearest to the picture's.
        nearest = sorted(shapes, key=lambda shape: abs(shape[1] / shape[0] - width / height))
        return [*nearest[:1], whole]
    pixels = numbers["pixel_values"]
    shape: Sequence[int] = pixels[i].shape if len(pixels) > i else ()
    is_square = len(shape) == 3 and shape[1] == shape[2] and "image_sizes" not in numbers
    return [whole] if is_square else []


def _padded(processor: Any, numbers: Mapping[str, Any], i: int, count: int) -> list[Tensor]:
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
        return []
    whole, cut = torch.arange(count).split([side**2, h * (w + 1)])
    return [whole.view(side, side), cut.view(h, w + 1)[:, :w]]
