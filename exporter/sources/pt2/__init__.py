"""Proof, before torch opens it, that an exported program carries no code but its graph.

Opening a ``.pt2`` file the ordinary way can run code from it: pickles inside it are loaded without
restriction when the restricted way fails; strings of its JSON reach ``eval`` (symbolic sizes),
``exec`` (guards, names of values and parameters in the generated forward), ``import_module``
(nested input types) and attribute look-ups (call targets); compiled libraries are loaded. So
everything is refused that torch.export.save does not write for a model of tensors:

- `members`: which files the archive may have;
- `document`: every string of the JSON, by the field of torch's schema it stands in;
- `expressions`, `guards`, `operators`, `treespecs`: the fields with a grammar of their own;
- `payloads`: sizes of weights against the bytes present;
- `inputs`: the pickle of example inputs.

All of them raise UnsupportedModelError with a phrase that fits after "the file".
"""

from __future__ import annotations

from linexport.errors import UnsupportedModelError
from linexport.sources.archive import TorchArchive
from linexport.sources.files import first_line
from linexport.sources.pt2.document import check_program
from linexport.sources.pt2.example_inputs import check_example_inputs
from linexport.sources.pt2.members import EXAMPLE_INPUTS, PROGRAM, check_members
from linexport.sources.pt2.payloads import check_payloads

__all__ = ["check_archive"]

_MAX_PROGRAM_BYTES = 256 * 2**20
_MAX_INPUT_BYTES = 2**32


def check_archive(archive: TorchArchive) -> None:
    """Check everything that torch will read from the archive.

    Raises:
        UnsupportedModelError: something in it is unsafe, damaged or not supported.
    """
    check_members(archive)
    try:
        check_program(archive.read(PROGRAM, _MAX_PROGRAM_BYTES))
        check_payloads(archive)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        # torch's reader of JSON does not compare values with the types of its schema.
        raise UnsupportedModelError(f"its JSON is damaged ({first_line(error)})") from error
    check_example_inputs(archive.read(EXAMPLE_INPUTS, _MAX_INPUT_BYTES))
