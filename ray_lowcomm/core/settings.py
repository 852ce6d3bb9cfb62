"""Typed settings of a run, as plain data.

The field names are the names on the command line (``--strategy.inner_steps``) and in YAML. Plain dataclasses, so that
the pure layers need no configuration library; `ray_lowcomm.config` reads them from YAML, environment and command line.
`None` in `StrategySettings` means 'the default of the chosen strategy' (`ray_lowcomm.strategies.resolve`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ray_lowcomm.core.checks import choices, fraction, not_negative, number_or_range, positive
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.fault import Fault as Fault
from ray_lowcomm.core.fault import RandomFaults as RandomFaults
from ray_lowcomm.core.shares import LEAST, check_share, share


@dataclass(frozen=True)
class RunSettings:
    """Name, place and pace of a run. `eval_every` and `log_every` are in rounds; 0 switches off, null logs as many
    rounds as can be read.

    `resume`: go on from the newest whole checkpoint of this name; `auto` does so if there is one, and begins otherwise.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str = "default"
    output_dir: str = "outputs"
    seed: int = 0
    resume: bool | Literal["auto"] = False
    eval_every: int = 4
    log_every: int | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise SettingError("run.name", self.name, "must be a folder name: not empty, no '/'")
        choices("run", self)
        not_negative("run", self, "seed", "eval_every", "log_every")
        if self.seed >= 2**32:
            raise SettingError("run.seed", self.seed, "must be less than 2**32")


@dataclass(frozen=True)
class CheckpointSettings:
    """`every` is in rounds (0: only at the end); the newest `keep` whole checkpoints stay."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        not_negative("checkpoint", self, "every")
        positive("checkpoint", self, "keep")


@dataclass(frozen=True)
class ModelSettings:
    """`name`: ``byte_gpt``, ``small_cnn``, ``hf:CONFIG_DIR`` or ``module:factory``; `args` go to it as keywords.

    `buffers`: what is done with BatchNorm statistics and counters after a round: `average` (floating ones; integer
    ones are taken from the lowest rank), `local` (left alone) or `first` (all taken from the lowest rank).
    `init_from`: a ``model/`` folder or a ``.safetensors`` file with weights to start from.

    `sharding`: how the shards of a replica hold the model. `fsdp2`: each a part of every parameter, made whole block by
    block where it is needed; `ddp`: each the whole model; `none`: there is one process. Default: `fsdp2` where a
    replica has several shards. `activation_checkpointing`: of a block only its input is kept until its backward pass,
    which computes the rest again. `compile`: each block by torch.compile.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str = "byte_gpt"
    args: dict[str, Any] = field(default_factory=dict)
    buffers: Literal["average", "local", "first"] = "average"
    init_from: str | None = None
    sharding: Literal["fsdp2", "ddp", "none"] | None = None
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        choices("model", self)

    def sharded_as(self, shards: int) -> Literal["fsdp2", "ddp", "none"]:
        """What `sharding` means for a replica of so many shards."""
        return self.sharding or ("fsdp2" if shards > 1 else "none")


