"""YAML as a person writes it: texts of several lines as blocks."""

from __future__ import annotations

from typing import Any

#: Longer than any command: a line break inside one would be read as a space.
NO_BREAKS = 2**20


def as_yaml(content: dict[str, Any]) -> str:
    """Write plain values as YAML, keys in their order."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    text: str = yaml.dump(content, Dumper=Dumper, sort_keys=False, width=NO_BREAKS)
    return text
