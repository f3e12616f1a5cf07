"""What is played with an engine on the stand-ins, by ``scripts/on_stand_in.py``."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np

import linexport
from linexport.artifact import Artifact
from tests.support.stand_in_engine import driver, wrong

PROMPT = b"Linear attention"
TOKENS = 12
SOURCE = "small_models:language_model"


def mark(name: str) -> None:
    """Write a line to the driver's log."""
    driver().fakeDriverMark(name.encode())


def opened(folder: Path, **options: Any) -> Artifact:
    mark("load")
    return linexport.load(folder, **options)


def ended(result: Any) -> Any:
    assert not wrong, wrong
    return result


def generate(folder: Path) -> Any:
    """A text, with a mark before every token; then another, and all is closed."""
    with opened(folder) as model:
        texts = []
        for text in ("first", "second"):
            mark(text)
            tokens = []
            for token in model.generate(PROMPT, max_tokens=TOKENS):
                tokens.append(token)
                mark(f"{text} token {len(tokens)}")
            texts.append(tokens)
    mark("closed")
    return ended(texts)


def stream(folder: Path) -> Any:
    """Steps, a fork, a way back and a state in a file; the outputs of all."""
    model = opened(folder)
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None]
    live, found = model.stream(history=4), []

    def step(one: Any, tokens: np.ndarray) -> None:
        found.append(next(iter(one.step(tokens).values()))[:, -1].tolist())

    step(live, ids[:, :5])
    other = live.fork()
    for at in range(5, 9):
        step(live, ids[:, at : at + 1])
    step(other, ids[:, 9:10])  # what it went on from is untouched
    live.rewind(2)
    step(live, ids[:, 12:13])
    kept = live.state()
    step(live, ids[:, 13:14])
    live.restore(kept)
    step(live, ids[:, 13:14])
    del live, other
    gc.collect()
    del model  # without a word
    gc.collect()
    mark("dropped")
    return ended(found)


def pool(folder: Path) -> Any:
    """Sessions of one pool, in a thread of their own as the server's are; their logits."""
    model, found = opened(folder), list[Any]()
    thread = threading.Thread(target=lambda: found.append(_sessions(model)))
    thread.start()
    thread.join()
    model.close()
    return ended(found[0])


def _sessions(model: Artifact) -> Any:
    """Sessions that come and go; the logits of each after every token."""
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None]
    found: dict[str, Any] = {}
    with model.pool(slots=3) as shared:
        sessions = {}
        for round_, name in enumerate(("a", "b", "c")):
            sessions[name] = shared.open()
            sessions[name].push(ids[:, : 3 + round_])
            _advance(shared, sessions, found)
        mark("decode")
        for at in range(6, 12):
            mark(f"decode {at}")
            for session in sessions.values():
                session.push(ids[:, at : at + 1])
            _advance(shared, sessions, found)
        mark("decoded")
        sessions.pop("b").close()
        sessions["a"].push(ids[:, 12:13])
        _advance(shared, sessions, found)
    return found


def _advance(shared: Any, sessions: dict[str, Any], found: dict[str, Any]) -> None:
    names = {id(session): name for name, session in sessions.items()}
    while any(session.queued for session in sessions.values()):
        for session, outputs in shared.advance().items():
            logits = next(iter(outputs.values()))[0, -1]
            found.setdefault(names[id(session)], []).append(logits.tolist())


def on_device(folder: Path) -> Any:
    """Inputs on the GPU, of another library: outputs stay there."""
    model = opened(folder)
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None]
    whole = next(iter(model.run(ids).values()))
    there = model.hold({"ids": ids})["ids"]

    class Other:
        __cuda_array_interface__ = there.__cuda_array_interface__ | {"stream": 1}

    class Third:
        """As TensorFlow's arrays, and ONNX Runtime's, with DLPack alone."""

        __dlpack_device__ = there.__dlpack_device__
        __dlpack__ = there.__dlpack__

    live = model.stream(finite=False)
    mark("on the GPU")
    first = next(iter(live.step(there).values()))
    second = next(iter(live.step(Other()).values()))
    third = next(iter(model.run(Third()).values()))
    mark("read")
    assert type(first).__name__ == "DeviceArray" and first.__dlpack_device__() == (2, 0)
    assert np.array_equal(np.asarray(first), whole)
    capsule = first.__dlpack__()
    result = {
        "shape": first.__cuda_array_interface__["shape"],
        "same": np.asarray(second).tolist() != whole.tolist(),
        "capsule": "dltensor" in repr(capsule),
        "by DLPack": np.asarray(third).tolist() == whole.tolist(),
        "rows": np.asarray(first[0][2:4]).tolist() == whole[0, 2:4].tolist(),
    }
    del capsule
    model.close()
    return ended(result)


