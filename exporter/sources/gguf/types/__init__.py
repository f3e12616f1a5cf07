"""Model types that are read from GGUF files: a file for each layout, found by ``recipes``.

Each gives ``ARCHITECTURES``, the names that a file may give itself in ``general.architecture``,
``configuration``, the settings of the class of transformers, and ``recipes``, its weights. The
names, the order and the signs of the stored values are those of llama.cpp's conversion.
"""
