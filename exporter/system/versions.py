"""The releases of libraries that linexport is tested with, and advice where another is installed.

``docs/data/versions.json`` has what was run with each of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from linexport.system.environment import version


@dataclass(frozen=True)
class ReleaseWindow:
    """Releases of a library.

    Attributes:
        package: its name.
        oldest: the first of them.
        newest: the last of them; later ones are installed, too, and may work.
    """

    package: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.package} {self.oldest} to {self.newest}"

    def advice(self) -> str:
        """Say which release is installed, which are tested, and how to get one."""
        install = f"pip install '{self.package}=={self.newest}'"
        found = version(self.package)
        if found is None:
            return f"{self.package} is not installed: {install}."
        if self.holds(found):
            return (
                f"{self.package} {found} is installed, and linexport is tested with {self.oldest} "
                f"to {self.newest}, but not with this form of it: pip install --force-reinstall "
                f"'{self.package}=={self.newest}', or update linexport."
            )
        return (
            f"{self.package} {found} is installed; linexport is tested with {self.oldest} to "
            f"{self.newest}: {install}, or update linexport."
        )

    def holds(self, found: str) -> bool:
        """Return whether a release is one of them."""
        return numbers(self.oldest) <= numbers(found) <= (*numbers(self.newest)[:2], 1 << 30)


def numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release up to the third, without what follows them."""
    leading = re.match(r"[\d.]*", release)
    return tuple(map(int, re.findall(r"\d+", leading[0] if leading else "")[:3]))


TRANSFORMERS = ReleaseWindow("transformers", "5.18.0", "5.24.0")
TORCH = ReleaseWindow("torch", "2.13.0", "2.14.1")
ONNX = ReleaseWindow("onnx", "1.21.0", "1.23.2")
ONNXRUNTIME = ReleaseWindow("onnxruntime", "1.30.0", "1.32.0")

WINDOWS = (TRANSFORMERS, TORCH, ONNX, ONNXRUNTIME)
