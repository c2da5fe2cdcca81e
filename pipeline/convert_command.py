"""`dflash convert`: a finished cache in another codec, or with fewer layers."""

from typing import Annotated, get_args

import typer

from pipeline.arguments import Device, layer_list
from pipeline.console import Console
from schemas.errors import OptionError
from schemas.manifest import Codec


def convert(
    cache: Annotated[str, typer.Argument(metavar="IN", help="A complete cache, a folder or s3://BUCKET/PATH.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Where the new one goes; the same command again goes on with it.")
    ],
    codec: Annotated[
        str | None,
        typer.Option(
            help="bf16, bf16-zstd, int8, fp8 or int4: as precise as the cache's own or less. By default its own."
        ),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to keep, as in 1,9,17. By default all.")] = None,
    device: Device = "auto",
) -> None:
    """Re-encode a finished cache, or keep some of its layers, without the target."""
    if codec is not None and codec not in get_args(Codec):
        raise OptionError(f"--codec {codec}: no such codec: use one of {', '.join(get_args(Codec))}")
    from cache.convert import convert as run
    from cache.device import resolve_device
    from pipeline.inspect import summary_text

    with Console() as say:
        manifest = run(cache, out, codec, layer_list(layers), resolve_device(device), say)  # type: ignore[arg-type]
    print(summary_text(out, manifest))