@dataclass(frozen=True)
class DataSettings:
    """`name`: ``python_stdlib``, ``digits``, ``files`` (Parquet, Arrow, JSONL or text at `path`) or ``hf:DATASET``.

    `tokens_column` holds lists of token numbers; None: data with such a column is read as text or images all the same.

    `sequence_length` is in tokens; `tokenizer` is ``bytes`` or a local folder or name of a Hugging Face tokenizer.
    `eval_samples` bounds the fixed validation subset. `cache_dir` is where Hugging Face `datasets` keeps its Arrow
    files (default: its own).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str = "python_stdlib"
    path: str | None = None
    text_column: str = "text"
    tokens_column: str | None = "input_ids"
    image_column: str = "image"
    label_column: str = "label"
    config_name: str | None = None
    split: str = "train"
    sequence_length: int = 64
    tokenizer: str = "bytes"
    validation_fraction: float = 0.05
    eval_samples: int = 512
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        positive("data", self, "sequence_length", "eval_samples")
        if not 0 < self.validation_fraction < 1:
            raise SettingError("data.validation_fraction", self.validation_fraction, "must be between 0 and 1")


@dataclass(frozen=True)
class InnerSettings:
    """The replica's own training. `steps` is the nominal number of optimizer steps per replica in the whole run.

    `skip_nonfinite`: where loss or gradients of a batch are not finite no optimizer step is taken (and it is counted).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    steps: int = 800
    batch_size: int = 16
    accumulate: int = 1
    lr: float = 3e-3
    optimizer: Literal["adamw", "sgd", "adopt"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.99)
    momentum: float = 0.9
    weight_decay: float = 0.1
    warmup_steps: int = 20
    schedule: Literal["constant", "cosine"] = "cosine"
    clip_norm: float | None = 1.0
    skip_nonfinite: bool = True
    state_on_sync: Literal["keep", "reset"] = "keep"
    autocast: bool = True

    def __post_init__(self) -> None:
        choices("inner", self)
        positive("inner", self, "steps", "batch_size", "accumulate", "lr", "clip_norm")
        not_negative("inner", self, "weight_decay", "warmup_steps")
        fraction("inner", self, "momentum")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise SettingError("inner.betas", self.betas, "each must be at least 0 and less than 1")


@dataclass(frozen=True)
class TrackCodec:
    """How one track of DES-LOC is sent; `None` takes the default. With all of them None the track is sent as it is.

    `topk` (of a full chunk of `chunk_size`², by default 64) entries are sent, or DCT coefficients (`transform: dct`);
    without it every value is. `value_bits` is 2 with `topk`, else 32. `residual` is of parameters: `model` (default) or
    `buffer`; a moment keeps itself what was not sent. `residual_decay`: what is left of that after a round, 1.0 (for
    `buffer` 0.95). `reduce` is of parameters with `topk`: the mean of an entry over all `replicas` (default), or over
    those that sent it (`senders`; the outer step is then to be smaller).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    topk: int | None = None
    transform: Literal["none", "dct"] | None = None
    chunk_size: int | None = None
    value_bits: int | None = None
    value_format: Literal["linear", "e3m0"] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    residual: Literal["model", "buffer"] | None = None
    residual_decay: float | None = None
    reduce: Literal["replicas", "senders"] | None = None

    def __post_init__(self) -> None:
        choices("strategy.codec", self)


@dataclass(frozen=True)
class StrategySettings:
    """Which algorithm, and its numbers; `None` takes the default of that algorithm.

    `inner_steps` is H. `topk` is for a full chunk of `chunk_size`² coefficients. The periods are DES-LOC's, in steps:
    of the parameters, of `exp_avg` and `momentum_buffer`, of `exp_avg_sq` and `max_exp_avg_sq`, and of whatever else
    the optimizer keeps for each parameter in its shape (`moment_period`). `overlap_steps`: a message is applied that
    many inner steps after it was made (`auto`: as few as hide its exchange). `fragments`: parameters are sent in so
    many parts, each at a time of its own; `fragment_order`: layer i is in part i mod P (`strided`), or layers that
    follow each other are. `mix`: the share of its own parameters with which a replica goes on from a round that is
    applied late, α of Streaming DiLoCo (`keep`: from the shared ones, with all its steps since the launch).
    `value_bits` (32, 16, 8, 4, 2, 1) and `rounding` are of the values sent;
    `value_format` is of those of 4 bits (`e3m0`: sign and exponent only). `combine`, of coded messages: every replica
    receives all (`gather`), or of 1/W of the chunks, whose sum it compresses again and sends to all (`sharded`).
    `codec`: how DES-LOC sends each track (`params`, or a moment by the optimizer's own name for it; `default`: all that
    are not named), a `TrackCodec` each; others go as they are.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str = "topk_diloco"
    inner_steps: int | None = None
    topk: int | None = None
    chunk_size: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer_optimizer: Literal["none", "sgd", "nesterov"] | None = None
    residual: Literal["model", "buffer", "none"] | None = None
    residual_decay: float | None = None
    value_bits: int | None = None
    value_format: Literal["linear", "e3m0"] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    variant: Literal["consistent", "paper"] | None = None
    reduce: Literal["replicas", "senders"] | None = None
    combine: Literal["gather", "sharded"] | None = None
    param_period: int | None = None
    exp_avg_period: int | None = None
    exp_avg_sq_period: int | None = None
    moment_period: int | None = None
    codec: dict[str, TrackCodec] | None = None
    periods: Literal["fixed", "random"] | None = None
    overlap_steps: int | Literal["auto"] | None = None
    fragments: int | None = None
    fragment_order: Literal["strided", "sequential"] | None = None
    mix: float | Literal["keep"] | None = None

    def __post_init__(self) -> None:
        choices("strategy", self)
        positive("strategy", self, "inner_steps", "topk", "chunk_size", "value_bits", "outer_lr")
        positive("strategy", self, "param_period", "exp_avg_period", "exp_avg_sq_period", "moment_period")
        positive("strategy", self, "fragments")
        if self.overlap_steps != "auto":
            not_negative("strategy", self, "overlap_steps")
        fraction("strategy", self, "outer_momentum")
        for name in ("residual_decay", "mix"):
            value = getattr(self, name)
            if value is not None and value != "keep" and not 0 <= value <= 1:
                raise SettingError(f"strategy.{name}", value, "must be between 0 and 1")


