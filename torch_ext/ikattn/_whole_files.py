"""A file stands under its name whole, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".ikattn-*.part"  # files that a killed process may leave


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file that gets its name, and replaces one of that name, when the block ends well.

    Until then it stands in the same directory under another name. An exception in the block, also
    a KeyboardInterrupt, removes it and leaves what stood under the name as it was. OSError, which
    names the path, tells that it is not writable or the disk is full.
    """
    final = Path(os.path.realpath(path))  # through a link, not in its place
    partial = final.with_name(PARTIAL.replace("*", secrets.token_hex(6)))
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, f"cannot write {path}: it is a directory")
    if final.exists() and not final.is_file():
        raise OSError(errno.EINVAL, f"cannot write {path}: it is a device, pipe or socket")
    with _naming(path):
        file = partial.open("xb")
    try:
        with _naming(path, only=_WRITING_FAILED), file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _naming(path):
            partial.replace(final)
            folder = os.open(final.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the new name survives a loss of power
            finally:
                os.close(folder)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# Errors of a failed write; any other error in the block may have to do with another file.
_WRITING_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def _naming(path: str | os.PathLike[str], only: Container[int] | None = None) -> Iterator[None]:
    """Makes an OSError name the path that was asked for."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (only is not None and error.errno not in only):
            raise
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
