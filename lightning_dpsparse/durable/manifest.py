"""Size and digest of every file of a directory, written last.

A directory with a manifest was written whole. Whether it still is can be told: a file that was cut
off, that lost a block, or that belongs to another directory has another size or digest, and is
named. A manifest says nothing of who wrote it: whoever changes a file on purpose can change the
manifest too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

from lightning_dpsparse.durable.files import write_file
from lightning_dpsparse.refused import Refused

MANIFEST_NAME = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """What a file is known by."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a directory should hold."""

    files: Mapping[str, FileDigest]
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the writer says of the directory: plain values."""


def digest_file(path: Path) -> FileDigest:
    """Read a file to its end."""
    digest, buffer, size = hashlib.sha256(), bytearray(_CHUNK), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileDigest(size, digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory, after all of its files have reached the disk."""
    data = {
        "format": _FORMAT,
        "about": dict(manifest.about),
        "files": {name: asdict(manifest.files[name]) for name in sorted(manifest.files)},
    }
    whole = {**data, "sha256": _digest_of(data)}
    write_file(folder / MANIFEST_NAME, json.dumps(whole, indent=1).encode() + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a directory. One without, or with one that is damaged, is refused."""
    path = folder / MANIFEST_NAME
    try:
        data = json.loads(path.read_bytes())
        stated = data.pop("sha256")
        if stated != _digest_of(data) or data["format"] != _FORMAT:
            raise ValueError
        files = {str(name): FileDigest(**found) for name, found in data["files"].items()}
        return Manifest(files, data["about"])
    except FileNotFoundError:
        found = "no such directory" if not folder.is_dir() else f"no {MANIFEST_NAME} in it"
    except NotADirectoryError:
        found = "a file"
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        found = f"that {MANIFEST_NAME} is damaged"
    raise Refused(
        f"Expected a whole checkpoint at {str(folder)!r}, found {found}. Name a directory that was "
        "saved by this package to its end, or copy it again."
    )


def _digest_of(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def faults_of(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
    """What is wrong with these files of a directory, by default with all: a phrase for each."""
    faults = []
    for name in manifest.files if names is None else names:
        expected = manifest.files[name]
        try:
            status = (folder / name).stat()
            size = status.st_size
            # Sizes are asked first: reading a large file takes long.
            if not S_ISREG(status.st_mode):
                faults.append(f"{name} is no file")
            elif size != expected.size:
                faults.append(f"{name} has {size:,} bytes, and had {expected.size:,} when saved")
            elif digest_file(folder / name) != expected:
                faults.append(f"{name} has other contents than when it was saved")
        except OSError as error:
            faults.append(f"{name} cannot be read ({error.strerror or error})")
    return faults


def check_no_faults(folder: Path, faults: Iterable[str]) -> None:
    """Refuse a directory with faults, and name them."""
    found = sorted(faults)
    if found:
        raise Refused(
            f"Expected a whole checkpoint at {str(folder)!r}, found a damaged one: "
            f"{'; '.join(found)}. Copy the directory again, or go on from an earlier one."
        )
