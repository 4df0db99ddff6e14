"""Fine-tunes a Hugging Face causal language model on your conversations: the command ``patrickstar finetune``.

Usage:
    python examples/finetune_llm.py --model FOLDER --data chat.jsonl
    python examples/finetune_llm.py --demo            # with and without a budget: the same losses, bit by bit
"""

import sys
from pathlib import Path

from patrickstar.finetune.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog=Path(__file__).name))
