"""Sequences sent to a Triton server by many clients at once; run by the server's environment.

python triton_client.py HOST:PORT MODEL sequences.npz outputs.npz [tokens to stream]
"""

import queue
import sys
import threading

import numpy as np
import tritonclient.grpc as grpc


def main() -> None:
    url, model, given, found, *streamed = sys.argv[1:]
    sequences = np.load(given)
    outputs: dict[str, np.ndarray] = {}
    failures: list[BaseException] = []

    def client(number: int, tokens: np.ndarray) -> None:
        try:
            run = stream if streamed else step_by_step
            outputs[str(number)] = run(url, model, number, tokens, *map(int, streamed))
        except BaseException as error:
            failures.append(error)

    given_to = {int(name): sequences[name] for name in sequences.files}
    threads = [threading.Thread(target=client, args=one) for one in given_to.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    np.savez(found, **outputs)


def step_by_step(url: str, model: str, number: int, tokens: np.ndarray) -> np.ndarray:
    """Send a prompt of three tokens, then one token after the other."""
    client = grpc.InferenceServerClient(url)
    pieces = [tokens[:3], *([t] for t in tokens[3:])]
    found = []
    for place, piece in enumerate(pieces):
        result = client.infer(
            model,
            [tensor(np.asarray([piece], np.int64))],
            sequence_id=1000 + number,
            sequence_start=place == 0,
            sequence_end=place == len(pieces) - 1,
        )
        found.append(result.as_numpy("output")[0])
    if number == 0:
        unknown(client, model)
    return np.concatenate(found)


def unknown(client: grpc.InferenceServerClient, model: str) -> None:
    """Ask for a sequence that ended: the server refuses."""
    try:
        client.infer(model, [tensor(np.asarray([[1]], np.int64))], sequence_id=1000)
    except Exception:
        return
    raise AssertionError("a sequence that was not begun was answered")


def stream(url: str, model: str, number: int, tokens: np.ndarray, count: int) -> np.ndarray:
    """Send a prompt once, and receive the logits of one token after the other."""
    client, answers = grpc.InferenceServerClient(url), queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    most = grpc.InferInput("MAX_TOKENS", [1, 1], "INT32")
    most.set_data_from_numpy(np.asarray([[count]], np.int32))
    client.async_stream_infer(
        model,
        [tensor(tokens[None].astype(np.int64)), most],
        sequence_id=2000 + number,
        sequence_start=True,
        sequence_end=True,
    )
    found = []
    for _ in range(count):
        result, error = answers.get(timeout=60)
        if error is not None:
            raise error
        found.append(result.as_numpy("output")[0, -1])
    client.stop_stream()
    return np.stack(found)


def tensor(values: np.ndarray) -> grpc.InferInput:
    made = grpc.InferInput("tokens", list(values.shape), "INT64")
    made.set_data_from_numpy(values)
    return made


if __name__ == "__main__":
    main()
