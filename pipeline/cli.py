"""The console script `dflash`: one command per stage. Nothing here imports torch, so that help and mistakes answer at once."""

import os
import signal
import sys
import traceback
from collections.abc import Sequence

import typer

from pipeline import capture_commands, convert_command, measure_commands, train_command
from pipeline.launch import launched
from pipeline.own_memory import settle_memory
from pipeline.signals import none_lost, stop
from schemas.errors import Bystander, DflashError, Interrupted

app = typer.Typer(
    name="dflash",
    help="Capture a frozen LLM's hidden states once, train any number of DFlash drafts from them, and measure what they accept.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    capture_commands.regenerate,
    capture_commands.preview,
    capture_commands.capture,
    convert_command.convert,
    capture_commands.merge,
    train_command.train,
    measure_commands.evaluate,
    measure_commands.inspect,
    measure_commands.verify,
    measure_commands.compare,
):
    app.command()(command)

INTERRUPTED = 130
# What typer raises for arguments that do not fit: the common base of its unknown options, bad values and missing ones.
UsageFault: type[Exception] = typer.BadParameter.__bases__[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `dflash` and exit: 0 done, 2 the user's input, 1 other faults, 143 after SIGTERM."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    first = os.environ.get("RANK", "0") == "0"
    speaks = first and not launched(os.environ)
    if not (sys.stderr.isatty() and first):
        # Libraries draw bars of their own, which a log holds as one endless line, and every process would draw its own.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    settle_memory()
    signal.signal(signal.SIGTERM, stop)
    words = with_resume_value([word for word in given if word != "--debug"])
    try:
        with none_lost():
            code = app(words, prog_name="dflash", standalone_mode=False, obj=given)
        if code == INTERRUPTED:  # typer turns Ctrl-C into a silent code
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except Bystander as fault:
        # The process that failed has spoken, though perhaps on another machine.
        _fail(str(fault) if speaks else "", fault.exit_code, debug)
    except Interrupted as fault:
        _fail(str(fault) if speaks else "", fault.exit_code, debug)
    except DflashError as fault:
        _fail(str(fault), fault.exit_code, debug)
    except UsageFault as fault:
        message = fault.format_message() if hasattr(fault, "format_message") else str(fault)
        _fail(f"{message.rstrip('.')}: see `dflash {words[0] if words else ''} --help`", 2, debug)
    except OSError as fault:
        # A path that a stage did not expect to fail: permissions, a full or vanished disk.
        _fail(
            f"{fault.filename or 'input or output'}: {fault.strerror or fault}: mend it, then run the command again",
            1,
            debug,
        )
    except (KeyboardInterrupt, typer.Abort):
        text = "interrupted; the same command goes on where it stopped (train: add --resume)"
        _fail(text if speaks else "", INTERRUPTED, debug)


def with_resume_value(words: Sequence[str]) -> list[str]:
    """`--resume` alone means the newest checkpoint; typer has no option whose value may be left out."""
    filled = []
    for position, word in enumerate(words):
        filled.append(word)
        following = words[position + 1] if position + 1 < len(words) else "--"
        if word == "--resume" and following.startswith("--"):
            filled.append(train_command.NEWEST)
    return filled


def _fail(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    if message:
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
