"""Help with its options under headings, without rich: plain help answers twice as fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    # typer carries its own copy of click since 0.2x; which one it is does not matter here.
    Context = Any
    HelpFormatter = Any

LAST = "Other options"


class GroupedCommand(TyperCommand):
    """A command whose help lists options by `rich_help_panel`, in the order they appear."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and param.param_type_name == "argument":
                # typer appends the Python type, which tells a reader nothing.
                record = (record[0].partition(" <")[0], record[1])
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or LAST
                groups.setdefault(heading, []).append(record)
        groups[LAST] = groups.pop(LAST)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        # typer writes {STORE}, and {INPUT}... for many.
        return [
            piece.strip("{}").replace("}...", "...") for piece in super().collect_usage_pieces(ctx)
        ]