def threads(folder: Path) -> Any:
    """Calls from several threads at a time, none of which made the context its own."""
    model = opened(folder)
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None]
    wanted, faults = next(iter(model.run(ids).values())), []

    def work() -> None:
        try:
            for _ in range(5):
                if not np.array_equal(next(iter(model.run(ids).values())), wanted):
                    faults.append("differs")
        except Exception as error:
            faults.append(repr(error))

    running = [threading.Thread(target=work) for _ in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    model.close()
    return ended(faults)


def timed(folder: Path) -> Any:
    """A step as ``bench`` times it."""
    model = opened(folder)
    ids = np.zeros((1, 1), np.int64)
    session: Any = model._session
    mark("timed")
    found = session.time(model.feeds(ids))
    mark("end")
    model.close()
    return ended({n: x if not isinstance(x, float) else x > 0 for n, x in found.items()})


def second_gpu(folder: Path) -> Any:
    """The engine on the second of two GPUs, and what is said of a third."""
    with opened(folder, device=1) as model:
        text = list(model.generate(PROMPT, max_tokens=3))
    try:
        linexport.load(folder, device=2)
    except linexport.errors.EnvironmentProblemError as error:
        return ended([text, str(error)])
    return None


def rtx_settings(folder: Path) -> Any:
    """How contexts of TensorRT-RTX are made, and what is kept of one process for the next."""
    from linexport.targets.trt.engine import cache_folder

    with opened(folder) as model:
        session: Any = model._session
        context = session.engine.contexts[0]
        strategy = context.config.cuda_graph_strategy.name
    kept = [p.name for p in cache_folder().iterdir()]
    with opened(folder) as model:
        session = model._session
        given = session.engine.contexts[0].config.cache.kernels.decode()
    return ended({"strategy": strategy, "kept": kept, "given": given})


def lost_state(folder: Path) -> Any:
    """Infinity in the state of the second of two rows."""
    from linexport.artifact import StreamState
    from linexport.errors import NonFiniteError

    model = opened(folder)
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None].repeat(2, 0)
    live = model.stream()
    live.step(ids[:, :4])
    arrays = {name: np.array(values) for name, values in live.state().arrays.items()}
    for values in arrays.values():
        values[1] = np.inf
    live._state = dict(StreamState(model.model_sha256, arrays).arrays)
    rows: list[int] = []
    try:
        live.step(ids[:, 4:5])
    except NonFiniteError as error:
        rows = list(error.rows)
    outputs = next(iter(live.step(ids[:, 5:6]).values()))
    finite = [bool(np.isfinite(row).all()) for row in outputs]
    result = {"rows": rows, "stopped": sorted(live.stopped), "finite": finite}
    model.close()
    return ended(result)


def calls(folder: Path) -> Any:
    """Calls of the session itself: in place, apart, refused, and after one that failed."""
    from linexport.errors import EnvironmentProblemError, UsageError

    model = opened(folder)
    session: Any = model._session
    session.in_place = {*session.pasts}
    feeds = model.feeds(np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None])
    first = session.run(feeds)
    carried = {**feeds, **{past: first[present] for present, past in session.pasts.items()}}
    apart, together = session.run(carried), session.run(carried, in_place=True)
    held = session.hold({past: carried[past] for past in session.pasts.values()})
    over = session.run({**feeds, **held}, in_place=True)
    result: dict[str, Any] = {
        "in_place": all(np.array_equal(x, together[n]) for n, x in apart.items()),
        "on_device": all(np.array_equal(x, np.asarray(over[n])) for n, x in apart.items()),
        "same_memory": all(over[n].address == held[p].address for n, p in session.pasts.items()),
        "errors": [],
    }

    def refused(call: Any) -> None:
        try:
            call()
        except (UsageError, EnvironmentProblemError) as error:
            result["errors"].append(str(error)[:80])

    refused(lambda: session.run({**feeds, "tokens": feeds["tokens"].astype(np.int32)}))
    refused(lambda: session.run({**feeds, "tokens": np.zeros((1, 65), np.int64)}))
    for context in session.engine.contexts:
        context.execute_async_v3 = lambda stream: False
    refused(lambda: session.run({**feeds, "tokens": feeds["tokens"][:, :3]}))
    model.close()
    refused(lambda: session.run(feeds))
    return ended(result)


