"""Maps of image models: from scores of tokens to the patches of a picture.

Sizes: S tokens, of which some stand before the patches (a class token, registers); h x w patches,
row by row.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from ikattn._optional import optional
from ikattn._whole_files import whole_file
from ikattn.maps.pictures import INK, QUIET, matplotlib, picture_format

_FOR, _AGAINST = "#e67800", "#006ec8"  # colours of texts: orange for, blue against


def patch_maps(
    scores: Tensor,
    model: Any = None,
    *,
    grid: tuple[int, int] | None = None,
    specials: int | None = None,
) -> Tensor:
    """Returns scores of an image model's tokens as a grid of patches.

    The tokens of vision transformers such as ViT, DeiT, CLIP, SigLIP and DINOv2 are all special
    ones, then the patches row by row. Special tokens are left out.

    Args:
        scores: ``[..., S]``: rows of a recorded map, of importance or of an attribution.
        model: One of transformers, or its config; its ``image_size`` and ``patch_size`` give the
            grid, and its ``num_register_tokens`` how many special tokens there may be.
        grid: h and w, for inputs of another size than the config's.
        specials: How many tokens stand before the patches. None: all but h w, which must be the
            registers, with a class token or without (and DeiT's second one).

    Returns:
        ``[..., h, w]``, a view.

    Raises:
        ValueError: The grid is not known, or S is not its patches and the special tokens.

    Example:
        >>> import torch
        >>> from ikattn.explain import patch_maps
        >>> patch_maps(torch.arange(7.0), grid=(2, 3))  # the first is the class token
        tensor([[1., 2., 3.],
                [4., 5., 6.]])
    """
    config = getattr(model, "config", model)
    config = getattr(config, "vision_config", config)  # CLIP and SigLIP read texts, too
    if grid is None:
        image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
        if image is None or patch is None:
            raise ValueError(
                "patch_maps: grid must be (h, w) where model has no image_size and patch_size"
            )
        # a config may hold height and width as one number
        (H, W), (height, width) = ((x, x) if isinstance(x, int) else x for x in (image, patch))
        grid = H // height, W // width
    if len(grid) != 2:
        raise ValueError(f"patch_maps: grid must be (h, w), got {grid}")
    h, w = grid
    if scores.dim() == 0 or min(h, w) < 1 or (specials or 0) < 0:
        raise ValueError(
            "patch_maps: scores must be [..., S], grid positive and specials 0 or more, got "
            f"{list(scores.shape)}, {(h, w)} and {specials}"
        )
    S = scores.size(-1)
    found = S - h * w
    registers = int(getattr(config, "num_register_tokens", None) or 0)
    classes = (2,) if getattr(config, "model_type", "") == "deit" else (0, 1)
    possible = [registers + n for n in classes] if specials is None else [specials]
    if found not in possible:
        raise ValueError(
            f"patch_maps: scores must have {' or '.join(str(n + h * w) for n in possible)} tokens, "
            f"{h} x {w} patches and {' or '.join(map(str, possible))} special ones, got {S}: give "
            "grid=(h, w), the input's height and width in patches, or specials="
        )
    patches: Tensor = scores[..., found:].unflatten(-1, (h, w))
    return patches


def plot_patches(
    patches: Tensor,
    picture: Any,
    path: str | os.PathLike[str],
    *,
    smooth: bool = True,
    title: str = "",
    dpi: int = 160,
) -> None:
    """Draws a picture, and beside it the same with a map of its patches laid over.

    Orange is for what has positive scores and blue for negative ones; what has none shows the
    picture in grey.

    Args:
        patches: ``[h, w]``, from :func:`patch_maps`.
        picture: The picture as the model saw it, resized and cropped, not normalised: a PIL image,
            an array ``[H, W, 3]``, or a tensor ``[3, H, W]``, bytes or numbers from 0 to 1.
        path: Ends in .png, .svg or .pdf.
        smooth: Go over from patch to patch linearly; False: patches have edges.
        title: Stands above.
        dpi: Dots per inch.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        ValueError: Patches or picture are not as above.
        OSError: The path cannot be written, or the disk is full.

    Example:
        >>> import pytest, tempfile, torch
        >>> _ = pytest.importorskip("matplotlib")
        >>> from ikattn.explain import patch_maps, plot_patches
        >>> patches = patch_maps(torch.randn(17), grid=(4, 4))
        >>> plot_patches(patches, torch.rand(3, 32, 32), tempfile.mkdtemp() + "/patches.png")
    """
    kind = picture_format("plot_patches", path)
    if patches.dim() != 2 or 0 in patches.shape or not bool(patches.isfinite().all()):
        raise ValueError(
            "plot_patches: patches must be [h, w] of finite numbers, got "
            f"{list(patches.shape)}: take one sequence, and one row of a map"
        )
    figure = _figure(patches.detach().double().cpu(), _colours_of(picture), smooth, title)
    with whole_file(path) as file:
        figure.savefig(file, format=kind, dpi=dpi)


def _colours_of(picture: Any) -> Tensor:
    """Returns a picture as numbers from 0 to 1, ``[H, W, 3]``."""
    if isinstance(picture, Tensor):
        colours = picture.detach().cpu()
        colours = colours.movedim(0, -1) if colours.dim() else colours
    else:
        image = picture.convert("RGB") if hasattr(picture, "convert") else picture
        array = optional("numpy", "a picture", "'ikattn[viz]'").array(image)  # a copy
        colours = torch.from_numpy(array) if array.dtype.kind in "uif" else torch.tensor(False)
    if colours.dim() != 3 or colours.size(-1) != 3 or colours.dtype == torch.bool:
        got = picture.dtype if isinstance(picture, Tensor) else type(picture).__name__
        raise ValueError(
            "plot_patches: picture must be a PIL image, an array [H, W, 3] or a tensor [3, H, W], "
            f"got {got} {list(getattr(picture, 'shape', []))}"
        )
    colours = colours.double() if colours.is_floating_point() else colours.double() / 255
    if colours.numel() == 0 or not bool(((colours >= 0) & (colours <= 1)).all()):
        least, most = (colours.min(), colours.max()) if colours.numel() else (0, 0)
        raise ValueError(
            "plot_patches: picture must hold bytes, or numbers from 0 to 1, got "
            f"{list(colours.shape)} from {float(least):.3g} to {float(most):.3g}: take it before "
            "it is normalised"
        )
    return colours


def _figure(patches: Tensor, colours: Tensor, smooth: bool, title: str) -> Any:
    """Draws two panels and a scale; lengths in inches."""
    H, W = colours.shape[:2]
    width, gap, above = 3.2, 0.12, 0.4 if title else 0.12
    height = min(max(width * H / W, 0.8), 12.0)
    whole = (2 * width + gap + 1.1, height + above + gap)
    figure = matplotlib("figure").Figure(figsize=whole)

    def place(left: float, own_width: float) -> Any:
        box = (left / whole[0], gap / whole[1], own_width / whole[0], height / whole[1])
        axes = figure.add_axes(box)
        axes.set_axis_off()
        return axes

    extent = (0, W, H, 0)
    place(gap, width).imshow(colours.numpy(), extent=extent, aspect="auto")
    over = place(2 * gap + width, width)
    grey = colours @ colours.new_tensor([0.299, 0.587, 0.114])  # the eye's brightness of RGB
    over.imshow(
        (0.35 + 0.65 * grey).numpy(), cmap="gray", vmin=0, vmax=1, extent=extent, aspect="auto"
    )
    top = float(patches.abs().max()) or 1.0
    lowest = -top if bool((patches < 0).any()) else 0.0
    between = "bilinear" if smooth else "nearest"
    shades = {"cmap": _scale(lowest < 0), "vmin": lowest, "vmax": top, "interpolation": between}
    shown = over.imshow(patches.numpy(), extent=extent, aspect="auto", **shades)
    text = {"fontsize": 8, "parse_math": False}
    figure.text(gap / whole[0], 1 - 0.26 / whole[1], title, color=INK, **text)
    bar = place(3 * gap + 2 * width, 0.12)
    bar.set_axis_on()
    scale = figure.colorbar(shown, cax=bar, ticks=[lowest, 0, top] if lowest else [0, top])
    scale.outline.set_visible(False)
    bar.tick_params(labelsize=7, length=0, colors=QUIET)
    bar.set_yticklabels([f"{tick:.3g}" for tick in scale.get_ticks()])
    return figure


def _scale(has_negative: bool) -> Any:
    """Makes colours that are clear at 0, so that the picture is seen through them."""
    colours = matplotlib("colors")
    strong, none = colours.to_rgba(_FOR, 0.85), colours.to_rgba(_FOR, 0.0)
    stops = [(0.0, none), (1.0, strong)]
    if has_negative:
        least = colours.to_rgba(_AGAINST, 0.85)
        stops = [(0.0, least), (0.5, colours.to_rgba(_AGAINST, 0.0)), (0.5, none), (1.0, strong)]
    return colours.LinearSegmentedColormap.from_list("patches", stops)
