"""Ask llama.cpp: a program of its own, which runs in the environment that has ``llama-cpp-python`` and nothing of ours.

    python llama.py < REQUESTS

REQUESTS: one JSON object a line; for each, one JSON object is printed on one line.

``{"tokenize": FILE, "texts": [...], "special": bool, "add": bool}``: ``ids`` of each text, as ``llama-tokenize`` gives
    them. ``special``: names of special tokens in a text are these tokens. ``add``: with those that begin and end a
    text. With ``"detokenize": true`` also ``back``, the text that llama.cpp makes of them (base64).
``{"vocabulary": FILE}``: ``bos``, ``eos``, ``add_bos``, ``add_eos``, ``ends`` (ids that end an answer), ``size``.
``{"logits": FILE, "ids": [...], "positions": int, "out": NPY}``: logits at all positions (float32), as computed with
    float32 keys and values, without flash attention, by one thread, are written to a file.
``{"perplexity": FILE, "ids": [[...]], "first": int, "exact": bool}``: ``nll``, the sum over each window's tokens from
    ``first`` on; ``exact``: with float32 keys and values.
``{"unpack": FILE, "out": FILE}``: the same model with float32 weights is written to a file.

An answer is ``{"error": ...}`` where llama.cpp refuses a file.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp as library
import numpy

F32 = 0


def main() -> None:
    """Answer requests from standard input, each on a line."""
    talk = library.llama_log_callback(lambda level, text, data: _heard(level, text))
    library.llama_log_set(talk, ctypes.c_void_p(0))
    library.llama_backend_init()
    actions = {
        "tokenize": _tokenize,
        "vocabulary": _vocabulary,
        "logits": _logits,
        "perplexity": _perplexity,
        "unpack": _unpack,
    }
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        action = next(name for name in actions if name in asked)
        _said.clear()
        try:
            answer = actions[action](asked)
        except ValueError as error:
            answer = {"error": " ".join([str(error), *_said])}
        print(json.dumps(answer), file=answers, flush=True)


_said: list[str] = []
"""Errors that llama.cpp reported for the request at hand."""


def _heard(level: int, text: bytes) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        _said.append(text.decode("utf-8", "replace").strip())


@contextmanager
def _model(path: str, vocabulary_only: bool) -> Iterator[Any]:
    given = library.llama_model_default_params()
    given.vocab_only = vocabulary_only
    given.n_gpu_layers = 0
    given.use_extra_bufts = False  # weights repacked for AMX, with which the process ends on some virtual machines
    model = library.llama_model_load_from_file(path.encode(), given)
    if not model:
        raise ValueError("llama.cpp refuses the file.")
    try:
        yield model
    finally:
        library.llama_model_free(model)


def _ids(vocabulary: Any, text: bytes, add: bool, special: bool) -> list[int]:
    room = len(text) + 16
    found = (ctypes.c_int32 * room)()
    count = library.llama_tokenize(vocabulary, text, len(text), found, room, add, special)
    if count < 0:
        raise ValueError(f"{-count} tokens of {len(text)} bytes")
    return list(found[:count])


def _back(vocabulary: Any, ids: list[int]) -> str:
    given = (ctypes.c_int32 * len(ids))(*ids)
    room = 64 * len(ids) + 64
    found = ctypes.create_string_buffer(room)
    count = library.llama_detokenize(vocabulary, given, len(ids), found, room, False, True)
    return base64.b64encode(found.raw[:count]).decode()


def _tokenize(asked: dict[str, Any]) -> dict[str, Any]:
    with _model(asked["tokenize"], True) as model:
        vocabulary = library.llama_model_get_vocab(model)
        texts = [text.encode("utf-8", "surrogatepass") for text in asked["texts"]]
        ids = [_ids(vocabulary, text, asked["add"], asked["special"]) for text in texts]
        return {"ids": ids} | ({"back": [_back(vocabulary, one) for one in ids]} if asked.get("detokenize") else {})


def _vocabulary(asked: dict[str, Any]) -> dict[str, Any]:
    with _model(asked["vocabulary"], True) as model:
        vocabulary = library.llama_model_get_vocab(model)
        size = library.llama_vocab_n_tokens(vocabulary)
        return {
            "size": size,
            "bos": library.llama_vocab_bos(vocabulary),
            "eos": library.llama_vocab_eos(vocabulary),
            "add_bos": bool(library.llama_vocab_get_add_bos(vocabulary)),
            "add_eos": bool(library.llama_vocab_get_add_eos(vocabulary)),
            "ends": [one for one in range(size) if library.llama_vocab_is_eog(vocabulary, one)],
        }


@contextmanager
def _context(model: Any, positions: int, exact: bool) -> Iterator[Any]:
    given = library.llama_context_default_params()
    given.n_ctx = given.n_batch = given.n_ubatch = positions
    given.n_threads = given.n_threads_batch = 1
    given.offload_kqv = False
    if exact:
        given.type_k = given.type_v = F32
        given.flash_attn_type = 0
    context = library.llama_init_from_model(model, given)
    if not context:
        raise ValueError("llama.cpp makes no context.")
    try:
        yield context
    finally:
        library.llama_free(context)


def _decoded(context: Any, ids: list[int], size: int) -> numpy.ndarray:
    """Logits at all positions, (positions, size)."""
    batch = library.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, at, 1, 1
        batch.seq_id[at][0] = 0
    failed = library.llama_decode(context, batch)
    library.llama_batch_free(batch)
    if failed:
        raise ValueError(f"llama_decode gives {failed}")
    return numpy.ctypeslib.as_array(library.llama_get_logits(context), (len(ids), size)).copy()


def _logits(asked: dict[str, Any]) -> dict[str, Any]:
    with _model(asked["logits"], False) as model, _context(model, asked["positions"], True) as context:
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        numpy.save(asked["out"], _decoded(context, asked["ids"], size))
        return {"size": size}


def _perplexity(asked: dict[str, Any]) -> dict[str, Any]:
    found, first = [], asked["first"]
    with _model(asked["perplexity"], False) as model:
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        for ids in asked["ids"]:
            with _context(model, len(ids), asked["exact"]) as context:
                logits = _decoded(context, ids, size)[first - 1 : -1].astype(numpy.float64)
            top = logits.max(-1, keepdims=True)
            sums = numpy.log(numpy.exp(logits - top).sum(-1)) + top[:, 0]
            found.append(float((sums - logits[numpy.arange(len(logits)), ids[first:]]).sum()))
    return {"nll": found}


def _unpack(asked: dict[str, Any]) -> dict[str, Any]:
    given = library.llama_model_quantize_default_params()
    given.ftype = 0  # LLAMA_FTYPE_ALL_F32
    given.allow_requantize = True
    if library.llama_model_quantize(asked["unpack"].encode(), asked["out"].encode(), given):
        raise ValueError("llama.cpp does not unpack the file.")
    return {}


if __name__ == "__main__":
    main()
