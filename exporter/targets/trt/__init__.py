"""What the targets ``tensorrt`` and ``tensorrt-rtx`` share: graph, profiles, build, session."""
