"""The server of ``linexport serve``: OpenAI's protocol, the Open Inference Protocol, metrics."""
