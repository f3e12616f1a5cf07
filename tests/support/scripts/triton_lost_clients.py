"""Clients that begin sequences and go away, more than the server holds; then one that goes on.

python triton_lost_clients.py HOST:PORT MODEL begin | refused
"""

import sys

import numpy as np
import tritonclient.grpc as grpc

LOST = 140
"""Sequences: more than the 128 candidates of the configuration."""


def main() -> None:
    url, model, what = sys.argv[1:]
    client = grpc.InferenceServerClient(url)
    tokens = grpc.InferInput("tokens", [1, 1], "INT64")
    tokens.set_data_from_numpy(np.ones((1, 1), np.int64))
    if what == "begin":
        for number in range(1, LOST):
            client.infer(
                model, [tokens], sequence_id=number, sequence_start=True, client_timeout=60
            )
        return
    for number in (1, LOST - 1):
        try:
            client.infer(model, [tokens], sequence_id=number, client_timeout=60)
        except grpc.InferenceServerException as error:
            print(error.message())
        else:
            raise AssertionError(f"sequence {number} was answered")


if __name__ == "__main__":
    main()
