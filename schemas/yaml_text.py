"""YAML as options are written in it: what would be read as something else than it says is refused or read as it is meant."""

import json
import re
from typing import Any

import yaml

# YAML 1.1 takes 1e-3 for text, since it has no dot; anyone who writes it means the number.
EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
FLOAT = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            # As text: 1 and "1" are one key of an option.
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


_Loader.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(FLOAT, EXPONENT, list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """The value of a YAML text. ValueError in one line for what is no YAML, names a key twice, or no JSON could say."""
    try:
        data = yaml.load(text, _Loader)
        json.dumps(data, default=str)  # circles, keys that are dates
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as fault:
        raise ValueError(" ".join(str(fault).split())) from None
    return data


def dump_yaml(data: Any, **style: Any) -> str:
    """YAML that `load_yaml` reads back as it was."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, **style))
