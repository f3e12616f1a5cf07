"""Parts that ``tensorrt`` and ``tensorrt-rtx`` share: graph, profiles, build, session."""
