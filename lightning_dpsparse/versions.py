"""Which versions of torch, TorchRec, FBGEMM and Lightning work together.

FBGEMM's kernels are compiled against one minor version of torch (fbgemm 1.X against torch 2.(X+5)),
and TorchRec calls them by private names. This package also reads private fields of TorchRec and of
FBGEMM, because privacy needs the gradient of every example and they offer no public way to it. So
versions are supported as sets and not one by one: a set is in `SUPPORTED_SETS` if the whole test
suite passed with it.

The doctor compares what is installed with this table. `pyproject.toml` pins the same versions, and
a test keeps the two equal. Code that reads a private field and does not find it refuses to start,
and names the installed set and the supported ones with the functions below. This module imports
nothing outside the standard library, so that it can be asked where an installation is broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata


@dataclass(frozen=True, kw_only=True)
class VersionSet:
    """Versions that work together. Each is a prefix: "2.13" stands for 2.13 and all of 2.13.*."""

    torch: str
    torchrec: str
    fbgemm: str
    lightning: str

    def __str__(self) -> str:
        return ", ".join(f"{name} {prefix}.*" for name, prefix in asdict(self).items())


SUPPORTED_SETS = (VersionSet(torch="2.13", torchrec="1.8", fbgemm="1.8", lightning="2.6"),)
"""The sets with which the whole test suite passed, newest first."""


def installed_versions() -> dict[str, str | None]:
    """The installed version of each member of a `VersionSet`; None for what is not installed."""
    names = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "lightning")
    return members_of_set({name: distribution_version(name) for name in names})


def members_of_set(distributions: Mapping[str, str | None]) -> dict[str, str | None]:
    """The members of a `VersionSet`, from versions of distributions.

    >>> members_of_set({"torch": "2.13.0", "fbgemm-gpu": "1.8.0+cpu", "fbgemm-gpu-cpu": "1.8.0"})
    {'torch': '2.13.0', 'torchrec': None, 'fbgemm': '1.8.0', 'lightning': None}
    """
    cuda, cpu = distributions.get("fbgemm-gpu"), distributions.get("fbgemm-gpu-cpu")
    return {
        "torch": distributions.get("torch"),
        "torchrec": distributions.get("torchrec"),
        "fbgemm": fbgemm_build(cuda, cpu),
        "lightning": distributions.get("lightning"),
    }


def distribution_version(distribution: str) -> str | None:
    """Version of an installed distribution, read from its metadata without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def fbgemm_build(fbgemm_gpu: str | None, fbgemm_gpu_cpu: str | None) -> str | None:
    """Version of the FBGEMM build that Python imports, from the versions of two distributions.

    TorchRec requires the name `fbgemm-gpu`. On CPU hosts an empty distribution of that name, with a
    version that ends in "+cpu", stands in for it (packaging/), and `fbgemm-gpu-cpu` has the code.

    >>> fbgemm_build("1.8.0+cpu", "1.8.0"), fbgemm_build("1.8.0", None)
    ('1.8.0', '1.8.0')
    """
    if fbgemm_gpu is None or fbgemm_gpu.endswith("+cpu"):
        return fbgemm_gpu_cpu
    return fbgemm_gpu


def is_supported(installed: Mapping[str, str | None]) -> bool:
    """Whether `installed`, as `installed_versions` returns it, is one of the supported sets.

    >>> ours = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm": "1.8.0", "lightning": "2.6.6"}
    >>> is_supported(ours), is_supported(ours | {"fbgemm": "1.7.0"})
    (True, False)
    """
    return any(
        all(_has_prefix(installed.get(name), prefix) for name, prefix in asdict(one).items())
        for one in SUPPORTED_SETS
    )


def _has_prefix(version: str | None, prefix: str) -> bool:
    """Whether `version` is in `prefix`.*: 1.80.0 is not in 1.8.*."""
    wanted = prefix.split(".")
    return version is not None and version.split("+")[0].split(".")[: len(wanted)] == wanted


def show_versions(installed: Mapping[str, str | None]) -> str:
    """A set of installed versions in words, for messages.

    >>> show_versions({"torch": "2.13.0", "torchrec": None})
    'torch 2.13.0, torchrec not installed'
    """
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in installed.items())


def show_supported() -> str:
    """The supported sets in words, for messages.

    >>> show_supported()
    'torch 2.13.*, torchrec 1.8.*, fbgemm 1.8.*, lightning 2.6.*'
    """
    return "; or ".join(str(one) for one in SUPPORTED_SETS)
