"""Checks -> the JUnit XML that continuous integration systems show as tests."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from linexport.ci.outcome import CheckResult
from linexport.system.escape import xml


def junit(artifact: str, found: Sequence[CheckResult]) -> str:
    """Return the text of a JUnit report: a suite for the artifact, a case for each check."""
    suite = Element(
        "testsuite",
        name=xml(f"linexport {artifact}"),
        tests=str(len(found)),
        failures=str(sum(c.passed is False for c in found)),
        skipped=str(sum(c.passed is None for c in found)),
        errors="0",
    )
    for check in found:
        case = SubElement(suite, "testcase", classname=check.group, name=xml(check.name))
        if check.passed is not True:
            kind = "skipped" if check.passed is None else "failure"
            allowed = f"; allowed: {check.allowed}" if check.allowed else ""
            message = xml(f"{check.found}{allowed}")
            SubElement(case, kind, message=message).text = message
    root = Element("testsuites")
    root.append(suite)
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"
