"""How every command ends: results exit 0, expected errors 1 with one line, usage errors 2, Ctrl-C 130.

Only a bug shows a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from loraplex.cli.output import print_error
from loraplex.errors import InvalidParameter, InvalidRequest, LoraplexError

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # as a shell reports SIGPIPE


class Commands(TyperGroup):
    """A command group that turns the error tree into exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except LoraplexError as error:
            print_error(error, as_json="--json" in sys.argv)
            raise typer.Exit(1) from error
        except UnicodeEncodeError as error:  # the shell handed us bytes that are no text
            print_error(InvalidRequest(f"an argument is not UTF-8 text: {error}"), as_json="--json" in sys.argv)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:  # the reader left, as `head` does; say nothing more into the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:
            if error.filename is None:
                raise
            # Of a file or folder that was named: no rights, a name that is too long, a full disk.
            refusal = InvalidParameter(f"{error.filename}: {error.strerror}", field="path")
            print_error(refusal, as_json="--json" in sys.argv)
            raise typer.Exit(1) from error


def new_group(help_text: str, *, top: bool = False) -> typer.Typer:
    """Return an empty command group; the top one handles errors."""
    return typer.Typer(
        cls=Commands if top else None,
        help=help_text,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=top,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