@dataclass(frozen=True)
class CohortSettings:
    """One Ray Train run of the fleet: how many replicas, on which nodes."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    replicas: int = 1
    label_selector: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive("fleet.cohorts", self, "replicas")


@dataclass(frozen=True)
class FleetSettings:
    """How many replicas, on what, and how long anybody waits for anybody. All times are in seconds.

    `replicas`: a number, or [min, max] of a fleet that grows and shrinks with the cluster. Such a run begins once `min`
    are there (and the others have not come within `grace_s`), and goes on with whoever is alive, be it fewer than
    `min`: only a start, also the one after all were lost, waits for so many. Who is missing up to `max` is asked for as
    long as the run lasts. Limits that count replicas (`quorum`, `cohorts`, a fault's replica) mean `max`.

    `shards_per_replica`: so many processes hold a replica's model together; each has an equal part of
    `resources_per_replica`, on one node (`replica_spread: strict_pack`) or on as few as there is room on (`pack`).
    `threads_per_replica`: of torch; of several shards each has an equal part, at least one.

    `collective`: gloo (CPU staging, any network) or nccl (GPUs in one place). `deadline_s` bounds one exchange;
    `hang_s` is how long a round waits for a replica that is alive but does not arrive; `start_s` how long a run waits
    for its first members. With `quorum` (a count) a round closes `grace_s` after the quorum has arrived, and goes on
    without who is late. `straggler`: what becomes of such a replica, of one that does not answer for a while, and of
    one whose slow link makes an exchange take twice as long as before (and `grace_s`). `catch_up`: it keeps its work,
    follows what it has missed and sends all with its next message, if that is not more than `keep_rounds` rounds;
    `drop`: it starts again from the shared state, and its steps are counted as lost; `wait`: rounds wait for it.
    Default: `catch_up` where the strategy can. `joiner_moments`: a replica that joins has the inner optimizer's state
    of another (`donor`) or begins with none (`zero`), which is half as many bytes. `max_failures` is the number of
    deaths of one replica, or of a cohort, without a committed round in between. `orphan_s`: for how long a fleet on a
    cluster trains on once its job's process is dead, and may be taken over by another; 0: it ends with it.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    replicas: int | tuple[int, int] = 2
    address: str | None = None
    resources_per_replica: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    shards_per_replica: int = 1
    replica_spread: Literal["pack", "strict_pack"] = "strict_pack"
    cohorts: tuple[CohortSettings, ...] = ()
    transport: Literal["ray", "local"] = "ray"
    collective: Literal["gloo", "nccl"] = "gloo"
    threads_per_replica: int = 1
    pace: Literal["equal", "by_speed"] = "equal"
    quorum: int | None = None
    grace_s: float = 5.0
    deadline_s: float = 60.0
    hang_s: float = 600.0
    start_s: float = 300.0
    straggler: Literal["wait", "drop", "catch_up"] | None = None
    keep_rounds: int = 4
    joiner_moments: Literal["donor", "zero"] = "donor"
    max_retries: int = 5
    max_failures: int = 5
    orphan_s: float = 120.0

    def __post_init__(self) -> None:
        choices("fleet", self)
        object.__setattr__(self, "replicas", number_or_range("fleet.replicas", self.replicas))
        positive(
            "fleet",
            self,
            "shards_per_replica",
            "threads_per_replica",
            "deadline_s",
            "hang_s",
            "start_s",
            "max_failures",
        )
        positive("fleet", self, "quorum", "keep_rounds")
        not_negative("fleet", self, "grace_s", "max_retries", "orphan_s")
        if self.quorum is not None and self.quorum > self.max_replicas:
            raise SettingError("fleet.quorum", self.quorum, f"must be at most fleet.replicas = {self.max_replicas}")
        if self.straggler == "drop" and self.quorum is None:
            raise SettingError("fleet.straggler", "drop", "needs fleet.quorum: how many a round waits for")
        if self.straggler == "wait" and self.quorum is not None:
            raise SettingError("fleet.quorum", self.quorum, "needs fleet.straggler: catch_up or drop")
        if self.threads_per_replica > 1024:
            raise SettingError("fleet.threads_per_replica", self.threads_per_replica, "must be at most 1024")
        for name, amount in self.resources_per_replica.items():
            if amount != 0 and not LEAST <= amount < math.inf:
                raise SettingError(f"fleet.resources_per_replica.{name}", amount, "must be 0, or 0.0001 or greater")
        if self.transport == "ray" and not any(self.resources_per_replica.values()):
            allowed = "must be more than 0 of something, or a fleet cannot grow with the cluster"
            raise SettingError("fleet.resources_per_replica", self.resources_per_replica, allowed)
        if self.transport == "ray" and self.collective == "nccl" and not self.resources_per_replica.get("GPU"):
            allowed = "needs GPUs: give each replica one (fleet.resources_per_replica.GPU: 1), or use gloo"
            raise SettingError("fleet.collective", "nccl", allowed)
        if self.shards_per_replica > 1 and self.transport == "local":
            allowed = "needs fleet.transport: ray, as shards are processes: leave one of the two out"
            raise SettingError("fleet.shards_per_replica", self.shards_per_replica, allowed)
        check_share(self.resources_per_replica, self.shards_per_replica)
        total = sum(cohort.replicas for cohort in self.cohorts)
        if self.cohorts and total != self.max_replicas:
            raise SettingError("fleet.replicas", self.max_replicas, f"must equal the sum over fleet.cohorts, {total}")

    @property
    def min_replicas(self) -> int:
        """How many replicas must be there for the run to begin."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas[0]

    @property
    def max_replicas(self) -> int:
        """How many replicas there are at most; their numbers are less than this."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas[1]

    @property
    def resources_per_shard(self) -> dict[str, float]:
        """What one process of a replica takes."""
        return share(self.resources_per_replica, self.shards_per_replica)

    @property
    def bundles(self) -> int:
        """Bundles of a placement group that a replica has: one is on one node."""
        return self.shards_per_replica if self.replica_spread == "pack" else 1

    @property
    def bundle(self) -> dict[str, float]:
        """What each of them holds."""
        return self.resources_per_shard if self.bundles > 1 else dict(self.resources_per_replica)

    @property
    def size(self) -> str:
        """How many, for people: '4' or '2 to 8'."""
        return f"{self.min_replicas} to {self.max_replicas}" if self.elastic else str(self.max_replicas)

    @property
    def elastic(self) -> bool:
        """Whether the fleet may grow and shrink."""
        return self.min_replicas < self.max_replicas


@dataclass(frozen=True)
class TrackingSettings:
    """MLflow: `uri` of the store (default: a SQLite file in the output directory) and name of the experiment."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    uri: str | None = None
    experiment: str = "ray_lowcomm"
    enabled: bool = True
