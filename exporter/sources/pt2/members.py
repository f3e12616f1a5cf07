"""Which members an exported program's archive may have, and which version it is."""

from __future__ import annotations

import re

from linexport.errors import UnsupportedModelError
from linexport.sources.archive import TorchArchive

PROGRAM = "models/model.json"
EXAMPLE_INPUTS = "data/sample_inputs/model.pt"
WEIGHTS_TABLE = "data/weights/model_weights_config.json"
CONSTANTS_TABLE = "data/constants/model_constants_config.json"

_ALLOWED = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|\.format_version"
    r"|\.storage_alignment|data/weights/weight_\d+|data/constants/tensor_\d+|extra/.+"
    + "".join(f"|{re.escape(n)}" for n in (PROGRAM, EXAMPLE_INPUTS, WEIGHTS_TABLE, CONSTANTS_TABLE))
)
_REFUSED = (
    (r"data/aotinductor/.*", "it carries compiled native code; save it with torch.export.save"),
    (r"data/constants/(custom|opaque)_obj_.*", "it carries a pickled object as a constant"),
    (r"data/(weights|constants)/.*\.pt", "its weights are a pickle, as torch 2.8 and older wrote"),
    (r"models/.*", "it holds several programs; save one with torch.export.save"),
)
_ARCHIVE_VERSION = b"0"
_SMALL = 64


def check_members(archive: TorchArchive) -> None:
    """Refuse any member that torch.export.save does not write for one plain program.

    Raises:
        UnsupportedModelError: naming the member.
    """
    for name in archive.names:
        if _ALLOWED.fullmatch(name):
            continue
        for pattern, reason in _REFUSED:
            if re.fullmatch(pattern, name):
                raise UnsupportedModelError(f"{reason} (member {name})")
        raise UnsupportedModelError(f"its member {name} is none that torch.export.save writes")
    if archive.read("archive_format", _SMALL) != b"pt2":
        raise UnsupportedModelError("its archive_format is not pt2")
    version = archive.read("archive_version", _SMALL)
    if version != _ARCHIVE_VERSION:
        raise UnsupportedModelError(
            f"its archive_version is {version.decode(errors='replace')!r}, not "
            f"{_ARCHIVE_VERSION.decode()!r}; save it again with the torch installed here"
        )
