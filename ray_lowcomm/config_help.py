"""What settings mean, in words, and the lines that say what is wrong with a configuration."""

import difflib
import reprlib
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ray_lowcomm.config_sources import Source, alternatives, members, type_at
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.fault_schedule import TAGS

_SCALARS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Any: "anything",
    NoneType: "null",
}

MEANINGS = {
    "run.name": "name of the run and of its folder",
    "run.output_dir": "where run folders and the MLflow store go: a folder or a URI",
    "run.seed": "of weights, data order and random schedules",
    "run.resume": "go on from the newest whole checkpoint (auto: if there is one)",
    "run.eval_every": "rounds between validations (0: none)",
    "run.log_every": "rounds between printed lines (0: none; null: as many as can be read)",
    "checkpoint.every": "rounds between checkpoints (0: only at the end)",
    "checkpoint.keep": "the newest whole checkpoints that stay",
    "model.name": "byte_gpt, small_cnn, hf:CONFIG_DIR or module:factory",
    "model.args": "keywords for the model: --model.args.width 128, or JSON",
    "model.buffers": "BatchNorm statistics and counters after a round",
    "model.init_from": "weights to start from: a model/ folder or .safetensors file",
    "model.sharding": "how a replica's shards hold the model (default: fsdp2 if there are several)",
    "model.activation_checkpointing": "keep only the inputs of blocks: less memory, more computing",
    "model.compile": "torch.compile for each block",
    "data.name": "python_stdlib, digits, files (at data.path) or hf:DATASET",
    "data.path": "Parquet, Arrow, JSONL or text (.gz, .zst ...): file, folder or pattern",
    "data.text_column": "column with the text",
    "data.tokens_column": "column with lists of token numbers (null: use no such column)",
    "data.image_column": "column with the images",
    "data.label_column": "column with the labels",
    "data.config_name": "configuration of a Hugging Face dataset",
    "data.split": "split to train on; of files by their names (valid-00.parquet)",
    "data.sequence_length": "tokens per sample",
    "data.tokenizer": "bytes, or folder or name of a Hugging Face tokenizer",
    "data.validation_fraction": "share held out where there is no validation split",
    "data.eval_samples": "most samples in the fixed validation subset",
    "data.cache_dir": "where Arrow files are kept (null: the datasets library's own place)",
    "inner.steps": "optimizer steps per replica in the whole run",
    "inner.batch_size": "samples per replica and backward pass; divides by its shards",
    "inner.accumulate": "backward passes per optimizer step",
    "inner.lr": "peak learning rate",
    "inner.optimizer": "the replica's own optimizer",
    "inner.betas": "of AdamW and ADOPT, as JSON: [0.9, 0.99]",
    "inner.momentum": "of SGD",
    "inner.weight_decay": "decoupled for AdamW and ADOPT",
    "inner.warmup_steps": "steps of linear warm-up",
    "inner.schedule": "learning rate after the warm-up",
    "inner.clip_norm": "largest norm of the gradient (null: no clipping)",
    "inner.skip_nonfinite": "no optimizer step where loss or gradients are not finite",
    "inner.state_on_sync": "moments of the optimizer after a round",
    "inner.autocast": "bf16 autocast on CUDA",
    "strategy.name": "the algorithm",
    "strategy.inner_steps": "H: inner steps between two exchanges",
    "strategy.topk": "entries (of dct_momentum: coefficients) kept of a full chunk of chunk_size²",
    "strategy.chunk_size": "side of the square chunks of which topk entries are kept",
    "strategy.outer_lr": "learning rate of the outer optimizer",
    "strategy.outer_momentum": "momentum of the outer optimizer",
    "strategy.outer_optimizer": "the step on the shared parameters",
    "strategy.residual": "where what was not sent is kept",
    "strategy.residual_decay": "share of the unsent part that is left after a round",
    "strategy.value_bits": "bits per value that is sent",
    "strategy.value_format": "of values in 4 bits: evenly spaced, or sign and exponent",
    "strategy.rounding": "of values that are sent in fewer bits",
    "strategy.variant": "paper: literally as published, replicas drift apart",
    "strategy.reduce": "mean over all replicas, or over who sent a coefficient",
    "strategy.combine": "of coded messages: each to all, or in shares to their owners, which send on the sums",
    "strategy.param_period": "steps between averages of parameters",
    "strategy.exp_avg_period": "steps between averages of the first moment",
    "strategy.exp_avg_sq_period": "steps between averages of the second moment",
    "strategy.moment_period": "steps between averages of what else the optimizer keeps for each parameter",
    "strategy.codec": "of DES-LOC's tracks: --strategy.codec.params.topk 64, also .exp_avg, .default …",
    "strategy.periods": "the periods: as given, or in the mean",
    "strategy.overlap_steps": "steps between making a message and applying it (auto: as few as hide its exchange)",
    "strategy.fragments": "parts that the parameters are sent in, each at a time of its own",
    "strategy.fragment_order": "strided: layer i is in part i mod P; sequential: neighbours are together",
    "strategy.mix": "share of its own parameters with which a replica goes on late, 0 to 1 (keep: its steps stay)",
    "fleet.replicas": "copies of the model that train; [2, 8]: as many as the cluster has room for",
    "fleet.address": "of the Ray cluster (null: RAY_ADDRESS, else a local one)",
    "fleet.resources_per_replica": "what Ray gives each: --fleet.resources_per_replica.GPU 1",
    "fleet.shards_per_replica": "processes that hold a replica's model together, each with its part of the resources",
    "fleet.replica_spread": "a replica's processes: on one node (strict_pack), or on few",
    "fleet.cohorts": 'places, as JSON: [{"replicas": 2, "label_selector": {…}}, …]',
    "fleet.transport": "local: all replicas in one process, without Ray",
    "fleet.collective": "gloo: any network; nccl: GPUs in one place",
    "fleet.threads_per_replica": "of torch",
    "fleet.pace": "inner steps per round: equal, or by measured speed",
    "fleet.quorum": "arrivals after which grace_s runs (null: all)",
    "fleet.grace_s": "seconds a round waits for the rest after the quorum, and a start after [min, max]'s min",
    "fleet.deadline_s": "seconds that one exchange may take",
    "fleet.hang_s": "seconds a round waits for a replica that does not arrive, and an absent one may be away",
    "fleet.start_s": "seconds the run waits for its first members",
    "fleet.straggler": "who is late: catch_up (null, where the strategy can): keeps its work; drop; wait",
    "fleet.keep_rounds": "rounds that a replica may miss and still catch up",
    "fleet.joiner_moments": "who joins begins with the optimizer's moments of a donor, or zero",
    "fleet.max_retries": "attempts at one round before the run fails",
    "fleet.max_failures": "deaths of one replica without a round in between",
    "fleet.orphan_s": "seconds a fleet trains on without its job's process, for run.resume to take it over (0: none)",
    "faults": 'faults to inject, as JSON: [{"do": "kill", "replica": 1, "round": 3}, …]',
    "tracking.uri": "MLflow store (null: a SQLite file in run.output_dir)",
    "tracking.experiment": "name of the MLflow experiment",
    "tracking.enabled": "log to MLflow at all",
}


