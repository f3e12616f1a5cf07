"""The folders of tiny models."""

from tests.hugging_face.conftest import model_folder

__all__ = ["model_folder"]
