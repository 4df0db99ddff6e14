"""``python -m patrickstar.config --json-schema``: writes the JSON Schema of a configuration file, for editors."""

from __future__ import annotations

import argparse
import json

from patrickstar.config.editor_schema import make_json_schema


def main() -> None:
    """Runs the command ``python -m patrickstar.config``."""
    parser = argparse.ArgumentParser(
        prog="python -m patrickstar.config", description="What a configuration file may have."
    )
    parser.add_argument("--json-schema", action="store_true", required=True, help="write the JSON Schema, for editors")
    parser.parse_args()
    print(json.dumps(make_json_schema(), indent=1))


if __name__ == "__main__":
    main()