def not_captured(folder: Path) -> Any:
    """An engine that cannot be captured is launched, and says why when it is timed."""
    model = opened(folder)
    session: Any = model._session
    context = session.engine.contexts[-1]
    launch = context.execute_async_v3

    def refusing(stream: int) -> bool:
        from cuda.bindings import driver as cuda

        return not int(cuda.cuStreamIsCapturing(cuda.CUstream(stream))[1]) and launch(stream)

    context.execute_async_v3 = refusing
    tokens = list(model.generate(PROMPT, max_tokens=8))
    timed = session.time(model.feeds(np.zeros((1, 1), np.int64)))
    model.close()
    return ended([tokens, timed["graph_ms"], timed["graph_problem"]])


def grow(folder: Path) -> Any:
    """Steps of a model whose states grow: the outputs after each."""
    model = opened(folder)
    x = np.random.default_rng(0).standard_normal((1, 40, 8)).astype(np.float32)
    live, found = model.stream(), []
    for start, end in ((0, 8), *((at, at + 1) for at in range(8, 40))):
        mark(f"step {end}")
        found.append(next(iter(live.step(x[:, start:end]).values()))[0, -1].tolist())
    mark("stepped")
    del live
    model.close()
    return ended(found)


def grow_pool(folder: Path) -> Any:
    """Sessions of a model whose states grow, of one length and of others, that come and go."""
    model = opened(folder)
    x = np.random.default_rng(0).standard_normal((1, 40, 8)).astype(np.float32)
    found: dict[str, Any] = {}
    with model.pool(slots=3) as shared:
        sessions = {name: shared.open() for name in "abc"}
        for (name, session), length in zip(sessions.items(), (4, 4, 6), strict=True):
            session.push(x[:, :length])
            _advance(shared, {name: session}, found)
        for at in range(6, 12):
            mark(f"decode {at}")
            for session in sessions.values():
                session.push(x[:, at : at + 1])
            _advance(shared, sessions, found)
        mark("leave")
        sessions.pop("b").close()
        sessions["d"] = shared.open(sessions["a"].state())
        sessions["d"].push(x[:, 14:15])
        _advance(shared, sessions, found)
        mark("left")
        for session in sessions.values():
            session.push(x[:, 12:14])
        _advance(shared, sessions, found)
    mark("done")
    model.close()
    return ended(found)


def validated(folder: Path) -> Any:
    """The engine compared with the original, as ``validate`` does where there is a GPU."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "artifact"
        shutil.copytree(folder, copy)
        (engine,) = linexport.validate(copy, source=SOURCE, threads=1).engines
    gc.collect()
    return ended([engine.checked, engine.reason, engine.max_relative_error])


def logits(folder: Path) -> Any:
    """Logits of all tokens, of some last ones, of a stream and of inputs on the GPU."""
    model = opened(folder)
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None]
    rows = np.concatenate([ids, ids[:, ::-1]])
    found = [next(iter(model.run(rows, logits_to_keep=n).values())).tolist() for n in (0, 1, 7, 99)]
    live = model.stream()
    for start, end, kept in ((0, 9, 0), (9, 10, 1), (10, 16, 6)):
        mark(f"{end - start} tokens, {kept} kept")
        part = live.step(rows[:, start:end], logits_to_keep=kept)
        found.append(next(iter(part.values())).tolist())
    mark("stepped")
    there = model.run(model.hold({"ids": rows})["ids"])
    found.append(np.asarray(next(iter(there.values()))).tolist())
    model.close()
    return ended(found)
