"""Fuzzing: mutate a valid file, attempt to read it, and say what happened; in a worker process.

``values`` mutates bytes and JSON, ``archives`` zip files, arrays and safetensors, ``pickles``
opcodes, ``protobufs`` fields. ``kinds`` says for every kind of file what is valid and what reads
it, ``worker`` attempts cases under a limit of memory, ``campaign`` watches the worker and counts.
"""
