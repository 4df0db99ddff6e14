"""``patrickstar finetune``: tunes a causal language model on conversations.

PyTorch and transformers are imported after all arguments are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from patrickstar.command.flags import words_after
from patrickstar.finetune.arguments import checked_arguments
from patrickstar.finetune.usage import PROGRAM, run_command, set_environment


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.finetune.main") -> int:
    """Returns the exit status: 2 for wrong input, 1 if a model does not fit, 130 after Ctrl-C, 75 after SIGTERM."""
    words = words_after(arguments)

    def body() -> int:
        set_environment()
        args, sets = checked_arguments(words, prog)
        from patrickstar.finetune.tuning import tune

        return tune(args, sets)

    return run_command(body, PROGRAM, words, prog)


if __name__ == "__main__":
    sys.exit(main())
