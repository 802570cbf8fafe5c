"""What an error of the file system means to a caller of the store.

Source: spec/kvformat.md section 8.5.
"""

from __future__ import annotations

import errno
from typing import Final

from kvformat.stores.protocol import Code

_CODES: Final = {
    errno.ENOENT: Code.NOT_FOUND,
    errno.EEXIST: Code.EXISTS,
    errno.EINVAL: Code.INVALID,
    errno.EAGAIN: Code.NOT_READY,
    errno.ENOSPC: Code.NO_SPACE,
    errno.EDQUOT: Code.NO_SPACE,
    errno.EFBIG: Code.NO_SPACE,
    errno.EMFILE: Code.UNAVAILABLE,
    errno.ENFILE: Code.UNAVAILABLE,
    errno.EACCES: Code.UNAVAILABLE,
    errno.EPERM: Code.UNAVAILABLE,
    errno.EROFS: Code.UNAVAILABLE,
    errno.ESTALE: Code.UNAVAILABLE,
    errno.ETIMEDOUT: Code.UNAVAILABLE,
    errno.EIO: Code.TRANSFER_FAILED,
    errno.EFAULT: Code.TRANSFER_FAILED,
}


def code_of(error: OSError) -> int:
    """The answer that a failed call stands for; ``INTERNAL`` where nothing is known of it."""
    return _CODES.get(error.errno or 0, Code.INTERNAL)
