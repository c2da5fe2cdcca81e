"""Every option of every command, once, with its default: what the command line, `--config` and `--set` may say.

`train`'s options are grouped as in its YAML file: draft, loss, data, optim, run, log. What each means is said in its description,
which `dflash train --print-config` and `--help` show.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from schemas.manifest import Codec
from schemas.strict import Strict

Kind = Literal["dflash", "dflash2", "domino", "jetspec"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# How a data file's rows, and a prompt file's, are read; "auto" goes by their columns.
DataFormat = Literal["auto", "messages", "sharegpt", "response", "text", "tokens"]
PromptFormat = Literal["auto", "messages", "conversations", "turns", "prompt"]
Reasoning = Literal["keep", "mask"]


class CaptureOptions(Strict):
    """`dflash capture`. `layers` and `shard_tokens` None: the defaults that follow from the target.

    `prefill_chunk` bounds the tokens of a sequence that one forward pass sees; None: samples run whole.
    """

    target: str
    data: tuple[str, ...] = ()
    format: DataFormat = "auto"
    reasoning: Reasoning = "keep"
    out: str = "hs.zarr"
    layers: tuple[int, ...] | None = None
    codec: Codec = "bf16"
    top_k: int = Field(64, ge=1)
    max_length: int = Field(4096, ge=2)
    val_fraction: float = Field(0.02, ge=0, lt=1)
    shard_tokens: int | None = Field(None, ge=1)
    batch_tokens: int = Field(16_384, ge=1)
    prefill_chunk: int | None = Field(None, ge=1)
    limit: int | None = Field(None, ge=1)
    mask_token_id: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: Dtype = "auto"
    attn: str = "auto"
    tp: int = Field(1, ge=1)
    trust_remote_code: bool = False
    skip_bad_rows: bool = False
    append: bool = False
    overwrite: bool = False

    @model_validator(mode="after")
    def _append_or_overwrite(self) -> "CaptureOptions":
        if self.append and self.overwrite:
            raise ValueError("--append keeps what is in --out, --overwrite replaces it: give one of them")
        return self


class RegenerateOptions(Strict):
    """`dflash regenerate`: answers of the target itself. `batch_tokens` bounds prompts plus answers of one batch.

    `temperature` 0 is greedy. With `server` the answers come from there: `server_api` "auto" asks for completions of
    token ids, and for chat completions where it has none. `timeout` is in seconds, for one answer.
    """

    target: str
    prompts: str
    out: str
    format: PromptFormat = "auto"
    max_new_tokens: int = Field(512, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0)
    limit: int | None = Field(None, ge=1)
    batch_tokens: int = Field(16_384, ge=1)
    server: str | None = None
    server_model: str | None = None
    server_api: Literal["auto", "completions", "chat"] = "auto"
    concurrency: int = Field(16, ge=1, le=1024)
    timeout: float = Field(600.0, gt=0)
    retries: int = Field(5, ge=0)
    device: str = "auto"
    dtype: Dtype = "auto"
    attn: str = "auto"
    trust_remote_code: bool = False


class DraftOptions(Strict):
    """The draft's shape; the defaults are the published ones (DFlash, arXiv 2602.06036). The hidden size is always the target's."""

    kind: Kind = Field("dflash", description="which draft, with its published shape")
    num_layers: int = Field(5, ge=1, description="decoder layers")
    block_size: int = Field(16, ge=2, description="tokens of a block, the verified one included")
    num_attention_heads: int | None = Field(None, ge=1, description="query heads; null: as the target's")
    num_key_value_heads: int | None = Field(None, ge=1, description="key-value heads; null: as the target's")
    head_dim: int | None = Field(None, ge=2, description="width of a head, even; null: as the target's")
    intermediate_size: int | None = Field(None, ge=1, description="width of the MLP; null: as the target's")
    sliding_window: int | None = Field(
        None, ge=2, description="tokens a slot looks back, at least the block size; null: all"
    )
    conv_kernel_size: int = Field(2, ge=1, description="dflash2: taps of the in-block convolution")
    conv_group_size: int = Field(
        16, ge=1, description="dflash2: channels that share a tap's change; divides the hidden size"
    )
    selector_rank: int = Field(256, ge=1, description="dflash2: width of the selector's codebooks")
    selector_top_k: int = Field(16, ge=1, description="dflash2: candidates of a slot among which the selector chooses")
    emb_dim: int = Field(256, ge=1, description="domino: width of its projection")
    gru_hidden_dim: int = Field(1024, ge=1, description="domino: width of its recurrent state")
    pure_draft_prefix_len: int = Field(1, ge=0, description="domino: first slots that keep the backbone's logits")
    shift_label: bool = Field(True, description="domino: whether slot k predicts the token after its position")


class LossOptions(Strict):
    """What is minimised: cross-entropy of each slot, the earlier slots weighing more."""

    gamma: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        "auto",
        description="slot k weighs exp(-(k-1)/gamma); auto: 7, 5, 4 for blocks of 16, 10, 8, else half the block; null: all alike",
    )
    selector_weight: float = Field(
        1.0, ge=0, description="dflash2: weight of the selector's loss beside the backbone's"
    )
    prefix: Literal["fixed", "variable"] = Field(
        "fixed", description="dflash: whether blocks show the anchor alone, or a prefix of random length"
    )
    prefix_base: float = Field(
        0.9, gt=0, le=1, description="variable prefix: length l has a probability in proportion to this^l"
    )
    distill: bool = Field(False, description="learn from the target's distribution rather than its tokens")
    temperature: float = Field(1.0, gt=0, description="jetspec: of the target's distribution")
    lambda_start: float = Field(1.0, ge=0, le=1, description="domino: first weight of the backbone's loss")
    lambda_decay: float = Field(
        0.5, gt=0, le=1, description="domino: share of the run over which that weight falls to 0"
    )


class DataOptions(Strict):
    """What a micro-batch holds. Order, repetitions and anchors are a pure function of (seed, epoch, sample)."""

    batch_tokens: int = Field(8192, ge=2, description="most tokens of a micro-batch; a longer sample is one of its own")
    anchors: int = Field(512, ge=1, description="most blocks of a sample in an epoch")
    anchor_rate: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = Field(
        "auto",
        description="blocks of a sample per supervised token of it, rounded up; auto: as many as give the longest training sample "
        "`anchors`, at most 1",
    )
    sources: dict[str, Weight] | None = Field(
        None,
        description="the cache's sources to train on, by file name or number, with how often each of its samples runs per epoch, such "
        "as {gsm8k.jsonl: 2, chat.jsonl: 0.5}; a list is each once; null: all once",
    )
    seed: int = Field(0, description="of order, anchors, and the draft's first weights")
    window: int = Field(8, ge=1, description="shards within which samples are shuffled")
    verify_every: int = Field(
        16, ge=1, description="a chunk's checksum is verified at its first reading, then at every so many-th; 1: always"
    )

    @field_validator("sources", mode="before")
    @classmethod
    def _once_each(cls, sources: Any) -> Any:
        if not isinstance(sources, list | tuple):
            return sources
        if repeated := [name for name in sources if sources.count(name) > 1]:
            raise ValueError(
                f"{repeated[0]!r} is given twice; give each source once, or a weight: {{{repeated[0]}: 2}}"
            )
        return {str(name): 1.0 for name in sources}


class OptimOptions(Strict):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = Field("muon", description="muon: Muon for the matrices, AdamW for the rest")
    lr: float | None = Field(
        None, gt=0, description="highest learning rate; null: 1e-2 with muon, the published 6e-4 with adamw"
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's decay of the gradient's mean and square")
    weight_decay: float = Field(0.0, ge=0, description="of everything with two dimensions")
    warmup: float = Field(
        0.04, ge=0, description="linear warm-up: a share of all steps where below 1, else a number of steps"
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="after the warm-up; wsd stays at `lr` and falls at the end"
    )
    decay: float = Field(0.2, gt=0, le=1, description="wsd: share of all steps over which the rate falls at the end")
    min_lr: float = Field(0.1, ge=0, le=1, description="where the rate falls to, as a share of `lr`")
    clip: float = Field(1.0, gt=0, description="largest norm of a step's gradient")
    accumulate: int = Field(1, ge=1, description="micro-batches of a step, per rank")

    @field_validator("warmup")
    @classmethod
    def _whole_steps(cls, warmup: float) -> float:
        if warmup >= 1 and warmup != int(warmup):
            raise ValueError("from 1 on it is a number of steps, so it has no fraction")
        return warmup


class RunOptions(Strict):
    """How long, where and how; what is written when. Either `steps` or `epochs` ends the run."""

    steps: int | None = Field(None, ge=1, description="optimizer steps")
    epochs: int | None = Field(None, ge=1, description="passes over the training samples; 6 where neither is given")
    layers: tuple[int, ...] | None = Field(
        None, description="which of the cache's layers to condition on; by default all but the target's last"
    )
    device: str = Field("auto", description="where to train: auto (CUDA where there is one), cpu, cuda or cuda:1")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of the arithmetic; auto: bfloat16 on CUDA, else float32. Weights and norms are float32 in any case",
    )
    draft_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="of the weights in draft/")
    attention: Literal["auto", "flex", "split"] = Field(
        "auto", description="how attention is computed; the results are the same"
    )
    shard: bool = Field(
        False,
        description="spread weights, gradients and optimizer state over the ranks, for drafts that need it (FSDP2)",
    )
    compile: bool = Field(
        False,
        description="compile the draft's layers before training (torch.compile; on a CPU it takes a C++ compiler): the same results",
    )
    float8: bool = Field(
        False,
        description="products of the draft's layers in float8, on CUDA of compute capability 8.9 or higher (torchao, an extra)",
    )
    eval_every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="steps between evaluations on held-out samples; 0: never; auto: as checkpoint_every, where samples are held out",
    )
    eval_share: float = Field(
        0.1,
        gt=0,
        description="most of the time to spend on those evaluations, as a share of training's: it bounds their number of samples",
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many evaluations in a row without a better walk acceptance; null: never"
    )
    export: Literal["best", "last"] = Field(
        "best",
        description="which checkpoint draft/ holds; best: by walk acceptance, the last where nothing was evaluated",
    )
    log_every: int = Field(20, ge=1, description="steps between lines of metrics.jsonl")
    checkpoint_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints to keep, beside the best")

    @model_validator(mode="after")
    def _one_length(self) -> "RunOptions":
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are two ways to say how long: give one")
        return self


class LogOptions(Strict):
    """Where the lines of metrics.jsonl go as well."""

    to: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (), description="each an extra to install: pip install 'dflash-pipeline[tensorboard,wandb]'"
    )
    project: str = Field("dflash", description="wandb: the project")
    name: str | None = Field(None, description="wandb: the run's name; null: its folder's")


class TrainOptions(Strict):
    """The whole of `config.yaml` of a run."""

    draft: DraftOptions = DraftOptions()
    loss: LossOptions = LossOptions()
    data: DataOptions = DataOptions()
    optim: OptimOptions = OptimOptions()
    run: RunOptions = RunOptions()
    log: LogOptions = LogOptions()


class EvaluateOptions(Strict):
    """`dflash evaluate`, from the cache (`target` None) or by decoding with the target on prompts or the cache's own."""

    draft: str
    cache: str | None = None
    split: Literal["train", "val"] = "val"
    target: str | None = None
    prompts: str | None = None
    max_new_tokens: int = Field(512, ge=1)
    limit: int | None = Field(None, ge=1)
    through_codec: bool = True
    lengths: bool = False
    device: str = "auto"
    dtype: Dtype = "auto"
    attn: str = "auto"
    trust_remote_code: bool = False
