"""Files that are replaced as a whole: the old one is there until the new one is written and on the disk."""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path as File

__all__ = ["replacing"]

_HOUR = 3600.0


@contextlib.contextmanager
def replacing(file: "str | os.PathLike[str]") -> Iterator[str]:
    """The name of a draft to write, which then takes the place of a file; if writing it fails, the old one stays.

    Drafts that killed processes have left beside the file are taken away.

    **Raises** `OSError` where no file can be made.
    """
    target = File(os.path.realpath(file))  # a link stays one
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "this is a device or a pipe, and not a file that can be replaced", str(file))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    # Names of files have a limit, which that of the file may reach alone.
    start = f".{target.name[:40]}.draft-"
    _sweep(target.parent, start)
    name = str(target.parent / f"{start}{secrets.token_hex(8)}")
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        mode = os.fstat(handle).st_mode
        _lock(handle)
        yield name
        with contextlib.suppress(FileNotFoundError):
            mode = target.stat().st_mode
        os.chmod(name, mode & 0o777)
        _flush(name)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):  # not every file system lets folders be flushed
        _flush(target.parent)


def _sweep(folder: File, start: str) -> None:
    """Take away drafts whose processes are gone: nothing was written for an hour, and nobody holds their locks."""
    for each in folder.iterdir():
        if not each.name.startswith(start):
            continue
        with contextlib.suppress(OSError):
            if time.time() - each.stat().st_mtime < _HOUR:
                continue
            handle = os.open(each, os.O_RDWR)
            try:
                if _lock(handle):
                    os.unlink(each)
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Hold a lock on a file until it is closed; `False` where another process has it, or there are no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _flush(name: "str | os.PathLike[str]") -> None:
    handle = os.open(name, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
