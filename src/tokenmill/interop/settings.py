"""The settings of a format: options that it alone has, checked, defaults filled in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenmill.interop.base import Format, Setting


def complete_settings(
    format_: Format, given: Mapping[str, str | int | bool]
) -> dict[str, str | int | bool]:
    """The settings of a format, checked, defaults filled in."""
    known = format_.about.settings
    for name in given:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise UsageError(
                f"the format {format_.about.name!r} has no setting {name!r}",
                hint=f"it has: {listed}",
            )
    return {name: _setting(name, known[name], given.get(name)) for name in known}


def _setting(name: str, setting: Setting, value: str | int | bool | None) -> str | int | bool:
    if value is None:
        return setting.default
    kind = type(setting.default)
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    try:
        found = words[str(value).lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        raise UsageError(
            f"{name}={value!r} is not {'yes or no' if kind is bool else 'a whole number'}",
            hint=f"{name}: {setting.help}",
        ) from None
    if setting.choices and found not in setting.choices:
        raise UsageError(
            f"{name}={value!r} is not known", hint=f"use one of: {', '.join(setting.choices)}"
        )
    return found