def describe(kind: Any) -> str:
    """A type in words: ``a whole number or null``, ``mean, gather or null``."""
    words: list[str] = []
    for option in alternatives(kind):
        if get_origin(option) is Literal:
            words += map(str, get_args(option))
        elif option is bool and kind is not bool:
            words += ["true", "false"]
        elif option in _SCALARS:
            words.append(_SCALARS[option])
        elif get_origin(option) is dict:
            words.append("names with values")
        elif get_origin(option) is tuple and Ellipsis not in get_args(option):
            words.append(f"a list of {len(get_args(option))}")
        elif get_origin(option) in (list, tuple):
            words.append("a list")
        else:
            words.append(f"a section with {', '.join(members(option) or {})}")
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def problem_lines(error: ValidationError, cls: type[BaseModel], given: Sequence[Source]) -> list[str]:
    """One line per problem: the field, the value given, what is allowed, and the file or variable it came from."""
    lines = []
    for problem in problems_of(error, cls):
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            lines.append(f"{cause}{_origin(cause.field.split('.'), given)}")
        else:
            lines.append(_line(problem, cls, given))
    return lines


def problems_of(error: ValidationError, cls: type) -> list[ErrorDetails]:
    """The problems of `cls`; one where a value fits no alternative of its type, of which pydantic has one for each."""
    found: dict[tuple[int | str, ...], ErrorDetails] = {}
    for problem in error.errors():
        problem["loc"] = tuple(part for part in problem["loc"] if part not in TAGS)
        settled = _settled(problem, cls)
        found.setdefault(settled["loc"], settled)
    return list(found.values())


def _settled(problem: ErrorDetails, cls: type) -> ErrorDetails:
    path = problem["loc"]
    for length in range(1, len(path)):
        kind = type_at(cls, path[:length])
        if kind is not None and _is_choice(kind):
            msg = f"must be {describe(kind)}"
            return ErrorDetails(type="union", loc=path[:length], msg=msg, input=problem["input"])
    return problem


def _is_choice(kind: Any) -> bool:
    """Whether this is a union of several types that are no sections."""
    options = [option for option in alternatives(kind) if option is not NoneType]
    return len(options) > 1 and not any(members(option) for option in options)


def _line(problem: ErrorDetails, cls: type[BaseModel], given: Sequence[Source]) -> str:
    path = problem["loc"]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    kind = type_at(cls, path)
    allowed = describe(kind) if kind is not None else problem["msg"]
    if problem["type"] in ("missing", "missing_argument"):
        return f"{name}: is missing; must be {allowed}{_origin(path[:-1], given)}"
    value = reprlib.repr(problem["input"])
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{name} = {value}: no such field; {_nearest(name, path, cls)}{_origin(path, given)}"
    return f"{name} = {value}: must be {allowed}{_how(kind, problem['input'])}{_origin(path, given)}"


def _how(kind: Any, value: object) -> str:
    """What a shell's argument that is no JSON lacks: in YAML it would do without the quotes."""
    named = isinstance(value, str) and any(
        get_origin(option) is dict or members(option) for option in alternatives(kind)
    )
    return """, in a shell as JSON: '{"name": 1}'""" if named else ""


def _nearest(name: str, path: Sequence[str | int], cls: type[BaseModel]) -> str:
    known = [full for full in _names(cls) if ("." in full) == (len(path) > 1)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.8)
    if len(path) == 1:
        near += [full for full in _names(cls) if full.endswith(f".{name}")]
    if near:
        return f"nearest: {', '.join(near)}"
    here = [name for kind in alternatives(type_at(cls, path[:-1])) for name in members(kind) or {}]
    return f"there are: {', '.join(here)}"


def _names(cls: type[BaseModel]) -> Iterator[str]:
    for section, kind in (members(cls) or {}).items():
        yield section
        yield from (f"{section}.{name}" for name in members(kind) or {})


def _origin(path: Sequence[str | int], given: Sequence[Source]) -> str:
    """`` (in run.yaml)``: the last source that gave the value at `path`; nothing for the command line."""
    for source in reversed(given):
        value: Any = source.values
        try:
            for part in path:
                value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        return f" ({source.label})" if source.label else ""
    return ""
