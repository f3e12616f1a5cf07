class Logger:
    ERROR: int
    severity: int

G_LOGGER: Logger
