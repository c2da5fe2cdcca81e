"""Stage one: `dflash regenerate`, `dflash capture` and `dflash merge`."""

import os
from typing import Annotated

import typer

from pipeline.arguments import Attention, Device, Dtype, Nproc, TrustRemoteCode, layer_list, options_of
from pipeline.console import Console
from pipeline.launch import launch, own_ranks
from schemas.options import CaptureOptions, RegenerateOptions
from schemas.ranks import ALONE

Data = Annotated[
    list[str] | None,
    typer.Option(help="Conversations (docs/data.md); may be given several times. By default those shipped."),
]
MaxLength = Annotated[int, typer.Option(help="Longer samples are cut, and counted as truncated.")]
ValFraction = Annotated[float, typer.Option(help="Share of the prompts that is held out, chosen by the prompt's hash.")]
Limit = Annotated[int | None, typer.Option(help="Take at most this many rows of the data.")]
Codec = Annotated[
    str, typer.Option(help="How hidden states are stored: f32, bf16, bf16-zstd, fp8, int8 or int4 (docs/cache.md).")
]
TopK = Annotated[int, typer.Option(help="How many next-token log-probabilities to keep per token.")]
Layers = Annotated[
    str | None,
    typer.Option(help="Decoder layers to keep, from 0: 1,9,17,25. By default spread for a draft of 5 layers."),
]
ShardTokens = Annotated[
    int | None, typer.Option(help="Rows of a shard, the unit of work and recovery. By default about 1 GiB.")
]
DataFormat = Annotated[
    str, typer.Option(help="How rows are read: messages, sharegpt, response, text, tokens; auto goes by their columns.")
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Run longer samples in pieces of this many tokens, for the memory of one piece.")
]
Reasoning = Annotated[str, typer.Option(help="Whether what the target thought is supervised: keep, or mask.")]
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Count and leave out malformed rows instead of stopping.")
]


def capture(
    context: typer.Context,
    target: Annotated[
        str, typer.Option(help="A model's folder, or its name on the Hub: Qwen3-8B means Qwen/Qwen3-8B.")
    ],
    layers: Layers = None,
    data: Data = None,
    format: DataFormat = "auto",
    reasoning: Reasoning = "keep",
    out: Annotated[
        str,
        typer.Option(
            help="Where the cache goes, a folder or s3://BUCKET/PATH; the same command again goes on with an unfinished one."
        ),
    ] = "hs.zarr",
    codec: Codec = "bf16",
    top_k: TopK = 64,
    max_length: MaxLength = 4096,
    val_fraction: ValFraction = 0.02,
    shard_tokens: ShardTokens = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one forward pass, padding included.")] = 16_384,
    tp: Annotated[
        int, typer.Option(help="Processes, each with its own GPU, over which one copy of the target is sharded.")
    ] = 1,
    nproc: Nproc = None,
    prefill_chunk: PrefillChunk = None,
    limit: Limit = None,
    mask_token_id: Annotated[
        int | None, typer.Option(help="The id that stands for a token to be drafted. By default found.")
    ] = None,
    skip_bad_rows: SkipBadRows = False,
    append: Annotated[
        bool,
        typer.Option("--append", help="Add --data to the finished cache in --out, made with the same settings."),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace a cache of other settings or data that is in --out; on a terminal the word is asked for.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan only: print samples, tokens, bytes, shards and free disk.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn: Attention = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run the frozen target once and write its hidden states, top-k logits and loss masks into a cache."""
    options = options_of(CaptureOptions, locals() | {"layers": layer_list(layers)})
    if (ranks := own_ranks(os.environ, nproc, tp)) is None:
        if not dry_run:
            launch(context.obj, nproc or tp)
        ranks = ALONE  # a plan takes one process, whatever the work will take
    if dry_run and not ranks.first:
        return
    from capture import run
    from pipeline.confirm import confirm_overwrite
    from pipeline.inspect import plan_text, summary_text

    with Console() as say:
        if dry_run:
            if (plan := run.dry_run(options, say)) is not None:
                print(plan_text(plan))
        elif (manifest := run.capture(options, say, ranks, lambda lost: confirm_overwrite(out, lost))) is not None:
            print(summary_text(out, manifest))


def preview(
    target: Annotated[str, typer.Option(help="A model's folder, or its name on the Hub; its weights are not read.")],
    data: Data = None,
    format: DataFormat = "auto",
    reasoning: Reasoning = "keep",
    samples: Annotated[int, typer.Option(min=0, help="How many samples to show, spread over the data.")] = 3,
    layers: Layers = None,
    codec: Codec = "bf16",
    top_k: TopK = 64,
    max_length: MaxLength = 4096,
    val_fraction: ValFraction = 0.02,
    shard_tokens: ShardTokens = None,
    limit: Limit = None,
    skip_bad_rows: SkipBadRows = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show what a capture would supervise and how large its cache would be, with the target's tokenizer alone."""
    options = options_of(CaptureOptions, locals() | {"layers": layer_list(layers)})
    from pipeline.preview import preview as show

    with Console() as say:
        show(options, samples, say)


def regenerate(
    target: Annotated[str, typer.Option(help="A model's folder, or its name on the Hub.")],
    prompts: Annotated[
        str,
        typer.Option(help="Rows with `messages`, `conversations`, `turns` or `prompt`; answers there are replaced."),
    ],
    out: Annotated[
        str, typer.Option(help="The conversations, with their ids; the same command again does what is missing.")
    ],
    max_new_tokens: Annotated[
        int, typer.Option(help="An answer longer than this is cut, and recorded as not finished.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; more is sampled, each row by a seed of its own.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this probability in all.")] = 1.0,
    seed: Annotated[int, typer.Option(help="What sampled answers depend on, beside their prompt's row and turn.")] = 0,
    format: Annotated[
        str,
        typer.Option(
            help="Which column to read: messages, conversations, turns, prompt; auto takes the first there is."
        ),
    ] = "auto",
    limit: Annotated[int | None, typer.Option(help="Answer at most this many prompts.")] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Ask an OpenAI-compatible server that runs the target, as in http://localhost:8000/v1."),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="The target's name there. By default the first it lists.")
    ] = None,
    server_api: Annotated[
        str, typer.Option(help="completions (of token ids), chat, or auto: completions where the server has them.")
    ] = "auto",
    concurrency: Annotated[int, typer.Option(help="Requests to the server at a time.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer of the server.")] = 600.0,
    retries: Annotated[
        int, typer.Option(help="How often to ask again where the server fails, waiting longer each time.")
    ] = 5,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one batch, prompts and answers.")] = 16_384,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn: Attention = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer prompts with the target itself: a draft learns best from what its target says."""
    options = options_of(RegenerateOptions, locals())
    from capture.regenerate import regenerate as answer

    with Console() as say:
        answer(options, say)


def merge(
    caches: Annotated[
        list[str],
        typer.Argument(help="Finished caches of the same settings; the first one's come first, its head is kept."),
    ],
    out: Annotated[
        str, typer.Option(help="The new cache; the same command again goes on with an unfinished one, or mends it.")
    ],
) -> None:
    """Join caches into one without decoding anything; samples that came before are left out."""
    from cache.merge import merge as run_merge
    from pipeline.inspect import summary_text

    with Console() as say:
        merged = run_merge(caches, out, say)
    for path, duplicates in zip(caches, merged.duplicates, strict=True):
        if duplicates:
            print(f"{path}: {duplicates:,} samples came before and are left out")
    print(summary_text(out, merged.manifest))
