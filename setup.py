"""exporter/, models/ and plugins/ become linexport, linexport.models and linexport.plugins.

Kept in code because a declared list of packages silently drops new subpackages.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "linexport": "exporter",
    "linexport.models": "models",
    "linexport.plugins": "plugins",
}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in [package, *(f"{package}.{sub}" for sub in find_packages(folder))]
    ],
    package_data={
        "linexport": ["py.typed", "report/*.html", "report/*.css", "manifest/schema.json"],
        "linexport.plugins": ["tensorrt/cpp/*"],
    },
)
