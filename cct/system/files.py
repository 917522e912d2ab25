"""Every file that cct writes: whole or not at all, flushed to the disk, and one message where that cannot be done.

What is read again by a program (checkpoints, policy, rollouts) has its SHA-256 in a run's `SHA256SUMS`, in the format of
`sha256sum`. It finds damage; it is no signature.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import resource
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"
LOCK = ".lock"
TEMPORARY = ".tmp"  # ends the name of what is being written
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# What an operating system answers where a file cannot be written; other errors are bugs, and pass.
REFUSALS = NO_ROOM | {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG}
REFUSALS |= {errno.EBUSY, errno.EMFILE, errno.ESTALE, errno.EEXIST}  # the last one: a file where a folder is to be


class WriteError(Exception):
    """A file could not be written; the message says which, why, where, and how much room is left."""


class Held(Exception):
    """Another process has the lock; the message says which, if it is known."""


# --- writing ----------------------------------------------------------------------------------
@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises WriteError about `path` where the operating system refuses a write within, whatever a library made of it."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        refused = _refusal(error)
        if refused is None:
            raise
        raise WriteError(_described(path, refused)) from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place beside `path` to write a file or a folder to; it is flushed and takes the place of `path` when the block ends.

    Where the block raises, nothing is left of it. What a link points to is replaced, and a device is written to as it is.
    Raises WriteError where it cannot be written.
    """
    with writing(path):
        if path.is_relative_to("/dev") or (path.exists() and not path.is_file() and not path.is_dir()):
            yield path
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = _beside(path)
        try:
            yield unfinished
            _flush(unfinished)
            _move(unfinished, path)
        except BaseException:
            remove(unfinished)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file as `whole` does."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="")


def without_nan(value: Any) -> Any:
    """What JSON can say: None instead of NaN and infinity."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path: Path, text: str) -> None:
    """Add to a text file, all of it or nothing. Raises WriteError."""
    with writing(path):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        before, left = os.fstat(file).st_size, text.encode()
        try:
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except BaseException:
            os.ftruncate(file, before)
            raise
        finally:
            os.close(file)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there; a folder is gone at once, however long it takes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path.rename(_beside(path)))
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path, beginning: str = "") -> None:
    """Remove what killed processes left unfinished in a folder. For one who holds its lock: nobody else is writing there."""
    for path in folder.glob(f".{beginning}*{TEMPORARY}"):
        remove(path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}{TEMPORARY}")


def _flush(path: Path) -> None:
    """To the disk, each file of a folder; with the permissions that a new file has here."""
    umask = os.umask(0)
    os.umask(umask)
    for file in _files_of(path):
        file.chmod(0o666 & ~umask)  # safetensors makes files that only their owner reads
        _fsync(file)
    if path.is_dir():
        _fsync(path)


def _fsync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _move(unfinished: Path, path: Path) -> None:
    """A file replaces a file in one step; a folder, or what stands in a folder's place, is removed first."""
    if path.is_dir() or unfinished.is_dir():
        remove(path)
    unfinished.replace(path)
    with suppress(OSError):  # some network file systems cannot
        _fsync(path.parent)


def _refusal(error: BaseException | None) -> OSError | None:
    """The operating system's error behind another one. Libraries in Rust write its number into their text, torch nothing."""
    chain: list[BaseException] = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for one in chain:
        if isinstance(one, OSError) and one.errno in REFUSALS:
            return one
        if found := re.search(r"\(os error (\d+)\)", str(one)):
            return OSError(int(found[1]), os.strerror(int(found[1])))
    if any(re.search("iostream error|unexpected pos|failed writing", str(one)) for one in chain):
        return OSError(errno.EIO, "torch could write a part of it only")
    return None


def _described(path: Path, error: OSError) -> str:
    place = path.parent
    while not place.is_dir() and place != place.parent:
        place = place.parent
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    advice = f"; files may have at most {_size(limit)} here (ulimit -f)" if error.errno == errno.EFBIG else ""
    return f"{path}: cannot be written ({error.strerror}){advice}; {_size(shutil.disk_usage(place).free)} are free in {place}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


# --- checksums --------------------------------------------------------------------------------
@contextmanager
def kept(root: Path, path: Path) -> Iterator[Path]:
    """As `whole`, with checksums kept in `root`; those of what is replaced are dropped before, so that none is ever wrong."""
    with whole(path) as unfinished:
        yield unfinished
        forget(root, path)
    with writing(root / SUMS):
        new = {file.relative_to(root).as_posix(): sha256_of(file) for file in _files_of(path)}
    _write_sums(root, _sums(root) | new)


def forget(root: Path, *paths: Path) -> None:
    """Drop the checksums of files and folders that are gone, or will be."""
    names, before = [path.relative_to(root).as_posix() for path in paths], _sums(root)
    after = {name: digest for name, digest in before.items() if not _is_of(name, names)}
    if len(after) < len(before):
        _write_sums(root, after)


def damage(root: Path, path: Path) -> str | None:
    """What differs between a file or folder and its checksums; None where nothing does, or none were kept."""
    name = path.relative_to(root).as_posix()
    for each, digest in _sums(root).items():
        if _is_of(each, [name]):
            file = root / each
            if not file.is_file():
                return f"{each} is missing"
            if sha256_of(file) != digest:
                return f"{each} is not as it was written: its SHA-256 differs from the one in {SUMS}"
    return None


def _files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def sha256_of(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _is_of(name: str, places: list[str]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


def _sums(root: Path) -> dict[str, str]:
    path = root / SUMS
    try:
        stat = path.stat()
    except FileNotFoundError:
        return {}
    return dict(_parsed(path, stat.st_mtime_ns, stat.st_size))


def _write_sums(root: Path, sums: dict[str, str]) -> None:
    write_text(root / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    _parsed.cache_clear()


@lru_cache(maxsize=4)
def _parsed(path: Path, changed: int, size: int) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}


# --- locks ------------------------------------------------------------------------------------
def hold(path: Path) -> int:
    """Lock a file for this process; returns its descriptor. The lock ends when every process that has it closed it or died.

    Raises Held where another process has it, WriteError where there cannot be a file. Over NFS it holds between machines where
    the server supports locks; a file system without locks has none.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(held, 200).decode(errors="replace").strip()
        os.close(held)
        raise Held(holder or "another process") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            os.close(held)
            raise
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(held, 0)
        os.pwrite(held, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return held


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs. Raises Held."""
    held = hold(folder / LOCK)
    try:
        yield
    finally:
        os.close(held)
