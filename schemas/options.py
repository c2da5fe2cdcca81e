"""Every option of every command, once, with its default: what the command line, `--config` and `--set` may say.

`train`'s options are grouped as in its YAML file: draft, loss, data, optim, run.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.manifest import Codec
from schemas.strict import Strict

Kind = Literal["dflash", "dflash2", "domino", "jetspec"]
Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class CaptureOptions(Strict):
    """`dflash capture`. `layers` and `shard_tokens` None: the defaults that follow from the target."""

    target: str
    data: tuple[str, ...] = ()
    out: str = "hs.zarr"
    layers: tuple[int, ...] | None = None
    codec: Codec = "bf16"
    top_k: int = Field(64, ge=1)
    max_length: int = Field(4096, ge=2)
    val_fraction: float = Field(0.02, ge=0, lt=1)
    shard_tokens: int | None = Field(None, ge=1)
    batch_tokens: int = Field(16_384, ge=1)
    limit: int | None = Field(None, ge=1)
    mask_token_id: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: Dtype = "auto"
    attn: str = "auto"
    tp: int = Field(1, ge=1)
    trust_remote_code: bool = False
    skip_bad_rows: bool = False
    overwrite: bool = False


class RegenerateOptions(Strict):
    """`dflash regenerate`: greedy answers of the target itself. `batch_tokens` bounds prompts plus answers of one batch."""

    target: str
    prompts: str
    out: str
    max_new_tokens: int = Field(512, ge=1)
    limit: int | None = Field(None, ge=1)
    batch_tokens: int = Field(16_384, ge=1)
    device: str = "auto"
    dtype: Dtype = "auto"
    attn: str = "auto"
    trust_remote_code: bool = False


class DraftOptions(Strict):
    """The draft's shape. None: as the target's; the hidden size is always the target's."""

    kind: Kind = "dflash"
    num_layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    intermediate_size: int | None = Field(None, ge=1)
    sliding_window: int | None = Field(None, ge=2)
    conv_kernel_size: int = Field(2, ge=1)
    conv_group_size: int = Field(16, ge=1)
    selector_rank: int = Field(256, ge=1)
    selector_top_k: int = Field(16, ge=1)
    emb_dim: int = Field(256, ge=1)
    gru_hidden_dim: int = Field(1024, ge=1)
    pure_draft_prefix_len: int = Field(1, ge=0)
    shift_label: bool = True


class LossOptions(Strict):
    """What is minimised. gamma "auto": 7, 5, 4 for blocks of 16, 10, 8, else half the block; None: no decay."""

    gamma: Annotated[float, Field(gt=0)] | Literal["auto"] | None = "auto"
    selector_weight: float = Field(1.0, ge=0)
    prefix: Literal["fixed", "variable"] = "fixed"
    prefix_base: float = Field(0.9, gt=0, le=1)
    distill: bool = False
    temperature: float = Field(1.0, gt=0)
    lambda_start: float = Field(1.0, ge=0, le=1)
    lambda_decay: float = Field(0.5, gt=0, le=1)


class DataOptions(Strict):
    """What a micro-batch holds: whole samples up to `batch_tokens` tokens, at most `anchors` blocks of each.

    `seed` decides order and anchors; `window` is the number of shards within which samples are shuffled.
    """

    batch_tokens: int = Field(8192, ge=2)
    anchors: int = Field(512, ge=1)
    seed: int = 0
    window: int = Field(8, ge=1)


class OptimOptions(Strict):
    """The optimizer. `warmup` is a share of all steps, `min_lr` a share of `lr`, `accumulate` micro-batches per step and rank."""

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(6e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup: float = Field(0.04, ge=0, lt=1)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr: float = Field(0.1, ge=0, le=1)
    clip: float = Field(1.0, gt=0)
    accumulate: int = Field(1, ge=1)


class RunOptions(Strict):
    """How long and how. Either `steps` or `epochs` ends the run; `eval_every` 0 evaluates never, `keep` bounds the checkpoints.

    `precision` is the arithmetic of training, `draft_dtype` the type of the weights in `draft/`.
    """

    steps: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    layers: tuple[int, ...] | None = None
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    draft_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["auto", "flex", "split"] = "auto"
    compile: bool = False
    eval_every: int = Field(0, ge=0)
    log_every: int = Field(20, ge=1)
    checkpoint_every: int = Field(500, ge=1)
    keep: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> "RunOptions":
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are two ways to say how long: give one")
        return self


class TrainOptions(Strict):
    """The whole of `config.yaml` of a run."""

    draft: DraftOptions = DraftOptions()
    loss: LossOptions = LossOptions()
    data: DataOptions = DataOptions()
    optim: OptimOptions = OptimOptions()
    run: RunOptions = RunOptions()


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
