"""Options made definite: every "auto" and default replaced by what it means for this cache and machine, the impossible refused."""

from collections.abc import Sequence

import torch

from cache.device import resolve_device
from schemas.errors import CacheError, OptionError
from schemas.manifest import Identity
from schemas.options import OptimOptions, RunOptions, TrainOptions
from schemas.ranks import ALONE, Ranks
from schemas.say import Say
from train.float8 import check_float8
from train.objective import resolve_gamma
from train.optim import RATES, highest_rate

DEFAULT_EPOCHS = 6
AVAILABLE = ("dflash", "dflash2")

# Options that mean something to some kinds of draft only.
KINDS_OF = {
    "draft.conv_kernel_size": ("dflash2",),
    "draft.conv_group_size": ("dflash2",),
    "draft.selector_rank": ("dflash2",),
    "draft.selector_top_k": ("dflash2",),
    "loss.selector_weight": ("dflash2",),
    "draft.emb_dim": ("domino",),
    "draft.gru_hidden_dim": ("domino",),
    "draft.pure_draft_prefix_len": ("domino",),
    "draft.shift_label": ("domino",),
    "loss.lambda_start": ("domino",),
    "loss.lambda_decay": ("domino",),
    "loss.temperature": ("jetspec",),
}


def resolve_options(options: TrainOptions, identity: Identity, say: Say, ranks: Ranks = ALONE) -> TrainOptions:
    """The options as the run will use them; raises OptionError or CacheError for what cannot be done, never leaves any out."""
    _check_kind(options, say)
    device = resolve_device(options.run.device, ranks)
    if device.type == "cpu" and options.run.device == "auto":
        say.note("no CUDA device here: training on the CPU")
    if options.run.shard and ranks.world == 1:
        say.warn("run.shard has no effect on one process: give --nproc")
    resolved = {
        "layers": resolve_layers(options.run.layers, identity),
        # Among several processes each has a GPU of its own, and the run has them all.
        "device": str(device) if ranks.local_world == 1 else device.type,
        "precision": _precision(options.run, device),
        "attention": _attention(options.run, device),
        "epochs": _epochs(options.run, say),
    }
    run = options.run.model_copy(update=resolved)
    if run.float8:
        check_float8(device, run.precision)
    loss = options.loss.model_copy(update={"gamma": resolve_gamma(options.loss, options.draft.block_size)})
    _warn_of_rate(options.optim, say)
    optim = options.optim.model_copy(update={"lr": highest_rate(options.optim)})
    return options.model_copy(update={"run": run, "loss": loss, "optim": optim})


def resolve_layers(asked: Sequence[int] | None, identity: Identity) -> tuple[int, ...]:
    """The layers to train on, ascending: by default the cache's, without the target's last, whose norm runtimes disagree on."""
    last = identity.target.num_hidden_layers - 1
    usable = tuple(layer for layer in identity.layers if layer != last)
    offer = f"choose among {', '.join(map(str, usable))}" if usable else "capture other layers"
    if asked is None:
        if not usable:
            raise CacheError(
                f"the cache holds only layer {last}, the target's last, whose norm runtimes disagree on: {offer}"
            )
        return usable
    if not asked:
        raise OptionError(f"no layers given: {offer}")
    for layer in asked:
        if asked.count(layer) > 1:
            raise OptionError(f"layer {layer} is given twice: name each layer once")
        if layer not in identity.layers:
            raise CacheError(f"layer {layer} is not in the cache: {offer}, or capture it")
        if layer == last:
            raise OptionError(f"layer {layer} is the target's last, whose norm runtimes disagree on: {offer}")
    return tuple(sorted(asked))


def _warn_of_rate(options: OptimOptions, say: Say) -> None:
    # As where --config is a run's config.yaml, which has the rate in full, and --set names the other optimizer.
    for name, rate in RATES.items():
        if options.lr == rate and options.name != name:
            say.warn(f"optim.lr={rate:g} is {name}'s rate, not {options.name}'s: for that, set optim.lr=null")


def _check_kind(options: TrainOptions, say: Say) -> None:
    kind, loss = options.draft.kind, options.loss
    if kind not in AVAILABLE:
        raise OptionError(f"draft kind {kind!r} is not available in this version yet: choose {' or '.join(AVAILABLE)}")
    if loss.prefix == "variable" and kind != "dflash":
        raise OptionError(f"loss.prefix 'variable' is for kind dflash, not {kind}: use loss.prefix=fixed")
    if loss.distill:
        raise OptionError("loss.distill is not available in this version yet: leave it false")
    defaults, given = TrainOptions().model_dump(), options.model_dump()
    for key, kinds in KINDS_OF.items():
        group, name = key.split(".")
        if kind not in kinds and given[group][name] != defaults[group][name]:
            say.warn(f"{key}={given[group][name]} has no effect on kind {kind}")


def _precision(run: RunOptions, device: torch.device) -> str:
    if run.precision != "auto":
        return run.precision
    return "bfloat16" if device.type == "cuda" else "float32"


def _attention(run: RunOptions, device: torch.device) -> str:
    if run.attention == "flex" and device.type != "cuda":
        raise OptionError(
            f"run.attention=flex needs a CUDA device, and the run is on {device}, where torch has no gradients of it: use auto or split"
        )
    if run.attention == "auto":
        return "flex" if device.type == "cuda" else "split"
    return run.attention


def _epochs(run: RunOptions, say: Say) -> int | None:
    if run.epochs is None and run.steps is None:
        say.note(f"neither steps nor epochs given: training for {DEFAULT_EPOCHS} epochs")
        return DEFAULT_EPOCHS
    return run.epochs
