"""Finds, checks and loads the shared library that registers the operators.

A library built for another torch fails to load with an undefined C++ symbol, or crashes later. So
the torch it was built for is read from a file beside it and compared before it is opened.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent
_LIBRARY = _PACKAGE / "lib" / "libikattn.so"
_BUILD_INFO = _PACKAGE / "build_info.json"  # versions that it was built for
_REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."


def load() -> str:
    """Loads the library into this process and returns its version.

    Raises:
        ImportError: The library is missing, was built for another torch, or does not load.
    """
    for file in (_BUILD_INFO, _LIBRARY):
        if not file.exists():
            raise ImportError(
                f"ikattn's library has not been built: {file} is missing. "
                "In ikattn's source tree, run: pip install --no-build-isolation ."
            )
    built: dict[str, str] = json.loads(_BUILD_INFO.read_text())
    check_torch_version(built["torch"], torch.__version__)
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        raise ImportError(
            f"ikattn, built for torch {built['torch']}, does not load into torch "
            f"{torch.__version__}: {error}. To build it anew, in ikattn's source tree, run: "
            f"{_REBUILD}"
        ) from error
    return built["version"]


def version() -> str:
    """Returns the version of the package that is built."""
    built: dict[str, str] = json.loads(_BUILD_INFO.read_text())
    return built["version"]


def check_torch_version(built_for: str, running: str) -> None:
    """Raises ImportError unless both are of one minor version, within which torch's ABI holds."""
    if built_for.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"ikattn was built for torch {built_for}, but this is torch {running}. "
            f"To build it for this torch, in ikattn's source tree, run: {_REBUILD}"
        )


def cmake_prefix_path() -> str:
    """Returns the directory for CMAKE_PREFIX_PATH in which find_package(ikattn) finds ikattn.

    LibTorch is found too where torch is installed beside ikattn, as pip does; otherwise add
    torch.utils.cmake_prefix_path. ``python -m ikattn cmake-prefix-path`` prints both.

    Example:
        >>> from ikattn._library import cmake_prefix_path
        >>> from pathlib import Path
        >>> (Path(cmake_prefix_path()) / "share/cmake/ikattn/ikattnConfig.cmake").exists()
        True
    """
    return str(_PACKAGE)
