"""Advice about unknown names: a table of other programs' names, the same name in another section, a similar name."""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from tripletune.core.options import leaves, nearest, shown

# Similarity from which a name may be a slip of the keys: "epohcs" is one of "epochs", "val_size" none of "batch_size".
_SLIP = 0.75


class Elsewhere(NamedTuple):
    """What a name of another program means here.

    Attributes:
        settings: The settings that do the same; a configuration may have only some of them.
        note: What differs, such as the unit, or what to do if there is no such setting.
    """

    settings: tuple[str, ...]
    note: str = ""


def elsewhere(kind: type, name: str, flag: str = "") -> str:
    """` (here it is X)` for a name of another program (see the class's `elsewhere`), or of another section.

    Users bring names from other trainers, and a name that is merely similar would mislead them. The section that they
    write before a name does not matter. The table comes first, since a name that we have too may mean something else
    there.
    """
    leaf = name.rpartition(".")[2].replace("-", "_")
    own_names = leaves(kind)
    table: Mapping[str, Elsewhere] = getattr(kind, "elsewhere", {})
    meaning = table.get(leaf)
    if meaning is None:
        same = [own_name for own_name in own_names if own_name.rpartition(".")[2] == leaf]
        meaning = Elsewhere(tuple(same))
    settings = [f"{flag}{setting}" for setting in meaning.settings if setting in own_names]
    if settings:
        note = f": {meaning.note}" if meaning.note else ""
        return f" (here it is {' or '.join(settings)}{note})"
    if meaning.settings:
        return f" (other tasks have {' or '.join(meaning.settings)}, this one has not)"
    if meaning.note:
        return f" ({meaning.note})"
    return ""


def similar_setting(kind: type, name: str, flag: str = "") -> str:
    """` (did you mean SECTION.X?)` for the setting whose name, without its section, is most similar; "" without one.

    Of equally similar settings, the one of the same section is named.
    """
    section, _, leaf = name.replace("-", "_").rpartition(".")
    best_name = ""
    best = (_SLIP, False)
    for own_name in leaves(kind):
        own_section, _, own_leaf = own_name.rpartition(".")
        similarity = (SequenceMatcher(None, leaf, own_leaf).ratio(), own_section == section)
        if similarity > best:
            best_name, best = own_name, similarity
    if not best_name:
        return ""
    return f" (did you mean {flag}{best_name}?)"


def misfits(
    name: str, given: Mapping[str, Any], hints: Mapping[str, Any], taken: Collection[str], kind: type | None = None
) -> list[str]:
    """Return a problem for each argument that a library would reject: unknown names and values of a wrong type.

    Libraries check their arguments late, or not at all, and report one at a time.

    Args:
        hints: The types of the library's arguments.
        taken: Arguments that have separate settings.
        kind: The class of the configuration; see `elsewhere`.
    """
    from huggingface_hub.dataclasses import validate_typed_dict

    new_schema: Any = typing.TypedDict  # as Any, because mypy reads only schemas with literal names
    messages = []
    allowed = [argument for argument in hints if argument not in taken]
    for key, value in given.items():
        if key not in allowed:
            advice = nearest(key, allowed) or f"; known: {', '.join(allowed) or 'none'}"
            if kind:
                advice = elsewhere(kind, key) or advice
            messages.append(f"{name}: unknown setting {key!r}{advice}")
            continue
        hint = hints[key]
        # YAML reads 1 as a whole number, also where the library wants 1.0.
        takes_only_floats = {float, int} & {hint, *typing.get_args(hint)} == {float}
        if type(value) is int and takes_only_floats:
            value = float(value)
        try:
            validate_typed_dict(new_schema("one_field", {key: hint}), {key: value})
        except Exception:
            wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            messages.append(f"{name}: {key} {shown(given[key])} is not {wanted}")
    return messages
